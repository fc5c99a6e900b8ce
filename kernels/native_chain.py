"""A chain as the loops that numba compiles take it: addresses, and where things lie behind them.

As a rule nothing is copied but what all steps share: one matrix for all of them, and the initial weights.
"""

from functools import cache
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from .chain import Chain
from .dither import ROUNDED_ANEW
from .exponentials import FLUSH, trusted_sum
from .native import called, cut, inlined
from .native_dither import round_anew
from .native_exp import bits, exp64, from_bits, from_ordered, ordered
from .native_vectors import LANES, everywhere, larger, largest, load

Array = np.ndarray[Any, Any]

# multiply-adds from which on another thread is worth its start
_SHARE = 2**21

_SMALLEST = np.nextafter(0.0, 1.0)

_FLUSH_32 = FLUSH[torch.float32]

# entries of emissions
_BLOCK = 512

# from so many entries of messages that are multiplied with one matrix on a chain's gradients are left to the BLAS
_WIDE = 25_000

# by step, float64's emissions may run so far (17 nats) above the states that can be reached
_SHALLOW = {torch.float32: 0.0, torch.float64: 2.0**-24}


class Walked(NamedTuple):
    """What the loops of either direction read, flat.

    `log`, `one`: whether matrices are logarithms, whether all steps have one. Then the strides of x (v, g, m) and of
    `raw` (s, g, from, to), the caller's matrices. `matrix` (g, c, c), `scale` (g) and `top` (g): the linear ones that
    all steps share, what was taken out of them, their largest entries. `exact` (g, c, c) float64: exponentials that
    `matrix` is too narrow for, or empty; see `round_matrices`. `initial` (g, m, c) in float64, `log_top`
    (g, m): the initial weights over the largest, and its logarithm; `faint` (g, m): whether some of them are too small
    for float64. `final` (g, m, c) or empty, `ends` (g, m): see `Chain`.
    """

    v: int
    g: int
    m: int
    c: int
    log: bool
    one: bool
    x_step: int
    x_set: int
    x_member: int
    step: int
    set: int
    row: int
    column: int
    x: Array
    raw: Array
    matrix: Array
    exact: Array
    scale: Array
    top: Array
    initial: Array
    log_top: Array
    faint: Array
    final: Array
    ends: Array


def wide(chain: Chain) -> bool:
    """Whether torch's products give gradients faster than loops, and so `sum_product`; the forward pass alone never.

    In the loops the gradients of a set's matrices are one thread's, but for a matrix that is everybody's.
    """
    threads = 1 if chain.g == len(chain.bulk) == 1 else max(1, torch.get_num_threads() // chain.g)
    return chain.m * chain.c * threads >= _WIDE


def operands(chain: Chain) -> tuple[list[Tensor | None], Array]:
    """x, bulk, p0, `ends` and `final`, whose addresses `walked` takes, and the sizes.

    A copy of x or of `bulk` is made where it is of another dtype, or where the batch's axes cannot be two.
    """
    v, g, m, c, dtype = chain.v, chain.g, chain.m, chain.c, chain.dtype
    x, bulk = chain.x.to(dtype), chain.bulk.to(dtype)
    x = (x if x.stride(-1) == 1 or c == 1 else x.contiguous()).reshape(v, g, m, c)
    bulk = bulk.reshape(len(bulk), g, c, c)
    p0 = chain.p0.expand(*chain.lead, c).reshape(g, m, c).to(dtype)
    ends = None if chain.ends is None else chain.ends.contiguous()
    final = None if chain.final is None else chain.final.to(dtype).contiguous()
    return [x, bulk, p0, ends, final], np.array(sizes_of(chain, x, bulk, p0))


def grid(chain: Chain) -> tuple[Tensor, Tensor, Tensor]:
    """x, bulk and p0 as (v, g, m, c), (s, g, c, c) and (g, m, c); a RuntimeError where they are no views."""
    v, g, m, c = chain.v, chain.g, chain.m, chain.c
    p0 = chain.p0.expand(*chain.lead, c)
    return chain.x.view(v, g, m, c), chain.bulk.view(-1, g, c, c), p0.view(g, m, c)


def sizes_of(chain: Chain, x: Tensor, bulk: Tensor, p0: Tensor) -> list[int]:
    """What `walked` is to know of x (v, g, m, c), bulk (s, g, c, c) and p0 (g, m, c)."""
    sizes = [chain.v, chain.g, chain.m, chain.c, int(chain.log_params), int(len(bulk) == 1)]
    return [*sizes, *x.stride()[:3], *bulk.stride(), *p0.stride()]


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


@cache
def empty(dtype: torch.dtype) -> Array:
    """Nothing, of a dtype."""
    return np.empty(0, np.float64 if dtype == torch.float64 else np.float32)


def address(tensor: Tensor | None) -> int:
    """Where its first entry lies; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


@intrinsic
def _pointer(typing: Any, address: Any, like: Any) -> Any:
    """What lies at an address, numbers of the type of an array."""
    found = types.CPointer(like.dtype)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(found))

    return found(address, like), generate


@inlined
def at(address, size, like):
    """So many numbers at an address, of the type of an array."""
    return numba.carray(_pointer(address, like), (size,))


@called
def in_sets(walked):
    """Whether more sequences than are walked together share the matrix of a step, which is looked at once for them."""
    return not (walked.one or walked.m in (1, 4) or walked.c <= LANES)


@called
def block_of(walked, matrices):
    """For how many steps emissions are made at a time: what a first-level cache holds.

    And so many `matrices`' entries at most where sets share them, for each group of a set returns to them; or 0: those
    of one step.
    """
    c = walked.c
    steps = min(_BLOCK // c, matrices // (c * c)) if in_sets(walked) else _BLOCK // c
    return max(1, min(walked.v, steps))


@called
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


@inlined
def matrix_at(raw, begin, stride_from, stride_to, c, log, linear, held):
    """The linear one of the matrix that begins somewhere: where it lies, where it begins, how far apart rows are.

    `held`: where the one looked at last begins, whether it is used where it lies, what was taken out of it, and its
    largest entry.
    """
    if held[0] != begin:
        here, most = usable(raw, begin, stride_from, stride_to, c, log)
        taken = 0.0
        if not here:
            taken, most = linear_matrix(raw, begin, stride_from, stride_to, c, log, linear)
        held[0], held[1], held[2], held[3] = begin, here, taken, most
    return (raw, begin, stride_from) if held[1] != 0 else (linear, 0, c)


@inlined
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


# as many numbers as may lie behind an address
MANY = 2**60


@called
def walked(low, high, x_at, raw_at, p0_at, ends_at, final_at, sizes, none):
    """The chain of the sequences from `low` to before `high`, with what all steps share.

    `none`: an empty array of the dtype of the arithmetic. An address of 0: no weights at the end, all steps.
    """
    v, g, m, c, log, one = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4] != 0, sizes[5] != 0
    x, raw, p0 = at(x_at, MANY, none), at(raw_at, MANY, none), at(p0_at, MANY, none)
    all_, sets = g * m, g if one else 0
    matrix, scale, top = np.empty(sets * c * c, none.dtype), np.empty(sets), np.empty(sets)
    exact = np.empty(sets * c * c if log and none.itemsize == 4 else 0)
    for i in range(low // m, min(sets, (high - 1) // m + 1)):
        begin, first, stop = i * sizes[10], i * c * c, (i + 1) * c * c
        if len(exact) > 0:
            scale[i], top[i] = linear_matrix(raw, begin, sizes[11], sizes[12], c, log, exact[first:stop])
        else:
            scale[i], top[i] = linear_matrix(raw, begin, sizes[11], sizes[12], c, log, matrix[first:stop])
    initial, log_top, faint = np.empty(all_ * c), np.empty(all_), np.empty(all_, np.bool_)
    zero = -np.inf if log else 0.0
    for q in range(low, high if p0_at else low):
        begin, most = q // m * sizes[13] + q % m * sizes[14], -np.inf
        for j in range(c):
            entry = float(p0[begin + j * sizes[15]])
            most = entry if entry > most else most
        most = (0.0 if most == -np.inf else most) if log else (1.0 if most == 0 else most)
        faint[q] = False
        for j in range(c):
            entry = float(p0[begin + j * sizes[15]])
            share = exp64(entry - most) if log else entry / most
            some = entry > zero
            # what is too small for float64 is not impossible
            initial[q * c + j] = _SMALLEST if some and share < _SMALLEST else share
            faint[q] |= some and share < 2.0**-900
        log_top[q] = most if log else np.log(most)
    ends = at(ends_at, all_, sizes) if ends_at else np.full(all_, v)
    final = at(final_at, all_ * c, none) if final_at else none
    return Walked(
        v, g, m, c, log, one, sizes[6], sizes[7], sizes[8], sizes[9], sizes[10], sizes[11], sizes[12], x, raw, matrix,
        exact, scale, top, initial, log_top, faint, final, ends,
    )  # fmt: skip


@called
def round_matrices(chain, low, high, step):
    """Round the exponentials that all steps share to the `matrix` of a step, for the sequences from `low` to `high`.

    A matrix that is one and the same in all steps would bend each of them in the same direction.
    """
    size = chain.c * chain.c
    if len(chain.exact) > 0:
        first, stop = low // chain.m * size, ((high - 1) // chain.m + 1) * size
        round_anew(chain.exact[first:stop], step // ROUNDED_ANEW, _FLUSH_32, chain.matrix[first:stop])
