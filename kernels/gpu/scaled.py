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

import torch
import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
# ln 2 with 32 bits, so that its products with integers of 21 bits are exact, and the rest
LN2_HIGH = tl.constexpr(0.6931471803691238)
LN2_LOW = tl.constexpr(1.9082149292705877e-10)
# log2 e as a float32, and what that lacks
LOG2E_HIGH = tl.constexpr(1.4426950216293335)
LOG2E_LOW = tl.constexpr(1.92596303350e-8)


@triton.constexpr_function
def target(dtype):
    """The exponent of two of a message's largest entry."""
    return 400 if dtype == tl.float64 else 60


@triton.constexpr_function
def floor_of(dtype):
    """FLOOR, the least positive entry of a message."""
    return 2.0**-500 if dtype == tl.float64 else 2.0**-48


@triton.constexpr_function
def low_exponent(dtype):
    """The exponent of LOW: FLOOR LOW is a normal number."""
    return -522 if dtype == tl.float64 else -78


@triton.constexpr_function
def trusted(dtype, n):
    """The least sum of n products of a message and matrix entries up to 2 that is exact to rounding."""
    return n * (2.0**-446 if dtype == tl.float64 else 2.0**-23)


@triton.constexpr_function
def trusted_joint(dtype, n):
    """The same for the products of two messages, one of them divided by 2^TARGET."""
    return n * n * (2.0**-444 if dtype == tl.float64 else 2.0**-22)


@triton.jit
def exponent(a):
    """The k with 2^k <= a < 2^(k + 1), for positive normal numbers."""
    if a.dtype == tl.float64:
        return ((a.to(tl.int64, bitcast=True) >> 52) & 2047).to(tl.int32) - 1023
    else:
        return ((a.to(tl.int32, bitcast=True) >> 23) & 255) - 127


@triton.jit
def times_power(a, k):
    """`a 2^k` for positive normal numbers and int32 k; 0 where that is not normal. It must not overflow."""
    if a.dtype == tl.float64:
        bits = a.to(tl.int64, bitcast=True)
        new = (bits >> 52) + k
        return tl.where(new > 0, (bits + (k.to(tl.int64) << 52)).to(tl.float64, bitcast=True), 0.0)
    else:
        bits = a.to(tl.int32, bitcast=True)
        new = (bits >> 23) + k
        return tl.where(new > 0, (bits + (k << 23)).to(tl.float32, bitcast=True), 0.0)


@triton.jit
def power(k, DTYPE: tl.constexpr):
    """2^k for int32 k, limited to normal numbers."""
    if DTYPE == tl.float64:
        k = tl.minimum(tl.maximum(k, -1022), 1023).to(tl.int64)
        return ((k + 1023) << 52).to(tl.float64, bitcast=True)
    else:
        k = tl.minimum(tl.maximum(k, -126), 127)
        return ((k + 127) << 23).to(tl.float32, bitcast=True)


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
    if p.dtype == tl.float64:
        bits = a.to(tl.int64, bitcast=True)
        k = (bits - 0x3FE6A09E667F3BCD) >> 52
        mantissa = (bits - (k << 52)).to(tl.float64, bitcast=True)
    else:
        bits = a.to(tl.int32, bitcast=True)
        k = (bits - 0x3F3504F3) >> 23
        mantissa = (bits - (k << 23)).to(tl.float32, bitcast=True)
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
