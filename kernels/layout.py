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
        rest = tensor.shape[len(self.batch) :]
        return _moved(tensor.expand((*self.batch, *rest)), self.order).reshape(*self.grid, *rest)

    def batched(self, tensor: Tensor) -> Tensor:
        """A tensor (g, m, *rest) as [*B, *rest], a view where it can be one."""
        lead = tuple(self.batch[axis] for axis in self.order)
        return _moved(tensor.reshape(lead + tensor.shape[2:]), self.back)

    def steps_first(self, x: Tensor) -> Tensor:
        """A view of x [*B, v, c] as (v, *lead, c); a chain without batch axes gets one."""
        last = len(self.batch)
        return x.permute(last, *self.order, last + 1) if self.batch else x.unsqueeze(1)

    def weights(self, p0: Tensor) -> Tensor:
        """A view of p0 [*B or ones, c], of which axes may be missing, as (*lead or ones, c)."""
        if not self.batch:
            return p0.unsqueeze(0)
        return _moved(p0[(None,) * (len(self.batch) + 1 - p0.dim())], self.order)

    def states(self, values: Tensor) -> Tensor:
        """A view of values (..., *lead, c) of states as [..., *B, c]."""
        return _moved(values, self.back, values.dim() - 1 - len(self.batch)) if self.batch else values.squeeze(-2)

    def matrices(self, bulk: Tensor) -> Tensor:
        """A view of bulk [*B or ones, s, c, c], of which axes may be missing, as (s, *own, c, c)."""
        lead = bulk.dim() - 3
        own = [axis - (len(self.batch) - lead) for axis in self.own]
        shared = tuple(axis for axis in range(lead) if axis not in own)
        bulk = bulk.squeeze(shared) if shared else bulk
        return bulk.movedim(len(own), 0) if own else bulk

    @property
    def _sets(self) -> "Layout":
        """The layout of sets alone, of one member each."""
        return Layout(tuple(size if axis in self.own else 1 for axis, size in enumerate(self.batch)), self.own)

    def parameter(self, tensor: Tensor) -> Tensor:
        """A parameter [*B or ones, s, *own] as (s, g or 1, *own), a view where all or no sets have their own."""
        if all(size == 1 for size in tensor.shape[: len(self.batch)]):
            return tensor.reshape(tensor.shape[len(self.batch) :]).unsqueeze(1)
        return self._sets.grouped(tensor)[:, 0].transpose(0, 1)

    def as_parameter(self, counts: Tensor, shape: Sequence[int]) -> Tensor:
        """Sums (s, g or 1, *own) over sets in the shape [*B or ones, s, *own] of a parameter, contiguous."""
        if counts.shape[1] == 1:
            return counts.reshape(shape)
        return self._sets.batched(counts.transpose(0, 1)[:, None]).sum_to_size(shape).contiguous()


def _moved(tensor: Tensor, order: Sequence[int], first: int = 0) -> Tensor:
    """A view whose axes from `first` on lie in another order."""
    last = range(first + len(order), tensor.dim())
    return tensor.permute((*range(first), *(first + axis for axis in order), *last))
