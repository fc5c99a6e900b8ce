"""Nodes of a product tree: matrices with a scale of their own, cut into blocks of as many as fit a workspace."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Block(NamedTuple):
    """Some nodes: `values` (g, p, c, c), and which of them are `linear` (g, p)."""

    values: Tensor
    linear: NDArray[np.bool_]
    leaf: bool

    @property
    def are_linear(self) -> bool:
        """Whether all are linear; if only some are, they become logarithms first."""
        if self.linear.all():
            return True
        if self.linear.any():
            where = tuple(torch.from_numpy(index) for index in self.linear.nonzero())
            self.values[where] = self.values[where].log_()
            self.linear[...] = False
        return False

    @property
    def may_be_linear(self) -> bool:
        """Whether linear numbers may hold all of it; of logarithms that were computed it is known not to be so."""
        return self.leaf or self.are_linear


@dataclass(frozen=True)
class Nodes:
    """`values` (g, p, c, c), and which nodes are `linear` (g, p): the others are logarithms.

    The logarithm of a node is `log values + offset`, or `values + offset`. An `offset` (g, p, r) is one float64, or two
    of which the second is what the sum lost, where values are float64, too. `taken` (g, p, 4) is what was taken out of
    the product that made a node: a factor, and three logarithms. Leaves are the caller's: of any floating dtype, never
    linear, with offsets of 0, never written.
    """

    values: Tensor
    linear: NDArray[np.bool_]
    offset: Tensor
    taken: Tensor
    leaf: bool = False

    @classmethod
    def leaves(cls, values: Tensor) -> "Nodes":
        """The matrices that the caller passed."""
        g, p = values.shape[:2]
        zero = values.new_zeros(1, 1, 1, dtype=torch.float64)
        linear = np.broadcast_to(np.False_, (g, p))
        offset = zero.expand(g, p, parts(values.dtype))
        return cls(values, linear, offset, zero.expand(g, p, 4), leaf=True)

    @classmethod
    def over(cls, values: Tensor) -> "Nodes":
        """Nodes to be written, in this memory."""
        g, p = values.shape[:2]
        offset = values.new_zeros(g, p, parts(values.dtype), dtype=torch.float64)
        return cls(values, np.zeros((g, p), bool), offset, values.new_zeros(g, p, 4))

    def at(self, slots: slice) -> "Nodes":
        """The nodes in some slots of each set, as a view."""
        part = slice(None), slots
        return Nodes(self.values[part], self.linear[part], self.offset[part], self.taken[part], self.leaf)

    def blocks(self, sets: int, slots: int) -> Iterator[Block]:
        """The same nodes, so many at a time."""
        across = max(1, -(-self.linear.shape[1] // slots))
        for number, values in enumerate(split(self.values, sets, slots)):
            z, i = number // across * sets, number % across * slots
            yield Block(values, self.linear[z : z + sets, i : i + slots], self.leaf)

    def copy_(self, other: "Nodes") -> None:
        """Become as many others."""
        self.linear[...] = other.linear
        for own, tensor in ((self.values, other.values), (self.offset, other.offset), (self.taken, other.taken)):
            own.copy_(tensor)


def split(values: Tensor, sets: int, slots: int) -> Iterator[Tensor]:
    """Blocks of so many, set after set; `narrow` takes a fraction of the time that slices and `split` do."""
    g, p = values.shape[:2]
    for z in range(0, g, sets):
        part = values if sets >= g else values.narrow(0, z, min(sets, g - z))
        for i in range(0, p, slots):
            yield part if slots >= p else part.narrow(1, i, min(slots, p - i))


def parts(dtype: torch.dtype) -> int:
    """How many float64 an offset of such values is."""
    return 2 if dtype == torch.float64 else 1


def two_sum(total: Tensor, term: Tensor, room: Tensor) -> None:
    """Add to the first part of `total` (2, g, p), and to the second what rounding took (D. E. Knuth's two-sum)."""
    (high, low), (result, back, other) = total, room
    torch.sub(torch.add(high, term, out=result), high, out=back)
    low.add_(torch.sub(term, back, out=other))
    low.add_(high.sub_(torch.sub(result, back, out=other)))
    high.copy_(result)
