"""What the kernels do to the elements of a tile: exponentials, logarithms, and the one guarded subtraction.

Logarithms are natural everywhere. An exponential is one EX2 instruction where `tl.exp` is five; the price is the factor
log2(e), which no float32 holds, and which is therefore multiplied in two parts.
"""

import triton
import triton.language as tl

# float32(log2 e), and what is missing from it
_HIGH = tl.constexpr(1.4426950216293335)
_LOW = tl.constexpr(1.92596303350e-8)

# From where on a sum of products of shifted exponentials is good to float32 rounding: what 3xTF32 and denormals lose
# of a term is below 2^-115. A logarithm of a smaller sum is wrong by more than the contract allows.
TRUSTED = tl.constexpr(2.0**-80)


@triton.jit
def finite(shift):
    """The shift itself, and 0 for -inf: the one subtraction that would be -inf - (-inf)."""
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
    """Whether a mask holds anywhere. Over all axes at once: one axis at a time crashes Triton 3.7 for sm_100."""
    return tl.max(mask.to(tl.int32)) > 0


@triton.jit
def operand(x, PRECISION: tl.constexpr):
    """A float32 operand of `tl.dot`: tensor cores truncate to TF32, and half of the last kept bit makes that rounding.

    Truncation is a bias, and adds up along a chain. The NaN that arithmetic makes, 0x7FFFFFFF, must not become a zero.
    """
    if PRECISION == "tf32":
        bits = tl.minimum(x.to(tl.int32, bitcast=True), 0x7FFFEFFF)
        return (bits + 0x1000).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def load(ptr, rows, columns, row_end, column_end, stride_row, stride_column, DTYPE: tl.constexpr, OTHER: tl.constexpr):
    """The entries (rows, columns) of a matrix in the dtype of the arithmetic, `OTHER` behind its ends."""
    mask = (rows < row_end)[:, None] & (columns < column_end)[None, :]
    return widened(tl.load(at(ptr, rows, columns, stride_row, stride_column), mask=mask, other=OTHER), DTYPE)


@triton.jit
def widened(entries, DTYPE: tl.constexpr):
    """The entries of a matrix in the dtype of the arithmetic.

    Behind an operand of `tl.dot` the compiler looks for the narrowest load, and lays the operand out for it, which
    float64 tensor cores cannot do for 16 bits: it does not look behind a sum, here of one term.
    """
    if DTYPE == tl.float64 and entries.dtype.primitive_bitwidth == 16:
        return tl.sum(entries.to(DTYPE)[:, :, None], 2)
    else:
        return entries.to(DTYPE)


@triton.jit
def at(ptr, rows, columns, stride_row, stride_column):
    """Where the entries (rows, columns) of a matrix lie, by 64-bit offsets."""
    return ptr + rows.to(tl.int64)[:, None] * stride_row + columns.to(tl.int64)[None, :] * stride_column


@triton.jit
def far(i, stride):
    """The distance of `i` strides in 64 bits."""
    return (tl.full((), 0, tl.int64) + i) * stride


@triton.jit
def multiple(size, WIDTH: tl.constexpr):
    """A size or stride that WIDTH divides, said so that the compiler knows."""
    return size // WIDTH * WIDTH


@triton.jit
def multiples(x, y, z, WIDTH: tl.constexpr):
    """`multiple` of three sizes."""
    return multiple(x, WIDTH), multiple(y, WIDTH), multiple(z, WIDTH)


@triton.jit
def exact_sum(x, y):
    """`x + y` of finite numbers, rounded, and what the rounding took away."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)
