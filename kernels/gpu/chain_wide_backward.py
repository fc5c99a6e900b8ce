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

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .chain_wide_tiles import ANY, Tile, layout, place, product, shift_from, slot, stored
from .chains import Operands, room
from .meeting import arrive, wait, words
from .scaled import doubtful, factors_of, floor, power_of_two, target, weighed
from .tiles import any_of, at, exp, far, finite, multiples


@triton.jit
def _ending(final_ptr, message_ptr, ending, there, part, L: tl.constexpr):
    """The messages of sequences that end, from logarithms; states above the top are none that a path reaches."""
    LOWEST: tl.constexpr = floor(final_ptr.dtype.element_ty == tl.float64)
    members, columns = tl.arange(0, L.rows), tl.arange(0, L.columns)
    tile = members[:, None] * L.c + columns[None, :]
    tops = tl.zeros_like(tile).to(final_ptr.dtype.element_ty) - float("inf")
    for k in tl.range(0, L.c, L.columns):
        inside = ending[:, None] & (columns < L.c - k)[None, :]
        reached = tl.load(message_ptr + k + tile, mask=inside, other=0.0) > 0.0
        tops = tl.maximum(tops, tl.load(final_ptr + k + tile, mask=reached, other=float("-inf")))
    own = ending[:, None] & there[None, :]
    final = tl.load(final_ptr + part * L.columns + tile, mask=own, other=float("-inf"))
    below = final - finite(tl.max(tops, 1))[:, None]
    new = exp(tl.where(below > 0.0, 0.0, below)) * 2.0 ** target(final.dtype == tl.float64)
    return tl.where(final == float("-inf"), 0.0, tl.maximum(new, LOWEST, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _inverse(nu, share):
    """1 / nu, 0 for 0, and NaN where the sequence's share is."""
    return tl.where(share != share, share, tl.where(nu == 0.0, 0.0, 1.0 / nu))


@triton.jit
def _narrowed(gamma, DTYPE: tl.constexpr):
    """A number of any float type, half types by way of float32."""
    if DTYPE.primitive_bitwidth == 16:
        gamma = gamma.to(tl.float32)
    return gamma.to(DTYPE)


@triton.jit
def _uncertain(nu, live, C: tl.constexpr):
    """Whether a nu 2^-TARGET may be inexact."""
    trusted: tl.constexpr = C * C * (2.0**-441 if nu.dtype == tl.float64 else 2.0**-34)
    return live & (((nu >= trusted) & (nu < float("inf"))) == 0)


@triton.jit(do_not_specialize=ANY)
def _step_kernel(
    x_ptr, bulk_ptr, bound_ptr, level_ptr, ends_ptr, message_ptr, w_ptr, work_ptr, final_ptr, log_norm_ptr, weight_ptr,
    grad_ptr, start_ptr, doubt_ptr, counters_ptr, g, m, v, first, stride_xv, stride_xg, stride_xm, stride_xc,
    stride_bv, stride_bg, stride_dv, stride_dg, stride_dm, stride_dc, L: tl.constexpr,
):  # fmt: skip
    """One program computes its tile of w, `first` or more steps before step v - 1, and divides what came before."""
    DTYPE: tl.constexpr = message_ptr.dtype.element_ty
    TARGET: tl.constexpr = target(DTYPE == tl.float64)
    NOTHING: tl.constexpr = float("-inf")
    stride_xv, stride_xg, stride_xm = multiples(stride_xv, stride_xg, stride_xm, L.width_x)
    stride_bv, stride_bg = multiples(stride_bv, stride_bg, 0, L.width_bulk)[:2]
    stride_dv, stride_dg, stride_dm = multiples(stride_dv, stride_dg, stride_dm, L.width_out)
    z, row, part, counter_ptr, ends = place(counters_ptr, ends_ptr, m, v, L)
    members, columns = tl.arange(0, L.rows), tl.arange(0, L.columns)
    inside, there = members < m - row, columns < L.c - part * L.columns
    own = inside[:, None] & there[None, :]
    sequence, column, sequences = z * m + row, part.to(tl.int64) * L.columns, g.to(tl.int64) * m
    tile, pitch = column + members[:, None] * L.c + columns[None, :], sequences * L.c

    # of two steps in turn: the joint, the largest w of each part, and its share of nu
    joint_ptr = work_ptr + sequence * L.c
    top_ptr = work_ptr + 2 * pitch + sequence * L.parts
    nu_ptr = top_ptr + 2 * sequences * L.parts
    x_ptr += z * stride_xg + row * stride_xm + column * stride_xc
    bulk_ptr += z * stride_bg + column * L.stride_k
    bound_ptr += z
    level_ptr += sequence
    message_ptr += sequence * L.c
    w_ptr += sequence * L.c
    if grad_ptr is not None:
        grad_ptr += z * stride_dg + row * stride_dm + column * stride_dc
    log_norm = tl.load(log_norm_ptr + sequence + members, mask=inside, other=0.0)
    share = tl.load(weight_ptr + sequence + members, mask=inside, other=0.0).to(DTYPE)
    share = tl.where((share == 0.0) | (log_norm == log_norm), share, float("nan"))
    share = tl.where(log_norm == float("-inf"), 0.0, share)
    lost = members < 0
    for turn in tl.range(first, v + 1 if L.together else first + 1):
        i = v - 1 - turn
        live, ending, later = (i >= 0) & (i < ends) & (share != 0.0), i == ends - 1, i + 1 < ends
        between, here = (i >= 0) & (i + 1 < tl.max(ends)), own & (i >= 0)
        bound_at = bound_ptr + tl.where(stride_bv == 0, 0, far(i, g))
        bound = tl.load(bound_at, mask=between, other=0)
        level = tl.load(level_ptr + far(i, sequences) + members, mask=inside & (i >= 0), other=0)
        if L.together:
            wait(counter_ptr, L.parts * (turn - first), L.parts)
        b = product(
            w_ptr + far(slot(i + 1, L), pitch), bulk_ptr + far(i, stride_bv), bound_at, inside, there,
            L.stride_j, L.stride_k, tl.where(between, L.c, 0), L,
        )  # fmt: skip
        x = tl.load(at(x_ptr + far(i, stride_xv), members, columns, stride_xm, stride_xc), mask=here, other=NOTHING)
        a = tl.load(message_ptr + far(i, pitch) + tile, mask=own & live[:, None], other=0.0)
        before = (turn + 1) % 2 * sequences * L.parts
        shift = shift_from(tl.max(stored(top_ptr + before, inside, L), 1))
        nu = tl.sum(stored(nu_ptr + before, inside, L), 1)
        lost |= tl.max(doubtful(b, (a > 0.0) & (ending == 0)[:, None], bound & 1).to(tl.int32), 1) > 0
        b = tl.where(live[:, None], b, 0.0)  # a NaN of others' may wait in a matrix
        if final_ptr is None:
            b = tl.where(ending[:, None], 2.0**TARGET, b)
        else:
            if any_of(ending & inside):
                last = _ending(final_ptr + sequence * L.c, message_ptr + far(i, pitch), ending & inside, there, part, L)
                b = tl.where(ending[:, None], last, b)
        factor, rest = factors_of(x.to(DTYPE), level[:, None])
        scale = power_of_two(tl.where(ending, 0, -shift), DTYPE)[:, None]
        w, joint = weighed(b, scale, factor, rest, a > 0.0), a * 2.0**-TARGET * b
        tl.store(w_ptr + far(slot(i, L), pitch) + tile, w, mask=here, cache_modifier=".cg")
        tl.store(joint_ptr + turn % 2 * pitch + tile, joint, mask=own)
        now = turn % 2 * sequences * L.parts + members * L.parts + part
        tl.store(top_ptr + now, tl.max(w, 1), mask=inside, cache_modifier=".cg")
        tl.store(nu_ptr + now, tl.sum(joint, 1), mask=inside, cache_modifier=".cg")
        if L.together:
            arrive(counter_ptr, L.parts)

        # what waited for nu of the step after
        lost |= _uncertain(nu, later & (share != 0.0), L.c)
        inverse = _inverse(nu, share)
        joint = tl.load(joint_ptr + (turn + 1) % 2 * pitch + tile, mask=own & later[:, None], other=0.0)
        gamma = tl.where(later[:, None], joint * (inverse * share)[:, None], 0.0)
        if grad_ptr is not None:
            grad_at = at(grad_ptr + far(i + 1, stride_dv), members, columns, stride_dm, stride_dc)
            tl.store(grad_at, _narrowed(gamma, grad_ptr.dtype.element_ty), mask=own & (i + 1 < v))
        if i < 0:
            tl.store(start_ptr + sequence * L.c + tile, gamma, mask=own)
        if L.kept:
            r_at, there_r = w_ptr + far(i + 2, pitch) + tile, own & (i + 2 < v)
            followed = (i + 2 < ends)[:, None]
            r = tl.load(r_at, mask=there_r & followed, other=0.0, cache_modifier=".cg") * 2.0**-TARGET
            tl.store(r_at, tl.where(followed, r * inverse[:, None], 0.0), mask=there_r)
    tl.store(doubt_ptr + sequence + members, 1, mask=inside & lost)


def backward(
    chain: Operands, messages: Tensor, redone: Tensor, log_norm: Tensor, weight: Tensor, *, grad_x: Tensor | None,
    grad_start: Tensor, r: Tensor | None, final: Tensor | None, tile: Tile | None = None, together: bool | None = None,
) -> Tensor:  # fmt: skip
    """Which sequences are doubtful (g, m), after the gradients of the others are written.

    Arguments are those of `chain_backward.backward`, and `tile` and `together` those of `chain_wide.forward`. r, of the
    dtype of the arithmetic, is divided by 2^TARGET.
    """
    v, g, m, c = chain.shape
    w = messages.new_empty(min(v, 2), g, m, c) if r is None else r
    fixed, programs, options = layout(chain, w, tile, together, grad_x)
    bound, level, doubt, counters = room(chain, words(programs // fixed.parts))
    work = messages.new_empty(2 * g * m * (c + 2 * fixed.parts))
    log_norm = log_norm.masked_fill(redone, -torch.inf)
    strides = *chain.strides[:6], *((0, 0, 0, 1) if grad_x is None else grad_x.stride())
    for first in range(1 if fixed.together else v + 1):
        launch.run(
            _step_kernel, (programs,), chain.x, chain.bulk, bound, level, chain.ends, messages, w, work, final,
            log_norm, weight.contiguous(), grad_x, grad_start, doubt, counters, g, m, v, first, *strides,
            L=fixed, **options,
        )  # fmt: skip
    return doubt
