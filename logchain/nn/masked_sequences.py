"""Sequences with masked variables as chains: the variables that count are moved to the front."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..tensors import at_hand


class Sequences(NamedTuple):
    """The sequences of a mask: variables that are not masked are moved to the front of each, and back.

    `inside` (n, v) is the mask, `lengths` (n) are the numbers of variables that count, `order` (n, v) is the step from
    which each variable is taken, `empty` (n) marks sequences without variables: they are computed as sequences of one,
    whose results are replaced. `order` and `empty` are None where the mask is known to leave the first variables of
    each sequence, at least one; `empty` is None where it has to leave the first; all are None without a mask.
    """

    inside: Tensor | None = None
    lengths: Tensor | None = None
    order: Tensor | None = None
    empty: Tensor | None = None

    def gathered(self, values: Tensor) -> Tensor:
        """Values (n, v) or (n, v, c) with those that are not masked at the front."""
        if self.order is None or self.inside is None:
            return values
        # masked values are zeroed, since an empty sequence is computed from one of them
        values = torch.where(_like(self.inside, values), values, 0)
        return values.gather(1, _like(self.order, values))

    def spread(self, values: Tensor, fill: float) -> Tensor:
        """Values (n, v) or (n, v, c) moved from the front back to where they were, with `fill` where masked."""
        if self.order is None or self.inside is None:
            return values
        values = values.gather(1, _like(self.order.argsort(1), values))
        return torch.where(_like(self.inside, values), values, fill)

    def zero_where_empty(self, values: Tensor) -> Tensor:
        """Log-weights (n) with 0 for empty sequences, whose only path has weight 1."""
        return values if self.empty is None else values.masked_fill(self.empty, 0.0)


def sequences(mask: Tensor | None, strict: bool) -> Sequences:
    """The `Sequences` of a mask (n, v), whose first steps have to be on if `strict`.

    Values that are on a GPU, for which the host would wait, or traced are not read: a first step that is off makes the
    length 0, which on a GPU makes results NaN, and on a CPU is refused where the chain is computed.
    """
    if mask is None:
        return Sequences()
    inside = mask.bool()
    lengths = inside.sum(1)
    if at_hand(mask):
        first = torch.arange(mask.shape[1]) < lengths[:, None]
        if inside.equal(first) and lengths.all():
            return Sequences(inside, lengths)
        if strict and not inside[:, 0].all():
            off = inside[:, 0].tolist().index(False)
            raise ValueError(
                f"mask: expected the first step of every sequence on, got it off in sequence {off}; if the mask is not"
                " upside down, pass strict_mask=False to the layer"
            )
    order = inside.logical_not().argsort(dim=1, stable=True)
    if strict:
        return Sequences(inside, torch.where(inside[:, 0], lengths, 0), order)
    return Sequences(inside, lengths.clamp(min=1), order, lengths == 0)


def _like(steps: Tensor, values: Tensor) -> Tensor:
    """Steps (n, v) expanded to the shape of values (n, v) or (n, v, c)."""
    return steps if values.dim() == 2 else steps[..., None].expand_as(values)
