"""The forward recursion of a sequence with matrices of its own: one program, or several that meet once a step.

    S_0 = start exp(x_0)        S_i = (S_{i-1} P_i) exp(x_i)        log_norm = log sum_j S_{v-1}(j)

Operands, cost and layouts: `chain_own`. Numerics: `own_step`.
"""

import triton
import triton.language as tl

from .meeting import arrive, refresh, wait
from .own_step import foreseen, held, inexact, place, potentials, product, summed, tile, weighed
from .scaled import below, doubtful, exponent_of, level_of, linear, log_scaled, started, target
from .tiles import far, multiple


@triton.jit(do_not_specialize=["v", "g", "slots"])
def forward_kernel(
    x_ptr, bulk_ptr, bound_ptr, level_ptr, start_ptr, ends_ptr, message_ptr, log_norm_ptr, error_ptr, doubt_ptr,
    counters_ptr, v, g, slots, stride_xv, stride_xg, stride_xc, stride_bv, stride_bg, FORM: tl.constexpr,
):  # fmt: skip
    """One program computes a part of the columns of a sequence."""
    C: tl.constexpr = FORM.c
    PARTS: tl.constexpr = FORM.parts
    SAME: tl.constexpr = FORM.same
    HELD: tl.constexpr = FORM.held
    ALONE: tl.constexpr = FORM.alone
    DTYPE: tl.constexpr = message_ptr.dtype.element_ty
    DOUBLE: tl.constexpr = DTYPE == tl.float64
    stride_xv, stride_xg = multiple(stride_xv, FORM.width_x), multiple(stride_xg, FORM.width_x)
    stride_bv, stride_bg = multiple(stride_bv, FORM.width_bulk), multiple(stride_bg, FORM.width_bulk)
    z, part, counter_ptr, columns, own, last, bound = place(counters_ptr, ends_ptr, bound_ptr, v, FORM)
    states = tl.arange(0, triton.next_power_of_2(C))
    pitch = g.to(tl.int64) * C
    message_ptr += z * C
    start_ptr += z * C
    x_ptr += z * stride_xg
    level_ptr += z
    bulk_ptr += z * stride_bg

    level = tl.load(level_ptr)
    start_level = level_of(tl.max(tl.load(start_ptr + states, mask=states < C, other=float("-inf"))))
    top = level_of(tl.max(_first(start_ptr, x_ptr, states, states < C, stride_xc, start_level, level)))
    new = started(_first(start_ptr, x_ptr, columns, own, stride_xc, start_level, level), top, DTYPE)
    tl.store(message_ptr + columns, new, mask=own, cache_modifier=".cg")
    if not ALONE:
        arrive(counter_ptr, PARTS)
    taken = start_level.to(tl.int64) + level + top - target(DOUBLE)
    # of the step before: the exponent of its message, its shift, and what k adds to that
    before, shift, base = tl.full((), target(DOUBLE), tl.int32), bound >> 1, bound >> 1
    doubt = new != new

    x_ptr += stride_xv
    level_ptr += g
    level, x = potentials(level_ptr, x_ptr, columns, own, stride_xc, last > 1, DTYPE)
    if HELD:
        p = tile(bulk_ptr, states, columns, own, last > 1, DTYPE, FORM)
        k, low = bound >> 1, (bound & 1) != 0
        if SAME:
            p = linear(p, k, FORM.log_params)
    for i in tl.range(1, last):
        more = i + 1 < last
        matrix_ptr = bulk_ptr
        bulk_ptr += tl.where(more, stride_bv, 0)
        if HELD:
            scaled = p
            if not SAME:
                if ALONE:
                    p = tile(bulk_ptr, states, columns, own, True, DTYPE, FORM)
                scaled, k, low = held(scaled, FORM.log_params)
        if not ALONE:
            wait(counter_ptr, PARTS * i, PARTS)
            if not HELD:
                refresh(counter_ptr, PARTS)
        before_ptr = message_ptr + far((i - 1) % slots, pitch)
        if ALONE:
            a = new
        else:
            a = tl.load(before_ptr + states, mask=states < C, other=0.0, cache_modifier=".cg")
            tl.debug_barrier()  # no load of the next step may overtake that of the message
        admitted, level_now, x_now = x != float("-inf"), level, x
        x_ptr += tl.where(more, stride_xv, 0)
        level_ptr += tl.where(more, g, 0)
        level, x = potentials(level_ptr, x_ptr, columns, own, stride_xc, True, DTYPE)
        if HELD:
            if not SAME and not ALONE:
                p = tile(bulk_ptr, states, columns, own, True, DTYPE, FORM)
            u = summed(a[:, None] * scaled)
        else:
            u, k, low = product(before_ptr, matrix_ptr, bound, columns, own, DTYPE, FORM)
        highest = exponent_of(tl.max(a))
        shift, base = foreseen(highest, before, shift, base, k, FORM, DOUBLE)
        before = highest
        new = weighed(u, x_now, level_now + shift - k, admitted)
        tl.store(message_ptr + far(i % slots, pitch) + columns, new, mask=own, cache_modifier=".cg")
        if not ALONE:
            arrive(counter_ptr, PARTS)
        doubt |= inexact(u, own & admitted, low, highest) | (own & (x_now != x_now))
        taken += level_now + shift
    if slots == v:
        for i in tl.range(last, v):
            tl.store(message_ptr + far(i, pitch) + columns, 0.0, mask=own)

    lost = tl.max(doubt.to(tl.int32)) > 0
    if part == 0:
        if ALONE:
            sums = tl.sum(new)
        else:
            wait(counter_ptr, PARTS * last, PARTS)
            at_end = message_ptr + far((last - 1) % slots, pitch) + states
            sums = tl.sum(tl.load(at_end, mask=states < C, other=0.0, cache_modifier=".cg"))
        lost |= doubtful(sums, True, 0)
        log_norm, error = log_scaled(sums, taken)
        tl.store(log_norm_ptr + z, log_norm)
        if error_ptr is not None:
            tl.store(error_ptr + z, error)
    if lost:
        tl.store(doubt_ptr + z, 1)


@triton.jit
def _first(start_ptr, x_ptr, states, there, stride_xc, start_level, level):
    """log(start exp(x_0)) less both levels, in float64."""
    start = tl.load(start_ptr + states, mask=there, other=float("-inf"))
    x = tl.load(x_ptr + states.to(tl.int64) * stride_xc, mask=there, other=float("-inf"))
    return below(start, start_level) + below(x, level)
