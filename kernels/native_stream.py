"""A piece of a stream walked where it lies, by the loop of `native_forward`, behind the message that is carried."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .chain import Chain
from .native import spread
from .native_chain import Array, address, empty, grid, limits_of, ranges, sizes_of
from .native_forward import walk
from .native_precision import sums_of


class Piece(NamedTuple):
    """What is worked out once for all pieces of the same shapes and strides.

    `sizes` as in `native_chain`, with the strides of posteriors (v, g, m); `spans`: the sequences of each thread;
    `next`: how many bytes lie between the matrices into the first step and into the second.
    """

    dtype: torch.dtype
    sizes: Array
    limits: Array
    spans: list[tuple[int, int]]
    next: int

    @classmethod
    def of(cls, chain: Chain, posteriors: Tensor | None) -> "Piece | None":
        """For a chain whose `bulk` (v or 1, *own, c, c) has the matrix into the first step too.

        `posteriors` (v, *lead, c) are written if they are there. None where a copy would be needed.
        """
        v, g, m, c, dtype = chain.v, chain.g, chain.m, chain.c, chain.dtype
        plain = chain.x.dtype == chain.bulk.dtype == dtype and (posteriors is None or posteriors.dtype == dtype)
        if not plain or (chain.x.stride(-1) != 1 and c > 1):
            return None
        try:
            x, bulk, p0 = grid(chain)
            out = x if posteriors is None else posteriors.view(v, g, m, c)
        except RuntimeError:
            return None
        sizes = np.array([*sizes_of(chain, x, bulk, p0), *out.stride()[:3]])
        following = bulk.stride(0) * bulk.itemsize if len(bulk) > 1 else 0
        return cls(dtype, sizes, limits_of(dtype, c), ranges(chain), following)

    def sums(self, bulk: Tensor, *, endless: bool) -> Array:
        """See `native_precision`; `endless`: the matrix is the stream's."""
        return sums_of(self.dtype, bulk.data_ptr(), self.sizes, endless=endless)

    def walk(
        self,
        x: Tensor,
        bulk: Tensor,
        p0: Tensor | None,
        carried: tuple[Tensor, Tensor, Tensor],
        posteriors: Tensor | None,
        number: int,
        sums: Array,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """The logarithm of the message after a piece [*B, c], the log-partition [*B], and what its rounding has lost.

        `carried`: the same before the piece, float64, whose message is not looked at where there is a `p0` to begin
        at; `number`: how many steps are before it. None where something may be lossy.
        """
        before = [tensor.contiguous() for tensor in carried]
        after = [torch.empty_like(tensor) for tensor in before]
        message, total, lost = (tensor.data_ptr() for tensor in before)
        new_message, new_total, new_lost = (tensor.data_ptr() for tensor in after)
        operands = x.data_ptr(), bulk.data_ptr() + self.next, address(p0), 0, 0
        ahead = 0, 0, new_total, 0, message if p0 is None else 0, bulk.data_ptr(), total, lost
        behind = address(posteriors), new_message, new_lost, self.sizes, self.limits, sums, empty(self.dtype)
        if any(spread(walk(self.dtype, sums.itemsize), self.spans, 2, number, *operands, *ahead, *behind)):
            return None
        return after[0], after[1], after[2]
