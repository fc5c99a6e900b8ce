"""The backward recursion of many chains in one launch: posteriors of states, and factors of those of transitions.

    w_i = x_i + b_i                                b_{v-1} = 0, or `final`            (each less its largest entry)
    b_{i-1} = log sum_j P_i(., j) exp w_i(j)                 nu = log sum_k exp(a_{i-1}(k) + b_{i-1}(k))
    gamma_{i-1} = exp(a_{i-1} + b_{i-1} - nu)                r_i = w_i - nu

with the forward messages `a` of `forward_chain`. gamma_i are the posteriors of states, the gradient with respect to
x_i, and `exp(a_{i-1}(k)) P_i(k, j) exp(r_i(j))` those of transitions, which sum to 1 over (k, j). Each is normalised by
its own sum, so that rounding errors do not add up along the chain. `w` is -inf where `a` is.

Layouts, cost, tiles and the numerics of a step are those of `forward_chain`, with `P` transposed; but w is a sum in the
dtype of the messages, which is enough for a posterior. Impossible sequences and steps after a sequence's end have gamma
0 and r -inf. A NaN stays in its sequence.

Definition: `logchain.reference.marginals`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chain_matrix import whole_matrix
from .chain_step import normalised, step
from .chain_tiles import Widths, column_tops, constants, tiles
from .tiles import at, exp, far, finite, log, multiple, multiples


@triton.jit
def _posteriors(message, b, weight):
    """`weight * gamma` (BLOCK_S, BLOCK_C) from `a` and `b`, and `nu`, +inf if impossible, so that `w - nu` is -inf."""
    joint = message + b
    top = finite(tl.max(joint, 1))
    shares = exp(joint - top[:, None])
    total = tl.sum(shares, 1)
    gamma = shares / tl.where(total == 0.0, 1.0, total)[:, None] * weight[:, None]
    # 0 even if the weight is not finite
    gamma = tl.where((joint == float("-inf")) | (weight == 0.0)[:, None], 0.0, gamma)
    return gamma, tl.where(total == 0.0, float("inf"), top + log(total))


@triton.jit(do_not_specialize=["v", "m"])
def _backward_kernel(
    x_ptr, bulk_ptr, top_ptr, ends_ptr, final_ptr, message_ptr, log_norm_ptr, weight_ptr, w_ptr, grad_ptr,
    start_ptr, r_ptr, v, m, c, stride_xv, stride_xg, stride_xm, stride_xc,
    stride_bv, stride_bg, stride_bk, stride_bj, stride_tv, stride_mv, stride_wg, stride_wm,
    stride_dv, stride_dg, stride_dm, stride_dc,
    LOG_PARAMS: tl.constexpr, HOMOGENEOUS: tl.constexpr, DTYPE: tl.constexpr, DOT: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
    WIDTH_C: tl.constexpr, WIDTH: tl.constexpr, WIDTH_K: tl.constexpr, WIDTH_J: tl.constexpr, WIDTH_X: tl.constexpr,
):  # fmt: skip
    # tell the compiler that WIDTH divides these, so that it can load WIDTH elements at once
    c, stride_tv, stride_mv = multiples(c, stride_tv, stride_mv, WIDTH_C)
    stride_xv, stride_xg, stride_xm = multiples(stride_xv, stride_xg, stride_xm, WIDTH_X)
    stride_dv, stride_dg, stride_dm = multiples(stride_dv, stride_dg, stride_dm, WIDTH_X)
    stride_bv, stride_bg = multiple(stride_bv, WIDTH), multiple(stride_bg, WIDTH)
    stride_bk, stride_bj = multiple(stride_bk, WIDTH_K), multiple(stride_bj, WIDTH_J)

    # scalar pointers move from step to step; tiles of pointers are small offsets from them
    blocks = tl.cdiv(m, BLOCK_S)
    z = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_S
    rows = tl.arange(0, BLOCK_S)
    columns = tl.arange(0, BLOCK_C)
    inside = rows < m - first
    tile = inside[:, None] & (columns < c)[None, :]
    sequence = z * m + first
    message_ptr += sequence * c
    w_ptr += sequence * c
    start_ptr += sequence * c
    x_ptr += z * stride_xg + first * stride_xm
    weight_ptr += z * stride_wg + (first + rows) * stride_wm
    if ends_ptr is None:
        ends = tl.full((BLOCK_S,), 0, tl.int32) + v
        last = v
    else:
        ends = tl.load(ends_ptr + sequence + rows, mask=inside, other=0).to(tl.int32)
        last = tl.max(ends)

    # steps after the last end of these sequences
    if grad_ptr is not None:
        grad_ptr += z * stride_dg + first * stride_dm
        for i in tl.range(last, v):
            out = at(grad_ptr + far(i, stride_dv), rows, columns, stride_dm, stride_dc)
            tl.store(out, tl.zeros((BLOCK_S, BLOCK_C), DTYPE), mask=tile)
        grad_ptr += far(last - 1, stride_dv)
    if r_ptr is not None:
        r_ptr += sequence * c
        for i in tl.range(last, v):
            out = (r_ptr + far(i, stride_mv) + rows * c)[:, None] + columns[None, :]
            tl.store(out, tl.full((BLOCK_S, BLOCK_C), float("-inf"), DTYPE), mask=tile)
        r_ptr += far(last - 1, stride_mv)

    i = last - 1
    x_ptr += far(i, stride_xv)
    message_ptr += far(i, stride_mv)
    log_norm_ptr += sequence
    if final_ptr is not None:
        final_ptr += sequence * c
    b = _last_b(final_ptr, log_norm_ptr, rows, columns, inside, c, DTYPE)
    current = w_ptr + i % 2 * stride_mv
    _, alive = _visit(
        x_ptr, stride_xm, stride_xc, message_ptr, b, weight_ptr, current, grad_ptr, stride_dm, stride_dc,
        start_ptr, i, rows, ends, inside, c, DTYPE, BLOCK_C,
    )  # fmt: skip

    matrix_ptr = bulk_ptr + z * stride_bg + far(i - 1, stride_bv)
    if top_ptr is not None:
        top_ptr += z * c + far(i - 1, stride_tv)
    if HOMOGENEOUS:
        held, held_top = whole_matrix(matrix_ptr, stride_bk, stride_bj, c, LOG_PARAMS, DTYPE, BLOCK_C)
    for n in tl.range(1, last):
        i = last - 1 - n
        # adding i // v, always 0, makes pointers depend on i: recomputed at each step, they take no registers
        rows = tl.arange(0, BLOCK_S) + i // v
        active = inside & (i + 1 < ends)
        x_ptr -= stride_xv
        message_ptr -= stride_mv
        if grad_ptr is not None:
            grad_ptr -= stride_dv
        previous = current
        current = w_ptr + i % 2 * stride_mv
        if HOMOGENEOUS:
            matrix, top = held, held_top
        elif WHOLE:
            matrix, top = whole_matrix(matrix_ptr, stride_bk, stride_bj, c, LOG_PARAMS, DTYPE, BLOCK_C)
        else:
            matrix, top = None, None
            if top_ptr is not None:
                top = tl.load(top_ptr + columns, mask=columns < c, other=float("-inf") if LOG_PARAMS else 0.0)
        mask = active[:, None] & (columns < c)[None, :]
        message = tl.load((message_ptr + rows * c)[:, None] + columns[None, :], mask=mask, other=float("-inf"))
        wanted = (message > float("-inf")) & alive[:, None]
        # the last w was stored by other threads
        tl.debug_barrier()
        u = step(
            previous, current, rows, active, matrix, top, matrix_ptr, stride_bk, stride_bj, wanted, c,
            None, LOG_PARAMS, DTYPE, DOT, WHOLE, BLOCK_S, BLOCK_K, BLOCK_C, PRECISION,
        )  # fmt: skip
        b, shift = normalised(u, DTYPE)
        if ends_ptr is not None:
            last_b = _last_b(final_ptr, log_norm_ptr, rows, columns, inside, c, DTYPE)
            b = tl.where(active[:, None], b, last_b)
        nu, alive = _visit(
            x_ptr, stride_xm, stride_xc, message_ptr, b, weight_ptr, current, grad_ptr, stride_dm, stride_dc,
            start_ptr, i, rows, ends, inside, c, DTYPE, BLOCK_C,
        )  # fmt: skip
        if r_ptr is not None:
            w = tl.load((previous + rows * c)[:, None] + columns[None, :], mask=mask, other=float("-inf"))
            r = (w.to(tl.float64) - (nu.to(tl.float64) + finite(shift))[:, None]).to(DTYPE)
            r = tl.where(mask, r, float("-inf"))
            tl.store((r_ptr + rows * c)[:, None] + columns[None, :], r, mask=tile)
            r_ptr -= stride_mv
        matrix_ptr -= stride_bv
        if top_ptr is not None:
            top_ptr -= stride_tv


@triton.jit
def _last_b(final_ptr, log_norm_ptr, rows, columns, inside, c, DTYPE: tl.constexpr):
    """The backward message of the last step; NaN where the log-partition is, so that all gradients are NaN."""
    log_norm = tl.load(log_norm_ptr + rows, mask=inside, other=0.0)
    last_b = tl.where(log_norm != log_norm, float("nan"), 0.0).to(DTYPE)[:, None] + tl.zeros_like(columns)[None, :]
    if final_ptr is not None:
        mask = inside[:, None] & (columns < c)[None, :]
        last_b += tl.load((final_ptr + rows * c)[:, None] + columns[None, :], mask=mask, other=float("-inf"))
    return last_b


@triton.jit
def _visit(
    x_ptr, stride_xm, stride_xc, message_ptr, b, weight_ptr, w_ptr, grad_ptr, stride_dm, stride_dc,
    start_ptr, i, rows, ends, inside, c,
    DTYPE: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`nu` of step `i`, and whether its `w` is not all -inf; its posteriors and `w` are written."""
    columns = tl.arange(0, BLOCK_C)
    tile = inside[:, None] & (columns < c)[None, :]
    mask = tile & (i < ends)[:, None]
    message = tl.load((message_ptr + rows * c)[:, None] + columns[None, :], mask=mask, other=float("-inf"))
    b = tl.where(message == float("-inf"), float("-inf"), b)
    weight = tl.load(weight_ptr, mask=inside, other=0.0).to(DTYPE)
    gamma, nu = _posteriors(message, b, weight)
    if grad_ptr is not None:
        tl.store(at(grad_ptr, rows, columns, stride_dm, stride_dc), gamma, mask=tile)
    tl.store((start_ptr + rows * c)[:, None] + columns[None, :], gamma, mask=tile & (i == 0))
    x = tl.load(at(x_ptr, rows, columns, stride_xm, stride_xc), mask=mask, other=float("-inf")).to(DTYPE)
    w = b + (x - finite(tl.max(x, 1))[:, None])
    top = tl.max(w, 1)
    tl.store((w_ptr + rows * c)[:, None] + columns[None, :], w - finite(top)[:, None], mask=mask)
    return nu, top != float("-inf")


def backward(
    x: Tensor,
    bulk: Tensor,
    ends: Tensor | None,
    messages: Tensor,
    log_norm: Tensor,
    weight: Tensor,
    *,
    log_params: bool,
    grad_x: Tensor | None,
    want_r: bool,
    final: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """`weight * gamma_0` (g, m, c), the gradient with respect to `start`, and `r` (v, g, m, c) if `want_r`.

    `messages` (v, g, m, c) and `log_norm` (g, m) are results of `forward_chain.forward`; `weight` (g, m) is the
    gradient of the log-partitions, and all gradients are 0 where it is 0. `weight * gamma` is written to `grad_x` (v,
    g, m, c) of any strides and dtype; `r[0]` is not written. `final` (g, m, c), contiguous logarithms, is b_{v-1};
    None for zeros.
    """
    v, g, m, c = x.shape
    dtype = messages.dtype
    assert messages.shape == x.shape and messages.is_contiguous() and bulk.shape[1:] == (g, c, c)
    assert ends is None or ends.is_contiguous()
    assert log_norm.is_contiguous() and (final is None or final.is_contiguous())
    transposed = bulk.mT
    widths = Widths.of(transposed, x, grad_x)
    choice = tiles(c, m, dtype, min(widths), transposed=True)
    grad_start = torch.empty(g, m, c, dtype=dtype, device=x.device)
    r = torch.empty_like(messages) if want_r else None
    w = torch.empty(2, g, m, c, dtype=dtype, device=x.device)
    top = column_tops(transposed[:, :, None], choice, dtype, log_params=log_params)
    homogeneous = bulk.shape[0] == 1
    if x.numel() == 0:
        return grad_start, r
    _backward_kernel[(g * triton.cdiv(m, choice.block_s),)](
        x, transposed, top, ends, final, messages, log_norm, weight, w, grad_x, grad_start, r, v, m, c,
        *x.stride(), 0 if homogeneous else transposed.stride(0), *transposed.stride()[1:],
        0 if homogeneous else g * c, g * m * c, *weight.stride(),
        *((0,) * 4 if grad_x is None else grad_x.stride()),
        LOG_PARAMS=log_params, **constants(choice, transposed, dtype, widths),
    )  # fmt: skip
    return grad_start, r
