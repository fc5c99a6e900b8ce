"""The transition matrix of a step, loaded with each column divided by its level, a number near its largest entry.

The level of a column of logarithms is their maximum; that of a linear column is the exponent of a power of two, which
divides without loss. So columns near 1e-36 or 1e30 neither underflow nor overflow in a product.
"""

import triton
import triton.language as tl

from .tiles import at, exp, finite, log, widened

_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_matrix(matrix_ptr, stride_k, stride_j, rows, columns, c, LOG_PARAMS: tl.constexpr, DTYPE: tl.constexpr):
    """A tile of `P` in the dtype of the arithmetic, weight zero outside of the matrix."""
    pointers = at(matrix_ptr, rows, columns, stride_k, stride_j)
    mask = (rows < c)[:, None] & (columns < c)[None, :]
    return widened(tl.load(pointers, mask=mask, other=float("-inf") if LOG_PARAMS else 0.0), DTYPE)


@triton.jit
def whole_matrix(
    matrix_ptr, stride_k, stride_j, c, LOG_PARAMS: tl.constexpr, DTYPE: tl.constexpr, BLOCK_C: tl.constexpr
):
    """The matrix as one tile, its columns divided by their levels, and the maxima of the columns before."""
    columns = tl.arange(0, BLOCK_C)
    p = load_matrix(matrix_ptr, stride_k, stride_j, columns, columns, c, LOG_PARAMS, DTYPE)
    top = tl.max(p, 0)
    return scaled(p, level_of(top, LOG_PARAMS), LOG_PARAMS), top


@triton.jit
def level_of(top, LOG_PARAMS: tl.constexpr):
    """The level of a column with maximum `top`: a logarithm, or the exponent of a power of two."""
    if LOG_PARAMS:
        return finite(top)
    else:
        # clamped so that the power and its inverse are normal numbers
        if top.dtype == tl.float64:
            biased = ((top.to(tl.int64, bitcast=True) >> 52) & 2047).to(tl.int32)
            return tl.minimum(tl.maximum(biased, 1), 2045) - 1023
        else:
            biased = (top.to(tl.int32, bitcast=True) >> 23) & 255
            return tl.minimum(tl.maximum(biased, 1), 253) - 127


@triton.jit
def scaled(p, level, LOG_PARAMS: tl.constexpr):
    """The linear entries of a tile of `P`, its columns divided by their levels."""
    if LOG_PARAMS:
        return exp(p - level[None, :])
    else:
        return p * _power_of_two(-level, p.dtype)[None, :]


@triton.jit
def log_level(level, LOG_PARAMS: tl.constexpr):
    """The logarithm of what a column was divided by, in float64."""
    if LOG_PARAMS:
        return level.to(tl.float64)
    else:
        return level.to(tl.float64) * _LN2


@triton.jit
def lowered(sums, top, new_top, LOG_PARAMS: tl.constexpr):
    """Sums (1, BLOCK_C) of entries divided by a column's old level, as sums of those divided by its new, higher one."""
    if LOG_PARAMS:
        return sums * exp(top - finite(new_top))[None, :]
    else:
        lower = level_of(top, LOG_PARAMS) - level_of(new_top, LOG_PARAMS)
        return tl.where(lower < -126, 0.0, sums * _power_of_two(tl.maximum(lower, -126), top.dtype)[None, :])


@triton.jit
def log_entry(p, LOG_PARAMS: tl.constexpr):
    """The logarithm of entries of `P`, also of denormal ones."""
    if LOG_PARAMS:
        return p
    else:
        tiny = p < 1e-30
        value = log(tl.where(tiny, p * 1.2676506002282294e30, p))
        # tl.where of two constants would be float32 for float64 entries too
        return tl.where(tiny, value - 69.31471805599453, value)


@triton.jit
def log_wide(s):
    """`log s` as float64, in which only the mantissa's logarithm is rounded to float32; -inf for 0, NaN for NaN."""
    if s.dtype == tl.float64:
        return log(s)
    else:
        exponent, mantissa = split(s)
        value = exponent.to(tl.float64) * _LN2 + tl.log(mantissa).to(tl.float64)
        special = tl.where(s == 0.0, float("-inf"), float("nan")).to(tl.float64)
        return tl.where((s > 0.0) & (s < float("inf")), value, special)


@triton.jit
def split(s):
    """Normal float32 numbers as `mantissa * 2**exponent` with the mantissa between sqrt(1/2) and sqrt(2)."""
    bits = s.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    return exponent, (bits - (exponent << 23)).to(tl.float32, bitcast=True)


@triton.jit
def _power_of_two(exponent, DTYPE: tl.constexpr):
    if DTYPE == tl.float64:
        return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    else:
        return ((exponent + 127) << 23).to(tl.float32, bitcast=True)
