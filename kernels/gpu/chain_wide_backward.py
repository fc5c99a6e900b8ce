"""The posteriors of chains that share wide matrices: a product a step, and a division one step later.

    w_i = exp(x_i) b_i      b_{i-1} = P_i w_i      nu_i = sum_k a_i(k) b_i(k)
    gamma_i = a_i b_i / nu_i            r_i = w_i / nu_{i-1}

a are the messages of `chain_wide`, b is scaled as they are, and joint_i = a_i b_i 2^-TARGET until nu_i is known. That
is a sum over all programs of a row: each stores its share beside its part of w_i, and divides after the next meeting.
w is kept in `r`, or in two slots in turn. A sequence without a share in the result, because its weight is 0, it is
impossible or its messages are logarithms, is all zeros.

What is lost. Sums b of states that a path reaches are exact where `scaled` says so. An entry of a that was raised to
FLOOR adds at most 2^-124 b to nu, where b is at most 2^63 c^2, for a row grows by less than 2 c a step: below c 2^-27
of nu where nu is not `_uncertain`. A sequence with another sum or nu is doubtful.

Cost: that of the forward pass, and a read of the messages.
"""

import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .chain_wide_tiles import ANY, Tile, grid, launches, layout, place, product, shift_from, strides, tile_of
from .chains import Operands, room
from .meeting import arrive, wait, words
from .scaled import doubtful, factors_of, floor, power_of_two, target, weighed
from .tiles import at, exp, far, finite, multiples

# columns of a row that kernels look at together
_BLOCK = tl.constexpr(1024)


@triton.jit
def _work(work_ptr, sequences, C: tl.constexpr, PARTS: tl.constexpr):
    """Where joint (g, m, c), tops and nus (2, g, m, PARTS), shares and largest entries of `final` (g, m) lie."""
    top_ptr = work_ptr + sequences * C
    nu_ptr = top_ptr + 2 * sequences * PARTS
    share_ptr = nu_ptr + 2 * sequences * PARTS
    return top_ptr, nu_ptr, share_ptr, share_ptr + sequences


@triton.jit
def _ending(final, top):
    """The backward message of a last step, from logarithms; states above the top are none that a path reaches."""
    LOWEST: tl.constexpr = floor(final.dtype == tl.float64)
    below = tl.where(final > top, 0.0, final - top)
    new = tl.maximum(exp(below) * 2.0 ** target(final.dtype == tl.float64), LOWEST, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(final == float("-inf"), 0.0, new)


@triton.jit
def _joined(a, b, x, level, scale):
    """w and a b 2^-TARGET; both are 0 where a is."""
    factor, rest = factors_of(x, level)
    return weighed(b, scale, factor, rest, a > 0.0), a * 2.0 ** -target(a.dtype == tl.float64) * b


@triton.jit
def _inverse(nu, share):
    """1 / nu, 0 for 0, and NaN where the sequence's share is."""
    return tl.where(share != share, share, tl.where(nu == 0.0, 0.0, 1.0 / nu))


@triton.jit
def _narrowed(gamma, DTYPE: tl.constexpr):
    """A number of any float type, half types by way of float32."""
    if DTYPE.primitive_bitwidth == 16:
        return gamma.to(tl.float32).to(DTYPE)
    else:
        return gamma.to(DTYPE)


@triton.jit
def _uncertain(nu, live, C: tl.constexpr):
    """Whether a nu 2^-TARGET may be inexact."""
    trusted: tl.constexpr = C * C * (2.0**-441 if nu.dtype == tl.float64 else 2.0**-34)
    return live & (((nu >= trusted) & (nu < float("inf"))) == 0)


@triton.jit(do_not_specialize=ANY)
def _first_kernel(
    x_ptr, level_ptr, ends_ptr, message_ptr, w_ptr, work_ptr, final_ptr, log_norm_ptr, redone_ptr, weight_ptr,
    g, m, v, slots, stride_xv, stride_xg, stride_xm, stride_xc, stride_wg, stride_wm,
    C: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program begins the backward pass of one sequence, at step v - 1."""
    DTYPE: tl.constexpr = message_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    sequences = g.to(tl.int64) * m
    top_ptr, nu_ptr, share_ptr, final_top_ptr = _work(work_ptr, sequences, C, PARTS)
    log_norm, weight = tl.load(log_norm_ptr + row), tl.load(weight_ptr + row // m * stride_wg + row % m * stride_wm)
    share = tl.where(log_norm != log_norm, log_norm, weight.to(tl.float64)).to(DTYPE)
    share = tl.where(tl.load(redone_ptr + row) | (log_norm == float("-inf")) | (weight == 0), 0.0, share)
    tl.store(share_ptr + row, share)

    states = tl.arange(0, _BLOCK)
    end = v if ends_ptr is None else tl.load(ends_ptr + row)
    final_top = tl.full((), 0.0, DTYPE)
    if final_ptr is not None:
        tops = tl.full((_BLOCK,), float("-inf"), DTYPE)
        for k in tl.range(0, C, _BLOCK):
            at_end = message_ptr + (far(end - 1, sequences) + row) * C + k + states
            reached = tl.load(at_end, mask=k + states < C, other=0.0) > 0.0
            final = tl.load(final_ptr + row * C + k + states, mask=reached, other=float("-inf"))
            tops = tl.maximum(tops, final)
        final_top = finite(tl.max(tops))
        tl.store(final_top_ptr + row, final_top)
    live = (end == v) & (share != 0.0)
    x_ptr += far(v - 1, stride_xv) + row // m * stride_xg + row % m * stride_xm
    level = tl.load(level_ptr + far(v - 1, sequences) + row)
    tops, nus = tl.zeros((_BLOCK,), DTYPE), tl.zeros((_BLOCK,), DTYPE)
    for k in tl.range(0, C, _BLOCK):
        mask = k + states < C
        x = tl.load(x_ptr + (k + states).to(tl.int64) * stride_xc, mask=mask, other=float("-inf")).to(DTYPE)
        a = tl.load(message_ptr + (far(v - 1, sequences) + row) * C + k + states, mask=mask & live, other=0.0)
        b = tl.full((_BLOCK,), 2.0 ** target(DTYPE == tl.float64), DTYPE)
        if final_ptr is not None:
            b = _ending(tl.load(final_ptr + row * C + k + states, mask=mask, other=float("-inf")), final_top)
        w, joint = _joined(a, b, x, level, 1.0)
        tl.store(w_ptr + (far((v - 1) % slots, sequences) + row) * C + k + states, w, mask=mask)
        tl.store(work_ptr + row * C + k + states, joint, mask=mask)
        tops, nus = tl.maximum(tops, w), nus + joint
    parts = tl.arange(0, triton.next_power_of_2(PARTS))
    slot = ((v - 1) % 2 * sequences + row) * PARTS + parts
    tl.store(top_ptr + slot, tl.where(parts == 0, tl.max(tops), 0.0), mask=parts < PARTS)
    tl.store(nu_ptr + slot, tl.where(parts == 0, tl.sum(nus), 0.0), mask=parts < PARTS)


@triton.jit(do_not_specialize=ANY)
def _step_kernel(
    x_ptr, bulk_ptr, bound_ptr, level_ptr, ends_ptr, message_ptr, w_ptr, work_ptr, final_ptr, grad_ptr, doubt_ptr,
    counters_ptr, g, m, v, first, slots,
    stride_xv, stride_xg, stride_xm, stride_xc, stride_bv, stride_bg, stride_bk, stride_bj,
    stride_dv, stride_dg, stride_dm, stride_dc, L: tl.constexpr,
):  # fmt: skip
    """One program computes its tile of the messages that are `first` or more steps before step v - 1."""
    DTYPE: tl.constexpr = message_ptr.dtype.element_ty
    ROWS: tl.constexpr = L.rows
    COLUMNS: tl.constexpr = L.columns
    ALL: tl.constexpr = triton.next_power_of_2(L.parts)
    NOTHING: tl.constexpr = float("-inf")
    TARGET: tl.constexpr = target(DTYPE == tl.float64)
    stride_xv, stride_xg, stride_xm, stride_bv, stride_bg, stride_bk, stride_bj = strides(
        stride_xv, stride_xg, stride_xm, stride_bv, stride_bg, stride_bk, stride_bj, L
    )
    stride_dv, stride_dg, stride_dm = multiples(stride_dv, stride_dg, stride_dm, L.width_out)
    z, row, part, counter_ptr = place(counters_ptr, m, L)
    members, columns, parts = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, ALL)
    inside, there = members < m - row, columns < L.c - part * COLUMNS
    own = inside[:, None] & there[None, :]
    all_parts = inside[:, None] & (parts < L.parts)[None, :]
    sequence, column, sequences = z * m + row, part.to(tl.int64) * COLUMNS, g.to(tl.int64) * m
    tile = members[:, None] * L.c + columns[None, :]
    pitch = sequences * L.c

    top_ptr, nu_ptr, share_ptr, final_top_ptr = _work(work_ptr, sequences, L.c, L.parts)
    top_ptr += sequence * L.parts
    nu_ptr += sequence * L.parts
    joint_ptr = work_ptr + sequence * L.c + column
    x_ptr += z * stride_xg + row * stride_xm + column * stride_xc
    bulk_ptr += z * stride_bg + column * stride_bk
    bound_ptr += z
    level_ptr += sequence
    message_ptr += sequence * L.c + column
    w_ptr += sequence * L.c
    if grad_ptr is not None:
        grad_ptr += z * stride_dg + row * stride_dm + column * stride_dc
    if ends_ptr is None:
        ends = tl.full((ROWS,), 0, tl.int32) + v
    else:
        ends = tl.load(ends_ptr + sequence + members, mask=inside, other=1).to(tl.int32)
    share = tl.load(share_ptr + sequence + members, mask=inside, other=0.0)
    steps = tl.max(ends)
    lost = members < 0
    for step in tl.range(first, v if L.together else first + 1):
        i = v - 1 - step
        live, ending = (i < ends) & (share != 0.0), i == ends - 1
        bound = tl.load(bound_ptr + tl.where(stride_bv == 0, 0, far(i, g)))
        if L.early:
            x = tl.load(at(x_ptr + far(i, stride_xv), members, columns, stride_xm, stride_xc), mask=own, other=NOTHING)
            a = tl.load(message_ptr + far(i, pitch) + tile, mask=own & live[:, None], other=0.0)
            joint = tl.load(joint_ptr + tile, mask=own, other=0.0, cache_modifier=".cg")
        if L.together:
            wait(counter_ptr, L.parts * (step - first), L.parts)
        b = product(
            w_ptr + far((i + 1) % slots, pitch), bulk_ptr + far(i, stride_bv), inside, there, stride_bj, stride_bk,
            bound >> 1, tl.where(i + 1 < steps, L.c, 0), L,
        )  # fmt: skip
        slot = (i + 1) % 2 * sequences * L.parts + members[:, None] * L.parts + parts[None, :]
        shift = shift_from(tl.max(tl.load(top_ptr + slot, mask=all_parts, other=0.0, cache_modifier=".cg"), 1))
        nu = tl.sum(tl.load(nu_ptr + slot, mask=all_parts, other=0.0, cache_modifier=".cg"), 1)
        level = tl.load(level_ptr + far(i, sequences) + members, mask=inside, other=0)
        if not L.early:
            x = tl.load(at(x_ptr + far(i, stride_xv), members, columns, stride_xm, stride_xc), mask=own, other=NOTHING)
            a = tl.load(message_ptr + far(i, pitch) + tile, mask=own & live[:, None], other=0.0)
            joint = tl.load(joint_ptr + tile, mask=own, other=0.0, cache_modifier=".cg")
        lost |= tl.max(doubtful(b, (a > 0.0) & (ending == 0)[:, None], bound & 1).to(tl.int32), 1) > 0
        x = x.to(DTYPE)
        b = tl.where(live[:, None], b, 0.0)  # a NaN of others' may wait in a matrix
        if final_ptr is None:
            b = tl.where(ending[:, None], 2.0**TARGET, b)
        else:
            final = tl.load(final_ptr + sequence * L.c + column + tile, mask=own & ending[:, None], other=float("-inf"))
            top = tl.load(final_top_ptr + sequence + members, mask=inside, other=0.0)
            b = tl.where(ending[:, None], _ending(final, top[:, None]), b)
        w, new_joint = _joined(a, b, x, level[:, None], power_of_two(tl.where(ending, 0, -shift), DTYPE)[:, None])
        tl.store(w_ptr + far(i % slots, pitch) + column + tile, w, mask=own, cache_modifier=".cg")
        tl.store(joint_ptr + tile, new_joint, mask=own, cache_modifier=".cg")
        slot = i % 2 * sequences * L.parts + members * L.parts + part
        tl.store(top_ptr + slot, tl.max(w, 1), mask=inside, cache_modifier=".cg")
        tl.store(nu_ptr + slot, tl.sum(new_joint, 1), mask=inside, cache_modifier=".cg")
        if L.together:
            arrive(counter_ptr, L.parts)
        lost |= _uncertain(nu, (i + 1 < ends) & (share != 0.0), L.c)
        inverse = _inverse(nu, share)
        if grad_ptr is not None:
            gamma = tl.where((i + 1 < ends)[:, None], joint * (inverse * share)[:, None], 0.0)
            grad_at = at(grad_ptr + far(i + 1, stride_dv), members, columns, stride_dm, stride_dc)
            tl.store(grad_at, _narrowed(gamma, grad_ptr.dtype.element_ty), mask=own)
        kept = own & ((i + 2 < v) & (slots == v))
        r_at = w_ptr + far(i + 2, pitch) + column + tile
        r = tl.load(r_at, mask=kept & (i + 2 < ends)[:, None], other=0.0, cache_modifier=".cg") * 2.0**-TARGET
        tl.store(r_at, tl.where((i + 2 < ends)[:, None], r * inverse[:, None], 0.0), mask=kept)
    tl.store(doubt_ptr + sequence + members, tl.full((ROWS,), 1, tl.int8), mask=inside & lost)


@triton.jit(do_not_specialize=ANY)
def _last_kernel(
    ends_ptr, w_ptr, work_ptr, grad_ptr, start_ptr, doubt_ptr, g, m, v, slots, stride_dg, stride_dm, stride_dc,
    C: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program divides the first step of one sequence."""
    DTYPE: tl.constexpr = work_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    sequences = g.to(tl.int64) * m
    _, nu_ptr, share_ptr, _ = _work(work_ptr, sequences, C, PARTS)
    parts = tl.arange(0, triton.next_power_of_2(PARTS))
    nu = tl.sum(tl.load(nu_ptr + row * PARTS + parts, mask=parts < PARTS, other=0.0))
    share = tl.load(share_ptr + row)
    inverse = _inverse(nu, share)
    tl.store(doubt_ptr + row, tl.full((), 1, tl.int8), mask=_uncertain(nu, share != 0.0, C))
    end = v if ends_ptr is None else tl.load(ends_ptr + row)
    states = tl.arange(0, _BLOCK)
    for k in tl.range(0, C, _BLOCK):
        mask = k + states < C
        gamma = tl.load(work_ptr + row * C + k + states, mask=mask, other=0.0) * (inverse * share)
        tl.store(start_ptr + row * C + k + states, gamma, mask=mask)
        if grad_ptr is not None:
            at_state = (k + states).to(tl.int64) * stride_dc
            to = grad_ptr + row // m * stride_dg + row % m * stride_dm + at_state
            tl.store(to, _narrowed(gamma, grad_ptr.dtype.element_ty), mask=mask)
        r_at = w_ptr + (far(1, sequences) + row) * C + k + states
        kept = mask & (v > 1) & (slots == v)
        r = tl.load(r_at, mask=kept & (end > 1), other=0.0) * 2.0 ** -target(DTYPE == tl.float64)
        tl.store(r_at, tl.where(end > 1, r * inverse, 0.0), mask=kept)


def backward(
    chain: Operands, messages: Tensor, redone: Tensor, log_norm: Tensor, weight: Tensor, *, grad_x: Tensor | None,
    grad_start: Tensor, r: Tensor | None, final: Tensor | None, tile: Tile | None = None, together: bool | None = None,
) -> Tensor:  # fmt: skip
    """Which sequences are doubtful (g, m), after the gradients of the others are written.

    Args:
        chain: operands; `start` is not read.
        messages: (v, g, m, c), from `forward`.
        redone: (g, m), bool: sequences whose messages are logarithms, for which zeros are written.
        log_norm: (g, m), contiguous float64. -inf gives gradients 0, and NaN gives NaN.
        weight: (g, m), float: factors of gradients; 0 gives 0.
        grad_x: (v, g, m, c) of any strides and float type, for weight gamma, 0 after a sequence's end; or None.
        grad_start: (g, m, c), contiguous, for weight gamma_0.
        r: (v, g, m, c), contiguous, of the dtype of the arithmetic, for r / 2^TARGET, 0 after a sequence's end; r[0]
            means nothing. None where no counts are wanted.
        final: (g, m, c), contiguous, of the dtype of the arithmetic: logarithms of b at each sequence's last step, up
            to an additive constant; None for zeros.
        tile: as that of `forward`.
        together: as that of `forward`.
    """
    v, g, m, c = chain.shape
    fixed, options = layout(chain, tile or tile_of(chain), together, grad_x)
    parts = fixed.parts
    bound, level, doubt, counters = room(chain, words(grid(chain, fixed) // parts))
    w = messages.new_empty(min(v, 2), g, m, c) if r is None else r
    work = messages.new_empty(g * m * (c + 4 * parts + 2))
    d_strides = (0, 0, 0, 1) if grad_x is None else grad_x.stride()
    redone = redone.contiguous()
    launch.run(
        _first_kernel, (g * m,), chain.x, level, chain.ends, messages, w, work, final, log_norm, redone, weight,
        g, m, v, len(w), *chain.x.stride(), *weight.stride(), C=c, PARTS=parts, num_warps=4,
    )  # fmt: skip
    for first in launches(v, fixed):
        launch.run(
            _step_kernel, (grid(chain, fixed),), chain.x, chain.bulk, bound, level, chain.ends, messages, w, work,
            final, grad_x, doubt, counters, g, m, v, first, len(w), *chain.strides, *d_strides, L=fixed, **options,
        )  # fmt: skip
    launch.run(
        _last_kernel, (g * m,), chain.ends, w, work, grad_x, grad_start, doubt, g, m, v, len(w), *d_strides[1:],
        C=c, PARTS=parts, num_warps=4,
    )  # fmt: skip
    return doubt
