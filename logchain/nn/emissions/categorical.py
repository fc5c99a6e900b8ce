"""Categorical observations, with probabilities for each hidden unit."""

from typing import Any

import torch
from torch import Generator, Tensor
from torch.distributions import constraints

from ..checks import check_count
from ..log_weights import LogWeights
from ..priors import Dirichlet
from .emission import Emission, Units

# number of observations of one variable whose gradients are summed sequentially
_BLOCK = 4096


class Weighted(Emission):
    """An emission whose only parameters are probabilities, the `weights`, which are fitted as a separate part."""

    statistics: Any = None
    weights: LogWeights

    @property
    def probabilities(self) -> Tensor:
        """The probabilities, in the shape of the weights, without gradients."""
        weights: Tensor = self.weights()
        return weights.detach().exp()

    def reset_parameters(self, generator: Generator | None = None) -> None:
        self.weights.reset_parameters(generator)


class Categorical(Weighted):
    r"""Categorical observations: `log p(k | unit)` is looked up in a table of log-probabilities.

    Args:
        units: `[*U, c]`, or `c` alone.
        num_categories: K; data are integers from 0 to K-1, of any dtype.
        prior: of the probabilities `[*U, K, c]`, see `LogWeights`.
        generator: the source of randomness for the initial probabilities, uniform over the simplex.

    `weights`: `LogWeights` `[*U, K, c]`. Call: data `[..., *U]` to `[..., *U, c]`, in nats; see `Emission`.

    Raises:
        ValueError: a value is not a category (checked on a CPU), or shapes do not go together.

    Cost: one pass over the result forward, and two backward, which save nothing of its size. The table is copied once
    for every 4096 observations of a variable.

    >>> coins = Categorical(2, 2)
    >>> coins.weights.set(torch.tensor([[0.5, 0.9], [0.5, 0.1]]))
    >>> coins(torch.tensor([0, 1, 1]), observed=torch.tensor([True, True, False])).exp()
    tensor([[0.5000, 0.9000],
            [0.5000, 0.1000],
            [1.0000, 1.0000]], grad_fn=<ExpBackward0>)
    """

    def __init__(
        self, units: Units, num_categories: int, *, prior: Dirichlet | None = None, generator: Generator | None = None
    ) -> None:
        check_count("num_categories", num_categories)
        super().__init__(units)
        self.num_values = num_categories
        self.support = constraints.integer_interval(0, num_categories - 1)
        self.expected = f"integers from 0 to {num_categories - 1}"
        shape = *self.units[:-1], num_categories, self.units[-1]
        self.weights = LogWeights(*shape, dim=-2, prior=prior, generator=generator)

    def distribution(self, at: tuple[Tensor, ...] = ()) -> torch.distributions.Categorical:
        return torch.distributions.Categorical(logits=self.weights().mT[at], validate_args=False)

    def log_density(self, data: Tensor) -> Tensor:
        return look_up(self.weights(), data[..., 0].long())


def look_up(table: Tensor, values: Tensor) -> Tensor:
    """The entries `[..., *U, c]` of tables `[*U, K, c]` for values int64 `[..., *U]`."""
    lead, (size, c) = table.shape[:-2], table.shape[-2:]
    rows = values + torch.arange(lead.numel(), device=values.device).view(lead) * size  # (..., *U)
    flat = rows.reshape(-1, lead.numel())
    copies = -(-len(flat) // _BLOCK)
    if copies > 1:
        # each block has a copy of the table, so that small gradients are not rounded away in the sum over all blocks
        flat = flat + torch.arange(len(flat), device=values.device)[:, None] // _BLOCK * (lead.numel() * size)
        table = table.expand(copies, *table.shape)
    # the backward pass of index_select is faster than that of an embedding
    return table.reshape(-1, c).index_select(0, flat.reshape(-1)).view(*rows.shape, c)
