"""Categories: each hidden unit has probabilities of its own."""

import torch
from torch import Tensor

from .input_layer import InputLayer
from .log_weights import LogWeights


class Categorical(InputLayer):
    r"""`log p(k | unit)`, a table of log-probabilities.

    Args:
        units: `[*U, c]`, or `c` alone.
        num_categories: K; data are integers from 0 to K-1, of any dtype.
        generator: where the initial probabilities come from, uniform over the simplex.

    `weights`: `LogWeights` `[*U, K, c]`. Call: data `[..., *U]` to `[..., *U, c]`, in nats; see `InputLayer`.

    Raises:
        TypeError: data are no integers.
        ValueError: a category is out of range (looked at on a CPU), or shapes do not go together.

    >>> coins = Categorical(2, 2)
    >>> coins.weights.set(torch.tensor([[0.5, 0.9], [0.5, 0.1]]))
    >>> coins(torch.tensor([0, 1, 1]), observed=torch.tensor([True, True, False])).exp()
    tensor([[0.5000, 0.9000],
            [0.5000, 0.1000],
            [1.0000, 1.0000]], grad_fn=<ExpBackward0>)
    """

    def __init__(
        self, units: int | tuple[int, ...], num_categories: int, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(units)
        *lead, c = self.units
        self.num_categories = num_categories
        self.weights = LogWeights(*lead, num_categories, c, dim=-2, generator=generator)

    def check(self, data: Tensor) -> Tensor:
        """Integers from 0 to K-1."""
        data = super().check(data)
        if data.dtype == torch.bool or data.is_complex():
            raise TypeError(f"data: expected integers, got {data.dtype}")
        return data

    def log_density(self, data: Tensor) -> Tensor:
        """A look-up: rows of the table of all variables."""
        data = self._categories(data[..., 0])
        table = self.weights()  # (*U, K, c)
        lead = table.shape[:-2]
        groups = torch.arange(lead.numel(), device=data.device).view(lead) * self.num_categories
        found: Tensor = torch.nn.functional.embedding(data + groups, table.reshape(-1, table.shape[-1]))
        return found

    def draw(self, states: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """int64."""
        shares = self.of_states(self.weights().movedim(-2, -1), states).exp()
        drawn: Tensor = torch.multinomial(shares.reshape(-1, self.num_categories), 1, generator=generator)
        return drawn.view(states.shape)

    def mode(self) -> tuple[Tensor, Tensor]:
        """The most likely category, the lowest among equals."""
        found = self.weights().max(-2)
        return found.indices, found.values

    def log_probabilities(self) -> Tensor:
        """Of all categories: `[*U, c, K]`."""
        return self.weights().movedim(-2, -1)

    def _categories(self, data: Tensor) -> Tensor:
        found = data.long()
        if data.device.type == "cpu" and not torch.compiler.is_compiling():
            wrong = (found < 0) | (found >= self.num_categories) | (found != data)
            if bool(wrong.any()):
                worst = data[wrong][0].item()
                raise ValueError(f"data: expected integers from 0 to {self.num_categories - 1}, got {worst:g}")
        return found
