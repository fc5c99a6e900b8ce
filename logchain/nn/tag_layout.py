"""How the steps of sequences lie in the emissions of a conditional random field."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import check_device, check_has_values, check_is_tensor
from .parameters import over


class TagLayout(NamedTuple):
    """How the variables of sequences lie in the emissions; with a mask, the chain has those that count first.

    `inside` (n, v) is the mask, `order` (n, v) the step from which each variable is taken, None for the first ones in
    order, `lengths` (n) the numbers of variables that count: 1 for an empty sequence, and 0 for one that `strict_mask`
    refuses.
    """

    batch_first: bool
    inside: Tensor | None = None
    order: Tensor | None = None
    lengths: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def gathered(self, values: Tensor) -> Tensor:
        """Values in the layout of the emissions as those of the chain, (n, v, ...) or (total, ...)."""
        if self.cu_seqlens is not None:
            return values
        values = values if self.batch_first else values.transpose(0, 1)
        return values if self.order is None else _rows(values, self.order)

    def spread(self, values: Tensor, fill: float) -> Tensor:
        """Values of the chain in the layout of the emissions, `fill` where masked."""
        if self.inside is not None:
            values = values if self.order is None else _rows(values, self.order.argsort(1))
            values = torch.where(over(self.inside, values.shape), values, fill)
        return values if self.batch_first or self.cu_seqlens is not None else values.transpose(0, 1)

    def ended(self, steps: int, device: torch.device) -> Tensor:
        """Whether each step (v), (n, v) or (total) is the last one of its sequence, or after it."""
        counts = torch.arange(1, steps + 1, device=device)
        if self.cu_seqlens is not None:
            return torch.isin(counts, self.cu_seqlens.to(device))
        return counts >= (steps if self.lengths is None else self.lengths[:, None])

    def lists(self, states: Tensor) -> list[list[int]]:
        """States of the chain as a list for each sequence, without masked variables."""
        check_has_values("emissions", states)
        rows = states.tolist()
        if self.cu_seqlens is not None:
            return [rows[first:end] for first, end in pairwise(self.cu_seqlens.tolist())]
        if self.inside is None:
            return rows
        return [row[:length] for row, length in zip(rows, self.inside.sum(1).tolist(), strict=True)]


def check_mask(name: str, mask: Tensor, emissions: Tensor) -> None:
    """Check for bool or integers of the shape of the steps."""
    check_is_tensor(name, mask)
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(f"{name}: expected bool or integers, got {str(mask.dtype)[6:]}")
    check_steps(name, mask, emissions)


def check_steps(name: str, values: Tensor, emissions: Tensor) -> None:
    """Check for the shape of the steps, on the device of the emissions."""
    if values.shape != emissions.shape[:-1]:
        raise ValueError(f"{name}: expected shape {list(emissions.shape[:-1])}, got {list(values.shape)}")
    check_device(name, values, emissions)


def _rows(values: Tensor, order: Tensor) -> Tensor:
    """Values (n, v, ...) at the steps `order` (n, v) of each sequence."""
    first = order.shape[1] * torch.arange(order.shape[0], device=order.device)[:, None]
    rows = values.flatten(0, 1).index_select(0, (first + order).flatten())
    return rows.view(*order.shape, *values.shape[2:])
