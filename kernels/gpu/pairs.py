"""Entries of a log-semiring matrix product whose sums underflowed, by log-sum-exp, term by term.

A product that stores MARK in place of such entries is followed by `redo`, in another kernel: a product of zeros and
ones finds those that no path reaches, and the others are computed again, few at a time, so that no register is spilled.
"""

import triton
import triton.language as tl

from .tiles import any_of, at, exact_sum, exp, finite, load, log

ZERO = tl.constexpr(float("-inf"))

# the value of an entry that is to be recomputed
MARK = tl.constexpr(float("inf"))


@triton.jit
def redo(
    a_ptr, b_ptr, out_ptr, a_top, b_top, out_top_ptr, out_column_ptr, own, rescued_ptr, first_row, first_column,
    m, n, k, stride_am, stride_ak, stride_bk, stride_bn, stride_om, stride_on,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PIECE: tl.constexpr = 16,
):  # fmt: skip
    """Replace the marks in a tile of a product less `a_top` and `b_top`, one piece of the tile after another.

    The tops of the whole tile, see `raise_tops`, are raised.
    """
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    for piece in tl.range(0, (BLOCK_M // PIECE) * (BLOCK_N // PIECE), disable_licm=True):
        rows = first_row + piece // (BLOCK_N // PIECE) * PIECE + tl.arange(0, PIECE)
        columns = first_column + piece % (BLOCK_N // PIECE) * PIECE + tl.arange(0, PIECE)
        value = load(out_ptr, rows, columns, m, n, stride_om, stride_on, DTYPE, ZERO)
        marked = value == MARK
        if any_of(marked):
            paths = reached(
                a_ptr, b_ptr, rows, columns, m, n, k, stride_am, stride_ak, stride_bk, stride_bn, BLOCK_K, DTYPE
            )
            value = tl.where(marked, ZERO, value)
            positive = marked & paths
            if any_of(positive):
                exact = pairwise(
                    a_ptr, b_ptr, a_top, b_top, rows, columns, m, n, k, stride_am, stride_ak, stride_bk, stride_bn,
                    DTYPE,
                )  # fmt: skip
                value = tl.where(positive, exact, value)
                if rescued_ptr is not None:
                    tl.atomic_add(rescued_ptr, tl.sum(positive.to(tl.int64)), sem="relaxed")
            tl.store(at(out_ptr, rows, columns, stride_om, stride_on), value, mask=marked)
        raise_tops(out_top_ptr, out_column_ptr, own, value, rows, columns, m, n, False)


@triton.jit
def raise_tops(top_ptr, column_ptr, own, value, rows, columns, m, n, WHOLE: tl.constexpr):
    """The largest entry of a tile, which raises the top that was found so far, or those of its rows and columns.

    Those of a product begin `own` behind pointers. NaN is left out, and so are rows and columns with marks; WHOLE:
    all rows and columns of a tile with marks.
    """
    if column_ptr is not None:
        row, column = tl.max(value, 1), tl.max(value, 0)
        top = tl.max(row, 0)
        if WHOLE:
            row, column = tl.where(top == MARK, MARK, row), tl.where(top == MARK, MARK, column)
        tl.atomic_max(top_ptr + own + rows, row, mask=(rows < m) & (row < MARK), sem="relaxed")
        tl.atomic_max(column_ptr + own + columns, column, mask=(columns < n) & (column < MARK), sem="relaxed")
    else:
        top = tl.max(value)
        if top_ptr is not None:
            tl.atomic_max(top_ptr + own, top, mask=top < MARK, sem="relaxed")
    return top


@triton.jit
def reached(
    a_ptr, b_ptr, rows, columns, m, n, k, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Whether entries of a piece have a term that is not -inf."""
    terms = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    for start in range(0, k, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        a = load(a_ptr, rows, inner, m, k, stride_am, stride_ak, DTYPE, ZERO)
        b = load(b_ptr, inner, columns, k, n, stride_bk, stride_bn, DTYPE, ZERO)
        terms = tl.dot((a > ZERO).to(tl.float16), (b > ZERO).to(tl.float16), terms)
    return terms > 0.0


@triton.jit
def pairwise(
    a_ptr, b_ptr, a_top, b_top, rows, columns, m, n, k, stride_am, stride_ak, stride_bk, stride_bn,
    DTYPE: tl.constexpr, DEPTH: tl.constexpr = 4,
):  # fmt: skip
    """A piece of the product by log-sum-exp, DEPTH terms at a time, relative to each entry's largest term so far."""
    peak = tl.full((rows.shape[0], columns.shape[0]), ZERO, DTYPE)
    s = tl.zeros((rows.shape[0], columns.shape[0]), DTYPE)
    for start in range(0, k, DEPTH):
        inner = start + tl.arange(0, DEPTH)
        a = load(a_ptr, rows, inner, m, k, stride_am, stride_ak, DTYPE, ZERO) - a_top
        b = load(b_ptr, inner, columns, k, n, stride_bk, stride_bn, DTYPE, ZERO) - b_top
        terms, error = exact_sum(a[:, :, None], b[None, :, :])
        error = tl.where(terms == ZERO, 0.0, error)
        higher = tl.maximum(peak, tl.max(terms, 1))
        shift = finite(higher)
        s = s * exp(peak - shift) + tl.sum(exp(terms - shift[:, None, :] + error), 1)
        peak = higher
    return peak + log(s)
