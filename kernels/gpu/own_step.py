"""One step of a chain whose matrices are its own: a vector times a matrix that is read only once.

    u(j) = sum_k a(k) P(k, j) / 2^k        new(j) = u(j) exp(x(j)) 2^(k - level - shift)

Messages are those of `scaled`: linear, raised to FLOOR where a path leads, and near 2^TARGET. What differs saves a
second look at a matrix: k and `low` are found from the tile that is multiplied, and if there are several tiles, sums
are divided by 2 as often as a later tile has a larger entry. A program that has only some columns has a k of its own,
which it takes out of their sums before anybody sees them.

`shift` foresees that a step grows the message as much as the step before it did, so that only the difference of two
steps leads away from TARGET. Nobody waits for the sums of others.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .meeting import counter_of, part_of, take_ticket
from .scaled import exp_scaled, exponent_of, is_low, level_of, linear, power_of_two, raised, target
from .tiles import at

_MOST = tl.constexpr(2**29)


class Form(NamedTuple):
    """What a kernel is compiled for.

    `same`: one matrix serves all steps. `out`: "r", "entries" or "logs" of matrices, whose gradient is wanted, or "".
    A message has entries of `sources`, and a part sums for `columns`: those of a matrix forwards, its rows backwards.
    So long is a matrix's tile along both, and `strides` are those of its entries; all other strides of x and of
    matrices are multiples of the widths.
    """

    c: int
    parts: int
    same: bool
    log_params: bool
    out: str
    sources: int
    columns: int
    stride_source: int
    stride_column: int
    width_x: int
    width_bulk: int

    @property
    def held(self) -> bool:
        """Whether a part's matrix is one tile, which registers hold a step ahead."""
        return self.sources >= self.c

    @property
    def alone(self) -> bool:
        """Whether messages stay in registers, too."""
        return self.held and self.parts == 1


@triton.constexpr_function
def nothing(log_params):
    """The entry of a matrix that leads nowhere."""
    return float("-inf") if log_params else 0.0


@triton.constexpr_function
def none(log_params, double):
    """An exponent at most that of any matrix whose sums are not doubtful."""
    return -(2**28) if log_params else -1022 if double else -126


@triton.jit
def place(counters_ptr, ends_ptr, bound_ptr, v, FORM: tl.constexpr):
    """The sequence and the part of a program, its counter, its columns and which are there, its steps and its bound."""
    PART: tl.constexpr = part_of(FORM.c, FORM.parts)
    program = tl.program_id(0)
    if FORM.parts > 1:
        program = take_ticket(counters_ptr)
    z, part = (program // FORM.parts).to(tl.int64), program % FORM.parts
    local = tl.arange(0, FORM.columns)
    columns = part * PART + local
    last, bound = v, tl.full((), 0, tl.int32)
    if ends_ptr is not None:
        last = tl.load(ends_ptr + z).to(tl.int32)
    if bound_ptr is not None:
        bound = tl.load(bound_ptr + z)
    return z, part, counter_of(counters_ptr, z), columns, (local < PART) & (columns < FORM.c), last, bound


@triton.jit
def tile(matrix_ptr, sources, columns, inside, there, DTYPE: tl.constexpr, FORM: tl.constexpr):
    """The entries (sources, columns) of a matrix; those outside lead nowhere."""
    mask = (sources < FORM.c)[:, None] & inside[None, :] & there
    entries = at(matrix_ptr, sources, columns, FORM.stride_source, FORM.stride_column)
    return tl.load(entries, mask=mask, other=nothing(FORM.log_params)).to(DTYPE)


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
def product(a_ptr, matrix_ptr, bound, columns, inside, DTYPE: tl.constexpr, FORM: tl.constexpr):
    """u, k and whether the matrix is low, of a vector in memory and a matrix in tiles; if `same`, `bound` is known."""
    BLOCK: tl.constexpr = FORM.sources
    LOG_PARAMS: tl.constexpr = FORM.log_params
    DOUBLE: tl.constexpr = DTYPE == tl.float64
    sums = tl.zeros((BLOCK, columns.shape[0]), DTYPE)
    least = tl.full((BLOCK, columns.shape[0]), float("inf"), DTYPE)
    k = tl.full((), none(LOG_PARAMS, DOUBLE), tl.int32)
    if FORM.same:
        k = bound >> 1
    for first in tl.range(0, FORM.c, BLOCK, num_stages=3):
        sources = first + tl.arange(0, BLOCK)
        p = tile(matrix_ptr, sources, columns, inside, True, DTYPE, FORM)
        a = tl.load(a_ptr + sources, mask=sources < FORM.c, other=0.0)
        if not FORM.same:
            least = tl.minimum(least, positive(p, LOG_PARAMS))
            larger = tl.maximum(k, top_exponent(p, LOG_PARAMS))
            fewer = k - larger
            lost: tl.constexpr = none(False, DOUBLE)
            sums *= tl.where(fewer < lost, 0.0, power_of_two(tl.maximum(fewer, lost), DTYPE))
            k = larger
        sums += a[:, None] * linear(p, k, LOG_PARAMS)
    low = (bound & 1) != 0
    if not FORM.same:
        low = is_low(tl.min(least), k, LOG_PARAMS)
    return summed(sums), k, low


@triton.jit
def summed(terms):
    """The sums of columns, each held by few threads: without `gather` all threads would do all that follows."""
    return tl.gather(tl.sum(terms, 0), tl.arange(0, terms.shape[1]), 0)


@triton.jit
def held(p, LOG_PARAMS: tl.constexpr):
    """A matrix in one tile divided by 2^k, k, and whether it is low."""
    k = top_exponent(p, LOG_PARAMS)
    return linear(p, k, LOG_PARAMS), k, is_low(tl.min(positive(p, LOG_PARAMS)), k, LOG_PARAMS)


@triton.jit
def foreseen(highest, before, shift, base, k, FORM: tl.constexpr, DOUBLE: tl.constexpr):
    """The shift of the next step and its base, from the exponents of the last two messages and the shift between them.

    The base is what a matrix adds to it: k, or its bound where parts have a k of their own.
    """
    shift = tl.minimum(tl.maximum(2 * highest - before + shift - base - target(DOUBLE), -_MOST), _MOST)
    if FORM.parts == 1:
        base = k
    return shift + base, base


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
