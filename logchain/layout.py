"""The order of the operands' axes that the recursions take: integers and views, no arithmetic.

Steps come first. Of the batch axes, those along which `bulk` has different matrices come before those that share
matrices. `Layout` finds that order once and gives views of operands and gradients in it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """An order of batch axes: `batch` are the sizes of x, `own` the axes along which bulk is not broadcast."""

    batch: torch.Size
    own: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor, bulk: Tensor) -> "Layout":
        """The layout of x `[*B, v, c]` and bulk `[*B or ones, s, c, c]`."""
        batch, lead = x.shape[:-2], bulk.shape[:-3]
        padded = (1,) * (len(batch) - len(lead)) + tuple(lead)
        return cls(batch, tuple(axis for axis, size in enumerate(padded) if size != 1))

    @property
    def grid(self) -> tuple[int, int]:
        """The number g of sets of matrices, and the number m of sequences that share each set."""
        sets = math.prod(self.batch[axis] for axis in self.own)
        return sets, math.prod(self.batch[axis] for axis in range(len(self.batch)) if axis not in self.own)

    @property
    def order(self) -> list[int]:
        """The batch axes, those along which bulk differs first."""
        return [*self.own, *(axis for axis in range(len(self.batch)) if axis not in self.own)]

    def steps_first(self, x: Tensor) -> Tensor:
        """A view of x `[*B, v, c]` as (v, *lead, c); a chain without batch axes gets one."""
        last = len(self.batch)
        view = x.permute(last, *self.order, last + 1)
        return view if self.batch else view.unsqueeze(1)

    def weights(self, p0: Tensor) -> Tensor:
        """A view of p0 `[*B or ones, c]` as (*lead or ones, c)."""
        if not self.batch:
            return p0.unsqueeze(0)
        padded = p0[(None,) * (len(self.batch) + 1 - p0.dim())]
        return padded.permute(*self.order, len(self.batch))

    def states(self, values: Tensor) -> Tensor:
        """A view of values (..., *lead, c) of states as `[..., *B, c]`."""
        if not self.batch:
            return values.squeeze(-2)
        order = self.order
        ahead = values.dim() - 1 - len(order)
        axes = (ahead + order.index(axis) for axis in range(len(order)))
        return values.permute(*range(ahead), *axes, values.dim() - 1)

    def matrices(self, bulk: Tensor) -> Tensor:
        """A view of bulk `[*B or ones, s, c, c]` as (s, *own, c, c)."""
        lead = bulk.dim() - 3
        missing = len(self.batch) - lead
        own = [axis - missing for axis in self.own]
        shared = tuple(axis for axis in range(lead) if axis not in own)
        bulk = bulk.squeeze(shared) if shared else bulk
        if not own:
            return bulk
        return bulk.permute(len(own), *range(len(own)), len(own) + 1, len(own) + 2)

    def sequences(self, values: Tensor) -> Tensor:
        """Values `[*B]` of sequences as (g, m)."""
        return values.permute(self.order).reshape(self.grid)

    def batched(self, values: Tensor) -> Tensor:
        """Values (g, m) of sequences as `[*B]`."""
        order = self.order
        return values.reshape([self.batch[axis] for axis in order]).permute(
            [order.index(axis) for axis in range(len(order))]
        )
