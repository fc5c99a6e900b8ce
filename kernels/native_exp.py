"""The exponential, in float64 arithmetic that LLVM turns into vectors, for loops that numba compiles.

    exp(d) = 2^k exp(r)        k = round(d log2(e)),  r = d - k log(2)

A polynomial of degree 12 is good to 3e-16 where |r| is at most log(2) / 2; 2^k is made from the bits of k. What libm
has is called entry by entry instead, and takes 3 times as long. `log(2)` is split in two (Cody and Waite), so that
`k log(2)` is exact enough. Results below 2^-995 are 0, so that nothing is denormal. Arguments are at most 0, -inf or
NaN: what is left when a maximum has been taken out. Tested against `math.exp`.
"""

import math
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

_LOG2E = math.log2(math.e)
_HIGH, _LOW = 0.693147180369123816490, 1.90821492927058770002e-10

# added and taken away again, it rounds to an integer, which its last bits then hold
_ROUND = 1.5 * 2.0**52

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


@numba.njit(fastmath={"contract"}, inline="always")
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
    scale = from_bits((bits(rounded) + np.int64(1023)) << np.int64(52))
    return 0.0 if d < _LEAST else p * scale


@numba.njit(fastmath={"contract"}, inline="always")
def exp_near(d):
    """The same to 1e-11, which is enough for float32 and for the sum of a million of its errors."""
    rounded = d * _LOG2E + _ROUND
    k = rounded - _ROUND
    r = (d - k * _HIGH) - k * _LOW
    p = r * (1 / 362880) + 1 / 40320
    p = p * r + 1 / 5040
    p = p * r + 1 / 720
    p = p * r + 1 / 120
    p = p * r + 1 / 24
    p = p * r + 1 / 6
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    scale = from_bits((bits(rounded) + np.int64(1023)) << np.int64(52))
    return 0.0 if d < _LEAST else p * scale


def exp_for(d: Any, like: Any) -> Any:
    """`exp(d)` as exactly as a number of the type of `like` is."""
    raise NotImplementedError  # compiled code has one of the two


@overload(exp_for, inline="always")
def _exp_for(d, like):
    if like == types.float32:
        return lambda d, like: exp_near(d)
    return lambda d, like: exp64(d)
