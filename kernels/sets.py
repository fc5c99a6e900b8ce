"""The sequences of a batch as g sets of m, where those of a set share all parameters.

Batch axes along which some parameter has its own values come first, then the others; (g, m) are the two groups.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Sets(NamedTuple):
    """The batch axes in the order of sets and members.

    Attributes:
        batch: the sizes of the batch axes.
        own: the axes of the batch that tell sets apart.
        shared: the axes that tell members apart.
    """

    batch: tuple[int, ...]
    own: tuple[int, ...]
    shared: tuple[int, ...]

    @classmethod
    def of(cls, batch: Sequence[int], parameters: Sequence[Tensor]) -> "Sets":
        """The sets of a batch *B, of parameters [*B or ones, ...]."""
        axes = range(len(batch))
        own = tuple(axis for axis in axes if any(one.shape[axis] != 1 for one in parameters))
        return cls(tuple(batch), own, tuple(axis for axis in axes if axis not in own))

    @property
    def g(self) -> int:
        """The number of sets."""
        return math.prod(self.batch[axis] for axis in self.own)

    @property
    def m(self) -> int:
        """The members of each set."""
        return math.prod(self.batch[axis] for axis in self.shared)

    def grouped(self, tensor: Tensor) -> Tensor:
        """A tensor [*B or ones, *rest] as (g, m, *rest)."""
        rest = tensor.shape[len(self.batch) :]
        tensor = tensor.expand((*self.batch, *rest))
        order = (*self.own, *self.shared, *range(len(self.batch), tensor.dim()))
        return tensor.permute(order).reshape(self.g, self.m, *rest)

    def batched(self, tensor: Tensor) -> Tensor:
        """A tensor (g, m, *rest) as a view [*B, *rest]."""
        rest = tensor.shape[2:]
        order = (*self.own, *self.shared)
        back = [order.index(axis) for axis in range(len(order))]
        grid = tensor.view((*(self.batch[axis] for axis in order), *rest))
        return grid.permute((*back, *range(len(order), len(order) + len(rest))))

    def parameter(self, tensor: Tensor) -> Tensor:
        """A parameter [*B or ones, s, *own] as (s, g or 1, *own), a view where all or no sets have their own."""
        count = len(self.batch)
        tensor = tensor.movedim(count, 0)
        rest = tensor.shape[count + 1 :]
        if all(size == 1 for size in tensor.shape[1 : count + 1]):
            return tensor.reshape(len(tensor), 1, *rest)
        tensor = tensor.permute(0, *(1 + axis for axis in (*self.own, *self.shared)), *range(count + 1, tensor.dim()))
        tensor = tensor.expand(-1, *(self.batch[axis] for axis in self.own), *tensor.shape[len(self.own) + 1 :])
        return tensor.reshape(len(tensor), self.g, *rest)

    def as_parameter(self, counts: Tensor, shape: Sequence[int]) -> Tensor:
        """Sums (s, g or 1, *own) over sets in the shape [*B or ones, s, *own] of a parameter, contiguous."""
        count = len(self.batch)
        if counts.shape[1] == 1:
            return counts.reshape(shape)
        own = [self.batch[axis] for axis in self.own]
        counts = counts.view(len(counts), *own, *(1 for _ in self.shared), *counts.shape[2:])
        order = (*self.own, *self.shared)
        back = [1 + order.index(axis) for axis in range(count)]
        counts = counts.permute(*back, 0, *range(count + 1, counts.dim()))
        axes = [axis for axis in range(count) if shape[axis] == 1 and counts.shape[axis] > 1]
        return (counts.sum(axes, keepdim=True) if axes else counts).contiguous()
