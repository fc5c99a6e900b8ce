"""The recursions of chains in logarithms, for sequences whose linear messages would lose something.

    a_0 = start + x_0        a_i = log(exp(a_{i-1}) P_i) + x_i        log_norm = log sum_j exp a_{v-1}(j)
    w_i = x_i + b_i          b_{i-1} = log(P_i exp(w_i))              nu_i = log sum_k exp(a_i(k) + b_i(k))
    gamma_i = exp(a_i + b_i - nu_i)        r_i = w_i - nu_{i-1} + n_i log 2

Operands: `chains`. Fast kernels mark sequences (g, m); all others are left as they are. Messages (slots, g, m, c) of
marked sequences become logarithms less their largest entry; of others they are linear, see `scaled`, and their
logarithms are those of `message / 2^TARGET`. `exp(a_{i-1}(k) + r_i(j)) P_i(k, j) / 2^n_i` sums to 1 over (k, j); the
integers n_i are chosen such that nothing is left in r of what matrices have in common, and r is rounded as w is.

Numerics: terms of a sum are taken relative to its largest, found on the way, so that nothing underflows. Their
logarithms are float64 and entries of linear matrices stay mantissas, so a sum is rounded as that of `exp` and products
in the arithmetic's dtype. Where that is float64, logarithms are less the `level` of their matrix, an integer. What is
taken out of messages is summed in two float64 numbers, and levels as integers. -inf and zeros are exact.

Cost: as the recursions, with an exponential for each multiply-add, and in float64 another look at the matrix; without a
mark, one load in each program. A program computes one sequence.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .chains import Operands
from .logs import apart, log_wide, message_logs, split
from .scaled import LN2_HIGH, LN2_LOW, below, level_of
from .tiles import exact_sum, exp, far, finite, load


class Form(NamedTuple):
    """What the backward kernel is compiled for."""

    c: int
    log_params: bool


@triton.constexpr_function
def _width(c):
    """The columns of a tile, which has all of them."""
    return triton.next_power_of_2(c)


@triton.constexpr_function
def _height(c):
    """The rows of a tile."""
    return max(1, min(triton.next_power_of_2(c), 2048 // triton.next_power_of_2(c)))


@triton.jit(do_not_specialize=["v", "sequences", "m", "slots"])
def _forward_kernel(
    x_ptr, bulk_ptr, start_ptr, ends_ptr, message_ptr, log_norm_ptr, error_ptr, doubt_ptr, v, sequences, m, slots,
    stride_xv, stride_xg, stride_xm, stride_xc, stride_bv, stride_bg, stride_bk, stride_bj,
    C: tl.constexpr, LOG_PARAMS: tl.constexpr,
):  # fmt: skip
    """One program computes one sequence."""
    sequence = tl.program_id(0).to(tl.int64)
    if tl.load(doubt_ptr + sequence) == 0:
        return
    states = tl.arange(0, _width(C))
    inside = states < C
    x_ptr += sequence // m * stride_xg + sequence % m * stride_xm
    bulk_ptr += sequence // m * stride_bg
    message_ptr += sequence * C
    pitch = sequences.to(tl.int64) * C
    end = end_of(ends_ptr, sequence, v)

    start = tl.load(start_ptr + sequence * C + states, mask=inside, other=float("-inf"))
    x, peak = _potentials(x_ptr, stride_xc, states, inside)
    top = finite(tl.max(start, 0))
    message, shift = _normalised((start - top) + x, message_ptr.dtype.element_ty)
    high, low = exact_sum(peak, shift)
    high, error = exact_sum(high, top)
    low += error
    taken = tl.zeros((), tl.int64)
    tl.store(message_ptr + states, message, mask=inside)
    for i in tl.range(1, end):
        # other threads stored the last message, and have read the one before it
        tl.debug_barrier()
        before = message_ptr + (i - 1) % slots * pitch
        level = _level(bulk_ptr, stride_bk, stride_bj, C, LOG_PARAMS, message_ptr.dtype.element_ty)
        u = _fold(before, bulk_ptr, level, stride_bk, stride_bj, C, LOG_PARAMS)
        taken += level
        x_ptr += stride_xv
        x, peak = _potentials(x_ptr, stride_xc, states, inside)
        message, shift = _normalised(u + x, message_ptr.dtype.element_ty)
        high, error = exact_sum(high, peak)
        high, other = exact_sum(high, shift)
        low += error + other
        tl.store(message_ptr + i % slots * pitch + states, message, mask=inside)
        bulk_ptr += stride_bv
    if slots == v:
        for i in tl.range(end, v):
            tl.store(message_ptr + i * pitch + states, tl.full(states.shape, float("-inf"), message.dtype), mask=inside)
    # loaded again rather than kept in registers
    message = tl.load(message_ptr + (end - 1) % slots * pitch + states, mask=inside, other=float("-inf"))
    high, rest = exact_sum(high, taken.to(tl.float64) * LN2_HIGH)
    rest += taken.to(tl.float64) * LN2_LOW
    log_norm, error = exact_sum(high, low + rest + log_wide(tl.sum(exp(message), 0)))
    tl.store(log_norm_ptr + sequence, log_norm)
    if error_ptr is not None:
        tl.store(error_ptr + sequence, tl.where(tl.abs(log_norm) < float("inf"), error, 0.0))


@triton.jit(do_not_specialize=["v", "m"])
def _backward_kernel(
    x_ptr, bulk_ptr, ends_ptr, message_ptr, redone_ptr, marked_ptr, log_norm_ptr, weight_ptr, grad_x_ptr,
    grad_start_ptr, r_ptr, exponent_ptr, final_ptr, v, m, stride_xv, stride_xg, stride_xm, stride_xc,
    stride_bv, stride_bg, stride_bk, stride_bj, stride_wg, stride_wm, stride_dv, stride_dg, stride_dm, stride_dc,
    FORM: tl.constexpr,
):  # fmt: skip
    """One program computes one sequence; w passes from step to step through the memory of the gradient of start."""
    sequence = tl.program_id(0).to(tl.int64)
    if tl.load(marked_ptr + sequence) == 0:
        return
    C: tl.constexpr = FORM.c
    DTYPE: tl.constexpr = message_ptr.dtype.element_ty
    states = tl.arange(0, _width(C))
    inside = states < C
    z, y = sequence // m, sequence % m
    x_ptr += z * stride_xg + y * stride_xm
    bulk_ptr += z * stride_bg
    w_ptr = grad_start_ptr + sequence * C
    pitch = (tl.num_programs(0) + tl.zeros((), tl.int64)) * C
    end = end_of(ends_ptr, sequence, v)
    redone = tl.load(redone_ptr + sequence) != 0
    weight = tl.load(weight_ptr + z * stride_wg + y * stride_wm).to(DTYPE)
    if grad_x_ptr is not None:
        grad_x_ptr += z * stride_dg + y * stride_dm
        for i in tl.range(end, v):
            out = grad_x_ptr + far(i, stride_dv) + states.to(tl.int64) * stride_dc
            tl.store(out, tl.zeros(states.shape, DTYPE), mask=inside)
    if r_ptr is not None:
        for i in tl.range(end, v):
            out = r_ptr + i * pitch + sequence * C + states
            tl.store(out, tl.full(states.shape, float("-inf"), DTYPE), mask=inside)

    # -inf and NaN of the log-partition make all logarithms the same
    log_norm = tl.load(log_norm_ptr + sequence)
    b = tl.zeros(states.shape, tl.float64) + tl.where(tl.abs(log_norm) < float("inf"), 0.0, log_norm)
    if final_ptr is not None:
        b += tl.load(final_ptr + sequence * C + states, mask=inside, other=float("-inf")).to(tl.float64)
    for back in tl.range(0, end):
        i = end - 1 - back
        lost = tl.zeros((), tl.float64)
        level = tl.zeros((), tl.int32)
        if back > 0:
            # other threads stored w
            tl.debug_barrier()
            matrix_ptr = bulk_ptr + far(i, stride_bv)
            level = _level(matrix_ptr, stride_bj, stride_bk, C, FORM.log_params, DTYPE)
            u = _fold(w_ptr, matrix_ptr, level, stride_bj, stride_bk, C, FORM.log_params)
            lost = finite(tl.max(u, 0))
            b = u - lost
        a = message_logs(message_ptr + i * pitch + sequence * C + states, inside, redone)
        joint = a + b
        top = finite(tl.max(joint, 0))
        shares = exp((joint - top).to(DTYPE))
        total = tl.sum(shares, 0)
        gamma = shares / tl.where(total == 0.0, 1.0, total) * weight
        # 0 even if the weight is not finite, or the messages are not
        gamma = tl.where(weight == 0.0, 0.0, tl.where(joint == float("-inf"), 0.0, gamma))
        if grad_x_ptr is not None:
            out = grad_x_ptr + far(i, stride_dv) + states.to(tl.int64) * stride_dc
            tl.store(out, gamma, mask=inside)
        if r_ptr is not None:
            w = tl.load(w_ptr + states, mask=inside & (back > 0), other=float("-inf"))
            nu = tl.where(total == 0.0, 0.0, top + lost + log_wide(total))
            n = level_of(nu)
            r = (w.to(tl.float64) - below(nu, n)).to(DTYPE)
            tl.store(r_ptr + (i + 1) * pitch + sequence * C + states, r, mask=inside & (back > 0))
            tl.store(exponent_ptr + (i + 1) * (pitch // C) + sequence, level + n, mask=back > 0)
        x, _ = _potentials(x_ptr + far(i, stride_xv), stride_xc, states, inside)
        w, _ = _normalised(tl.where(a == float("-inf"), float("-inf"), b) + x, DTYPE)
        tl.debug_barrier()
        tl.store(w_ptr + states, tl.where(i == 0, gamma, w), mask=inside)


@triton.jit
def end_of(ends_ptr, sequence, v):
    """The steps of a sequence."""
    if ends_ptr is None:
        return v
    else:
        return tl.load(ends_ptr + sequence).to(tl.int32)


@triton.jit
def _potentials(x_ptr, stride_xc, states, inside):
    """x of a step less its largest entry, and that, in float64."""
    x = tl.load(x_ptr + states.to(tl.int64) * stride_xc, mask=inside, other=float("-inf")).to(tl.float64)
    peak = finite(tl.max(x, 0))
    return x - peak, peak


@triton.jit
def _normalised(total, DTYPE: tl.constexpr):
    """Logarithms less their largest, as a message, and that; 0 where it is -inf."""
    shift = finite(tl.max(total, 0))
    return (total - shift).to(DTYPE), shift


@triton.jit
def _level(matrix_ptr, stride_k, stride_j, C: tl.constexpr, LOG_PARAMS: tl.constexpr, DTYPE: tl.constexpr):
    """The exponent of two of about the largest entry of a matrix; 0 for float32, whose logarithms are float64."""
    level = tl.zeros((), tl.int32)
    if DTYPE == tl.float64:
        NOTHING: tl.constexpr = float("-inf") if LOG_PARAMS else 0.0
        columns = tl.arange(0, _width(C))
        top = tl.full((_width(C),), NOTHING, DTYPE)
        for first in tl.range(0, C, _height(C)):
            rows = first + tl.arange(0, _height(C))
            p = load(matrix_ptr, rows, columns, C, C, stride_k, stride_j, DTYPE, NOTHING)
            top = tl.maximum(top, tl.max(p, 0))
        level = level_of(tl.max(top, 0)) if LOG_PARAMS else split(tl.max(top, 0))[0]
    return level


@triton.jit
def _fold(message_ptr, matrix_ptr, level, stride_k, stride_j, C: tl.constexpr, LOG_PARAMS: tl.constexpr):
    """`log sum_k exp(message(k)) P(k, .) / 2^level` in float64."""
    DTYPE: tl.constexpr = message_ptr.dtype.element_ty
    columns = tl.arange(0, _width(C))
    top = tl.full((_width(C),), float("-inf"), tl.float64)
    sums = tl.zeros((_width(C),), DTYPE)
    for first in tl.range(0, C, _height(C)):
        rows = first + tl.arange(0, _height(C))
        message = tl.load(message_ptr + rows, mask=rows < C, other=float("-inf")).to(tl.float64)
        p = load(matrix_ptr, rows, columns, C, C, stride_k, stride_j, DTYPE, float("-inf") if LOG_PARAMS else 0.0)
        logs, factors = apart(p, level, LOG_PARAMS)
        logs += message[:, None]
        before, top = top, tl.maximum(top, tl.max(logs, 0))
        shift = finite(top)
        terms = factors * exp((logs - shift[None, :]).to(DTYPE))
        sums = sums * exp((before - shift).to(DTYPE)) + tl.sum(terms, 0)
    return top + log_wide(sums)


def warps(c: int) -> int:
    """The warps of a program; with them only float64 rows of more than 2,048 states spill registers."""
    return 4 if c <= 32 else 8 if c <= 1024 else 16


def forward(chain: Operands, messages: Tensor, log_norm: Tensor, doubt: Tensor, error: Tensor | None = None) -> None:
    """Messages and log-partitions (g, m) of doubtful sequences are written again; `doubt` (g, m), bool.

    `messages` (v or min(v, 2), g, m, c), contiguous: with v slots all messages are kept, and are -inf after a
    sequence's end.
    """
    v, g, m, c = chain.shape
    launch.run(
        _forward_kernel, (g * m,), chain.x, chain.bulk, chain.start, chain.ends, messages, log_norm, error, doubt,
        v, g * m, m, len(messages), *chain.strides, C=c, LOG_PARAMS=chain.log_params, **launch.all_registers(warps(c)),
    )  # fmt: skip


def backward(
    chain: Operands,
    messages: Tensor,
    redone: Tensor,
    marked: Tensor,
    log_norm: Tensor,
    weight: Tensor,
    *,
    grad_x: Tensor | None,
    grad_start: Tensor,
    r: Tensor | None,
    exponent: Tensor | None,
    final: Tensor | None,
) -> None:
    """The posteriors of marked sequences, times `weight`, and the logarithms `r` are written.

    Args:
        chain: the operands of `forward`; `start` is not read.
        messages: all forward messages (v, g, m, c), contiguous.
        redone: (g, m), bool: sequences whose messages are logarithms.
        marked: (g, m), bool: sequences to compute, redone or not.
        log_norm: (g, m), contiguous float64; -inf marks sequences without a path, with gradients of exactly 0, and NaN
            makes all gradients NaN.
        weight: (g, m) of any strides; 0 gives gradients of exactly 0.
        grad_x: `weight * gamma` (v, g, m, c) of any strides and float type, 0 after a sequence's end.
        grad_start: `weight * gamma_0` (g, m, c), contiguous, in the dtype of the messages.
        r: (v, g, m, c), contiguous, in the dtype of the messages; -inf after a sequence's end. r[0] is not written.
        exponent: n (v, g, m), contiguous int32, if r is wanted; written where r is, before a sequence's end.
        final: b_{v-1} (g, m, c), contiguous logarithms; None for zeros.
    """
    v, g, m, c = chain.shape
    assert len(messages) == v and grad_start.is_contiguous() and grad_start.dtype == messages.dtype
    launch.run(
        _backward_kernel, (g * m,), chain.x, chain.bulk, chain.ends, messages, redone, marked, log_norm, weight, grad_x,
        grad_start, r, exponent, final, v, m, *chain.strides, *weight.stride(),
        *((0, 0, 0, 0) if grad_x is None else grad_x.stride()),
        FORM=Form(c, chain.log_params), **launch.all_registers(warps(c)),
    )  # fmt: skip
