"""Scaled numbers: linear messages with one power of two per row, exponentials and logarithms without bias.

    exp(x) = f 2^n                p = mantissa 2^exponent

A message is stored as `S 2^k`: its largest entry is near 2^TARGET, and the integer k is kept apart. Integers add up
exactly, so no logarithm and no float64 is needed between two steps. Where a path leads, S is raised to at least FLOOR:
an exact 0 means that no path does.

What is lost: raised entries add at most N FLOOR to a sum, so a sum of at least `trusted` is exact to rounding. A matrix
with a positive entry below LOW, or LOW times its largest, is `low`: products with it may underflow to 0, and then a sum
of 0 may still have a path. A sequence with any other sum, in a state that x admits, is flagged, and `exact` recomputes
it.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..message import LOG_LIMIT

LN2 = tl.constexpr(0.6931471805599453)
# ln 2 with 32 bits, so that its products with integers of 21 bits are exact, and the rest
LN2_HIGH = tl.constexpr(0.6931471803691238)
LN2_LOW = tl.constexpr(1.9082149292705877e-10)
# log2 e as a float32, and what that lacks
LOG2E_HIGH = tl.constexpr(1.4426950216293335)
LOG2E_LOW = tl.constexpr(1.92596303350e-8)


class Numbers(NamedTuple):
    """The constants of messages of one dtype, and the layout of its bits."""

    target: int  # the exponent of two of a message's largest entry
    floor: float  # FLOOR, the least positive entry of a message
    low: int  # the exponent of LOW: FLOOR LOW is a normal number
    trusted: float  # times n: the least sum of n products of a message and entries up to 2 that is exact to rounding
    trusted_joint: float  # times n^2: the same for two messages, one of them divided by 2^TARGET
    limit: float  # the stored logarithm that represents NaN; its negative represents -inf
    integer: tl.dtype  # of the same size
    digits: int  # of a mantissa, below the exponent plus `bias`
    bias: int
    root_half: int  # the bits of sqrt(1/2)


_FLOAT32 = Numbers(60, 2.0**-48, -78, 2.0**-23, 2.0**-22, LOG_LIMIT[torch.float32], tl.int32, 23, 127, 0x3F3504F3)
_FLOAT64 = Numbers(
    400, 2.0**-500, -522, 2.0**-446, 2.0**-444, LOG_LIMIT[torch.float64], tl.int64, 52, 1023, 0x3FE6A09E667F3BCD
)


@triton.constexpr_function
def numbers(dtype):
    """The constants of a dtype of Triton or torch."""
    return _FLOAT64 if dtype in (tl.float64, torch.float64) else _FLOAT32


@triton.jit
def exponent(a):
    """The k with 2^k <= a < 2^(k + 1), for positive normal numbers."""
    NUMBERS: tl.constexpr = numbers(a.dtype)
    field = (a.to(NUMBERS.integer, bitcast=True) >> NUMBERS.digits) & (2 * NUMBERS.bias + 1)
    return field.to(tl.int32) - NUMBERS.bias


@triton.jit
def times_power(a, k):
    """`a 2^k` for positive normal numbers and int32 k; 0 where that is not normal. It must not overflow."""
    NUMBERS: tl.constexpr = numbers(a.dtype)
    bits = a.to(NUMBERS.integer, bitcast=True)
    new = (bits >> NUMBERS.digits) + k
    return tl.where(new > 0, (bits + (k.to(NUMBERS.integer) << NUMBERS.digits)).to(a.dtype, bitcast=True), 0.0)


@triton.jit
def power(k, DTYPE: tl.constexpr):
    """2^k for int32 k, limited to normal numbers."""
    NUMBERS: tl.constexpr = numbers(DTYPE)
    k = tl.minimum(tl.maximum(k, 1 - NUMBERS.bias), NUMBERS.bias).to(NUMBERS.integer)
    return ((k + NUMBERS.bias) << NUMBERS.digits).to(DTYPE, bitcast=True)


@triton.jit
def whole_bits(x):
    """n of `exp(x) = f 2^n`, as int32, within 2^29."""
    return tl.minimum(tl.maximum(tl.floor(x * LOG2E_HIGH), -536870912.0), 536870912.0).to(tl.int32)


@triton.jit
def exp_over_power(x, n):
    """`exp(x) / 2^n`; 0 for -inf. Its error is that of x, however large n is."""
    if x.dtype == tl.float64:
        k = n.to(tl.float64)
        return tl.exp((x - k * LN2_HIGH) - k * LN2_LOW)
    else:
        return tl.exp2(tl.fma(x, LOG2E_HIGH, -n.to(tl.float32)) + x * LOG2E_LOW)


@triton.jit
def exp_split(x):
    """f and n of `exp(x) = f 2^n`, f between 0.7 and 2; it is 0 or infinite for |x| beyond 1.4e6.

    One exponential and no other slow instruction: adding 1.5 2^23 rounds to an integer, which is then in the last bits.
    """
    limited = tl.minimum(tl.maximum(x, -1.4e6), 1.4e6)
    if x.dtype == tl.float64:
        n = whole_bits(limited)
        return exp_over_power(x, n), n
    else:
        shifted = tl.fma(limited, LOG2E_HIGH, 12582912.0)
        n = shifted.to(tl.int32, bitcast=True) - 0x4B400000
        return tl.exp2(tl.fma(x, LOG2E_HIGH, 12582912.0 - shifted) + x * LOG2E_LOW), n


@triton.jit
def exp(x):
    """`e^x` without bias; 0 for -inf."""
    if x.dtype == tl.float64:
        return tl.exp(x)
    else:
        return tl.exp2(tl.fma(x, LOG2E_HIGH, x * LOG2E_LOW))


@triton.jit
def finite(top):
    """A largest entry, with 0 for -inf, so that -inf less it is -inf and not NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _exponent_and_mantissa(p):
    """k and mantissas between sqrt(1/2) and sqrt(2) of positive numbers; denormal numbers are no less exact."""
    tiny = p < 1e-30
    a = tl.where(tiny, p * 1.2676506002282294e30, p)  # 2^100
    NUMBERS: tl.constexpr = numbers(p.dtype)
    bits = a.to(NUMBERS.integer, bitcast=True)
    k = (bits - NUMBERS.root_half) >> NUMBERS.digits
    mantissa = (bits - (k << NUMBERS.digits)).to(p.dtype, bitcast=True)
    weight = (p > 0.0) & (p < float("inf"))
    return k.to(tl.int32) - tl.where(tiny, 100, 0), tl.where(weight, mantissa, 1.0)


@triton.jit
def _checked(p, logs):
    """`logs` of positive p, -inf of 0, NaN of what is no weight."""
    weight = (p > 0.0) & (p < float("inf"))
    return tl.where(weight, logs, tl.where(p == 0.0, float("-inf"), float("nan")))


@triton.jit
def log_split(p):
    """Exponents as float64 logarithms, and mantissas: -inf and 1 for 0, NaN for what is no weight."""
    k, mantissa = _exponent_and_mantissa(p)
    return _checked(p, k.to(tl.float64) * LN2), mantissa


@triton.jit
def log(p):
    """`log p` in float64, in which only the mantissa's logarithm is rounded to the dtype of p; -inf for 0."""
    logs, mantissa = log_split(p)
    return logs + tl.log(mantissa).to(tl.float64)


@triton.jit
def add(total, lost, term):
    """A float64 sum and its rounding error (D. E. Knuth's two-sum), which stays finite."""
    new = total + term
    part = new - total
    error = (total - (new - part)) + (term - part)
    return new, lost + tl.where(tl.abs(error) < float("inf"), error, 0.0)


@triton.jit
def log_times_power(s, k):
    """`log(s 2^k)` in float64, for int64 k of any size, -inf for 0, and its rounding error."""
    added, mantissa = _exponent_and_mantissa(s)
    k += added
    upper = (k >> 11) << 11
    total = k.to(tl.float64) * LN2_LOW + tl.log(mantissa).to(tl.float64)
    total, lost = add(total, total * 0.0, (k - upper).to(tl.float64) * LN2_HIGH)
    total, lost = add(total, lost, upper.to(tl.float64) * LN2_HIGH)
    total, lost = add(total, lost * 0.0, lost)
    return _checked(s, total), lost


@triton.jit
def split(a):
    """The upper half of float32 numbers, rounded to TF32, and the exact rest."""
    high = ((a.to(tl.int32, bitcast=True) + 0x1000) & -8192).to(tl.float32, bitcast=True)
    return high, a - high


@triton.jit
def multiply(a, b, sums, PRECISION: tl.constexpr):
    """`sums + a b`. "tf32x3" is as exact as float32, on tensor cores; "tf32" rounds operands, which they truncate."""
    if PRECISION == "tf32x3":
        a_high, a_low = split(a)
        b_high, b_low = split(b)
        sums = tl.dot(a_low, b_high, sums, input_precision="tf32")
        sums = tl.dot(a_high, b_low, sums, input_precision="tf32")
        return tl.dot(a_high, b_high, sums, input_precision="tf32")
    elif PRECISION == "tf32":
        # the rounding of a NaN of all ones would overflow to a zero
        a, b = tl.where(a == a, split(a)[0], a), tl.where(b == b, split(b)[0], b)
        return tl.dot(a, b, sums, input_precision="tf32")
    else:
        return tl.dot(a, b, sums, input_precision="ieee", out_dtype=sums.dtype)


def precision(dtype: torch.dtype, device: torch.device) -> str:
    """How `tl.dot` multiplies: "ieee", "tf32x3", which is as exact, or "tf32" where the user allows it."""
    if dtype == torch.float64 or torch.version.hip is not None or not _has_tf32(device):
        return "ieee"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@functools.cache
def _has_tf32(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 8


@functools.cache
def num_processors(device: torch.device) -> int:
    """The device's number of multiprocessors; 8 in the interpreter, so that tests meet both schedules of a scan."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
