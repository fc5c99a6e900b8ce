"""Wide numbers, a mantissa and an exponent of two each: sums and products that neither overflow nor underflow.

    number = mantissa 2^exponent        zero: a mantissa of 0

Mantissas have the dtype of the arithmetic; stored ones lie in [sqrt(1/2), sqrt(2)), or are 0 or NaN. Exponents are
int32. Those of weights and potentials are within SPAN, those of stored messages at least LEAST, and NOTHING is the
exponent of a sum of no terms, below all others: no sum or difference of three of them overflows. What would lie below
LEAST, 370 million nats under the largest number of its message, or under SPAN, 93 million nats for one weight, lies
there. Zeros are exact.
"""

import triton
import triton.language as tl

from .logs import log_wide, split
from .scaled import LN2_HIGH, LN2_LOW, below, bits_of, power_of_two, times_power_of_two
from .tiles import exact_sum

SPAN = tl.constexpr(2**27)
LEAST = tl.constexpr(-(2**29))
NOTHING = tl.constexpr(-5 * 2**28)

_LN2 = tl.constexpr(0.6931471805599453)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def exponential(logs, rest):
    """`exp(logs + rest)` with a mantissa near 1, exactly 0 for -inf; NaN for NaN and infinity."""
    near = tl.where(logs == logs, tl.minimum(tl.maximum(logs, -SPAN * _LN2), SPAN * _LN2), 0.0)
    exponent = tl.floor(near * _LOG2E + 0.5).to(tl.int32)
    if logs.dtype == tl.float64:
        mantissa = tl.exp(below(near, exponent) + rest)
    else:
        mantissa = tl.exp2(bits_of(near, exponent) + rest * _LOG2E)
    special = tl.where(logs == float("-inf"), 0.0, float("nan")).to(logs.dtype)
    return tl.where(tl.abs(logs) < float("inf"), mantissa, special), exponent


@triton.jit
def potential(x, peak):
    """`exp(x - peak)`, from the difference without its rounding."""
    difference, error = exact_sum(x, -peak)
    return exponential(difference, error)


@triton.jit
def weight_of(p, LOG_PARAMS: tl.constexpr):
    """A parameter, or the exponential of one; NaN for what is no weight."""
    if LOG_PARAMS:
        return exponential(p, tl.zeros(p.shape, p.dtype))
    else:
        exponent, mantissa = split(p)
        special = tl.where(p == 0.0, 0.0, float("nan")).to(p.dtype)
        return tl.where((p > 0.0) & (p < float("inf")), mantissa, special), exponent


@triton.jit
def normal(mantissa, exponent):
    """The same number as it is stored."""
    found, added = weight_of(mantissa, False)
    return found, tl.where(mantissa == 0.0, LEAST, tl.maximum(exponent + added, LEAST))


@triton.jit
def times(mantissa, exponent, other, other_exponent):
    """The product."""
    product = mantissa * other
    return product, tl.where(product == 0.0, NOTHING, exponent + other_exponent)


@triton.jit
def plus(mantissa, exponent, other, other_exponent):
    """The sum."""
    top = tl.maximum(exponent, other_exponent)
    return mantissa * _shifted(exponent - top, mantissa) + other * _shifted(other_exponent - top, mantissa), top


@triton.jit
def total(mantissa, exponent):
    """The sum over the only axis."""
    top = tl.max(exponent, 0)
    return tl.sum(mantissa * _shifted(exponent - top, mantissa), 0), top


@triton.jit
def _shifted(exponent, like):
    """Two to the power of an exponent that is not positive, or about the least normal number, which no sum notices."""
    least: tl.constexpr = -1022 if like.dtype == tl.float64 else -126
    return power_of_two(tl.maximum(exponent, least), like.dtype)


@triton.jit
def share(mantissa, exponent, scale, scale_exponent):
    """A number times `scale / 2^scale_exponent`; 0 for a scale of 0, whatever the number is."""
    return tl.where(scale == 0.0, 0.0, times_power_of_two(mantissa * scale, exponent - scale_exponent))


@triton.jit
def logarithm(mantissa, exponent, high, low):
    """`log(mantissa 2^exponent) + high + low` in float64, of an int64 exponent, rounded once if high and low are so."""
    coarse = (exponent >> 20) << 20
    # so that both products with the short constant are exact
    high, error = exact_sum(high, coarse.to(tl.float64) * LN2_HIGH)
    high, other = exact_sum(high, (exponent - coarse).to(tl.float64) * LN2_HIGH)
    return high + (low + error + other + exponent.to(tl.float64) * LN2_LOW + log_wide(mantissa))
