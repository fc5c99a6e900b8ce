"""One step of a chain whose matrices are its own: a vector times a matrix that is read only once.

    u(j) = sum_k a(k) P(k, j) / 2^k        new(j) = u(j) exp(x(j)) 2^(k - level - shift)

Messages are those of `scaled`: linear, raised to FLOOR where a path leads, and near 2^TARGET. What differs saves a
second look at a matrix: k and `low` are found from the tile that is multiplied, and if there are several tiles, sums
are divided by 2 as often as a later tile has a larger entry. A program that has only some columns has a k of its own,
which it takes out of their sums before anybody sees them.

`shift` foresees that a step grows the message as much as the step before it did, so that only the difference of two
steps leads away from TARGET. Nobody waits for the sums of others.
"""

import triton
import triton.language as tl

from .scaled import exp_scaled, exponent_of, is_low, level_of, linear, power_of_two, raised, target
from .tiles import at

_MOST = tl.constexpr(2**29)


@triton.constexpr_function
def nothing(log_params):
    """The entry of a matrix that leads nowhere."""
    return float("-inf") if log_params else 0.0


@triton.constexpr_function
def none(log_params, double):
    """An exponent at most that of any matrix."""
    return -(2**30) if log_params else -1022 if double else -126


@triton.constexpr_function
def part_of(c, parts):
    """The columns of a part; a multiple of four, so that loads of four begin where a part does."""
    return (-(-c // parts) + 3) // 4 * 4


@triton.jit
def tile(
    matrix_ptr, sources, columns, inside, stride_k, stride_j, there,
    C: tl.constexpr, LOG_PARAMS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The entries (sources, columns) of a matrix; those outside lead nowhere."""
    mask = (sources < C)[:, None] & inside[None, :] & there
    p = tl.load(at(matrix_ptr, sources, columns, stride_k, stride_j), mask=mask, other=nothing(LOG_PARAMS))
    return p.to(DTYPE)


@triton.jit
def top_exponent(p, LOG_PARAMS: tl.constexpr):
    """The exponent of the largest entry of a tile."""
    top = tl.max(p)
    if LOG_PARAMS:
        return tl.where(top > float("-inf"), level_of(top), none(True, False))
    else:
        return exponent_of(top)


@triton.jit
def positive(p, LOG_PARAMS: tl.constexpr):
    """The entries of a tile that lead somewhere; infinity elsewhere."""
    return tl.where(p > nothing(LOG_PARAMS), p, float("inf"))


@triton.jit
def known(k, LOG_PARAMS: tl.constexpr):
    """The exponent, and 0 for that of logarithms that lead nowhere."""
    if LOG_PARAMS:
        return tl.where(k == none(True, False), 0, k)
    else:
        return k


@triton.jit
def product(
    a_ptr, matrix_ptr, bound, columns, inside, stride_k, stride_j,
    C: tl.constexpr, SAME: tl.constexpr, LOG_PARAMS: tl.constexpr, DTYPE: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """u, k and whether the matrix is low, of a vector in memory and a matrix in tiles; if SAME, `bound` is known."""
    DOUBLE: tl.constexpr = DTYPE == tl.float64
    sums = tl.zeros((BLOCK_K, columns.shape[0]), DTYPE)
    least = tl.full((BLOCK_K, columns.shape[0]), float("inf"), DTYPE)
    k = tl.full((), none(LOG_PARAMS, DOUBLE), tl.int32)
    low = k > 0
    if SAME:
        k, low = bound >> 1, (bound & 1) != 0
    for first in tl.range(0, C, BLOCK_K, num_stages=STAGES):
        sources = first + tl.arange(0, BLOCK_K)
        p = tile(matrix_ptr, sources, columns, inside, stride_k, stride_j, True, C, LOG_PARAMS, DTYPE)
        a = tl.load(a_ptr + sources, mask=sources < C, other=0.0)
        if not SAME:
            least = tl.minimum(least, positive(p, LOG_PARAMS))
            larger = tl.maximum(k, top_exponent(p, LOG_PARAMS))
            fewer = k - larger
            lost: tl.constexpr = none(False, DOUBLE)
            sums *= tl.where(fewer < lost, 0.0, power_of_two(tl.maximum(fewer, lost), DTYPE))
            k = larger
        sums += a[:, None] * linear(p, known(k, LOG_PARAMS), LOG_PARAMS)
    if not SAME:
        k = known(k, LOG_PARAMS)
        low = is_low(tl.min(least), k, LOG_PARAMS)
    return summed(sums), k, low


@triton.jit
def summed(terms):
    """The sums of columns, each held by few threads: without `gather` all threads would do all that follows."""
    return tl.gather(tl.sum(terms, 0), tl.arange(0, terms.shape[1]), 0)


@triton.jit
def held(p, LOG_PARAMS: tl.constexpr):
    """A matrix in one tile divided by 2^k, k, and whether it is low."""
    k = known(top_exponent(p, LOG_PARAMS), LOG_PARAMS)
    return linear(p, k, LOG_PARAMS), k, is_low(tl.min(positive(p, LOG_PARAMS)), k, LOG_PARAMS)


@triton.jit
def foreseen(highest, before, shift, DOUBLE: tl.constexpr):
    """The shift of the next step, from the exponents of the last two messages and the shift between them."""
    return tl.minimum(tl.maximum(2 * highest - before + shift - target(DOUBLE), -_MOST), _MOST)


@triton.jit
def weighed(u, x, exponent, admitted):
    """The new messages `u exp(x) / 2^exponent` of states that x admits, see `scaled.raised`.

    An exponential that would be flushed is taken larger, and the sum smaller.
    """
    spare: tl.constexpr = 500 if u.dtype == tl.float64 else 64
    tiny = x < (exponent - spare).to(x.dtype) * 0.6931471805599453
    factor = exp_scaled(x, tl.where(tiny, exponent - spare, exponent))
    return raised(u, factor, tl.where(tiny, u * 2.0**-spare, u) * factor, admitted)


@triton.jit
def inexact(u, wanted, low, highest):
    """Whether sums that are `wanted` may be wrong; infinities are, and NaN everywhere.

    What 2^k flushes in a low matrix matters the more the larger the entries of a message are; its largest has the
    exponent `highest`.
    """
    if u.dtype == tl.float64:
        least = power_of_two(tl.where(low, tl.maximum(highest - 960, -440), -440), tl.float64)
    else:
        least = power_of_two(tl.where(low, tl.maximum(highest - 96, -10), -36), tl.float32)
    exact = ((u >= least) & (u < float("inf"))) | ((u == 0.0) & (low == 0))
    return (wanted & (exact == 0)) | (u != u)


@triton.jit
def potentials(level_ptr, x_ptr, columns, own, stride_xc, there, DTYPE: tl.constexpr):
    """The level of a step's x, and the part's columns of it."""
    x = tl.load(x_ptr + columns.to(tl.int64) * stride_xc, mask=own & there, other=float("-inf")).to(DTYPE)
    return tl.load(level_ptr, mask=there, other=0), x
