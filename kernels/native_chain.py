"""A chain as the loops that numba compiles take it: flat arrays, and where things lie in them.

As a rule nothing is copied but what all steps share: one matrix for all of them, and the initial weights.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from .chain import Chain
from .exponentials import FLUSH, trusted_sum
from .native import compiled, cut
from .native_exp import bits, exp64, from_bits, from_ordered, ordered
from .native_vectors import LANES, everywhere, larger, largest, load

Array = np.ndarray[Any, Any]

# multiply-adds from which on another thread is worth its start
_SHARE = 2**21

_SMALLEST = np.nextafter(0.0, 1.0)

# entries of emissions
_BLOCK = 512

# from so many states, and members that share a matrix, on products are left to the BLAS
_WIDE = 96, 16

# by step, float64's emissions may run so far (17 nats) above the states that can be reached
_SHALLOW = {torch.float32: 0.0, torch.float64: 2.0**-24}


class Operands(NamedTuple):
    """What both directions read.

    `sizes`: v, g, m, c, whether matrices are logarithms, whether all steps have one; then the strides of x (v, g, m)
    and of `raw` (s, g, from, to). `raw` holds the caller's matrices. `matrix` (g, c, c), `scale` (g) and `top` (g): the
    linear ones that all steps share, what was taken out of them, their largest entries. `initial` (g, m, c) in float64,
    `log_top` (g, m): the initial weights over the largest, and its logarithm; `faint` (g, m): whether some of them are
    too small for float64. `limits`: see `limits_of`.
    """

    sizes: Array
    x: Array
    raw: Array
    matrix: Array
    scale: Array
    top: Array
    initial: Array
    log_top: Array
    faint: Array
    final: Array
    ends: Array
    limits: Array


def wide(chain: Chain) -> bool:
    """Whether torch's products are faster than a loop, and so `sum_product`."""
    return chain.c >= _WIDE[0] and chain.m >= _WIDE[1]


def operands(chain: Chain) -> Operands:
    """A copy of x or of `bulk` is made where it is of another dtype, or where the batch's axes cannot be two."""
    v, g, m, c, dtype = chain.v, chain.g, chain.m, chain.c, chain.dtype
    x, bulk, one = chain.x.to(dtype), chain.bulk.to(dtype), chain.bulk.shape[0] == 1
    x = (x if x.stride(-1) == 1 or c == 1 else x.contiguous()).reshape(v, g, m, c)
    bulk = bulk.reshape(len(bulk), g, c, c)
    p0 = chain.p0.expand(*chain.lead, c).reshape(g, m, c).to(dtype)
    kept, kind = g if one else 0, KINDS[dtype]
    matrix, scale, top = np.empty(kept * c * c, kind), np.empty(kept), np.empty(kept)
    initial, log_top, faint = np.empty(g * m * c), np.empty(g * m), np.empty(g * m, np.bool_)
    raw, log = flat(bulk), chain.log_params
    outputs = matrix, scale, top, initial, log_top, faint
    _compiled(dtype)(raw, *bulk.stride()[1:], flat(p0), *p0.stride(), m, c, log, *outputs)
    sizes = np.array([v, g, m, c, log, one, *x.stride()[:3], *bulk.stride()])
    final = np.empty(0, KINDS[dtype]) if chain.final is None else chain.final.to(dtype).reshape(-1).numpy()
    ends = np.full(g * m, v) if chain.ends is None else chain.ends.reshape(-1).contiguous().numpy()
    limits = limits_of(dtype, c)
    return Operands(sizes, flat(x), raw, matrix, scale, top, initial, log_top, faint, final, ends, limits)


@cache
def limits_of(dtype: torch.dtype, c: int) -> Array:
    """From where on a sum is trusted, below what a message's entry is zero, and what a scale has to be at least."""
    return np.array([trusted_sum(dtype, c), FLUSH[dtype], _SHALLOW[dtype]])


def ranges(chain: Chain, *, whole_sets: bool = False) -> list[tuple[int, int]]:
    """The sequences that each thread walks, whole sets of them if need be."""
    g, m = chain.g, chain.m
    work = chain.v * g * m * chain.c**2
    parts = max(1, min(torch.get_num_threads(), g if whole_sets else g * m, work // _SHARE))
    return [(low * m, high * m) for low, high in cut(g, parts)] if whole_sets else cut(g * m, parts)


def flat(tensor: Tensor) -> Array:
    """The memory from its first entry to its last, whatever lies between."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        found: Array = tensor.numpy().reshape(-1)
        return found
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    found = tensor.as_strided((extent if tensor.numel() else 0,), (1,)).numpy()
    return found


KINDS = {torch.float32: np.float32, torch.float64: np.float64}


@cache
def _compiled(dtype: torch.dtype) -> Callable[..., None]:
    real = numba.float64 if dtype == torch.float64 else numba.float32
    many, wide, size = real[::1], numba.float64[::1], numba.int64
    strides = (size,) * 3
    outputs = many, wide, wide, wide, wide, numba.boolean[::1]
    return compiled(_prepare, numba.void(many, *strides, many, *strides, size, size, numba.boolean, *outputs))


@numba.njit
def block_of(sizes):
    """For how many steps emissions are made at a time: what a first-level cache holds.

    One at a time where more sequences than are walked together share a large matrix of a step, which is looked at once.
    """
    some = sizes[5] or sizes[2] in (1, 4) or sizes[3] <= LANES
    return max(1, min(sizes[0], _BLOCK // sizes[3])) if some else 1


@numba.njit(fastmath={"contract"})
def usable(raw, begin, stride_from, stride_to, c, log):
    """Whether a matrix may be used where it lies, and its largest entry."""
    if log or (stride_to != 1 and c > 1):
        return False, 1.0
    # four at a time, so that none waits for another's maximum
    high0 = high1 = high2 = high3 = everywhere(raw, 0.0)
    for k in range(c):
        for j in range(0, c, 4 * LANES):
            at, n = begin + k * stride_from + j, c - j
            high0 = larger(high0, load(raw, at, n, 0.0))
            high1 = larger(high1, load(raw, at + LANES, n - LANES, 0.0))
            high2 = larger(high2, load(raw, at + 2 * LANES, n - 2 * LANES, 0.0))
            high3 = larger(high3, load(raw, at + 3 * LANES, n - 3 * LANES, 0.0))
    top = float(largest(larger(larger(high0, high1), larger(high2, high3))))
    return not (top < 2.0**-60 or 2.0**60 < top < np.inf) or top == 0, top


@numba.njit(fastmath={"contract"})
def linear_matrix(raw, begin, stride_from, stride_to, c, log, out):
    """Write a matrix (c, c), linear and with entries near 1; the logarithm of what was taken out, the largest entry."""
    flush = 2.0**-115 if out.itemsize == 4 else 2.0**-990
    high = ordered(raw.dtype.type(-np.inf))
    for k in range(c):
        for j in range(c):
            value = ordered(raw[begin + k * stride_from + j * stride_to])
            high = value if value > high else high
    top = float(from_ordered(high))
    shift, scale = 0.0, 1.0
    if log:
        shift = 0.0 if top == -np.inf else top
    elif (top > 2.0**16 or 0 < top < 2.0**-16) and top < np.inf:
        scale = 2.0 ** min(max(-np.floor(np.log2(top)), -1020.0), 1020.0)
        shift = -np.log(scale)
    largest = np.int64(0)
    for k in range(c):
        row = out[k * c : (k + 1) * c]
        for j in range(c):
            entry = float(raw[begin + k * stride_from + j * stride_to])
            entry = exp64(entry - shift) if log else entry * scale
            row[j] = 0.0 if log and entry < flush else entry
            value = bits(entry)
            largest = value if value > largest else largest
    return shift, from_bits(largest)


def _prepare(
    raw, stride_set, stride_from, stride_to, p0, first, second, third, m, c, log, matrix, scale, top, initial, log_top,
    faint,
):  # fmt: skip
    """Write what all steps share; see `Operands`."""
    for i in range(len(scale)):
        part = matrix[i * c * c : (i + 1) * c * c]
        scale[i], top[i] = linear_matrix(raw, i * stride_set, stride_from, stride_to, c, log, part)
    zero = -np.inf if log else 0.0
    for q in range(len(log_top)):
        begin = q // m * first + q % m * second
        most = -np.inf
        for j in range(c):
            entry = float(p0[begin + j * third])
            most = entry if entry > most else most
        most = (0.0 if most == -np.inf else most) if log else (1.0 if most == 0 else most)
        faint[q] = False
        for j in range(c):
            entry = float(p0[begin + j * third])
            share = exp64(entry - most) if log else entry / most
            some = entry > zero
            # what is too small for float64 is not impossible
            initial[q * c + j] = _SMALLEST if some and share < _SMALLEST else share
            faint[q] |= some and share < 2.0**-900
        log_top[q] = most if log else np.log(most)


prepare = numba.njit(fastmath={"contract"})(_prepare)
