"""A tile of a log-semiring matrix product: maxima of rows and columns, sums of exponentials, and their logarithms.

In float32 an exponential is 2^(a L - shift), with one rounding: L = log2 e, and shift is the product of L and the
maximum, rounded up. What that has gained is known, and is added to the logarithm of the sum.
"""

import torch
import triton
import triton.language as tl

from .pairs import MARK, ZERO
from .scaled import halves
from .tiles import TRUSTED, at, exact_sum, far, finite, load, log, multiple, widened

# float32(log2 e), and ln 2
_LOG2E, _LN2 = tl.constexpr(1.4426950216293335), tl.constexpr(0.6931471805599453)

# the least shift, finite as all entries are
_LEAST = tl.constexpr(-3.4e38)

# whether the logarithm of a device by NVIDIA is at hand, one instruction where `tl.log2` has 25
_LG2 = tl.constexpr(torch.version.hip is None and not triton.knobs.runtime.interpret)


# arguments of kernels that may be any number from call to call, and those that are 1 or not
VARYING = [
    "count", "p", "m", "n", "k", "stride_ag", "stride_ap", "stride_bg", "stride_bp", "stride_og", "stride_op",
    "stride_om", "stride_tg", "stride_tp",
]  # fmt: skip
STRIDES = ["stride_am", "stride_ak", "stride_bk", "stride_bn"]


@triton.constexpr_function
def width_of_size(layout, axis):
    """The number that divides the size m, n or k: `layout` names the axes of operands whose entries are adjacent."""
    return 4 if axis in layout else 1


@triton.constexpr_function
def width_of_stride(layout, axis):
    """The number that divides a stride: of the axis am, ak, bk or bn, of batches, or of rows of the result."""
    return 4 if layout and axis not in layout else 1


@triton.jit
def sizes(m, n, k, LAYOUT: tl.constexpr):
    """The sizes in a form that tells the compiler what divides them."""
    return (
        multiple(m, width_of_size(LAYOUT, "m")),
        multiple(n, width_of_size(LAYOUT, "n")),
        multiple(k, width_of_size(LAYOUT, "k")),
    )


@triton.jit
def left_operand(a_ptr, z, y, stride_ag, stride_ap, stride_am, stride_ak, LAYOUT: tl.constexpr):
    """Where a matrix `a` begins, and its strides."""
    a_ptr += multiple(z * stride_ag + y * stride_ap, width_of_stride(LAYOUT, "batch"))
    stride_am = multiple(stride_am, width_of_stride(LAYOUT, "am"))
    return a_ptr, stride_am, multiple(stride_ak, width_of_stride(LAYOUT, "ak"))


@triton.jit
def right_operand(b_ptr, z, y, stride_bg, stride_bp, stride_bk, stride_bn, LAYOUT: tl.constexpr):
    """Where a matrix `b` begins, and its strides."""
    b_ptr += multiple(z * stride_bg + y * stride_bp, width_of_stride(LAYOUT, "batch"))
    stride_bk = multiple(stride_bk, width_of_stride(LAYOUT, "bk"))
    return b_ptr, stride_bk, multiple(stride_bn, width_of_stride(LAYOUT, "bn"))


@triton.jit
def walked_maxima(
    a_ptr, b_ptr, rows, columns, m, n, k, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The maxima of rows of `a` and of columns of `b`."""
    a_top = tl.full((rows.shape[0], BLOCK_K), ZERO, DTYPE)
    b_top = tl.full((BLOCK_K, columns.shape[0]), ZERO, DTYPE)
    for first in tl.range(0, k, BLOCK_K):
        inner = first + tl.arange(0, BLOCK_K)
        a_top = tl.maximum(a_top, load(a_ptr, rows, inner, m, k, stride_am, stride_ak, DTYPE, ZERO))
        b_top = tl.maximum(b_top, load(b_ptr, inner, columns, k, n, stride_bk, stride_bn, DTYPE, ZERO))
    return tl.max(a_top, 1), tl.max(b_top, 0)


@triton.jit
def sums_of(
    a_ptr, b_ptr, row, column, rows, columns, m, n, k, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """s of a tile."""
    row, column = shift_of(row)[:, None], shift_of(column)[None, :]
    inner = tl.arange(0, BLOCK_K)
    a_at, b_at = at(a_ptr, rows, inner, stride_am, stride_ak), at(b_ptr, inner, columns, stride_bk, stride_bn)
    a_inside, b_inside = (rows < m)[:, None], (columns < n)[None, :]
    sums = tl.zeros((rows.shape[0], columns.shape[0]), row.dtype)
    for first in range(0, k, BLOCK_K):
        left = k - first
        a = widened(tl.load(a_at, mask=a_inside & (inner < left)[None, :], other=ZERO), row.dtype)
        b = widened(tl.load(b_at, mask=b_inside & (inner < left)[:, None], other=ZERO), row.dtype)
        sums = add_product(a, b, row, column, sums, PRECISION)
        a_at += far(BLOCK_K, stride_ak)
        b_at += far(BLOCK_K, stride_bk)
    return sums


@triton.jit
def shift_of(top):
    """What `_exp` subtracts for a maximum: in float32 in bits, and rounded up, so that no exponential is above 1."""
    if top.dtype == tl.float64:
        return finite(top)
    else:
        bits = tl.maximum(finite(top) * _LOG2E, _LEAST, propagate_nan=tl.PropagateNan.ALL)
        return tl.fma(tl.abs(bits), 2.0**-23, bits)


@triton.jit
def _exp(x, shift):
    """`exp(x - maximum)`, in float32 times 2 to the power of what the shift has lost by rounding."""
    if x.dtype == tl.float64:
        return tl.exp(x - shift)
    else:
        return tl.exp2(tl.fma(x, _LOG2E, -shift))


@triton.jit
def _gained(top):
    """What the shift has gained by rounding."""
    return tl.fma(finite(top), -_LOG2E, shift_of(top)) * _LN2


@triton.jit
def add_product(a, b, row, column, sums, PRECISION: tl.constexpr):
    """`sums` plus the product of exponentials."""
    left, left_rest = halves(_exp(a, row), PRECISION)
    right, right_rest = halves(_exp(b, column), PRECISION)
    if PRECISION == "tf32x3":
        sums = tl.dot(left_rest, right, sums, input_precision="tf32")
        sums = tl.dot(left, right_rest, sums, input_precision="tf32")
        return tl.dot(left, right, sums, input_precision="tf32")
    else:
        return tl.dot(left, right, sums, input_precision=PRECISION, out_dtype=a.dtype)


@triton.jit
def logarithms(sums, row, column, a_top, b_top, PRECISION: tl.constexpr):
    """A tile of the result less both tops, with marks."""
    shift, error = exact_sum((finite(row) - a_top)[:, None], (finite(column) - b_top)[None, :])
    if sums.dtype == tl.float64:
        value = shift + (log(sums) + error)
    else:
        # LG2 has an error of 2^-22 between 0.7 and 1.4, and as much relative to the result elsewhere
        power = (sums.to(tl.int32, bitcast=True) - 0x3F3504F3) & -0x800000
        bits = _log2((sums.to(tl.int32, bitcast=True) - power).to(tl.float32, bitcast=True), PRECISION)
        logs = tl.fma(power.to(tl.float32), _LN2 * 2.0**-23, bits * _LN2)
        value = shift + (logs + (error + (_gained(row)[:, None] + _gained(column)[None, :])))
    # a NaN is neither: it passes by the addition
    lowest = tl.minimum(tl.where(row == ZERO, ZERO, MARK)[:, None], tl.where(column == ZERO, ZERO, MARK)[None, :])
    return tl.where(sums >= TRUSTED, value, lowest + sums)


@triton.jit
def _log2(s, PRECISION: tl.constexpr):
    if PRECISION != "ieee" and _LG2:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [s], tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(s)


@triton.jit
def top_of(top_ptr, batch):
    """The number subtracted from all entries of an operand, 0 in place of -inf."""
    if top_ptr is None:
        return 0.0
    else:
        return finite(tl.load(top_ptr + batch))


@triton.jit
def copy_rows(a_ptr, saved_ptr, rows, m, k, stride_am, stride_ak, BLOCK_K: tl.constexpr):
    """Copy rows of a matrix to one that is contiguous."""
    for start in range(0, k, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        mask = (rows < m)[:, None] & (inner < k)[None, :]
        a = tl.load(at(a_ptr, rows, inner, stride_am, stride_ak), mask=mask)
        tl.store(at(saved_ptr, rows, inner, k, 1), a, mask=mask)


@triton.jit
def store(out_ptr, value, rows, columns, m, n, stride_om):
    """Write a tile of a matrix that is contiguous by rows."""
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(at(out_ptr, rows, columns, stride_om, 1), value, mask=mask)
