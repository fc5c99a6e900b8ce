"""Functions of the elements of a tile that all kernels use: loads, exponentials, logarithms, exact sums.

Logarithms are natural everywhere. An exponential is one EX2 instruction, where `tl.exp` takes five; it needs the factor
log2(e), which no float32 holds exactly and which therefore is multiplied in two parts.
"""

import triton
import triton.language as tl

# float32(log2 e), and the difference from log2 e
_HIGH = tl.constexpr(1.4426950216293335)
_LOW = tl.constexpr(1.92596303350e-8)

# The least sum of products of shifted exponentials that is exact to float32 rounding: 3xTF32 and denormals lose less
# than 2^-115 of a term. The logarithm of a smaller sum is wrong by more than the contract of accuracy allows.
TRUSTED = tl.constexpr(2.0**-80)


@triton.jit
def finite(shift):
    """The shift, and 0 for -inf, so that -inf less its shift is -inf and not NaN."""
    return tl.where(shift == float("-inf"), 0.0, shift)


@triton.jit
def exp(x):
    """`e**x`; 0 for -inf, without bias."""
    if x.dtype == tl.float64:
        return tl.exp(x)
    else:
        return tl.exp2(tl.fma(x, _HIGH, x * _LOW))


@triton.jit
def log(s):
    """`log s`; -inf for 0, NaN for NaN."""
    zero = s == 0.0
    return tl.where(zero, float("-inf"), tl.log(tl.where(zero, 1.0, s)))


@triton.jit
def any_of(mask):
    """Whether any entry of a mask is true, over all axes at once: one axis at a time crashes Triton 3.7 for sm_100."""
    return tl.max(mask.to(tl.int32)) > 0


@triton.jit
def operand(x, PRECISION: tl.constexpr):
    """An operand of `tl.dot`, rounded to TF32 if that is the precision: tensor cores truncate, which is a bias.

    A bias adds up along a chain. Adding half of the last kept bit makes truncation rounding; the NaN that arithmetic
    makes, 0x7FFFFFFF, must not become a zero by that.
    """
    if PRECISION == "tf32":
        bits = tl.minimum(x.to(tl.int32, bitcast=True), 0x7FFFEFFF)
        return (bits + 0x1000).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def load(ptr, rows, columns, row_end, column_end, stride_row, stride_column, DTYPE: tl.constexpr, OTHER: tl.constexpr):
    """The entries (rows, columns) of a matrix in the dtype of the arithmetic, `OTHER` outside of it."""
    mask = (rows < row_end)[:, None] & (columns < column_end)[None, :]
    return widened(tl.load(at(ptr, rows, columns, stride_row, stride_column), mask=mask, other=OTHER), DTYPE)


@triton.jit
def widened(entries, DTYPE: tl.constexpr):
    """The entries of a matrix in the dtype of the arithmetic.

    The compiler lays an operand of `tl.dot` out for the narrowest load that it comes from, which float64 tensor cores
    cannot do for 16 bits. The sum, of one term, hides the load from it.
    """
    if DTYPE == tl.float64 and entries.dtype.primitive_bitwidth == 16:
        return tl.sum(entries.to(DTYPE)[:, :, None], 2)
    else:
        return entries.to(DTYPE)


@triton.jit
def at(ptr, rows, columns, stride_row, stride_column):
    """Pointers to the entries (rows, columns) of a matrix, by 64-bit offsets."""
    return ptr + rows.to(tl.int64)[:, None] * stride_row + columns.to(tl.int64)[None, :] * stride_column


@triton.jit
def far(i, stride):
    """The distance of `i` strides in 64 bits."""
    return (tl.full((), 0, tl.int64) + i) * stride


@triton.jit
def multiple(size, WIDTH: tl.constexpr):
    """A size or stride that WIDTH divides, in a form that tells the compiler so."""
    return size // WIDTH * WIDTH


@triton.jit
def multiples(x, y, z, WIDTH: tl.constexpr):
    """`multiple` of three sizes."""
    return multiple(x, WIDTH), multiple(y, WIDTH), multiple(z, WIDTH)


@triton.jit
def exact_sum(x, y):
    """`x + y` of finite numbers, rounded, and the rounding error."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)
