"""Products of messages of sixteen sequences and a part of a matrix, loaded as tensor cores hold their operands.

The sum over states is shared by warps: each loads its states of the message and their rows of the matrix, into the
registers from which it multiplies them, and no operand passes through shared memory. Only the sums of warps do, which
are added up. Within a sum states may come in any order, and columns of a matrix in any order that is undone at the end:
both are chosen such that a thread's entries are neighbours in memory. A warp's lanes are q = 0..3 of the states, and
l = 0..7 of the sequences or columns:

    state = 16 (W j + w) + 4 q + r        column = 32 h + 4 l + s        sequence = 8 h + l

with w for the W warps, r and s for what a thread loads at once, and j and h for what it loads one after the other.
Products that tensor cores do not do this way, IEEE and few states, are those of one warp: W = 1.
"""

import triton
import triton.language as tl

from .scaled import multiply
from .tiles import widened


@triton.constexpr_function
def sharing(c, precision):
    """W: how many warps share a sum over c states."""
    return 1 if precision == "ieee" or c <= 32 else min(8, triton.next_power_of_2(c) // 16)


@triton.constexpr_function
def _states(c):
    return max(16, triton.next_power_of_2(c))


@triton.jit
def _axis(SIZE: tl.constexpr, AXIS: tl.constexpr, RANK: tl.constexpr):
    """0, 1, ... along one of so many axes."""
    along = tl.arange(0, SIZE)
    for _ in tl.static_range(AXIS):
        along = tl.expand_dims(along, 0)
    for _ in tl.static_range(RANK - AXIS - 1):
        along = tl.expand_dims(along, -1)
    return along


@triton.jit
def load_message(ptr, rows, C: tl.constexpr, W: tl.constexpr):
    """The first `rows` of 16 rows of C states, 0 elsewhere, (W, 16, states); past the first cache."""
    K: tl.constexpr = _states(C)
    R: tl.constexpr = 4 if C % 4 == 0 else 1
    h, j, r, w = _axis(2, 0, 7), _axis(K // (16 * W), 1, 7), _axis(4 // R, 2, 7), _axis(W, 3, 7)
    member = 8 * h + _axis(8, 4, 7)
    state = 16 * (W * j + w) + 4 * _axis(4, 5, 7) + R * r + _axis(R, 6, 7)
    mask = (member < rows) & (state < C)
    a = tl.load(ptr + member * C + state, mask=mask, other=0.0, cache_modifier=".cg")
    return tl.reshape(tl.permute(a, (3, 0, 4, 1, 2, 6, 5)), (W, 16, K // W))


@triton.jit
def load_matrix(
    ptr, end, STRIDE_K: tl.constexpr, STRIDE_J: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
    W: tl.constexpr, NOTHING: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The first `end` of N columns of a matrix with C rows, NOTHING elsewhere, (W, states, columns).

    WIDTH entries can be loaded at once, along columns or along rows.
    """
    K: tl.constexpr = _states(C)
    S: tl.constexpr = WIDTH if STRIDE_J == 1 else 1
    R: tl.constexpr = WIDTH if STRIDE_K == 1 and S == 1 else 1
    L: tl.constexpr = min(8, N // 4)
    h, j, r, s = _axis(N // (4 * L), 0, 9), _axis(K // (16 * W), 1, 9), _axis(4 // R, 2, 9), _axis(4 // S, 3, 9)
    state = 16 * (W * j + _axis(W, 4, 9)) + 4 * _axis(4, 6, 9) + R * r + _axis(R, 7, 9)
    column = 4 * (L * h + _axis(L, 5, 9)) + S * s + _axis(S, 8, 9)
    mask = (state < C) & (column < end)
    p = tl.load(ptr + state.to(tl.int64) * STRIDE_K + column.to(tl.int64) * STRIDE_J, mask=mask, other=NOTHING)
    if W == 1:
        return widened(tl.reshape(tl.permute(p, (4, 1, 2, 7, 6, 0, 5, 3, 8)), (K, N)), DTYPE)
    else:
        return tl.reshape(tl.permute(p, (4, 1, 2, 7, 6, 0, 3, 8, 5)), (W, K // W, N)).to(DTYPE)


@triton.jit
def product(a, high, low, PRECISION: tl.constexpr):
    """The product (16, N) of a message and a matrix in `halves`."""
    if a.shape[0] == 1:
        return multiply(tl.reshape(a, a.shape[1:]), high, low, PRECISION)
    else:
        W: tl.constexpr = high.shape[0]
        N: tl.constexpr = high.shape[2]
        L: tl.constexpr = min(8, N // 4)
        shares = tl.reshape(multiply(a, high, low, PRECISION), (W // 2, 2, 16, N // (4 * L), 4, L))
        # `split` has the sums of all warps in one thread
        even, odd = tl.split(tl.permute(shares, (0, 4, 2, 3, 5, 1)))
        return tl.reshape(tl.permute(tl.sum(even + odd, 0), (1, 2, 3, 0)), (16, N))


@triton.jit
def largest(a):
    """The largest entries (16,) of a message's rows."""
    return tl.max(tl.max(a, 2), 0)
