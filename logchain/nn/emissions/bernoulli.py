"""Bernoulli observations, with a probability for each hidden unit."""

import torch

from .binomial import Binomial


class Bernoulli(Binomial):
    r"""Bernoulli observations: `log p(1 | unit) = log p`, `log p(0 | unit) = log(1 - p)`.

    Args:
        units: `[*U, c]`, or `c` alone.
        generator: the source of randomness for the initial probabilities, uniform in 0..1.

    `logits`: parameter `[*U, c]`, `log p / (1 - p)`; -inf and inf are probabilities 0 and 1. Call: data `[..., *U]`,
    0 or 1 of any dtype, to `[..., *U, c]`, in nats; see `InputLayer`.

    Raises:
        ValueError: a value is neither 0 nor 1 (checked on a CPU), or shapes do not go together.

    >>> switches = Bernoulli(2)
    >>> switches.set(torch.tensor([0.25, 1.0]))
    >>> switches(torch.tensor([True, False])).exp()
    tensor([[0.2500, 1.0000],
            [0.7500, 0.0000]], grad_fn=<ExpBackward0>)
    """

    def __init__(self, units: int | tuple[int, ...], *, generator: torch.Generator | None = None) -> None:
        super().__init__(units, 1, generator=generator)

    def extra_repr(self) -> str:
        """Sizes, as torch prints them."""
        return f"units={self.units}"
