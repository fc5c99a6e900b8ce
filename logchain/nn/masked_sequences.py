"""The sequences that a mask leaves, as chains whose variables come first."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..operands import at_hand


class Sequences(NamedTuple):
    """The variables that a mask (n, v) leaves to each sequence, moved to the front.

    `inside` is the mask, `lengths` and `empty` are (n), `order` (n, v) is the step from which each variable is taken.
    An empty sequence is computed as one variable, and left out of the results. `order` and `empty` are None where the
    mask is known to leave the first variables of each sequence; all are None without a mask.
    """

    inside: Tensor | None = None
    lengths: Tensor | None = None
    order: Tensor | None = None
    empty: Tensor | None = None

    def gathered(self, values: Tensor) -> Tensor:
        """Values (n, v) or (n, v, c) in the order of the chain."""
        if self.order is None or self.inside is None:
            return values
        values = torch.where(_like(self.inside, values), values, 0)  # an empty sequence is computed from masked values
        return values.gather(1, _like(self.order, values))

    def spread(self, values: Tensor, fill: float) -> Tensor:
        """Values (n, v) or (n, v, c) of the chain at the places of the mask, `fill` elsewhere."""
        if self.order is None or self.inside is None:
            return values
        values = values.gather(1, _like(self.order.argsort(1), values))
        return torch.where(_like(self.inside, values), values, fill)

    def zero_where_empty(self, values: Tensor) -> Tensor:
        """Log-weights (n) of each sequence, 0 for an empty one, which has one path."""
        return values if self.empty is None else values.masked_fill(self.empty, 0.0)


def sequences(mask: Tensor | None) -> Sequences:
    """The sequences of a mask (n, v). A mask on a GPU is not read: the host would wait for it."""
    if mask is None:
        return Sequences()
    inside = mask.bool()
    lengths = inside.sum(1)
    if at_hand(mask):
        first = torch.arange(mask.shape[1]) < lengths[:, None]
        if inside.equal(first) and lengths.all():
            return Sequences(inside, lengths)
    return Sequences(inside, lengths.clamp(min=1), inside.logical_not().argsort(dim=1, stable=True), lengths == 0)


def _like(steps: Tensor, values: Tensor) -> Tensor:
    """Steps (n, v) expanded to the shape of values (n, v) or (n, v, c)."""
    return steps if values.dim() == 2 else steps[..., None].expand_as(values)
