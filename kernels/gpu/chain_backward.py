"""Posteriors of chains that share their matrices, and the factors of their transitions' expected counts.

    w_i = exp(x_i) b_i        b_{i-1} = P_i w_i        nu_i = sum_k a_i(k) b_i(k)        posterior_i = a_i b_i / nu_i
    r_i = w_i / nu_{i-1}      expected count of (k, j) = a_{i-1}(k) P_i(k, j) / 2^k_i r_i(j), which sums to 1

a are the linear messages of `chain_forward` and 2^k_i is a matrix's bound, see `chains`. b matters up to a factor: a
row's w is divided by powers of two as in `scaled`, which nobody needs to add up. w is 0 where no path leads.

What is lost. An entry of a may have been raised to FLOOR, a product or w may underflow. Summed over states against the
messages of the other direction, a loss is the same at every step; it is below 2^-30 of nu where nu, beside the largest
entry of w, is at least `trusted`. A sequence with another nu is doubtful, and its results mean nothing.

Cost and programs are those of `chain_forward`, with rows of P for columns. nu is a sum over all parts: each stores its
share beside its part of w, and everybody divides one step later, behind a meeting that is there anyway.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .chain_forward import GROUP, _potentials, parts_of, warps_of
from .chain_posteriors import SHARES, exact, factor_of, finish, following, gather, publish, scale_kernel, share_of
from .chains import Operands
from .fragments import load_matrix, load_message, product, sharing, tile_of
from .meeting import arrive, counter_of, part_of, take_ticket, wait, words
from .scaled import halves, linear, next_shift, target
from .tiles import at, far, multiple, multiples


class Form(NamedTuple):
    """What the kernel is compiled for: `strides` of a matrix's rows and columns, `widths` of x, matrices, gradients."""

    c: int
    parts: int
    log_params: bool
    precision: str
    strides: tuple[int, int]
    widths: tuple[int, int, int]


@triton.jit(do_not_specialize=["v", "g", "m"])
def _backward_kernel(
    x_ptr, bulk_ptr, bound_ptr, level_ptr, message_ptr, scale_ptr, final_ptr, ends_ptr, grad_ptr, grad_start_ptr,
    r_ptr, w_ptr, doubt_ptr, counters_ptr,
    v, g, m, stride_xv, stride_xg, stride_xm, stride_xc, stride_bv, stride_bg,
    stride_dv, stride_dg, stride_dm, stride_dc, FORM: tl.constexpr,
):  # fmt: skip
    """One program computes a part of the states of GROUP sequences."""
    C: tl.constexpr = FORM.c
    PARTS: tl.constexpr = FORM.parts
    LOG_PARAMS: tl.constexpr = FORM.log_params
    PRECISION: tl.constexpr = FORM.precision
    STRIDE_BK: tl.constexpr = FORM.strides[0]
    STRIDE_BJ: tl.constexpr = FORM.strides[1]
    WIDTH: tl.constexpr = FORM.widths[1]
    DTYPE: tl.constexpr = message_ptr.dtype.element_ty
    DOUBLE: tl.constexpr = DTYPE == tl.float64
    PART: tl.constexpr = part_of(C, PARTS)
    N: tl.constexpr = tile_of(PART)
    W: tl.constexpr = sharing(C, PRECISION)
    TOP: tl.constexpr = 2.0 ** target(DOUBLE)
    stride_xv, stride_xg, stride_xm = multiples(stride_xv, stride_xg, stride_xm, FORM.widths[0])
    stride_bv, stride_bg = multiple(stride_bv, WIDTH), multiple(stride_bg, WIDTH)
    stride_dv, stride_dg, stride_dm = multiples(stride_dv, stride_dg, stride_dm, FORM.widths[2])

    ticket = take_ticket(counters_ptr)
    part, group = ticket % PARTS, ticket // PARTS
    counter_ptr = counter_of(counters_ptr, group)
    blocks = tl.cdiv(m, GROUP)
    z, first = (group // blocks).to(tl.int64), (group % blocks).to(tl.int64) * GROUP
    sequence = z * m + first
    members = tl.arange(0, GROUP)
    rows = tl.minimum(m - first, GROUP).to(tl.int32)
    inside = members < rows
    columns = part * PART + tl.arange(0, N)
    end = tl.minimum(PART, C - part * PART)
    own = inside[:, None] & (tl.arange(0, N) < end)[None, :]
    tile = members[:, None] * C + columns[None, :]

    pitch = g.to(tl.int64) * m * C
    message_ptr += sequence * C
    share_ptr = w_ptr + 2 * pitch + (sequence + members) * PARTS
    w_ptr += sequence * C
    pitch_share = 2 * pitch // C * PARTS
    grad_start_ptr += sequence * C
    if grad_ptr is not None:
        grad_ptr += z * stride_dg + first * stride_dm
    if r_ptr is not None:
        r_ptr += sequence * C
    scale = tl.load(scale_ptr + sequence + members, mask=inside, other=0.0)
    living = own & (scale != 0.0)[:, None]
    nan = scale != scale  # b is NaN from the last step on
    scale = tl.where(nan, 1.0, scale)
    if ends_ptr is None:
        ends = tl.full((GROUP,), 0, tl.int32) + v
    else:
        ends = tl.load(ends_ptr + sequence + members, mask=inside, other=1).to(tl.int32)
    last = tl.max(ends)
    b_end = tl.where(nan, float("nan"), TOP).to(DTYPE)[:, None]
    if final_ptr is not None:
        b_end *= following(final_ptr + sequence * C, message_ptr, ends, members, columns, inside, own, pitch, C)
    lasting = tl.where(scale == 0.0, 0, ends)

    # the last step
    i = last - 1
    x_ptr += z * stride_xg + first * stride_xm + far(i, stride_xv)
    level_ptr += sequence + far(i, pitch // C)
    level, x = _potentials(level_ptr, x_ptr, members, columns, own, inside, stride_xm, stride_xc, DTYPE)
    message_ptr += far(i, pitch)
    a = tl.load(message_ptr + tile, mask=living, other=0.0)
    b_last = tl.where((lasting == last)[:, None], b_end, 0.0)
    w, joint = b_last * factor_of(x, level, a), b_last * share_of(a)
    # behind a sequence's end, what makes no shift and no doubt
    share = tl.where(lasting == last, tl.sum(joint, 1), TOP)
    largest = tl.where(lasting == last, tl.max(w, 1), TOP)
    tl.store(w_ptr + i % 2 * pitch + tile, w, mask=own, cache_modifier=".cg")
    publish(share_ptr + i % SHARES * pitch_share, share, largest, part, inside, pitch_share, PARTS)
    arrive(counter_ptr, PARTS)
    old_w = tl.zeros_like(w)  # of the step after, whose r has to wait for nu
    top = tl.full((GROUP,), TOP, DTYPE)
    shift = tl.zeros((GROUP,), tl.int32)
    lost = inside & (shift > 0)

    if ends_ptr is not None:
        for behind in tl.range(last, v):
            if grad_ptr is not None:
                tl.store(at(grad_ptr + far(behind, stride_dv), members, columns, stride_dm, stride_dc), old_w, mask=own)
            if r_ptr is not None:
                tl.store(r_ptr + far(behind, pitch) + tile, old_w, mask=own)

    more = i > 0
    bulk_ptr += z * stride_bg + far(i - 1, stride_bv) + far(part * PART, STRIDE_BK)
    pitch_bound = tl.where(stride_bv == 0, 0, g)
    bound_ptr += z + far(i - 1, pitch_bound)
    nothing: tl.constexpr = float("-inf") if LOG_PARAMS else 0.0
    # the states that others computed are the rows of what is loaded
    p = load_matrix(bulk_ptr, tl.where(more, end, 0), STRIDE_BJ, STRIDE_BK, WIDTH, C, N, W, nothing, DTYPE)
    bound = tl.load(bound_ptr, mask=more, other=0)
    if W > 1:
        p, p_rest = halves(linear(p, bound >> 1, LOG_PARAMS), PRECISION)
    x_ptr -= tl.where(more, stride_xv, 0)
    level_ptr -= tl.where(more, pitch // C, 0)
    message_ptr -= tl.where(more, pitch, 0)
    level, x = _potentials(level_ptr, x_ptr, members, columns, own & more, inside, stride_xm, stride_xc, DTYPE)
    a = tl.load(message_ptr + tile, mask=living & more, other=0.0)
    arrivals = PARTS + 0
    while i > 0:
        i -= 1
        factor, joint_factor = factor_of(x, level + shift, a), share_of(a)
        if W > 1:
            high, low = p, p_rest
        else:
            high, low = halves(linear(p, bound >> 1, LOG_PARAMS), PRECISION)
        b_begin = 0.0 if ends_ptr is None else tl.where((i + 1 == lasting)[:, None], b_end, 0.0)
        wait(counter_ptr, arrivals, PARTS)
        ahead = load_message(w_ptr + (i + 1) % 2 * pitch, rows, C, W)
        more = i > 0
        x_ptr -= tl.where(more, stride_xv, 0)
        level_ptr -= tl.where(more, pitch // C, 0)
        message_ptr -= tl.where(more, pitch, 0)
        bulk_ptr -= tl.where(more, stride_bv, 0)
        bound_ptr -= tl.where(more, pitch_bound, 0)
        p = load_matrix(bulk_ptr, end, STRIDE_BJ, STRIDE_BK, WIDTH, C, N, W, nothing, DTYPE)
        bound = tl.load(bound_ptr)
        level, x = _potentials(level_ptr, x_ptr, members, columns, own, inside, stride_xm, stride_xc, DTYPE)
        a = tl.load(message_ptr + tile, mask=living, other=0.0)

        b = product(ahead, high, low, PRECISION)
        if W == 1:  # a sum of one term: what follows need not be laid out as the product is
            b = tl.sum(b[:, :, None], 2)
        b = tl.where((i + 1 < lasting)[:, None], b, b_begin)  # a NaN may wait in a matrix behind a sequence's end
        new_w, new_joint = b * factor, b * joint_factor
        new_share = tl.where(i < lasting, tl.sum(new_joint, 1), TOP)
        new_largest = tl.where(i < lasting, tl.max(new_w, 1), TOP)
        tl.store(w_ptr + i % 2 * pitch + tile, new_w, mask=own, cache_modifier=".cg")
        publish(share_ptr + i % SHARES * pitch_share, new_share, new_largest, part, inside, pitch_share, PARTS)
        arrive(counter_ptr, PARTS)
        arrivals += PARTS
        # the step before this one: all have stored their shares of its nu
        nu, largest = gather(share_ptr + (i + 1) % SHARES * pitch_share, share, largest, inside, pitch_share, PARTS)
        lost |= exact(nu, top) == 0
        finish(
            joint, old_w, nu, scale, i + 1, v, members, columns, own, pitch,
            grad_ptr, r_ptr, stride_dv, stride_dm, stride_dc, C,
        )  # fmt: skip
        top, shift = largest, next_shift(largest, shift)
        joint, share, largest, old_w, w = new_joint, new_share, new_largest, w, new_w
        if W > 1:
            p, p_rest = halves(linear(p, bound >> 1, LOG_PARAMS), PRECISION)
    if ends_ptr is not None:  # found again: a register less in the loop
        arrivals = PARTS * tl.max(tl.load(ends_ptr + sequence + members, mask=inside, other=1).to(tl.int32))
    wait(counter_ptr, arrivals, PARTS)
    nu, _ = gather(share_ptr, share, largest, inside, pitch_share, PARTS)
    lost |= exact(nu, top) == 0
    gamma = finish(
        joint, old_w, nu, scale, 0, v, members, columns, own, pitch,
        grad_ptr, r_ptr, stride_dv, stride_dm, stride_dc, C,
    )  # fmt: skip
    tl.store(grad_start_ptr + tile, gamma, mask=own)
    tl.store(doubt_ptr + sequence + members, tl.full((GROUP,), 1, tl.int8), mask=inside & lost)


def parts_here(chain: Operands) -> int:
    """The parts of `chain_forward`, narrower where entries of wide matrices are loaded one by one."""
    parts, c = parts_of(chain), chain.shape[3]
    return triton.cdiv(c, 32) if parts > 1 and c > 128 and max(launch.widths(chain.bulk)) == 1 else parts


class Begun(NamedTuple):
    """What a launch needs before it begins.

    Memory for two steps of `w`, with shares of nu behind them; `scale` (g, m), the factors of gradients; `doubt`
    (g, m), bool: false; `counters`: zeros.
    """

    w: Tensor
    scale: Tensor
    doubt: Tensor
    counters: Tensor


def begun(chain: Operands, parts: int, redone: Tensor, log_norm: Tensor, weight: Tensor) -> Begun:
    """See `Begun`; the arguments are those of `backward`."""
    _, g, m, c = chain.shape
    sizes = 2 * g * m * c + 2 * SHARES.value * g * m * parts, g * m
    w, scale = launch.parts(chain.x.new_empty(launch.whole(*sizes), dtype=chain.dtype), *sizes)
    sizes = -(-g * m // 4), words(g * triton.cdiv(m, GROUP.value))
    zeros = chain.x.new_empty(launch.whole(*sizes), dtype=torch.int32)
    doubt, counters = launch.parts(zeros, *sizes)
    launch.run(
        scale_kernel, (triton.cdiv(g * m, 256),), weight, log_norm, redone, scale, zeros, g * m, m, len(zeros),
        *weight.stride(), BLOCK=256,
    )  # fmt: skip
    return Begun(w, scale, doubt.view(torch.bool)[: g * m].view(g, m), counters)


def backward(
    chain: Operands,
    messages: Tensor,
    redone: Tensor,
    log_norm: Tensor,
    weight: Tensor,
    *,
    bound: Tensor,
    level: Tensor,
    grad_x: Tensor | None,
    grad_start: Tensor,
    r: Tensor | None,
    final: Tensor | None,
    parts: int | None = None,
    programs: int | None = None,
) -> Tensor:
    """Which sequences are doubtful (g, m), after gradients and r of the others are written.

    Args:
        chain: the operands of `chain_forward.forward`.
        messages: (v, g, m, c), all that it kept.
        redone: (g, m), bool, sequences whose messages are logarithms: they are left out, and zeros are written.
        log_norm: (g, m), float64. -inf is an impossible sequence, without gradient; NaN makes all gradients NaN.
        weight: (g, m) of any float type and strides; a sequence of weight 0 has gradient 0, whatever it holds.
        bound: that of `chains.room`.
        level: likewise.
        grad_x: memory for weight times posterior (v, g, m, c), of any float type and strides, or None.
        grad_start: memory for that of the first step (g, m, c), contiguous.
        r: memory for r (v, g, m, c), contiguous, or None. r[0] means nothing; zeros where there is no transition.
        final: b of each sequence's last step (g, m, c), contiguous logarithms up to a constant; None for b = 1.
        parts: how many programs share sixteen sequences.
        programs: how many are started, for a test that starts one at a time.
    """
    v, g, m, c = chain.shape
    parts = parts_here(chain) if parts is None else parts
    w, scale, doubt, counters = begun(chain, parts, redone, log_norm, weight)
    strides = (0, 0, 0, 0) if grad_x is None else grad_x.stride()
    width_x, width_grad = (launch.common_width(c, *each[:-1]) for each in (chain.x.stride(), strides))
    widths = width_x, max(launch.widths(chain.bulk)), width_grad
    form = Form(c, parts, chain.log_params, chain.precision, (chain.bulk.stride(2), chain.bulk.stride(3)), widths)
    launch.run(
        _backward_kernel, (programs or g * triton.cdiv(m, GROUP.value) * parts,), chain.x, chain.bulk, bound, level,
        messages, scale, final, chain.ends, grad_x, grad_start, r, w, doubt, counters, v, g, m, *chain.strides[:6],
        *strides, FORM=form, **launch.all_registers(warps_of(c, chain.precision)), num_stages=1,
    )  # fmt: skip
    return doubt
