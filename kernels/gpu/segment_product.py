"""The product of consecutive matrices, with potentials between, in one program: each row with an exponent of two.

    P_b D_{b+1} P_{b+1} ... D_{e-1} P_{e-1}          D_i = diag(exp x_i), or all 1

Each row is the message of a sequence that begins in one state. Numerics: `scaled`; rows with a sum that may be inexact
become NaN.
"""

import torch
import triton
import triton.language as tl

from .scaled import (
    exp_scaled,
    exponent_of,
    floor,
    halves,
    least_exponent,
    level_of,
    linear,
    multiply,
    next_shift,
    power_of_two,
    target,
)
from .tiles import any_of, far, widened


@triton.constexpr_function
def block_of(c):
    """The length of a tile's axis for so many states."""
    return max(16, triton.next_power_of_2(c))


@triton.jit
def segment_product(
    x_ptr, bulk_ptr, begin, end, stride_xv, stride_xc, stride_bv, STRIDE_BK: tl.constexpr, STRIDE_BJ: tl.constexpr,
    C: tl.constexpr, SAME: tl.constexpr, LOG_PARAMS: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The product of the matrices into the steps after `begin` to `end`, without x of both, and its rows' exponents.

    Rows of states that x does not admit at `begin`, and columns of states that it does not admit at `end`, are 0.
    """
    BLOCK: tl.constexpr = block_of(C)
    full: tl.constexpr = 2.0 ** target(DTYPE == tl.float64)
    states = tl.arange(0, BLOCK)
    there = begin < end
    x = potentials(x_ptr, begin, states, stride_xv, stride_xc, True, C, DTYPE)
    p = _matrix(bulk_ptr, begin, states, stride_bv, there, STRIDE_BK, STRIDE_BJ, C, LOG_PARAMS, DTYPE)
    k, low = _bound(p, LOG_PARAMS)
    entries = linear(p, k, LOG_PARAMS)
    high, rest = halves(entries, PRECISION)
    u = tl.where((x != float("-inf"))[:, None] | (entries != entries), entries * full, 0.0)
    before = tl.where(x != float("-inf"), full, 0.0).to(DTYPE)
    taken = tl.zeros((BLOCK,), tl.int64) + (k - target(DTYPE == tl.float64))
    shift = tl.zeros((BLOCK,), tl.int32)
    # the least of each entry, or of each row where registers are few
    least = tl.full((BLOCK, BLOCK if BLOCK <= 32 else 1), float("inf"), DTYPE)
    x = potentials(x_ptr, begin + 1, states, stride_xv, stride_xc, there, C, DTYPE)
    wrong = x != x
    if not SAME:
        more = begin + 1 < end
        p = _matrix(bulk_ptr, begin + 1, states, stride_bv, more, STRIDE_BK, STRIDE_BJ, C, LOG_PARAMS, DTYPE)
    for i in tl.range(begin + 1, end):
        least = _least(least, u, x, before, low)
        level = level_of(tl.max(x, 0))
        a = raised_sums(u * power_of_two(-shift, DTYPE)[:, None], u, x, level)
        x = potentials(x_ptr, i + 1, states, stride_xv, stride_xc, True, C, DTYPE)
        wrong |= x != x
        if not SAME:
            k, low = _bound(p, LOG_PARAMS)
            high, rest = halves(linear(p, k, LOG_PARAMS), PRECISION)
            more = i + 1 < end
            p = _matrix(bulk_ptr, i + 1, states, stride_bv, more, STRIDE_BK, STRIDE_BJ, C, LOG_PARAMS, DTYPE)
        u = multiply(a, high, rest, PRECISION)
        taken += (level + shift + k).to(tl.int64)
        shift = next_shift(before, shift)
        before = tl.max(a, 1)
    least = _least(least, u, x, before, low)
    exact = (tl.min(least, 1) >= enough(DTYPE == tl.float64))[:, None] & (u < float("inf"))
    kept = tl.where((x != float("-inf"))[None, :], u, 0.0)
    return tl.where(exact & (any_of(wrong) == 0), kept, float("nan")), taken


@triton.jit
def raised_sums(scaled, u, x, level):
    """The messages of sums `scaled`, which are u up to a factor, see `scaled.raised`; NaN where sums are."""
    least = tl.where(x == float("-inf"), 0.0, floor(u.dtype == tl.float64)).to(u.dtype)
    new = tl.maximum(scaled * exp_scaled(x, level)[None, :], least[None, :], propagate_nan=tl.PropagateNan.ALL)
    return tl.where(u == 0.0, 0.0, new)


@triton.jit
def _least(least, u, x, before, low):
    """The least of what was found before and of the sums u of states that x admits, but for true zeros.

    A product with a matrix that is low counts less, so that all are exact above the same bound; its zeros are not true,
    except in rows of which the largest message `before` is 0. NaN is not seen.
    """
    beyond = tl.where(x == float("-inf"), float("inf"), 0.0).to(u.dtype)
    found = tl.where(u == 0.0, float("inf"), u) + beyond[None, :]
    if low > 0:
        wanted = (before > 0.0)[:, None] & (x != float("-inf"))[None, :]
        found = tl.minimum(found, tl.where(wanted, u * 2.0**-26, float("inf")))
    if least.shape[1] == 1:
        found = tl.min(found, 1)[:, None]
    return tl.minimum(least, found)


@triton.constexpr_function
def enough(double):
    """The least sum that is exact, see `scaled`; for low matrices, in the scale of `_least`."""
    return 2.0**-440 if double else 2.0**-36


@triton.jit
def _bound(p, LOG_PARAMS: tl.constexpr):
    """The exponent of a matrix's largest entry, and whether the matrix is low."""
    DOUBLE: tl.constexpr = p.dtype == tl.float64
    nothing: tl.constexpr = float("-inf") if LOG_PARAMS else 0.0
    if LOG_PARAMS:
        k = level_of(tl.max(p))
        least = tl.min(tl.where(p > nothing, p, float("inf")))
        return k, (level_of(least) - k <= least_exponent(DOUBLE)).to(tl.int32)
    elif DOUBLE:
        k = exponent_of(tl.max(p))
        least = tl.min(tl.where(p > nothing, p, float("inf")))
        return k, (least < power_of_two(k, p.dtype) * 2.0 ** least_exponent(DOUBLE)).to(tl.int32)
    else:
        # non-negative numbers are in the order of their bits, and integers are compared by all lanes at once
        bits = p.to(tl.int32, bitcast=True)
        k = exponent_of(tl.max(bits).to(tl.float32, bitcast=True))
        least = tl.min((bits - 1).to(tl.uint32, bitcast=True))
        return k, (least < (tl.maximum(k + 127 + least_exponent(False), 1) << 23).to(tl.uint32)).to(tl.int32)


@triton.jit
def potentials(x_ptr, step, states, stride_xv, stride_xc, there, C: tl.constexpr, DTYPE: tl.constexpr):
    """x of a step, 0 if there is none; -inf for states that do not exist."""
    if x_ptr is None:
        return tl.where(states < C, 0.0, float("-inf")).to(DTYPE)
    else:
        pointers = x_ptr + far(step, stride_xv) + states.to(tl.int64) * stride_xc
        return tl.load(pointers, mask=(states < C) & there, other=float("-inf")).to(DTYPE)


@triton.jit
def _matrix(
    bulk_ptr, index, states, stride_bv, there,
    STRIDE_BK: tl.constexpr, STRIDE_BJ: tl.constexpr, C: tl.constexpr, LOG_PARAMS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The matrix of an index; weight 0 for states that do not exist."""
    mask = (states < C)[:, None] & (states < C)[None, :] & there
    pointers = bulk_ptr + far(index, stride_bv) + states[:, None] * STRIDE_BK + states[None, :] * STRIDE_BJ
    return widened(tl.load(pointers, mask=mask, other=float("-inf") if LOG_PARAMS else 0.0), DTYPE)


def fits(c: int, dtype: torch.dtype) -> bool:
    """Whether a program holds products of so many states in registers."""
    return c <= (32 if dtype == torch.float64 else 64)


def warps(c: int, double: bool) -> int:
    """The warps of a program."""
    block = block_of(c) * (2 if double else 1)
    return 1 if block <= 16 else 2 if block <= 32 else 8


def registers(c: int) -> int:
    """The most registers of a thread: those of few states leave room for sixteen warps."""
    return 128 if c <= 16 else 255


def resident(c: int, dtype: torch.dtype) -> int:
    """How many programs one multiprocessor has registers for."""
    return 65536 // ((registers(c) + 1) // 8 * 8 * 32 * warps(c, dtype == torch.float64))
