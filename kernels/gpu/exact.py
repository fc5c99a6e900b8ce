"""The recursions of chains in logarithms, for flagged sequences only, and in the max semiring for best paths.

    a_0 = start + x_0        a_i = log(exp(a_{i-1}) P_i) + x_i        w_i = x_i + b_i        b_{i-1} = log(P_i exp(w_i))
    posterior_i = exp(a_i + b_i) / sum
    best paths  a_i(j) = max_k (a_{i-1}(k) + log P_i(k, j)) + x_i(j)        back_i(j) = the lowest such k

Operands: `scan`. A message is logarithms less their largest entry, which is summed in float64. Terms of a sum are taken
relative to its largest, so nothing underflows, and the logarithm of a linear entry is its exponent, its mantissa being
a factor. One program computes one sequence; if that is not flagged, it returns at once.

Kept messages are finite, see `kernels.message`: a matrix product multiplies those of flagged sequences by 0.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chains import Chains
from .scaled import add, exp, finite, log, log_split, numbers
from .scan import load_block


@triton.jit
def logs_and_factors(p, LOG: tl.constexpr):
    """Float64 logarithms, and factors near 1: the products of their exponentials are entries of a matrix."""
    if LOG:
        return p.to(tl.float64), tl.full(p.shape, 1.0, p.dtype)
    else:
        return log_split(p)


@triton.jit
def _store_logs(at, logs, mask):
    """Store float64 logarithms as finite numbers."""
    LIMIT: tl.constexpr = numbers(at.dtype.element_ty).limit
    least = tl.where(logs == float("-inf"), -LIMIT, tl.maximum(logs, -0.99 * LIMIT))
    tl.store(at, tl.where(logs < LIMIT, least, LIMIT).to(at.dtype.element_ty), mask=mask)


@triton.jit
def _load_logs(at, mask):
    """Load stored logarithms as float64."""
    LIMIT: tl.constexpr = numbers(at.dtype.element_ty).limit
    logs = tl.load(at, mask=mask, other=-LIMIT).to(tl.float64)
    return tl.where(logs <= -0.995 * LIMIT, float("-inf"), tl.where(logs >= 0.995 * LIMIT, float("nan"), logs))


@triton.jit
def load_end(ends_ptr, sequence, v):
    """The number of steps of a sequence."""
    if ends_ptr is None:
        return v + tl.zeros((), tl.int32)
    else:
        return tl.load(ends_ptr + sequence).to(tl.int32)


@triton.jit
def load_x(x_ptr, i, j, x_strides, ENTERED: tl.constexpr, C: tl.constexpr):
    """The potentials of step i of a sequence in float64, 0 for one that entered."""
    x_ptr += tl.cast(i - ENTERED, tl.int64) * x_strides[0] + j * x_strides[3]
    x = tl.load(x_ptr, mask=(j < C) & (i >= ENTERED), other=float("-inf")).to(tl.float64)
    return tl.where((j < C) & (i < ENTERED), 0.0, x)


@triton.jit
def _sum_or_best(
    message_ptr, stride_c, p_ptr, STRIDE_K: tl.constexpr, STRIDE_J: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
    LOG: tl.constexpr, BEST: tl.constexpr,
):  # fmt: skip
    """`log sum_k exp(message(k)) P(k, .)` in float64; or with BEST the largest term, and its lowest k."""
    DTYPE: tl.constexpr = message_ptr.dtype.element_ty
    K: tl.constexpr = min(N, max(1, 2048 // N))
    j = tl.arange(0, N)
    top = tl.full((N,), float("-inf"), tl.float64)
    sums, best = tl.zeros((N,), DTYPE), tl.zeros((N,), tl.int32)
    for first in tl.range(0, C, K):
        k = first + tl.arange(0, K)
        message = _load_logs(message_ptr + k * stride_c, k < C)
        p = load_block(p_ptr, k, j, STRIDE_K, STRIDE_J, C, LOG)
        logs, factors = logs_and_factors(p.to(DTYPE), LOG)
        logs += message[:, None]
        if BEST:
            logs += tl.log(factors).to(tl.float64)
            highest, lowest_k = tl.max(logs, 0, return_indices=True)
            best = tl.where(highest > top, first + lowest_k, best)
            top = tl.maximum(top, highest)
        else:
            before, top = top, tl.maximum(top, tl.max(logs, 0), propagate_nan=tl.PropagateNan.ALL)
            shift = finite(top)
            terms = factors * exp((logs - shift[None, :]).to(DTYPE))
            sums = sums * exp((before - shift).to(DTYPE)) + tl.sum(terms, 0)
    if BEST:
        return top, best
    else:
        return top + log(sums), best


@triton.jit(do_not_specialize=["v", "g", "m", "slots"])
def forward_kernel(
    x_ptr, p_ptr, start_ptr, ends_ptr, flag_ptr, message_ptr, back_ptr, path_ptr, log_norm_ptr, v, g, m, slots,
    x_strides, p_strides, start_strides, message_strides, START_LOG: tl.constexpr, ENTERED: tl.constexpr,
    STRIDE_K: tl.constexpr, STRIDE_J: tl.constexpr, C: tl.constexpr, N: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """Messages and the log-partition of one sequence; with `back_ptr` its best path, -1 past the end, and weight."""
    sequence = tl.program_id(0).to(tl.int64)
    if flag_ptr is not None:
        if tl.load(flag_ptr + sequence) == 0:
            return
    z, row, j = sequence // m, sequence % m, tl.arange(0, N)
    inside = j < C
    end = load_end(ends_ptr, sequence, v)
    x_ptr += z * x_strides[1] + row * x_strides[2]
    p_ptr += z * p_strides[1]
    message_ptr += z * message_strides[1] + row * message_strides[2]
    pitch, to = tl.zeros((), tl.int64) + message_strides[0], j * message_strides[3]
    start_ptr += z * start_strides[0] + row * start_strides[1] + j * start_strides[2]
    start = tl.load(start_ptr, mask=inside, other=float("-inf") if START_LOG else 0.0)
    u = start.to(tl.float64) if START_LOG else log(start)
    taken, error = tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    if back_ptr is not None:
        back_pitch = g.to(tl.int64) * m * C
        back_ptr += sequence * C
    for i in tl.range(0, end):
        if i > 0:
            tl.debug_barrier()  # other threads of this program stored the message
            before = message_ptr + (i - 1) % slots * pitch
            u, back = _sum_or_best(
                before, message_strides[3], p_ptr, STRIDE_K, STRIDE_J, C, N, LOG, back_ptr is not None
            )
            if back_ptr is not None:
                tl.store(back_ptr + i * back_pitch + j, back.to(back_ptr.dtype.element_ty), mask=inside)
            p_ptr += p_strides[0]
        x = load_x(x_ptr, i, j, x_strides, ENTERED, C)
        peak, top = finite(tl.max(x, 0)), finite(tl.max(u, 0))
        total = (u - top) + (x - peak)
        shift = finite(tl.max(total, 0))
        taken, error = add(taken, error, peak)
        taken, error = add(taken, error, shift)
        taken, error = add(taken, error, top)
        _store_logs(message_ptr + i % slots * pitch + to, total - shift, inside)
    tl.debug_barrier()
    if log_norm_ptr is not None:
        message = _load_logs(message_ptr + (end - 1) % slots * pitch + to, inside)
        if back_ptr is None:
            whole = log(tl.sum(exp(message.to(message_ptr.dtype.element_ty)), 0))
        else:
            whole = tl.max(message, 0)
            state = tl.argmax(tl.where(message == message, message, float("-inf")), 0)
            for reverse in tl.range(0, v):
                i = v - 1 - reverse
                tl.store(path_ptr + sequence * v + i, tl.where(i >= end, -1, state).to(tl.int64))
                if (i < end) & (i > 0):
                    state = tl.load(back_ptr + i * back_pitch + state).to(tl.int32)
        taken, error = add(taken, error * 0.0, error + whole)
        tl.store(log_norm_ptr + sequence, taken)
        tl.store(log_norm_ptr + g.to(tl.int64) * m + sequence, error)
    if slots >= v:
        for i in tl.range(end, v):
            _store_logs(message_ptr + i * pitch + to, tl.full((N,), float("-inf"), tl.float64), inside)


@triton.jit(do_not_specialize=["v", "g", "m"])
def backward_kernel(
    x_ptr, p_ptr, final_ptr, ends_ptr, flag_ptr, w_ptr, log_norm_ptr, weight_ptr, posterior_ptr, size_ptr, v, g, m,
    x_strides, p_strides, posterior_strides, ENTERED: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_J: tl.constexpr,
    C: tl.constexpr, N: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """Posteriors of one sequence over its forward messages, its messages w, and what was subtracted from each."""
    sequence = tl.program_id(0).to(tl.int64)
    if tl.load(flag_ptr + sequence) == 0:
        return
    DTYPE: tl.constexpr = w_ptr.dtype.element_ty
    z, row, j = sequence // m, sequence % m, tl.arange(0, N)
    inside = j < C
    pitch = g.to(tl.int64) * m * C
    end = load_end(ends_ptr, sequence, v)
    x_ptr += z * x_strides[1] + row * x_strides[2]
    p_ptr += z * p_strides[1]
    posterior_ptr += z * posterior_strides[1] + row * posterior_strides[2]
    weight = tl.load(weight_ptr + sequence).to(DTYPE)
    log_norm = tl.load(log_norm_ptr + sequence)
    b = tl.zeros((N,), tl.float64) + tl.where(tl.abs(log_norm) < float("inf"), 0.0, log_norm)
    if final_ptr is not None:
        b += tl.load(final_ptr + sequence * C + j, mask=inside, other=float("-inf")).to(tl.float64)
    for back in tl.range(0, v):
        i = v - 1 - back
        g_at = posterior_ptr + i.to(tl.int64) * posterior_strides[0] + j * posterior_strides[3]
        if i >= end:
            tl.store(g_at, tl.zeros((N,), DTYPE), mask=inside)
        else:
            if i + 1 < end:
                tl.debug_barrier()  # other threads of this program stored w
                w_at = w_ptr + (i + 1) * pitch + sequence * C
                p_at = p_ptr + i.to(tl.int64) * p_strides[0]
                b, _ = _sum_or_best(w_at, 1, p_at, STRIDE_J, STRIDE_K, C, N, LOG, False)
            a = _load_logs(g_at, inside)
            joint = a + b
            top = finite(tl.max(joint, 0))
            shares = exp((joint - top).to(DTYPE))
            total = tl.sum(shares, 0)
            gamma = tl.where(joint == float("-inf"), 0.0, shares / tl.where(total == 0.0, 1.0, total) * weight)
            tl.store(g_at, tl.where(weight == 0.0, 0.0, gamma), mask=inside)
            x = load_x(x_ptr, i, j, x_strides, ENTERED, C)
            peak = finite(tl.max(x, 0))
            w = tl.where(a == float("-inf"), float("-inf"), b + (x - peak))
            size = finite(tl.max(w, 0))
            _store_logs(w_ptr + i * pitch + sequence * C + j, w - size, inside)
            size_at = size_ptr + 2 * (i * g.to(tl.int64) * m + sequence)
            tl.store(size_at, size)
            tl.store(size_at + 1, peak)


def _options(chains: Chains) -> dict[str, int]:
    bulk, n = chains.bulk, max(2, chains.width)
    warps = 2 if n <= 32 else 4 if n <= 64 else 8 if n <= 1024 else 16
    strides = {"STRIDE_K": bulk.stride(2), "STRIDE_J": bulk.stride(3), "ENTERED": chains.entered}
    return {"C": chains.x.shape[-1], "N": n, "LOG": chains.log_params, "num_warps": warps, **strides}


def forward(
    chains: Chains, flags: Tensor | None, messages: Tensor, log_norm: Tensor | None, back: Tensor | None = None,
    paths: Tensor | None = None,
) -> None:  # fmt: skip
    """Write messages (slots, g, m, c) of flagged sequences, and as `Scan.forward` does, log-partitions.

    `back` (v, g, m, c) and `paths` (g, m, v): back-pointers and states of best paths, of all sequences.
    """
    v, g, m, _ = chains.shape
    forward_kernel[(g * m,)](
        chains.x, chains.bulk, chains.start, chains.ends, flags, messages, back, paths, log_norm, v, g, m,
        len(messages), chains.x.stride(), chains.matrix_strides, chains.start.stride(), messages.stride(),
        START_LOG=chains.start_log, **_options(chains),
    )  # fmt: skip


def backward(
    chains: Chains, flags: Tensor, log_norm: Tensor, weight: Tensor, final: Tensor | None, posterior: Tensor, w: Tensor
) -> Tensor:
    """Write posteriors (v, g, m, c) of flagged sequences, times weights (g, m), and w less terms that are returned.

    Of the terms (v, g, m, 2) the second is the largest x.
    """
    v, g, m, _ = chains.shape
    size = chains.new(v, g, m, 2, dtype=torch.float64)
    forward(chains, flags, posterior, None)
    backward_kernel[(g * m,)](
        chains.x, chains.bulk, final, chains.ends, flags, w, log_norm, weight, posterior, size, v, g, m,
        chains.x.stride(), chains.matrix_strides, posterior.stride(), **_options(chains),
    )  # fmt: skip
    return size
