"""The exponential, in arithmetic that LLVM turns into vectors, for loops that numba compiles.

    exp(d) = 2^k exp(r)        k = round(d log2(e)),  r = d - k log(2)

A polynomial of degree 12 is good to 3e-16 where |r| is at most log(2) / 2, one of degree 7 to float32's 1e-7; one of
degree 9 lies between. 2^k is made from the bits of k. In the first two log(2) is split in two (Cody and Waite), so that
`k log(2)` is exact enough. What libm has is called entry by entry instead, and takes 3 times as long. Results below
2^-995, in float32 below 2^-115, are 0, so that nothing is denormal. Arguments are at most 0, -inf or NaN: what is left
when a maximum has been taken out. Tested against `math.exp`.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from .native import inlined
from .native_vectors import flushed, two_to

_LOG2, _LOG2E = math.log(2), math.log2(math.e)
LN2 = _HIGH, _LOW = 0.693147180369123816490, 1.90821492927058770002e-10

# added and taken away again, it rounds to an integer, which its last bits then hold
_ROUND = 1.5 * 2.0**52

# the same for float32, with results below 2^-115 zero
_LOG2E_32, _HIGH_32, _LOW_32 = np.float32(_LOG2E), np.float32(0.693359375), np.float32(-2.12194440e-4)
_ROUND_32 = np.float32(1.5 * 2.0**23)
_LEAST_32 = np.float32(-115 * math.log(2))
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_C2, _C3, _C4, _C5, _C6, _C7 = (np.float32(1 / math.factorial(n)) for n in range(2, 8))

_LEAST = -995 * math.log(2)


@intrinsic
def bits(typing: Any, value: Any) -> Any:
    """The bits of a float as an integer of its size: ordered as the floats are, where those are not negative."""
    found: Any = types.int64 if value == types.float64 else types.int32

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(found.bitwidth))

    return found(value), generate


@intrinsic
def from_bits(typing: Any, value: Any) -> Any:
    """The float that has these bits."""
    found: Any = types.float64 if value == types.int64 else types.float32

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType() if found == types.float64 else ir.FloatType())

    return found(value), generate


@intrinsic
def ordered(typing: Any, value: Any) -> Any:
    """An integer of a float's size that is ordered as the float is, of whatever sign."""
    found: Any = types.int64 if value == types.float64 else types.int32

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        integer = ir.IntType(found.bitwidth)
        given = builder.bitcast(args[0], integer)
        sign = builder.ashr(given, ir.Constant(integer, found.bitwidth - 1))
        return builder.xor(given, builder.lshr(sign, ir.Constant(integer, 1)))

    return found(value), generate


@intrinsic
def from_ordered(typing: Any, value: Any) -> Any:
    """The float that `ordered` made an integer of."""
    found: Any = types.float64 if value == types.int64 else types.float32

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        integer = ir.IntType(found.bitwidth)
        sign = builder.ashr(args[0], ir.Constant(integer, found.bitwidth - 1))
        given = builder.xor(args[0], builder.lshr(sign, ir.Constant(integer, 1)))
        return builder.bitcast(given, ir.DoubleType() if found == types.float64 else ir.FloatType())

    return found(value), generate


@inlined
def exp64(d):
    """`exp(d)` for a float64 `d` of at most 0."""
    rounded = d * _LOG2E + _ROUND
    k = rounded - _ROUND
    r = (d - k * _HIGH) - k * _LOW
    p = r * (1 / 479001600) + 1 / 39916800
    p = p * r + 1 / 3628800
    p = p * r + 1 / 362880
    p = p * r + 1 / 40320
    p = p * r + 1 / 5040
    p = p * r + 1 / 720
    p = p * r + 1 / 120
    p = p * r + 1 / 24
    p = p * r + 1 / 6
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    return flushed(p * two_to(rounded), d, _LEAST)


@inlined
def exp_near(d):
    """The same to 1e-11, which is enough for float32 and for the sum of a million of its errors.

    In pairs of terms that do not wait for each other (G. Estrin's scheme).
    """
    rounded = d * _LOG2E + _ROUND
    r = d - (rounded - _ROUND) * _LOG2
    r2 = r * r
    r4 = r2 * r2
    high = (r * (1 / 5040) + 1 / 720) * r2 + (r * (1 / 120) + 1 / 24)
    high = (r * (1 / 362880) + 1 / 40320) * r4 + high
    p = high * r4 + ((r * (1 / 6) + 0.5) * r2 + (r + 1.0))
    return flushed(p * two_to(rounded), d, _LEAST)


def exp_for(d: float, like: Any) -> float:
    """`exp(d)`, in float64, to what a number of the type of `like` can tell."""
    return math.exp(d)


@overload(exp_for, inline="always")
def _exp_for(d, like):
    if like == types.float32:
        return lambda d, like: exp_near(d)
    return lambda d, like: exp64(d)


@inlined
def exp32(d):
    """The same in float32, to 1e-7."""
    rounded = d * _LOG2E_32 + _ROUND_32
    k = rounded - _ROUND_32
    r = (d - k * _HIGH_32) - k * _LOW_32
    p = r * _C7 + _C6
    p = p * r + _C5
    p = p * r + _C4
    p = p * r + _C3
    p = p * r + _C2
    p = p * r + _ONE
    p = p * r + _ONE
    # times 2^k: the last bits of what has been rounded are k
    found = from_bits(np.int32(bits(p) + (bits(rounded) << np.int32(23))))
    return _ZERO if d < _LEAST_32 else found


def exp(d: float) -> float:
    """`exp(d)` in the precision of `d`, float32 or float64."""
    return math.exp(d)


@overload(exp, inline="always")
def _exp(d):
    if d == types.float32:
        return lambda d: exp32(d)
    return lambda d: exp64(d)
