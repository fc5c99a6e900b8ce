"""The forward recursion of chains whose states have few transitions each, in wide numbers.

    a_0 = p0 exp(x_0 - peak_0)        a_i(j) = sum_k a_{i-1}(k) P_i(k, j) exp(x_i(j) - peak_i) / 2^shift_i
    log_norm = log sum_j a_{v-1}(j) + sum_i (peak_i + shift_i log 2)

Operands: `sparse_rows`. Messages (n, slots, c), mantissas and exponents: with v slots all are kept, with two they
take turns. What lies behind a sequence's end is neither read nor written.

Numerics: see `wide`. `peak` is the largest x of a step and `shift` the exponent of the last message's largest number.
Peaks are summed in two float64 numbers and shifts as an int64. Each state is exact to rounding, however far it lies
below others: nothing is flagged or computed again. A NaN anywhere makes the log-partition NaN, even if no path leads
on from there.

Cost: a look at x for its peak, and a multiply-add of wide numbers for each transition and step; v dependent steps with
one barrier each. A program computes one sequence, BLOCK states at a time, a lane a state: neighbours in `Rows` have
like numbers of transitions. One state with very many is summed by one lane. Not measured on a device yet.
"""

import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .chain_exact import end_of
from .sparse_rows import Operands, Rows, sizes
from .tiles import exact_sum, far, finite
from .wide import LEAST, NOTHING, logarithm, normal, plus, potential, times, total, weight_of


@triton.jit(do_not_specialize=["v", "slots", "bands"])
def _forward_kernel(
    x_ptr, p_ptr, p0_ptr, place_ptr, ends_ptr, mantissa_ptr, exponent_ptr, log_norm_ptr,
    order_ptr, first_ptr, degree_ptr, other_ptr, entry_ptr, v, slots, c, bands,
    stride_xv, stride_xc, stride_pv, stride_pb, stride_pc, stride_0c,
    LOG_PARAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program computes one sequence."""
    DTYPE: tl.constexpr = mantissa_ptr.dtype.element_ty
    sequence = tl.program_id(0).to(tl.int64)
    x_ptr += tl.load(place_ptr + sequence * 3)
    p_ptr += tl.load(place_ptr + sequence * 3 + 1)
    p0_ptr += tl.load(place_ptr + sequence * 3 + 2)
    mantissa_ptr += sequence * slots * c
    exponent_ptr += sequence * slots * c
    end = end_of(ends_ptr, sequence, v)
    high, low = tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    base, shift = tl.zeros((), tl.int64), tl.zeros((), tl.int32)
    spoilt = tl.zeros((BLOCK,), DTYPE)
    for i in tl.range(0, end):
        # other threads stored the last message, and have read the one before it
        tl.debug_barrier()
        peak = peak_of(x_ptr, stride_xc, c, DTYPE, BLOCK)
        before, now = far((i + slots - 1) % slots, c), far(i % slots, c)
        top = tl.full((BLOCK,), LEAST, tl.int32)
        for start in tl.range(0, c, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            inside = rows < c
            states = states_of(order_ptr, rows, inside)
            if i == 0:
                p0 = tl.load(p0_ptr + states * stride_0c, mask=inside, other=float("-inf") if LOG_PARAMS else 0.0)
                m, e = weight_of(p0.to(DTYPE), LOG_PARAMS)
            else:
                m, e = fold(
                    mantissa_ptr + before, exponent_ptr + before, p_ptr, first_ptr, degree_ptr, other_ptr, entry_ptr,
                    rows, states, c, bands, stride_pb, stride_pc, LOG_PARAMS, False, order_ptr is None,
                )  # fmt: skip
            x = tl.load(x_ptr + states * stride_xc, mask=inside, other=float("-inf")).to(DTYPE)
            factor, power = potential(x, peak)
            m, e = normal(m * factor, e + power - shift)
            tl.store(mantissa_ptr + now + states, m, mask=inside)
            tl.store(exponent_ptr + now + states, e, mask=inside)
            top = tl.maximum(top, e)
            spoilt += m - m
        base += shift
        shift = tl.max(top, 0)
        high, error = exact_sum(high, peak.to(tl.float64))
        low += error
        x_ptr += stride_xv
        p_ptr += tl.where(i == 0, 0, stride_pv)
    tl.debug_barrier()
    last = far((end - 1) % slots, c)
    m, e = tl.zeros((BLOCK,), DTYPE), tl.full((BLOCK,), NOTHING, tl.int32)
    for start in tl.range(0, c, BLOCK):
        states = start + tl.arange(0, BLOCK)
        number, power = load(mantissa_ptr + last, exponent_ptr + last, states, states < c)
        m, e = plus(m, e, number, power)
    m, top = total(m, e)
    log_norm = logarithm(m, base + top, high, low)
    tl.store(log_norm_ptr + sequence, log_norm + tl.sum(spoilt, 0).to(tl.float64))


@triton.jit
def peak_of(x_ptr, stride_xc, c, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """The largest x of a step, 0 if all are -inf."""
    top = tl.full((BLOCK,), float("-inf"), DTYPE)
    for start in tl.range(0, c, BLOCK):
        states = start + tl.arange(0, BLOCK).to(tl.int64)
        top = tl.maximum(top, tl.load(x_ptr + states * stride_xc, mask=states < c, other=float("-inf")).to(DTYPE))
    return finite(tl.max(top, 0))


@triton.jit
def states_of(order_ptr, rows, inside):
    """The states of some rows, in 64 bits."""
    if order_ptr is None:
        return rows.to(tl.int64)
    else:
        return tl.load(order_ptr + rows, mask=inside, other=0).to(tl.int64)


@triton.jit
def load(mantissa_ptr, exponent_ptr, states, inside):
    """Numbers of a message, 0 outside."""
    mantissa = tl.load(mantissa_ptr + states, mask=inside, other=0.0)
    return mantissa, tl.load(exponent_ptr + states, mask=inside, other=LEAST)


@triton.jit
def fold(
    mantissa_ptr, exponent_ptr, p_ptr, first_ptr, degree_ptr, other_ptr, entry_ptr, rows, states, c, bands,
    stride_pb, stride_pc, LOG_PARAMS: tl.constexpr, AHEAD: tl.constexpr, BANDED: tl.constexpr,
):  # fmt: skip
    """The sums over the transitions of states of weights times the message at the other end: AHEAD, of the targets."""
    DTYPE: tl.constexpr = mantissa_ptr.dtype.element_ty
    inside = rows < c
    m, e = tl.zeros(rows.shape, DTYPE), tl.full(rows.shape, NOTHING, tl.int32)
    if BANDED:
        most = bands
    else:
        degree = tl.load(degree_ptr + rows, mask=inside, other=0)
        place = tl.load(first_ptr + rows, mask=inside, other=0)
        most = tl.max(degree, 0)
    # loads of several transitions are under way at once
    for t in tl.range(0, most, loop_unroll_factor=4):
        if BANDED:
            offset = tl.load(first_ptr + t)
            other = states + offset if AHEAD else states - offset
            present = inside & (other >= 0) & (other < c)
            weight_ptr = p_ptr + far(t, stride_pb) + (other if AHEAD else states) * stride_pc
        else:
            present = t < degree
            other = tl.load(other_ptr + place + t, mask=present, other=0)
            weight_ptr = p_ptr + tl.load(entry_ptr + place + t, mask=present, other=0).to(tl.int64) * stride_pc
        p = tl.load(weight_ptr, mask=present, other=float("-inf") if LOG_PARAMS else 0.0).to(DTYPE)
        weight, weight_power = weight_of(p, LOG_PARAMS)
        number, power = load(mantissa_ptr, exponent_ptr, other, present)
        number, power = times(number, power, weight, weight_power)
        m, e = plus(m, e, number, power)
    return m, e


def forward(chain: Operands, incoming: Rows, mantissas: Tensor, exponents: Tensor, log_norm: Tensor) -> None:
    """Messages (n, v or min(v, 2), c), contiguous, and log-partitions (n) are written."""
    n, v, c = chain.shape
    launch.run(
        _forward_kernel, (n,), chain.x, chain.parameter, chain.p0, chain.places, chain.ends, mantissas, exponents,
        log_norm, *incoming.tensors, v, mantissas.shape[1], c, incoming.bands, *chain.strides, *chain.p0.stride()[-1:],
        LOG_PARAMS=chain.log_params, **sizes(c, chain.dtype),
    )  # fmt: skip
