"""Small chains: where their tensors lie is worked out once for all calls of the same shapes, and a call is one loop.

A chain of a few dozen steps is walked in less time than it takes to arrange its tensors for the walk. A `Frame` knows
the strides; compiled code is handed the addresses, makes its own room and writes gradients as the caller wants them.
Numerics are those of `native_forward` and `native_backward`, whose loops it runs. What it finds lossy it leaves to
`native_sum_product`, and to it gradients that are weighted out of the ordinary.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .chain import Chain
from .native_backward import walk_back
from .native_chain import Array, empty, grid, limits_of, ranges, sizes_of, wide
from .native_forward import walk
from .native_precision import is_short, sums_of


class Frame(NamedTuple):
    """`sizes` and `limits` as in `native_chain`; `into`: the strides of gradients, as in `native_backward`.

    `short`: as in `native_precision`.
    """

    shape: tuple[int, int, int, int]  # v, g, m, c
    dtype: torch.dtype
    sizes: Array
    limits: Array
    into: Array
    short: bool

    @classmethod
    def of(cls, chain: Chain, dense: Chain) -> "Frame | None":
        """`dense`: the same with operands that are contiguous. None where a call is not small or would need a copy."""
        v, g, m, c, dtype = chain.v, chain.g, chain.m, chain.c, chain.dtype
        if chain.v == 1:  # what leads nowhere has gradients all the same
            return None
        plain = chain.x.dtype == chain.bulk.dtype == chain.p0.dtype == dtype and chain.ends is None
        if not plain or wide(chain) or len(ranges(chain)) > 1 or (chain.x.stride(-1) != 1 and c > 1):
            return None
        try:
            x, bulk, p0 = grid(chain)
            over_x, over_bulk, over_p0 = (view.stride() for view in grid(dense))
        except RuntimeError:
            return None
        into = [*over_x[:3], *over_bulk[:2], *over_p0, chain.p0.numel()]
        sizes, limits = np.array(sizes_of(chain, x, bulk, p0)), limits_of(dtype, c)
        return cls((v, g, m, c), dtype, sizes, limits, np.array(into), is_short(dtype, v, c))

    def forward(
        self, x: Tensor, bulk: Tensor, p0: Tensor, keep: bool, room: Tensor | None, number: int = 0
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], bool]:
        """The log-partition [*B], messages, scales and what is lossy (g, m); whether something is.

        `number`: that of the first step, in a stream.
        """
        v, g, m, c = self.shape
        found = torch.empty(x.shape[:-2], dtype=torch.float64)
        messages = torch.empty((v, g, m, c) if keep else (0,), dtype=self.dtype) if room is None else room
        scales = torch.ones((v + 1, g, m, 1), dtype=self.dtype)
        lossy = torch.zeros((g, m), dtype=torch.bool)
        operands = x.data_ptr(), bulk.data_ptr(), p0.data_ptr(), 0, 0
        rests = scales.data_ptr() + v * g * m * scales.itemsize
        outputs = messages.data_ptr() if keep else 0, rests, found.data_ptr(), lossy.data_ptr(), *(0,) * 7
        sums = self._sums(bulk)
        slots, fixed = v if keep else 2, (self.sizes, self.limits, sums, empty(self.dtype))
        some = walk(self.dtype, sums.itemsize)(0, g * m, slots, number, *operands, *outputs, *fixed)
        return (found, messages, scales, lossy), some

    def _sums(self, bulk: Tensor) -> Array:
        return empty(self.dtype) if self.short else sums_of(self.dtype, bulk.data_ptr(), self.sizes)

    def backward(
        self,
        x: Tensor,
        bulk: Tensor,
        p0: Tensor,
        messages: Tensor,
        weight: Tensor,
        by_log: bool,
        gradients: tuple[Tensor, ...],
    ) -> bool:
        """Write the gradients of x, bulk and p0 that are not empty; False, and nothing, for weights far from 1."""
        _, g, m, _ = self.shape
        weight = weight.to(torch.float64).contiguous()
        operands = x.data_ptr(), bulk.data_ptr(), p0.data_ptr(), 0, 0, messages.data_ptr(), weight.data_ptr()
        into_x, into_bulk, into_p0 = (gradient.data_ptr() for gradient in gradients)
        outputs = into_x, into_bulk, 0, into_p0
        sums = self._sums(bulk)
        fixed = by_log, self.sizes, self.into, sums, empty(self.dtype)
        return bool(walk_back(self.dtype, sums.itemsize)(0, g * m, 0, *operands, *outputs, *fixed))
