"""The sequences of a batch as g sets of m, where those of a set share all matrices: integers and views, no arithmetic.

Batch axes along which some parameter has its own values come first, then the others; (g, m) are the two groups. Kernels
take steps first, then these axes.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Layout(NamedTuple):
    """The batch axes in the order of sets and members.

    Attributes:
        batch: the sizes of the batch axes.
        own: the axes of the batch that tell sets apart.
    """

    batch: tuple[int, ...]
    own: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor, bulk: Tensor) -> "Layout":
        """The layout of x [*B, v, c] and bulk [*B or ones, s, c, c], of which leading axes may be missing."""
        return cls.of_parameters(x.shape[:-2], [bulk[(None,) * (x.dim() + 1 - bulk.dim())]])

    @classmethod
    def of_parameters(cls, batch: Sequence[int], parameters: Sequence[Tensor]) -> "Layout":
        """The layout of a batch *B, of parameters [*B or ones, ...]."""
        axes = range(len(batch))
        return cls(tuple(batch), tuple(axis for axis in axes if any(one.shape[axis] != 1 for one in parameters)))

    @property
    def order(self) -> tuple[int, ...]:
        """The batch axes, those that tell sets apart first."""
        return (*self.own, *(axis for axis in range(len(self.batch)) if axis not in self.own))

    @property
    def back(self) -> tuple[int, ...]:
        """The place of each batch axis in `order`."""
        order = self.order
        return tuple(order.index(axis) for axis in range(len(order)))

    @property
    def grid(self) -> tuple[int, int]:
        """The number g of sets, and the number m of members of each."""
        g = math.prod(self.batch[axis] for axis in self.own)
        return g, math.prod(self.batch[axis] for axis in self.order[len(self.own) :])

    def grouped(self, tensor: Tensor) -> Tensor:
        """A tensor [*B or ones, *rest] as (g, m, *rest)."""
        count = len(self.batch)
        rest = tensor.shape[count:]
        order = (*self.order, *range(count, tensor.dim()))
        return tensor.expand((*self.batch, *rest)).permute(order).reshape(*self.grid, *rest)

    def batched(self, tensor: Tensor) -> Tensor:
        """A tensor (g, m, *rest) as [*B, *rest], a view where it can be one."""
        count, rest = len(self.batch), tensor.shape[2:]
        grid = tensor.reshape((*(self.batch[axis] for axis in self.order), *rest))
        return grid.permute((*self.back, *range(count, count + len(rest))))

    def steps_first(self, x: Tensor) -> Tensor:
        """A view of x [*B, v, c] as (v, *lead, c); a chain without batch axes gets one."""
        last = len(self.batch)
        view = x.permute(last, *self.order, last + 1)
        return view if self.batch else view.unsqueeze(1)

    def weights(self, p0: Tensor) -> Tensor:
        """A view of p0 [*B or ones, c], of which axes may be missing, as (*lead or ones, c)."""
        if not self.batch:
            return p0.unsqueeze(0)
        padded = p0[(None,) * (len(self.batch) + 1 - p0.dim())]
        return padded.permute(*self.order, len(self.batch))

    def states(self, values: Tensor) -> Tensor:
        """A view of values (..., *lead, c) of states as [..., *B, c]."""
        if not self.batch:
            return values.squeeze(-2)
        first = values.dim() - 1 - len(self.batch)
        return values.permute(*range(first), *(first + axis for axis in self.back), values.dim() - 1)

    def matrices(self, bulk: Tensor) -> Tensor:
        """A view of bulk [*B or ones, s, c, c], of which axes may be missing, as (s, *own, c, c)."""
        lead = bulk.dim() - 3
        own = [axis - (len(self.batch) - lead) for axis in self.own]
        shared = tuple(axis for axis in range(lead) if axis not in own)
        bulk = bulk.squeeze(shared) if shared else bulk
        return bulk.movedim(len(own), 0) if own else bulk

    def parameter(self, tensor: Tensor) -> Tensor:
        """A parameter [*B or ones, s, *own] as (s, g or 1, *own), a view where all or no sets have their own."""
        count = len(self.batch)
        tensor = tensor.movedim(count, 0)
        rest = tensor.shape[count + 1 :]
        if all(size == 1 for size in tensor.shape[1 : count + 1]):
            return tensor.reshape(len(tensor), 1, *rest)
        tensor = tensor.permute(0, *(1 + axis for axis in self.order), *range(count + 1, tensor.dim()))
        tensor = tensor.expand(-1, *(self.batch[axis] for axis in self.own), *tensor.shape[len(self.own) + 1 :])
        return tensor.reshape(len(tensor), self.grid[0], *rest)

    def as_parameter(self, counts: Tensor, shape: Sequence[int]) -> Tensor:
        """Sums (s, g or 1, *own) over sets in the shape [*B or ones, s, *own] of a parameter, contiguous."""
        count = len(self.batch)
        if counts.shape[1] == 1:
            return counts.reshape(shape)
        sizes = [self.batch[axis] for axis in self.own] + [1] * (count - len(self.own))
        counts = counts.view(len(counts), *sizes, *counts.shape[2:])
        counts = counts.permute(*(1 + axis for axis in self.back), 0, *range(count + 1, counts.dim()))
        axes = [axis for axis in range(count) if shape[axis] == 1 and counts.shape[axis] > 1]
        return (counts.sum(axes, keepdim=True) if axes else counts).contiguous()
