"""Observations with finitely many values, whose log-probabilities are looked up in a table."""

import torch
from torch import Tensor

from ...tensors import at_hand
from ..checks import check_count
from .input_layer import InputLayer

# number of observations of one variable whose gradients are added up one after the other
_BLOCK = 4096


class Finite(InputLayer):
    """Observations that are integers from 0 to K-1; a subclass implements `table`.

    Args:
        units: `[*U, c]`, or `c` alone.
        num_values: K.

    Cost: one pass over the result forward, two backward, for which nothing of its size is kept. The table is copied
    once for every 4096 observations of a variable.

    >>> from logchain.nn import Categorical
    >>> coins = Categorical((5, 3), 2)  # five variables, three states
    >>> coins.table().shape, coins.log_probabilities().shape
    (torch.Size([5, 2, 3]), torch.Size([5, 3, 2]))
    """

    def __init__(self, units: int | tuple[int, ...], num_values: int) -> None:
        super().__init__(units)
        check_count("num_values", num_values)
        self.num_values = num_values

    def table(self) -> Tensor:
        """Log-probabilities of all values.

        Returns:
            `[*U, K, c]` in nats.
        """
        raise NotImplementedError

    def log_probabilities(self) -> Tensor:
        """Log-probabilities of all values, `[*U, c, K]`: see `InputLayer.log_probabilities`."""
        return self.table().movedim(-2, -1)

    def log_density(self, data: Tensor) -> Tensor:
        """The log-probabilities of the data, looked up in the tables of all variables: see `InputLayer.log_density`."""
        data = self._values(data[..., 0])
        table = self.table()
        lead, (size, c) = table.shape[:-2], table.shape[-2:]
        groups = torch.arange(lead.numel(), device=data.device).view(lead) * size
        rows = data + groups  # (..., *U)
        flat = rows.reshape(-1, lead.numel())
        copies = -(-len(flat) // _BLOCK)
        if copies > 1:
            # each block has a copy of the table, so that small gradients are not lost in the sum over all blocks
            flat = flat + torch.arange(len(flat), device=data.device)[:, None] // _BLOCK * (lead.numel() * size)
            table = table.expand(copies, *table.shape)
        # the backward pass of index_select is faster than that of an embedding
        return table.reshape(-1, c).index_select(0, flat.reshape(-1)).view(*rows.shape, c)

    def draw(self, states: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """One observation of each given state, int64: see `InputLayer.draw`."""
        shares = self.of_states(self.log_probabilities().detach(), states).exp()
        drawn = torch.multinomial(shares.reshape(-1, self.num_values), 1, generator=generator)
        return drawn.view(states.shape)

    def mode(self) -> tuple[Tensor, Tensor]:
        """The most probable value, the lowest among equals, and its log-probability: see `InputLayer.mode`."""
        best = self.table().detach().max(-2)
        return best.indices, best.values

    def _values(self, data: Tensor) -> Tensor:
        """Data as int64; on a CPU their values are checked."""
        values = data.long()
        if at_hand(data):
            wrong = (values < 0) | (values >= self.num_values) | (values != data)
            if bool(wrong.any()):
                worst = data[wrong][0].item()
                raise ValueError(f"data: expected integers from 0 to {self.num_values - 1}, got {worst:g}")
        return values
