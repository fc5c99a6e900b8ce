"""Log-sum-exp, term by term, for the entries of a log-semiring matrix product whose sums underflowed."""

import triton
import triton.language as tl

from .tiles import any_of, at, exact_sum, exp, finite, load, log

ZERO = tl.constexpr(float("-inf"))

# the value of an entry that is to be recomputed
MARK = tl.constexpr(float("inf"))


@triton.jit
def redo(
    a_ptr, b_ptr, out_ptr, a_top, b_top, out_top_ptr, rescued_ptr, first_row, first_column, m, n, k,
    stride_am, stride_ak, stride_bk, stride_bn, stride_om, stride_on,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr,
    PIECE: tl.constexpr = 16,
):  # fmt: skip
    """Replace the marks in a tile that this program has stored, one piece of the tile after another."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    tl.debug_barrier()  # the tile was stored by other threads of this program
    for piece in tl.range(0, (BLOCK_M // PIECE) * (BLOCK_N // PIECE), disable_licm=True):
        rows = first_row + piece // (BLOCK_N // PIECE) * PIECE + tl.arange(0, PIECE)
        columns = first_column + piece % (BLOCK_N // PIECE) * PIECE + tl.arange(0, PIECE)
        marked = load(out_ptr, rows, columns, m, n, stride_om, stride_on, DTYPE, ZERO) == MARK
        if any_of(marked):
            terms = tl.zeros((PIECE, PIECE), tl.float32)  # the number of finite terms
            for start in range(0, k, BLOCK_K):
                inner = start + tl.arange(0, BLOCK_K)
                a = load(a_ptr, rows, inner, m, k, stride_am, stride_ak, DTYPE, ZERO)
                b = load(b_ptr, inner, columns, k, n, stride_bk, stride_bn, DTYPE, ZERO)
                terms = tl.dot((a > ZERO).to(tl.float16), (b > ZERO).to(tl.float16), terms)
            tl.store(at(out_ptr, rows, columns, stride_om, stride_on), ZERO, mask=marked)
            positive = marked & (terms > 0.0)
            if any_of(positive):
                value = _pairwise(
                    a_ptr, b_ptr, a_top, b_top, rows, columns, m, n, k, stride_am, stride_ak, stride_bk, stride_bn,
                    DEPTH, DTYPE,
                )  # fmt: skip
                tl.store(at(out_ptr, rows, columns, stride_om, stride_on), value, mask=positive)
                if out_top_ptr is not None:
                    tl.atomic_max(out_top_ptr, tl.max(tl.where(positive, value, ZERO)), sem="relaxed")
                if rescued_ptr is not None:
                    tl.atomic_add(rescued_ptr, tl.sum(positive.to(tl.int64)), sem="relaxed")


@triton.jit
def _pairwise(
    a_ptr, b_ptr, a_top, b_top, rows, columns, m, n, k, stride_am, stride_ak, stride_bk, stride_bn,
    DEPTH: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A piece of the result by log-sum-exp, the sums relative to each entry's largest term so far."""
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
