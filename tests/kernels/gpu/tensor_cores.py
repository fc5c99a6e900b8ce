"""Products of float32 matrices as tensor cores compute them, which see ten fraction bits of a number.

The steps are those of Triton's code for sm_90 (3.6.0 and 3.7.1, PTX read). How Hopper sums is the model of Khattak and
Mikaitis, "Accurate Models of NVIDIA Tensor Cores", arXiv:2512.07004.
"""

import numpy as np
from triton._C.libtriton import ir

# how many terms are summed at once
_GROUP = 8
# the fraction bits of a float32, and those that the addends of a group have beyond them
_FRACTION, _EXTRA = 23, 2
# of a float64
_BIAS, _FRACTION64 = 1023, 52
# leaves a float64 no more fraction bits than a float32 has
_CUT = -1 << (_FRACTION64 - _FRACTION)


@np.errstate(invalid="ignore", over="ignore")
def rounding(a: np.ndarray, b: np.ndarray, sums: np.ndarray, precision: ir.INPUT_PRECISION) -> np.ndarray:
    """`sums + a @ b` where only the operands lose bits: all sums are IEEE."""
    if precision == ir.INPUT_PRECISION.TF32:
        return np.matmul(_truncated(a), _truncated(b)) + sums
    if precision == ir.INPUT_PRECISION.TF32x3:
        (high_a, low_a), (high_b, low_b) = _halves(a), _halves(b)
        small = np.matmul(low_a, high_b) + np.matmul(high_a, low_b)
        return np.matmul(high_a, high_b) + _no_nan(small) + sums
    return np.matmul(a, b) + sums


@np.errstate(invalid="ignore", over="ignore")
def truncating(a: np.ndarray, b: np.ndarray, sums: np.ndarray, precision: ir.INPUT_PRECISION) -> np.ndarray:
    """`sums + a @ b` as Hopper computes it: what the sums of tensor cores lose, they lose towards zero."""
    if precision == ir.INPUT_PRECISION.TF32:
        return _summed(_truncated(a), _truncated(b), sums)
    if precision == ir.INPUT_PRECISION.TF32x3:
        (high_a, low_a), (high_b, low_b) = _halves(a), _halves(b)
        small = _summed(high_a, low_b, _summed(low_a, high_b, np.zeros_like(sums)))
        # an ordinary addition, not one of the tensor cores'
        return _summed(high_a, high_b, _no_nan(small)) + sums
    return np.matmul(a, b) + sums


def _summed(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
    """`total + a @ b` in groups: addends are cut to the grid of the largest of them, and their sum to a float32.

    In float64, where products of TF32 and sums of a group are exact. Infinities and NaN pass as IEEE would have them.
    """
    a, b, total = a.astype(np.float64), b.astype(np.float64), total.astype(np.float64)
    for i in range(0, a.shape[-1], _GROUP):
        terms = a[..., :, i : i + _GROUP, None] * b[..., None, i : i + _GROUP, :]  # (..., m, 8, n)
        largest = np.maximum(np.abs(terms).max(-2), np.abs(total))
        # the grid is no finer than float32's, where the largest is 0 or next to it
        exponent = np.maximum((largest.view(np.int64) >> _FRACTION64) - _BIAS, _EXTRA - 126)
        scale = ((_BIAS + _FRACTION + _EXTRA - exponent) << _FRACTION64).view(np.float64)
        terms *= scale[..., None, :]
        whole = np.trunc(terms, out=terms).sum(-2) + np.trunc(total * scale)
        total = (whole.view(np.int64) & _CUT).view(np.float64) / scale
    return total.astype(np.float32)


def _halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What tensor cores see of a number, rounded half away from zero, and of the rest."""
    # a NaN of all ones would become a zero
    bits = np.where(np.isnan(x), np.float32(np.nan), x).view(np.uint32) + np.uint32(0x1000)
    high = _truncated(bits.view(np.float32))
    return high, _truncated(x - high)


def _truncated(x: np.ndarray) -> np.ndarray:
    """What a tensor core sees of a float32: the low 13 bits are ignored."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _no_nan(small: np.ndarray) -> np.ndarray:
    """Zeros for NaN, so that the product of the high halves decides: of infinity a rest is left that is NaN."""
    return np.where(np.isnan(small), np.float32(0), small)
