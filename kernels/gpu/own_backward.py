"""Posteriors of a sequence with matrices of its own, and of its transitions: one program, or several that meet.

    w_i = exp(x_i) b_i      b_{i-1} = P_i w_i      nu_i = sum_k a_i(k) b_i(k) / 2^TARGET
    gamma_i = a_i b_i / 2^TARGET / nu_i            r_i = w_i / 2^TARGET / nu_{i-1}
    d log_norm / d log P_i(k, j) = a_{i-1}(k) P_i(k, j) r_i(j)

Operands, cost and layouts: `chain_own`; a program has some rows of a matrix. Numerics: `own_step`, w as a message that
is 0 where the forward message a is. A posterior is exact if nu is not small beside what raised entries of a may have
added. Parts add up their shares of nu, each with the exponent of its tile, behind the meeting that a step needs anyway:
so posteriors are divided one step later.
"""

import triton
import triton.language as tl

from .meeting import arrive, refresh, wait
from .own_posteriors import count, entries_at, overflows, posterior, publish, small, total_of, write_counts
from .own_step import foreseen, held, inexact, place, potentials, product, summed, tile, weighed
from .scaled import exponent_of, level_of, linear, started, target
from .tiles import far, multiple

# how many w and shares of nu are there at a time
SLOTS = tl.constexpr(4)


@triton.jit(do_not_specialize=["v", "g"])
def backward_kernel(
    x_ptr, bulk_ptr, bound_ptr, level_ptr, ends_ptr, message_ptr, redone_ptr, log_norm_ptr, weight_ptr, final_ptr,
    grad_x_ptr, grad_start_ptr, out_ptr, w_ptr, share_ptr, doubt_ptr, counters_ptr,
    v, g, stride_xv, stride_xg, stride_xc, stride_bv, stride_bg, stride_dv, stride_dg, stride_dc, stride_ov, stride_og,
    FORM: tl.constexpr,
):  # fmt: skip
    """One program computes a part of the states of a sequence."""
    C: tl.constexpr = FORM.c
    PARTS: tl.constexpr = FORM.parts
    SAME: tl.constexpr = FORM.same
    OUT: tl.constexpr = FORM.out
    HELD: tl.constexpr = FORM.held
    ALONE: tl.constexpr = FORM.alone
    MATRICES: tl.constexpr = OUT == "entries" or OUT == "logs"
    DTYPE: tl.constexpr = message_ptr.dtype.element_ty
    DOUBLE: tl.constexpr = DTYPE == tl.float64
    UNIT: tl.constexpr = 2.0 ** -target(DOUBLE)
    stride_xv, stride_xg = multiple(stride_xv, FORM.width_x), multiple(stride_xg, FORM.width_x)
    stride_bv, stride_bg = multiple(stride_bv, FORM.width_bulk), multiple(stride_bg, FORM.width_bulk)
    z, part, counter_ptr, rows, own, last, bound = place(counters_ptr, ends_ptr, bound_ptr, v, FORM)
    if tl.load(redone_ptr + z) != 0:
        return
    states = tl.arange(0, triton.next_power_of_2(C))
    pitch = g.to(tl.int64) * C
    grad_start_ptr += z * C
    if grad_x_ptr is not None:
        grad_x_ptr += z * stride_dg
    if OUT != "":
        out_ptr += z * stride_og
    w_ptr += z * C
    share_ptr += z * PARTS * 2

    # sequences without a possible path, or of weight 0, and steps after the end
    log_norm = tl.load(log_norm_ptr + z)
    weight = tl.load(weight_ptr + z).to(DTYPE)
    alive = (log_norm != float("-inf")) & (weight != 0.0)
    for i in tl.range(tl.where(alive, last, 0), v):
        if grad_x_ptr is not None:
            tl.store(grad_x_ptr + far(i, stride_dv) + rows.to(tl.int64) * stride_dc, 0.0, mask=own)
        if OUT == "r":
            tl.store(out_ptr + far(i, stride_ov) + rows, 0.0, mask=own)
        if MATRICES:
            if i > 0:
                for first in tl.range(0, C, FORM.sources):
                    tile_states = first + tl.arange(0, FORM.sources)
                    mask = (tile_states < C)[:, None] & own[None, :]
                    tl.store(entries_at(out_ptr + far(i - 1, stride_ov), tile_states, rows, C), 0.0, mask=mask)
    if alive == 0:
        tl.store(grad_start_ptr + rows, 0.0, mask=own)
        return

    # the last step
    i = last - 1
    x_ptr += z * stride_xg + far(i, stride_xv)
    level_ptr += z + far(i, g)
    message_ptr += z * C + far(i, pitch)
    a = tl.load(message_ptr + rows, mask=own, other=0.0)
    level, x = potentials(level_ptr, x_ptr, rows, own, stride_xc, True, DTYPE)
    b = tl.where(own, 2.0 ** target(DOUBLE), 0.0).to(DTYPE)
    peak = tl.full((), 2.0 ** target(DOUBLE), DTYPE)
    if final_ptr is not None:
        final = tl.load(final_ptr + z * C + states, mask=states < C, other=float("-inf")).to(tl.float64)
        there = tl.load(message_ptr + states, mask=states < C, other=0.0) != 0.0
        top = level_of(tl.max(tl.where(there, final, float("-inf"))))
        final = tl.load(final_ptr + z * C + rows, mask=own, other=float("-inf")).to(tl.float64)
        b = tl.where(a != 0.0, started(final, top, DTYPE), 0.0)
        peak = tl.maximum(peak, tl.max(a))
    b = tl.where(log_norm != log_norm, float("nan"), b)
    joint = a * UNIT * b
    share, k = tl.sum(joint), tl.full((), 0, tl.int32)
    w = weighed(b, x, level, (a != 0.0) & (x != float("-inf")))
    earlier = w
    if not ALONE:
        tl.store(w_ptr + i % SLOTS * pitch + rows, w, mask=own, cache_modifier=".cg")
        publish(share_ptr + i % SLOTS * g * PARTS * 2 + part * 2, share, k, PARTS)
        arrive(counter_ptr, PARTS)
    before, shift, base = tl.full((), target(DOUBLE), tl.int32), bound >> 1, bound >> 1
    doubt = x != x
    lost = log_norm != log_norm

    bulk_ptr += z * stride_bg + far(i - 1, stride_bv)
    more = i > 0
    x_ptr -= tl.where(more, stride_xv, 0)
    level_ptr -= tl.where(more, g, 0)
    message_ptr -= tl.where(more, pitch, 0)
    level, x = potentials(level_ptr, x_ptr, rows, own, stride_xc, more, DTYPE)
    left = a
    a = tl.load(message_ptr + rows, mask=own, other=0.0)
    low = (bound & 1) != 0
    if HELD:
        p = tile(bulk_ptr, states, rows, own, more, DTYPE, FORM)
        if SAME:
            p = linear(p, bound >> 1, FORM.log_params)
    for n in tl.range(1, last):
        i = last - 1 - n
        k_before, more = k, i > 0
        matrix_ptr = bulk_ptr
        bulk_ptr -= tl.where(more, stride_bv, 0)
        if HELD:
            raw, scaled = p, p
            if SAME:
                k = bound >> 1
            else:
                if ALONE:
                    p = tile(bulk_ptr, states, rows, own, True, DTYPE, FORM)
                scaled, k, low = held(raw, FORM.log_params)
        ahead_ptr = w_ptr + (i + 1) % SLOTS * pitch
        if ALONE:
            ahead = w
        else:
            wait(counter_ptr, PARTS * n, PARTS)
            if MATRICES or not HELD:
                refresh(counter_ptr, PARTS)
            ahead = tl.load(ahead_ptr + states, mask=states < C, other=0.0, cache_modifier=".cg")
        nu, ratio = total_of(share_ptr + (i + 1) % SLOTS * g * PARTS * 2, share, k_before, PARTS)
        if not ALONE:
            tl.debug_barrier()  # no load of the next step may overtake those of this one
        a_now, level_now, x_now = a, level, x
        x_ptr -= tl.where(more, stride_xv, 0)
        level_ptr -= tl.where(more, g, 0)
        message_ptr -= tl.where(more, pitch, 0)
        level, x = potentials(level_ptr, x_ptr, rows, own, stride_xc, True, DTYPE)
        a = tl.load(message_ptr + rows, mask=own, other=0.0)
        if HELD:
            if not SAME and not ALONE:
                p = tile(bulk_ptr, states, rows, own, True, DTYPE, FORM)
            b = summed(ahead[:, None] * scaled)
        else:
            b, k, low = product(ahead_ptr, matrix_ptr, bound, rows, own, DTYPE, FORM)
        highest = exponent_of(tl.max(ahead))
        shift, base = foreseen(highest, before, shift, base, k, FORM, DOUBLE)
        highest_before, before = before, highest
        admitted = a_now != 0.0
        w_new = weighed(b, x_now, level_now + shift - k, admitted & (x_now != float("-inf")))
        joint_new = tl.where(admitted, a_now * UNIT * b, 0.0)
        share = tl.sum(joint_new)
        if not ALONE:
            tl.store(w_ptr + i % SLOTS * pitch + rows, w_new, mask=own, cache_modifier=".cg")
            publish(share_ptr + i % SLOTS * g * PARTS * 2 + part * 2, share, k, PARTS)
            arrive(counter_ptr, PARTS)
        doubt |= inexact(b, own & admitted, low, highest) | (own & (x_now != x_now))

        # what waited for nu of the step before, i + 1
        lost |= small(nu, peak * ratio)
        if grad_x_ptr is not None:
            out = grad_x_ptr + far(i + 1, stride_dv) + rows.to(tl.int64) * stride_dc
            tl.store(out, posterior(joint, ratio, nu, weight), mask=own)
        if OUT == "r":
            tl.store(out_ptr + far(i + 2, stride_ov) + rows, earlier * UNIT / nu, mask=own & (n > 1))
        if MATRICES:
            if PARTS == 1:
                lost |= overflows(highest, share, k, OUT)
            elif n > 1:
                lost |= overflows(highest_before, nu, k_before, OUT)
            matrix_out = out_ptr + far(i, stride_ov)
            if ALONE:
                write_counts(matrix_out, raw, a_now, ahead, share, weight, k, 1.0, states, rows, own, FORM)
            elif PARTS == 1:
                count(matrix_out, ahead_ptr, matrix_ptr, a_now, share, weight, k, 1.0, rows, own, FORM)
            elif n > 1:
                count(
                    matrix_out + stride_ov, w_ptr + (i + 2) % SLOTS * pitch, matrix_ptr + stride_bv, left, nu, weight,
                    k_before, ratio, rows, own, FORM,
                )  # fmt: skip
        joint, left, peak = joint_new, a_now, tl.max(tl.where(admitted, b, 0.0))
        earlier, w = w, w_new

    if not ALONE:
        wait(counter_ptr, PARTS * last, PARTS)
        if MATRICES or not HELD:
            refresh(counter_ptr, PARTS)
    nu, ratio = total_of(share_ptr, share, k, PARTS)
    lost |= small(nu, peak * ratio)
    gamma = posterior(joint, ratio, nu, weight)
    tl.store(grad_start_ptr + rows, gamma, mask=own)
    if grad_x_ptr is not None:
        tl.store(grad_x_ptr + rows.to(tl.int64) * stride_dc, gamma, mask=own)
    if OUT == "r":
        tl.store(out_ptr + stride_ov + rows, earlier * UNIT / nu, mask=own & (last > 1))
    if MATRICES and PARTS > 1:
        if last > 1:
            lost |= overflows(before, nu, k, OUT)
            count(out_ptr, w_ptr + pitch, bulk_ptr, left, nu, weight, k, ratio, rows, own, FORM)
    if lost | (tl.max(doubt.to(tl.int32)) > 0):
        tl.store(doubt_ptr + z, 1)
