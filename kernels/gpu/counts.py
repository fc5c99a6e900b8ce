"""Gradients of transition matrices: expected counts, and counts divided by weights.

    count(k, j) = sum over i and sequences of a_{i-1}(k) P(k, j) w_i(j) / nu

The messages, one of them divided by nu, come from `scan`: one stock matrix product for the sequences that share a
matrix; if each sequence has its own matrices, an outer product in the kernel. The kernel multiplies by P or by its
power of two, and adds the counts of flagged sequences, from the posteriors and backward messages of `exact`:

    count(k, j) = posterior_{i-1}(k) P(k, j) exp(x_i(j) + b_i(j)) / exp(b_{i-1}(k))

One program has one tile of one matrix, and adds sequences in their order: no atomics.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chains import Scan
from .exact import load_end, load_x, logs_and_factors
from .scaled import exp, exp_over_power, log, power
from .scan import load_block

_TILE = 32


@triton.jit(do_not_specialize=["v", "g", "m", "middle", "matrices"])
def counts_kernel(
    p_ptr, bound_ptr, out_ptr, message_ptr, other_ptr, x_ptr, ends_ptr, flag_ptr, posterior_ptr, size_ptr, v, g, m,
    middle, matrices, x_strides, p_strides, out_strides, posterior_strides, ENTERED: tl.constexpr,
    STRIDE_K: tl.constexpr, STRIDE_J: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr, LOG: tl.constexpr,
    BY_LOG: tl.constexpr, OUTER: tl.constexpr,
):  # fmt: skip
    """Write a tile of the gradient of a matrix, or BY_LOG of its logarithms, over the sums that `out` holds."""
    DTYPE: tl.constexpr = message_ptr.dtype.element_ty
    ACROSS: tl.constexpr = (C + TILE - 1) // TILE
    matrix, tile = (tl.program_id(0) // (ACROSS * ACROSS)).to(tl.int64), tl.program_id(0) % (ACROSS * ACROSS)
    step, z = matrix // g, matrix % g
    k, j = tile // ACROSS * TILE + tl.arange(0, TILE), tile % ACROSS * TILE + tl.arange(0, TILE)
    inside = (k < C)[:, None] & (j < C)[None, :]
    pitch = g.to(tl.int64) * m * C
    p = load_block(p_ptr + step * p_strides[0] + z * p_strides[1], k, j, STRIDE_K, STRIDE_J, C, LOG).to(DTYPE)
    exponent_of_p = tl.load(bound_ptr + matrix) >> 2
    out_at = out_ptr + step * out_strides[0] + z * out_strides[1] + k[:, None] * C + j[None, :]
    flagged = 0
    for first in tl.range(z * m, z * m + m, 1024):
        at = first + tl.arange(0, 1024)
        flagged += tl.sum(tl.load(flag_ptr + at, mask=at < z * m + m, other=0).to(tl.int32), 0)
    if OUTER:
        # in halves, forward messages of later steps and backward messages of earlier ones lie in `other`
        early = step + 1 <= middle
        at_k, at_j = step * pitch + z * C + k, (step + 1) * pitch + z * C + j
        a = tl.load(message_ptr + at_k, mask=(k < C) & early, other=0.0)
        a += tl.load(other_ptr + 2 * pitch + at_k, mask=(k < C) & (early == 0), other=0.0)
        w = tl.load(other_ptr + at_j, mask=(j < C) & early, other=0.0)
        w += tl.load(message_ptr + at_j, mask=(j < C) & (early == 0), other=0.0)
        share = tl.where(flagged > 0, 0.0, a[:, None] * w[None, :])
    else:
        share = tl.load(out_at, mask=inside, other=0.0)
    if LOG:
        weight = exp_over_power(p, exponent_of_p)
    elif BY_LOG:
        weight = p * power(-exponent_of_p, DTYPE)
    else:
        weight = tl.zeros((TILE, TILE), DTYPE) + power(-exponent_of_p, DTYPE)
    zero = p == (float("-inf") if LOG else 0.0)
    total = tl.where(zero | (share == 0.0), 0.0, share * weight)
    if flagged > 0:
        logs, factors = logs_and_factors(p, LOG)
        if not BY_LOG:
            logs, factors = tl.where(zero, float("-inf"), logs * 0.0), tl.full(p.shape, 1.0, DTYPE)
        for sequence in tl.range(z * m, z * m + m):
            if tl.load(flag_ptr + sequence) != 0:
                end = load_end(ends_ptr, sequence, v)
                since = step.to(tl.int32) + 1
                until = tl.minimum(since + 1, end)
                if matrices == 1:
                    since, until = 1 + tl.zeros((), tl.int32), end
                x_at = x_ptr + z * x_strides[1] + (sequence - z * m) * x_strides[2]
                g_at = posterior_ptr + z * posterior_strides[1] + (sequence - z * m) * posterior_strides[2]
                for i in tl.range(since, until):
                    now = i + tl.zeros((), tl.int64)
                    gamma_at = g_at + (now - 1) * posterior_strides[0] + k * posterior_strides[3]
                    gamma = tl.load(gamma_at, mask=k < C, other=0.0)
                    x = load_x(x_at, now - 1, k, x_strides, ENTERED, C)
                    at = other_ptr + now * pitch + sequence * C
                    after = tl.load(at + j, mask=j < C, other=0.0).to(tl.float64)
                    before = tl.load(at - pitch + k, mask=k < C, other=0.0).to(tl.float64)
                    size_at = size_ptr + 2 * ((now - 1) * g.to(tl.int64) * m + sequence)
                    before += tl.load(size_at) - (x - tl.load(size_at + 1))
                    joint = ((after[None, :] - before[:, None]) + logs) + log(tl.abs(gamma))[:, None]
                    joint = tl.where((gamma == 0.0)[:, None], float("-inf"), joint)
                    count = tl.where((gamma < 0.0)[:, None], -factors, factors) * exp(joint.to(DTYPE))
                    total += tl.where(joint == float("-inf"), 0.0, count)
    tl.store(out_at, total, mask=inside)


def multiply(scan: Scan, messages: Tensor, others: Tensor, middle: int, out: Tensor) -> None:
    """Write sums over sequences (s, g, c, c), before `exact` writes to the messages of flagged sequences.

    Up to the `middle` step, `messages` are forward messages and `others` backward ones, and then the reverse. Both
    halves of the chain are stock matrix products; outer products are left to the kernel.
    """
    v, g, m, _ = messages.shape
    if v == 1:
        out.zero_()
    if v == 1 or (scan.chains.separate and len(out) > 1):
        return
    halves = [(messages[:middle], others[1 : middle + 1], slice(0, middle))]
    if middle < v - 1:
        halves.append((others[middle + 2 : v + 1], messages[middle + 1 :], slice(middle, v - 1)))
    for number, (a, w, steps) in enumerate(halves):
        if len(out) > 1:
            for z in range(g):
                torch.bmm(a[:, z].mT, w[:, z], out=out[steps, z])
        elif m == 1:  # (g, v, c), without a copy
            a, w = a[:, :, 0].transpose(0, 1), w[:, :, 0].transpose(0, 1)
            torch.baddbmm(out[0], a.mT, w, beta=number, out=out[0])
        else:
            for z in range(g):
                a_z, w_z = a[:, z].reshape(-1, a.shape[-1]), w[:, z].reshape(-1, w.shape[-1])
                torch.addmm(out[0, z], a_z.mT, w_z, beta=number, out=out[0, z])


def write(
    scan: Scan, messages: Tensor, others: Tensor, posterior: Tensor, size: Tensor, middle: int, out: Tensor, *,
    by_log: bool,
) -> None:  # fmt: skip
    """Turn sums into the gradient of the matrices, or `by_log` of their logarithms; `size`: see `exact.backward`."""
    chains, (v, g, m, c), bulk = scan.chains, scan.chains.shape, scan.chains.bulk
    if v == 1:
        return
    counts_kernel[(len(bulk) * g * triton.cdiv(c, _TILE) ** 2,)](
        bulk, scan.bound, out, messages, others, chains.x, chains.ends, scan.flags, posterior, size, v, g, m, middle,
        len(bulk), chains.x.stride(), chains.matrix_strides, out.stride()[:2], posterior.stride(),
        ENTERED=chains.entered, STRIDE_K=bulk.stride(2), STRIDE_J=bulk.stride(3), C=c, TILE=_TILE,
        LOG=chains.log_params, BY_LOG=by_log or chains.log_params, OUTER=chains.separate and len(out) > 1, num_warps=4,
    )  # fmt: skip
