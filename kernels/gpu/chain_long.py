"""The log-partition of few long chains of few states in one launch, in which no program waits for another.

    M_s = P_b D_b P_{b+1} ... D_{e-1} P_e        b, e: the first and the last step of segment s, D_i = diag(exp x_i)
    S_b = S_a D_a M_s                            a = b - 1, the last step of the segment before

One program multiplies the matrices of a segment. Whoever is the last in a group of segments multiplies their products,
and the last of all passes the first message through those of the groups: each is a chain of its own, whose matrices are
products. Operands: `chains`. Numerics: `scaled`; each row of a product is the message of a sequence that begins in one
state, with its exponent of two, and rows with a sum that may be inexact become NaN. A sequence which that reaches is
doubtful, and its result means nothing.

Cost: g m (v - 1) c^3 multiply-adds; v / segments + 2 sqrt(segments) dependent steps. Matrices are read once, x twice
where segments meet.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .chains import Operands
from .scaled import (
    doubtful,
    exponent_of,
    floor,
    halves,
    least_exponent,
    level_of,
    log_scaled,
    multiply,
    power_of_two,
    target,
)
from .segment_product import block_of, enough, potentials, raised_sums, registers, segment_product, warps
from .tiles import any_of, exp, far, finite, multiple, multiples


@triton.jit(do_not_specialize=["v", "m", "length", "segments", "members"])
def _long_kernel(
    x_ptr, bulk_ptr, start_ptr, ends_ptr, product_ptr, taken_ptr, counters_ptr, log_norm_ptr, doubt_ptr,
    v, m, length, segments, members, stride_xv, stride_xg, stride_xm, stride_xc,
    stride_bv, stride_bg, STRIDE_BK: tl.constexpr, STRIDE_BJ: tl.constexpr,
    C: tl.constexpr, SAME: tl.constexpr, LOG_PARAMS: tl.constexpr, PRECISION: tl.constexpr,
    WIDTH_X: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program multiplies a segment of one sequence; `product` has room for those of segments, then of groups."""
    BLOCK: tl.constexpr = block_of(C)
    stride_xv, stride_xg, stride_xm = multiples(stride_xv, stride_xg, stride_xm, WIDTH_X)
    stride_bv, stride_bg = multiple(stride_bv, WIDTH), multiple(stride_bg, WIDTH)
    n, segment = (tl.program_id(0) // segments).to(tl.int64), tl.program_id(0) % segments
    group, groups = segment // members, tl.cdiv(segments, members)
    x_ptr += n // m * stride_xg + n % m * stride_xm
    bulk_ptr += n // m * stride_bg
    product_ptr += n * (segments + groups) * BLOCK * BLOCK
    taken_ptr += n * (segments + groups) * BLOCK
    counters_ptr += n * (groups + 1)
    last = v - 1
    if ends_ptr is not None:
        last = tl.load(ends_ptr + n).to(tl.int32) - 1
    there = tl.maximum(tl.cdiv(last, length), 1)  # segments with a step before the end, but at least one program
    states = tl.arange(0, BLOCK)

    if segment < there:
        begin = segment * length
        u, taken = segment_product(
            x_ptr, bulk_ptr, begin, tl.minimum(begin + length, last), stride_xv, stride_xc, stride_bv, STRIDE_BK,
            STRIDE_BJ, C, SAME, LOG_PARAMS, PRECISION, product_ptr.dtype.element_ty,
        )  # fmt: skip
        _store(product_ptr, taken_ptr, segment, states, u, taken)
        first = group * members
        count = tl.minimum(members, there - first)
        if _is_last(counters_ptr + group, count):
            u, taken = _load(product_ptr, taken_ptr, first, states)
            u, taken, _ = _through(
                u, taken, x_ptr, product_ptr, taken_ptr, states, first + 1, first + count, (first + 1) * length, length,
                last, stride_xv, stride_xc, C, PRECISION,
            )  # fmt: skip
            _store(product_ptr, taken_ptr, segments + group, states, u, taken)
            groups_there = tl.cdiv(there, members)
            if _is_last(counters_ptr + groups, groups_there):
                _finish(
                    x_ptr, start_ptr + n * C, product_ptr, taken_ptr, log_norm_ptr + n, doubt_ptr + n, states, segments,
                    groups_there, members * length, last, stride_xv, stride_xc, C, PRECISION,
                )  # fmt: skip


@triton.jit
def _store(product_ptr, taken_ptr, item, states, u, taken):
    """Write a product and its rows' exponents."""
    BLOCK: tl.constexpr = states.shape[0]
    cells = states[:, None] * BLOCK + states[None, :]
    tl.store(product_ptr + far(item, BLOCK * BLOCK) + cells, u, cache_modifier=".cg")
    tl.store(taken_ptr + far(item, BLOCK) + states, taken, cache_modifier=".cg")


@triton.jit
def _load(product_ptr, taken_ptr, item, states):
    """A product and its rows' exponents, as another program has written them."""
    BLOCK: tl.constexpr = states.shape[0]
    cells = states[:, None] * BLOCK + states[None, :]
    product = tl.load(product_ptr + far(item, BLOCK * BLOCK) + cells, cache_modifier=".cg")
    return product, tl.load(taken_ptr + far(item, BLOCK) + states, cache_modifier=".cg")


@triton.jit
def _is_last(counter_ptr, count):
    """Whether all others of so many have arrived; then what they stored before is there, past the first cache."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
    tl.debug_barrier()
    return arrived == count - 1


@triton.jit
def _through(
    u, taken, x_ptr, product_ptr, taken_ptr, states, first, end, step, span, last, stride_xv, stride_xc,
    C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums `u` at a step times the products `first` to `end`, of `span` steps each, their exponents, and the last x.

    In u, the x of its own step is not contained, but that of step 0 is. Rows that may be inexact become NaN.
    """
    DTYPE: tl.constexpr = u.dtype
    step = tl.full((), 0, tl.int32) + step
    x = potentials(x_ptr, step, states, stride_xv, stride_xc, step > 0, C, DTYPE)
    x = tl.where((step == 0) & (states < C), 0.0, x)
    doubt = u != u
    product, exponents = _load(product_ptr, taken_ptr, tl.minimum(first, end - 1), states)
    for item in tl.range(first, end):
        a, taken = _settled(u, taken, x)
        entries, k, low = _normal(product, exponents)
        step = tl.minimum(step + span, last)
        x = potentials(x_ptr, step, states, stride_xv, stride_xc, True, C, DTYPE)
        product, exponents = _load(product_ptr, taken_ptr, tl.minimum(item + 1, end - 1), states)
        high, rest = halves(entries, PRECISION)
        u = multiply(a, high, rest, PRECISION)
        taken += k
        doubt |= doubtful(u, (tl.max(a, 1) > 0.0)[:, None] & (x != float("-inf"))[None, :], low) | (u != u)
    lost = tl.max(doubt.to(tl.int32), 1) > 0
    return tl.where(lost[:, None], float("nan"), u), taken, x


@triton.jit
def _settled(u, taken, x):
    """The messages of sums `u` and potentials `x`, and the rows' exponents."""
    DOUBLE: tl.constexpr = u.dtype == tl.float64
    shift = tl.maximum(exponent_of(tl.max(u, 1)) - target(DOUBLE), -900 if DOUBLE else -100)
    level = level_of(tl.max(x, 0))
    messages = raised_sums(u * power_of_two(-shift, u.dtype)[:, None], u, x, level)
    return messages, taken + (shift + level).to(tl.int64)


@triton.jit
def _normal(product, exponents):
    """A product whose rows have one exponent in common, its exponent, and whether it is low."""
    DOUBLE: tl.constexpr = product.dtype == tl.float64
    least: tl.constexpr = -1000 if DOUBLE else -120
    top = tl.max(product, 1)
    own = exponent_of(top)
    highest = tl.max(tl.where(top > 0.0, exponents + own, -(2**62)))
    k = tl.where(highest == -(2**62), 0, highest)
    down = tl.minimum(tl.maximum(exponents + own - k, least), 0).to(tl.int32)
    entries = product * power_of_two(-own, product.dtype)[:, None] * power_of_two(down, product.dtype)[:, None]
    return entries, k, any_of((product > 0.0) & (entries < 2.0 ** least_exponent(DOUBLE)))


@triton.jit
def _finish(
    x_ptr, start_ptr, product_ptr, taken_ptr, log_norm_ptr, doubt_ptr, states, first, count, span, last,
    stride_xv, stride_xc, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The log-partition, and whether it may be inexact, from the products of groups `first` to `first + count`."""
    DTYPE: tl.constexpr = product_ptr.dtype.element_ty
    DOUBLE: tl.constexpr = DTYPE == tl.float64
    x = potentials(x_ptr, 0, states, stride_xv, stride_xc, True, C, tl.float64)
    first_message = tl.load(start_ptr + states, mask=states < C, other=float("-inf")) + x
    top = finite(tl.max(first_message, 0))
    message = exp((first_message - top).to(DTYPE)) * 2.0 ** target(DOUBLE)
    message = tl.maximum(message, floor(DOUBLE), propagate_nan=tl.PropagateNan.ALL)
    message = tl.where(first_message == float("-inf"), 0.0, message)
    only = states[:, None] == 0
    taken = tl.zeros_like(states).to(tl.int64) - target(DOUBLE)
    u, taken, x = _through(
        tl.where(only, message[None, :], 0.0), taken, x_ptr, product_ptr, taken_ptr, states, first,
        first + tl.where(last > 0, count, 0), 0, span, last, stride_xv, stride_xc, C, PRECISION,
    )  # fmt: skip
    messages, taken = _settled(u, taken, x)
    total = tl.sum(tl.sum(tl.where(only, messages, 0.0), 1), 0)
    exact = (total == 0.0) | ((total >= enough(DOUBLE)) & (total < float("inf")))
    log_norm, _ = log_scaled(total, tl.sum(tl.where(states == 0, taken, 0), 0))
    tl.store(log_norm_ptr, top + log_norm)
    tl.store(doubt_ptr, (exact == 0).to(tl.int8))


def log_norm(chain: Operands, segments: int) -> tuple[Tensor, Tensor]:
    """The log-partitions (g, m) in float64, and which are doubtful, of states that `segment_product.fits`.

    Chains are cut into at most so many `segments`.
    """
    v, g, m, c = chain.shape
    length = max(1, math.ceil((v - 1) / segments))
    count = max(1, math.ceil((v - 1) / length))
    members = math.isqrt(count - 1) + 1
    items, block = count + math.ceil(count / members), block_of(c)
    new = chain.x.new_empty
    products, taken = (
        new((g * m, items, block, block), dtype=chain.dtype),
        new((g * m, items, block), dtype=torch.int64),
    )
    counters = torch.zeros(g * m, items - count + 1, dtype=torch.int32, device=chain.x.device)
    out, doubt = new((g, m), dtype=torch.float64), new((g, m), dtype=torch.bool)
    launch.run(
        _long_kernel, (g * m * count,), chain.x, chain.bulk, chain.start, chain.ends, products, taken, counters, out,
        doubt, v, m, length, count, members, *chain.strides[:6], **constants(chain),
    )  # fmt: skip
    return out, doubt


def constants(chain: Operands) -> dict[str, Any]:
    """The compile-time arguments of the kernel, with its warps and stages."""
    c = chain.shape[3]
    precision = launch.precision(chain.x.new_empty(0, dtype=chain.dtype))
    if c <= 16 and precision == "tf32x3":
        precision = "ieee"  # as fast
    return {
        "STRIDE_BK": chain.bulk.stride(2), "STRIDE_BJ": chain.bulk.stride(3), "C": c, "SAME": len(chain.bulk) == 1,
        "LOG_PARAMS": chain.log_params, "PRECISION": precision,
        "WIDTH_X": launch.common_width(c, *chain.x.stride()[:-1]), "WIDTH": max(launch.widths(chain.bulk)),
        "num_warps": warps(c, chain.double), "num_stages": 1,
        **({} if torch.version.hip else {"maxnreg": registers(c)}),
    }  # fmt: skip
