"""Products of messages of sixteen sequences and a part of a matrix, loaded as tensor cores hold their operands.

The sum over states is shared by warps: each loads its states of the message and their rows of the matrix, into the
registers from which it multiplies them, and no operand passes through shared memory. Only the sums of warps do, which
are added up. Within a sum states may come in any order, and columns of a matrix in any order that is undone at the end:
both are chosen such that a thread's entries are neighbours in memory. A warp's lanes are q = 0..3 of the states, and
l = 0..7 of the sequences or columns:

    state = 16 (W j + w) + 4 q + r        column = 32 h + 4 l + s        sequence = 8 h + l

with w for the W warps, r and s for what a thread loads at once, and j and h for what it loads one after the other.
Products that tensor cores do not do this way, IEEE and of few states, are made as Triton makes them: W = 1.

Counted for c = 200, parts of 50 columns, sm_90: a step of `chain_forward` takes 989 instructions a warp and 32 KiB of
shared memory; with operands that pass through shared memory it took 1,610 and 144 KiB.
"""

import triton
import triton.language as tl

from .scaled import multiply, split
from .tiles import operand, widened


@triton.constexpr_function
def sharing(c, precision):
    """W: how many warps share a sum over c states."""
    return 1 if precision == "ieee" or c <= 32 else min(8, triton.next_power_of_2(c) // 16)


@triton.constexpr_function
def tile_of(count):
    """The length of a tile's axis for so many entries."""
    return max(16, triton.next_power_of_2(count))


# Along axes of which none is contiguous Triton lays lanes and warps from the last one on, before 3.7 from the first
_FIRST = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7))


@triton.constexpr_function
def _place(axis, rank):
    """Where a tile that is loaded has an axis. The last one, of neighbours in memory, stays the last."""
    return rank - 2 - axis if _FIRST and axis < rank - 1 else axis


@triton.jit
def _axis(SIZE: tl.constexpr, AXIS: tl.constexpr, RANK: tl.constexpr):
    """0, 1, ... along one of so many axes."""
    along = tl.arange(0, SIZE)
    for _ in tl.static_range(_place(AXIS, RANK)):
        along = tl.expand_dims(along, 0)
    for _ in tl.static_range(RANK - _place(AXIS, RANK) - 1):
        along = tl.expand_dims(along, -1)
    return along


@triton.jit
def _state(j, w, q, r, W: tl.constexpr):
    return 16 * (W * j + w) + 4 * q + r


@triton.jit
def load_message(ptr, rows, C: tl.constexpr, W: tl.constexpr):
    """16 rows of C states, 0 behind the first `rows`, as (W, 16, states of a warp); as (16, states) if W is 1.

    They are loaded past the first cache.
    """
    K: tl.constexpr = tile_of(C)
    R: tl.constexpr = 4 if C % 4 == 0 else 1
    if W == 1:
        member, state = _axis(16, 0, 2), _axis(K, 1, 2)
    else:  # [h, j, r, w, l, q, r]
        member = 8 * _axis(2, 0, 7) + _axis(8, 4, 7)
        r = R * _axis(4 // R, 2, 7) + _axis(R, 6, 7)
        state = _state(_axis(K // (16 * W), 1, 7), _axis(W, 3, 7), _axis(4, 5, 7), r, W)
    mask = (member < rows) & (state < C)
    a = tl.load(ptr + member * C + state, mask=mask, other=0.0, cache_modifier=".cg")
    if W == 1:
        return a
    else:
        a = tl.permute(a, (2, 5, 1, 4, 3, 6, 0) if _FIRST else (3, 0, 4, 1, 2, 6, 5))
        return tl.reshape(a, (W, 16, K // W))


@triton.jit
def load_matrix(
    ptr, end, STRIDE_K: tl.constexpr, STRIDE_J: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
    W: tl.constexpr, NOTHING: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """C rows of N columns, NOTHING behind the first `end`, as (W, rows of a warp, N); as (rows, N) if W is 1.

    WIDTH entries that are neighbours can be loaded at once.
    """
    K: tl.constexpr = tile_of(C)
    S: tl.constexpr = WIDTH if STRIDE_J == 1 else 1
    R: tl.constexpr = WIDTH if STRIDE_K == 1 and S == 1 else 1
    L: tl.constexpr = min(8, N // 4)
    if W == 1:
        state, column = _axis(K, 0, 2), _axis(N, 1, 2)
    else:  # [h, j, r, s, w, l, q, r, s]
        r, s = R * _axis(4 // R, 2, 9) + _axis(R, 7, 9), S * _axis(4 // S, 3, 9) + _axis(S, 8, 9)
        state = _state(_axis(K // (16 * W), 1, 9), _axis(W, 4, 9), _axis(4, 6, 9), r, W)
        column = 4 * (L * _axis(N // (4 * L), 0, 9) + _axis(L, 5, 9)) + s
    mask = (state < C) & (column < end)
    p = tl.load(ptr + state.to(tl.int64) * STRIDE_K + column.to(tl.int64) * STRIDE_J, mask=mask, other=NOTHING)
    if W == 1:
        return widened(p, DTYPE)
    else:  # columns in the order [h, s, l]
        p = tl.permute(p, (3, 6, 5, 0, 1, 7, 4, 8, 2) if _FIRST else (4, 1, 2, 7, 6, 0, 3, 8, 5))
        return tl.reshape(p, (W, K // W, N)).to(DTYPE)


@triton.jit
def product(a, high, low, PRECISION: tl.constexpr):
    """The product (16, N), columns in their own order, of a message and a matrix in `halves`."""
    if len(a.shape) == 2:
        return multiply(a, high, low, PRECISION)
    else:
        W: tl.constexpr = high.shape[0]
        N: tl.constexpr = high.shape[2]
        L: tl.constexpr = min(8, N // 4)
        sums = tl.zeros((W, 16, N), a.dtype)
        if PRECISION == "tf32x3":  # in one chain of sums, small ones first: there are registers for no second one
            a_high, a_low = split(a)
            sums = tl.dot(a_low, high, sums, input_precision="tf32")
            sums = tl.dot(a_high, low, sums, input_precision="tf32")
            sums = tl.dot(a_high, high, sums, input_precision="tf32")
        else:
            sums = tl.dot(operand(a, PRECISION), high, sums, input_precision="tf32")
        sums = tl.reshape(sums, (W // 2, 2, 16, N // (4 * L), 4, L))
        # `split` wants both in one thread, and so do the sums of all warps come there, by the fewest instructions
        even, odd = tl.split(tl.permute(sums, (0, 4, 2, 3, 5, 1)))
        return tl.reshape(tl.permute(tl.sum(even + odd, 0), (1, 2, 3, 0)), (16, N))


@triton.jit
def largest(a):
    """The largest entries (16,) of a message's rows."""
    if len(a.shape) == 2:
        return tl.max(a, 1)
    else:
        return tl.max(tl.max(a, 2), 0)
