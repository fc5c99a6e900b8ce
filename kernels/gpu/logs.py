"""Logarithms of numbers of any size, rounded as those of numbers near 1: exponents are kept apart as integers.

    p = mantissa 2^exponent        sqrt(1/2) <= mantissa < sqrt(2)        log p = exponent log 2 + log mantissa

Denormal numbers are no less exact. The logarithm of 0 is -inf, and that of what is no weight (negative numbers,
infinity, NaN) is NaN.
"""

import triton
import triton.language as tl

from .scaled import below, target

_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def split(p):
    """The exponents (int32) and mantissas of positive numbers; those of others mean nothing, but are finite."""
    tiny = p < 1e-30
    p = tl.where(tiny, p * 1.2676506002282294e30, p)
    if p.dtype == tl.float64:
        bits = p.to(tl.int64, bitcast=True)
        exponent = (bits - 0x3FE6A09E667F3BCD) >> 52
        mantissa = (bits - (exponent << 52)).to(tl.float64, bitcast=True)
    else:
        bits = p.to(tl.int32, bitcast=True)
        exponent = (bits - 0x3F3504F3) >> 23
        mantissa = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    return exponent.to(tl.int32) - tl.where(tiny, 100, 0), mantissa


@triton.jit
def _checked(p, value):
    """`value` for positive p, -inf for 0, NaN for what is no weight."""
    special = tl.where(p == 0.0, float("-inf"), float("nan")).to(value.dtype)
    return tl.where((p > 0.0) & (p < float("inf")), value, special)


@triton.jit
def log_wide(p):
    """`log p` as float64, in which only the mantissa's logarithm is rounded to the dtype of p."""
    exponent, mantissa = split(p)
    return _checked(p, exponent.to(tl.float64) * _LN2 + tl.log(mantissa).to(tl.float64))


@triton.jit
def log_entry(p, LOG_PARAMS: tl.constexpr):
    """The logarithms of entries of a matrix, as float64."""
    if LOG_PARAMS:
        return p.to(tl.float64)
    else:
        return log_wide(p)


@triton.jit
def apart(p, k, LOG_PARAMS: tl.constexpr):
    """Float64 logarithms and factors near 1 whose exponentials and products are entries of a matrix, divided by 2^k.

    Without a log. Logarithms are rounded as what is left of them.
    """
    if LOG_PARAMS:
        return below(p, k), tl.full(p.shape, 1.0, p.dtype)
    else:
        exponent, mantissa = split(p)
        return _checked(p, (exponent - k).to(tl.float64) * _LN2), mantissa


@triton.jit
def logs_below(p, level, LOG_PARAMS: tl.constexpr):
    """The logarithms of entries of a matrix less the `level` of each column, in their dtype.

    The level of a linear column is an exponent, and is subtracted from exponents without rounding.
    """
    if LOG_PARAMS:
        return p - level[None, :]
    else:
        exponent, mantissa = split(p)
        return _checked(p, (exponent - level[None, :]).to(p.dtype) * _LN2 + tl.log(mantissa))


@triton.jit
def message_logs(ptr, inside, redone):
    """The logarithms of a forward message in float64, -inf outside: of `message / 2^TARGET` where it is not redone."""
    message = tl.load(ptr, mask=inside, other=float("-inf"))
    exponent, mantissa = split(message)
    exponent -= target(message.dtype == tl.float64)
    logs = _checked(message, exponent.to(tl.float64) * _LN2 + tl.log(mantissa).to(tl.float64))
    return tl.where(inside, tl.where(redone, message.to(tl.float64), logs), float("-inf"))
