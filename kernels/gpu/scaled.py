"""Linear messages with a power of two for each row, as all kernels of chains that share their matrices hold them.

    u = S_{i-1} P_i / 2^k        S_i = u exp(x_i) / 2^(level + shift)        the row's exponent: sum of k, level, shift

No logarithm and nothing in float64 stands between two steps. k is the exponent of the matrix's largest entry, `level`
the row's largest x in bits, and `shift` is chosen from the message before the last one, so that nobody waits for a
maximum: integers, which add up exactly. The largest entry of a row stays near 2^TARGET. Where a path leads, S is raised
to at least FLOOR: an exact 0 means that no path does.

What is lost. Raised entries add at most c FLOOR to a sum, so sums above TRUSTED are exact to rounding. A matrix is
`low` if it has a positive entry below 2^LOW times its largest, whose products with messages may underflow: sums are
then exact above TRUSTED_LOW only, and a sum of 0 need not be one. A sequence with a sum that is not exact, of a state
that x admits, is doubtful: another kernel computes it again.
"""

import triton
import triton.language as tl

from .tiles import exact_sum, exp, log, operand

# ln 2 with few enough digits that its products with exponents are exact, and the rest
LN2_HIGH = tl.constexpr(0.6931471803691238)
LN2_LOW = tl.constexpr(1.9082149292705877e-10)

_LOG2E = tl.constexpr(1.4426950408889634)
# float32(log2 e), and the difference from log2 e
_LOG2E_HIGH = tl.constexpr(1.4426950216293335)
_LOG2E_LOW = tl.constexpr(1.92596303350e-8)

# levels beyond are not taken out of x: the row overflows, and its sequence is doubtful
_MOST = tl.constexpr(2.0**30)


@triton.constexpr_function
def target(double):
    """The exponent of two near which the largest entry of a message is kept."""
    return 400 if double else 60


@triton.constexpr_function
def floor(double):
    """The least positive entry of a message."""
    return 2.0**-500 if double else 2.0**-64


@triton.constexpr_function
def least_exponent(double):
    """LOW: products of messages with entries of at least 2^LOW, beside a largest entry of 1, are normal numbers."""
    return -520 if double else -62


@triton.jit
def power_of_two(k, DTYPE: tl.constexpr):
    """2^k of integers, for normal numbers."""
    if DTYPE == tl.float64:
        return ((k.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    else:
        return ((k + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent_of(a):
    """The k with 2^k <= a < 2^(k + 1) of positive numbers, such that 2^k and 2^-k are normal; the least for 0."""
    if a.dtype == tl.float64:
        biased = ((a.to(tl.int64, bitcast=True) >> 52) & 2047).to(tl.int32)
        return tl.minimum(tl.maximum(biased, 1), 2045) - 1023
    else:
        biased = (a.to(tl.int32, bitcast=True) >> 23) & 255
        return tl.minimum(tl.maximum(biased, 1), 253) - 127


@triton.jit
def level_of(top):
    """The largest logarithm `top` in bits, rounded up to an integer of type int32; 0 where it is not finite or huge."""
    level = tl.ceil(top * _LOG2E)
    return tl.where(tl.abs(level) < _MOST, level, 0.0).to(tl.int32)


@triton.jit
def is_low(least, k, LOG_PARAMS: tl.constexpr):
    """Whether a matrix with the exponent k and the least positive entry is `low`, see above."""
    lowest: tl.constexpr = least_exponent(least.dtype == tl.float64)
    if LOG_PARAMS:
        return least < (k + lowest).to(least.dtype) * 0.6931471805599453
    else:
        return least < power_of_two(k, least.dtype) * 2.0**lowest


@triton.jit
def below(a, k):
    """`a - log 2^k` in float64, for logarithms and integers k near them rounded as their difference is."""
    shift = k.to(tl.float64)
    return (a.to(tl.float64) - shift * LN2_HIGH) - shift * LN2_LOW


@triton.jit
def exp_scaled(a, k):
    """`exp(a) / 2^k` with integers k; 0 for -inf."""
    if a.dtype == tl.float64:
        return tl.exp(below(a, k))
    else:
        return tl.exp2(bits_of(a, k))


@triton.jit
def bits_of(a, k):
    """`log2 exp(a) - k` of float32 numbers; -inf for -inf."""
    return tl.fma(a, _LOG2E_HIGH, -k.to(tl.float32)) + tl.where(a == float("-inf"), 0.0, a) * _LOG2E_LOW


@triton.jit
def log_scaled(s, k):
    """`log(s 2^k)` in float64 and its rounding error, for numbers s and integers k of any size; -inf and 0 for 0."""
    exponent = exponent_of(s)
    whole = (k + exponent).to(tl.float64)
    rest = log(s * power_of_two(-exponent, s.dtype)).to(tl.float64) + whole * LN2_LOW
    total, error = exact_sum(whole * LN2_HIGH, rest)
    return total, tl.where(tl.abs(total) < float("inf"), error, 0.0)


@triton.jit
def linear(p, k, LOG_PARAMS: tl.constexpr):
    """Entries of a matrix, or exponentials of its logarithms, divided by 2^k."""
    if LOG_PARAMS:
        return exp_scaled(p, k)
    else:
        return p * power_of_two(-k, p.dtype)


@triton.jit
def factors_of(x, level):
    """`exp(x) / 2^level` in two factors of which none is flushed to 0, for what is above 2^-190.

    Beside a large sum the whole, as one number, would lose more than FLOOR; float64 would not.
    """
    if x.dtype == tl.float64:
        return exp_scaled(x, level), 1.0
    else:
        bits = bits_of(x, level)
        tiny = bits < -64.0
        return tl.exp2(tl.where(tiny, bits + 64.0, bits)), tl.where(tiny, 2.0**-64, 1.0)


@triton.jit
def weighed(u, scale, factor, rest, admitted):
    """The new messages `u scale factor rest` of states that x admits, see `factors_of`."""
    return raised(u, factor, u * scale * rest * factor, admitted)


@triton.jit
def raised(u, factor, new, admitted):
    """New messages, products of `u` and `factor`: at least FLOOR, but 0 where no path leads or x admits none.

    NaN where u or the factor is, even if the other one is 0.
    """
    lowest: tl.constexpr = floor(u.dtype == tl.float64)
    least = tl.maximum(new, lowest, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(((u == 0.0) & (factor == factor)) | ((admitted == 0) & (u == u)), 0.0, least)


@triton.jit
def started(logs, k, DTYPE: tl.constexpr):
    """The linear message `exp(logs) 2^(TARGET - k)` of float64 logarithms, of which the largest is near k bits."""
    lowest: tl.constexpr = floor(DTYPE == tl.float64)
    new = exp(below(logs, k).to(DTYPE)) * 2.0 ** target(DTYPE == tl.float64)
    return tl.where(logs == float("-inf"), 0.0, tl.maximum(new, lowest, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def next_shift(before, shift):
    """The shift of the next step, from the largest entries of the messages that this step multiplied, and its shift.

    With r the growth of a step in bits, this leaves the next message at TARGET + r_i + r_{i+1}.
    """
    if before.dtype == tl.float64:
        return tl.minimum(tl.maximum(exponent_of(before) - target(True) - shift, -900), 900)
    else:
        return tl.minimum(tl.maximum(exponent_of(before) - target(False) - shift, -60), 100)


@triton.jit
def doubtful(u, wanted, low):
    """Whether sums that are `wanted` may be inexact, see above; NaN and infinity are."""
    if u.dtype == tl.float64:
        least = 2.0**-440
    else:
        least = tl.where(low != 0, 1.0, 2.0**-36)
    exact = ((u >= least) & (u < float("inf"))) | ((u == 0.0) & (low == 0))
    return wanted & (exact == 0)


@triton.jit
def split(a):
    """The upper half of float32 numbers, rounded to TF32, and the exact rest, which is NaN for NaN and infinity."""
    high = ((a.to(tl.int32, bitcast=True) + 0x1000) & -8192).to(tl.float32, bitcast=True)
    return high, a - high


@triton.jit
def halves(b, PRECISION: tl.constexpr):
    """The right operand of `multiply`: two halves for "tf32x3", otherwise twice the same."""
    if PRECISION == "tf32x3":
        return split(b)
    else:
        rounded = operand(b, PRECISION)
        return rounded, rounded


@triton.jit
def multiply(a, high, low, PRECISION: tl.constexpr):
    """The product of non-negative tiles, the right one in `halves`; float64 is "ieee".

    "tf32x3" is as exact as float32 on tensor cores, in two chains of sums, which run side by side.
    """
    sums = tl.zeros((a.shape[0], high.shape[1]), a.dtype)
    if PRECISION == "tf32x3":
        a_high, a_low = split(a)
        cross = tl.dot(a_low, high, sums, input_precision="tf32")
        sums = tl.dot(a_high, high, sums, input_precision="tf32")
        return sums + tl.dot(a_high, low, cross, input_precision="tf32")
    else:
        return tl.dot(operand(a, PRECISION), high, sums, input_precision=PRECISION, out_dtype=a.dtype)
