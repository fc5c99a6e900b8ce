"""Categorical observations, with probabilities for each hidden unit."""

import torch
from torch import Tensor

from ..checks import check_count
from ..log_weights import LogWeights
from .finite import Finite
from .starts import observations


class Categorical(Finite):
    r"""Categorical observations: `log p(k | unit)` is looked up in a table of log-probabilities.

    Args:
        units: `[*U, c]`, or `c` alone.
        num_categories: K; data are integers from 0 to K-1, of any dtype.
        prior_count: added to each expected count by expectation maximisation, a number or what broadcasts to
            `[*U, K, c]`; see `LogWeights`.
        generator: the source of randomness for the initial probabilities, uniform over the simplex.

    `weights`: `LogWeights` `[*U, K, c]`. Call: data `[..., *U]` to `[..., *U, c]`, in nats; see `InputLayer`.

    Raises:
        ValueError: a value is no category (checked on a CPU), or shapes do not go together.

    >>> coins = Categorical(2, 2)
    >>> coins.weights.set(torch.tensor([[0.5, 0.9], [0.5, 0.1]]))
    >>> coins(torch.tensor([0, 1, 1]), observed=torch.tensor([True, True, False])).exp()
    tensor([[0.5000, 0.9000],
            [0.5000, 0.1000],
            [1.0000, 1.0000]], grad_fn=<ExpBackward0>)
    """

    def __init__(
        self,
        units: int | tuple[int, ...],
        num_categories: int,
        *,
        prior_count: float | Tensor = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        check_count("num_categories", num_categories)
        super().__init__(units, num_categories)
        shape = *self.units[:-1], num_categories, self.units[-1]
        self.weights = LogWeights(*shape, dim=-2, prior_count=prior_count, generator=generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the probabilities anew, uniformly over the simplex: see `InputLayer.reset_parameters`."""
        self.weights.reset_parameters(generator)

    @torch.no_grad()
    def initialise(
        self, data: Tensor, observed: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> None:
        """Set the probabilities to frequencies in the data (one observation spread over all added) times noise.

        See `InputLayer.initialise`.
        """
        rows, known = observations(self, data, observed)  # (g, n, 1)
        counts = rows.new_zeros(len(rows), self.num_values)
        counts.scatter_add_(1, self._values(rows[..., 0]), known[..., 0].double())
        noise = self.weights.logits.new_empty(self.weights.logits.shape).exponential_(generator=generator)
        self.weights.set((counts + 1 / self.num_values).view(*self.units[:-1], -1, 1) * noise)

    def table(self) -> Tensor:
        """Log-probabilities `[*U, K, c]`: see `Finite.table`."""
        logs: Tensor = self.weights()
        return logs
