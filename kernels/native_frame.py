"""Small chains: where their tensors lie is worked out once for all calls of the same shapes, and a call is one loop.

A chain of a few dozen steps is walked in less time than it takes to arrange its tensors for the walk. A `Frame` knows
the strides; compiled code is handed the addresses, makes its own room and writes gradients as the caller wants them.
Numerics are those of `native_forward` and `native_backward`, whose loops it runs. What it finds lossy, or weighted out
of the ordinary, it leaves to them.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from .chain import Chain
from .native import compiled
from .native_backward import from_linear, walk_back
from .native_chain import KINDS, Array, limits_of, prepare, ranges, wide
from .native_forward import walk


class Frame(NamedTuple):
    """`sizes` and `limits` as in `native_chain.Operands`.

    `lead`: the strides of p0 over (g, m, c), those of its gradient, and how many entries it has.
    """

    shape: tuple[int, int, int, int]  # v, g, m, c
    dtype: torch.dtype
    sizes: Array
    limits: Array
    lead: Array
    none: Array

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
            x, bulk = chain.x.view(v, g, m, c), chain.bulk.view(-1, g, c, c)
            p0, into = (of.p0.expand(*chain.lead, c).view(g, m, c).stride() for of in (chain, dense))
        except RuntimeError:
            return None
        sizes = np.array([v, g, m, c, chain.log_params, len(bulk) == 1, *x.stride()[:3], *bulk.stride()])
        lead = np.array([*p0, *into, chain.p0.numel()])
        return cls((v, g, m, c), dtype, sizes, limits_of(dtype, c), lead, np.empty(0, KINDS[dtype]))

    def forward(
        self, x: Tensor, bulk: Tensor, p0: Tensor, keep: bool, room: Tensor | None
    ) -> tuple[Tensor, ...] | None:
        """The log-partition [*B], messages, scales and what was redone; None where something may be lossy."""
        v, g, m, c = self.shape
        found = torch.empty(x.shape[:-2], dtype=torch.float64)
        messages = torch.empty((v, g, m, c) if keep else (0,), dtype=self.dtype) if room is None else room
        scales = torch.ones((v + 1, g, m, 1), dtype=self.dtype)
        operands = x.data_ptr(), bulk.data_ptr(), p0.data_ptr()
        outputs = found.data_ptr(), messages.data_ptr(), scales.data_ptr()
        if _compiled(self.dtype)[0](*operands, *outputs, keep, self.sizes, self.limits, self.lead, self.none):
            return None
        return found, messages, scales, torch.zeros((g, m), dtype=torch.bool)

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
        weight = weight.to(torch.float64).contiguous()
        operands = x.data_ptr(), bulk.data_ptr(), p0.data_ptr(), messages.data_ptr(), weight.data_ptr()
        outputs = [gradient.data_ptr() for gradient in gradients]
        needs = [gradient.numel() > 0 for gradient in gradients]
        walk = _compiled(self.dtype)[1]
        return bool(walk(*operands, *outputs, *needs, by_log, self.sizes, self.limits, self.lead, self.none))


@intrinsic
def _pointer(typing: Any, address: Any, like: Any) -> Any:
    """What lies at an address, numbers of the type of an array."""
    found = types.CPointer(like.dtype)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(found))

    return found(address, like), generate


@numba.njit(inline="always")
def _at(address, size, like):
    return numba.carray(_pointer(address, like), (size,))


def _forward(x_at, raw_at, p0_at, found_at, messages_at, scales_at, keep, sizes, limits, lead, none):
    v, g, m, c, log, one = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4] != 0, sizes[5] != 0
    x, raw, p0 = _at(x_at, _MANY, none), _at(raw_at, _MANY, none), _at(p0_at, _MANY, none)
    wide, sets, all_ = np.empty(0), g if one else 0, g * m
    matrix, scale, top = np.empty(sets * c * c, none.dtype), np.empty(sets), np.empty(sets)
    initial, log_top, faint = np.empty(all_ * c), np.empty(all_), np.empty(all_, np.bool_)
    prepare(
        raw, sizes[10], sizes[11], sizes[12], p0, lead[0], lead[1], lead[2], m, c, log, matrix, scale, top, initial,
        log_top, faint,
    )  # fmt: skip
    slots = v if keep else min(v, 2)
    messages = _at(messages_at, slots * all_ * c, none) if keep else np.empty(slots * all_ * c, none.dtype)
    rests, found = _at(scales_at + v * all_ * none.itemsize, all_, none), _at(found_at, all_, wide)
    lossy, ends = np.zeros(all_, np.bool_), np.full(all_, v)
    low = np.int64(0)  # a literal is a type of its own
    walk(
        low, all_, slots, sizes, x, raw, matrix, scale, top, initial, log_top, faint, none, ends, limits, messages,
        rests, found, lossy,
    )  # fmt: skip
    return lossy.any()


def _backward(
    x_at, raw_at, p0_at, messages_at, weight_at, into_x_at, into_bulk_at, into_p0_at, need_x, need_bulk, need_p0,
    by_log, sizes, limits, lead, none,
):  # fmt: skip
    v, g, m, c, log, one = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4] != 0, sizes[5] != 0
    x, raw, p0 = _at(x_at, _MANY, none), _at(raw_at, _MANY, none), _at(p0_at, _MANY, none)
    wide, sets, all_, by_log = np.empty(0), g if one else 0, g * m, by_log or log
    weight, messages = _at(weight_at, all_, wide), _at(messages_at, _MANY, none)
    largest = np.abs(weight).max()
    if not (2.0**-20 <= largest <= 2.0**20 or largest == 0):
        return False
    matrix, scale, top = np.empty(sets * c * c, none.dtype), np.empty(sets), np.empty(sets)
    initial, log_top, faint = np.empty(all_ * c), np.empty(all_), np.empty(all_, np.bool_)
    prepare(
        raw, sizes[10], sizes[11], sizes[12], p0, lead[0], lead[1], lead[2], m, c, log, matrix, scale, top, initial,
        log_top, faint,
    )  # fmt: skip
    turned = np.empty(sets * c * c, none.dtype)
    for i in range(sets):
        for k in range(c):
            for j in range(c):
                turned[(i * c + j) * c + k] = matrix[(i * c + k) * c + j]
    counts = np.zeros(sets * c * c if need_bulk else 0)
    into_x = _at(into_x_at, all_ * v * c, none) if need_x else none
    into_bulk = _at(into_bulk_at, g * (v - 1) * c * c, none) if need_bulk and not one else none
    more = np.array([c, m * v * c, v * c, c * c, (v - 1) * c * c, c, by_log])
    begun, ends = np.zeros(all_ * c), np.full(all_, v)
    low = np.int64(0)
    walk_back(
        low,
        all_,
        counts,
        sizes,
        x,
        raw,
        turned,
        initial,
        none,
        ends,
        more,
        weight,
        messages,
        begun,
        into_x,
        into_bulk,
    )
    if len(counts):
        into = _at(into_bulk_at, g * c * c, none)
        for i in range(sets):
            for k in range(c):
                e, at = (i * c + k) * c, i * sizes[10] + k * sizes[11]
                from_linear(into, e, 1.0, counts, e, matrix, e, raw, at, sizes[12], c, scale[i], by_log)
    if need_p0:
        sums = np.zeros(lead[6])
        for q in range(all_):
            factor = np.exp(-log_top[q])
            for j in range(c):
                share = initial[q * c + j]
                gradient = begun[q * c + j] * (share if by_log else factor)
                sums[q // m * lead[3] + q % m * lead[4] + j * lead[5]] += 0.0 if share == 0 else gradient
        _at(into_p0_at, lead[6], none)[:] = sums
    return True


# as many numbers as may lie behind an address
_MANY = 2**60


@cache
def _compiled(dtype: torch.dtype) -> tuple[Callable[..., bool], Callable[..., bool]]:
    real = numba.float64 if dtype == torch.float64 else numba.float32
    address, flag, whole = numba.int64, numba.boolean, numba.int64[::1]
    shared = whole, numba.float64[::1], whole, real[::1]
    forward = numba.boolean(*(address,) * 6, flag, *shared)
    backward = numba.boolean(*(address,) * 8, *(flag,) * 4, *shared)
    return compiled(_forward, forward), compiled(_backward, backward)
