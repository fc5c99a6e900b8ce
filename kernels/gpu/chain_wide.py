"""The forward recursion of chains that share matrices too wide for one program: a product a step.

    S_0 = start exp(x_0)        S_i = (S_{i-1} P_i) exp(x_i)        log_norm = log sum_j S_{v-1}(j)

Operands: `chains`. Numerics: `scaled`, but that `shift` brings a row to 2^TARGET exactly: programs store the largest
entry of their part of it beside the message.

Cost: g m (v - 1) c^2 multiply-adds and v dependent steps. A program has the sums of some sequences and states, and
reads their messages and columns of the matrix from memory in blocks; all else is done to the sums in registers.
Matrices are read as they are: halves made beforehand would be twice the traffic, and splitting on the way takes about
as many instructions as the tensor cores take time. Programs that share sequences meet once a step; of many states, a
step takes longer than a launch, each has its own, and nobody waits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .chain_wide_backward import backward as backward
from .chain_wide_tiles import ANY, Tile, layout, place, product, shift_from, slot, stored
from .chains import Operands, room
from .meeting import arrive, wait, words
from .scaled import below, doubtful, factors_of, level_of, log_scaled, power_of_two, started, target, weighed
from .tiles import any_of, at, far, log, multiples


@triton.jit(do_not_specialize=ANY)
def _first_kernel(
    x_ptr, level_ptr, start_ptr, message_ptr, top_ptr, taken_ptr, leaving_ptr, m, stride_xg, stride_xm, stride_xc,
    C: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program writes the first message of one sequence."""
    DTYPE: tl.constexpr = message_ptr.dtype.element_ty
    TARGET: tl.constexpr = target(DTYPE == tl.float64)
    row = tl.program_id(0).to(tl.int64)
    states, parts = tl.arange(0, triton.next_power_of_2(C)), tl.arange(0, triton.next_power_of_2(PARTS))
    inside, here = states < C, row * C + states
    start = tl.load(start_ptr + here, mask=inside, other=float("-inf"))
    x_ptr += row // m * stride_xg + row % m * stride_xm
    x = tl.load(x_ptr + states.to(tl.int64) * stride_xc, mask=inside, other=float("-inf"))
    level, start_level = tl.load(level_ptr + row), level_of(tl.max(start))
    logs = below(start, start_level) + below(x, level)
    top = level_of(tl.max(logs))
    tl.store(message_ptr + here, started(logs, top, DTYPE), mask=inside)
    if leaving_ptr is not None:
        tl.store(leaving_ptr + here, below(logs, top).to(DTYPE), mask=inside)
    tl.store(top_ptr + row * PARTS + parts, 2.0**TARGET, mask=parts < PARTS)
    tl.store(taken_ptr + row, start_level.to(tl.int64) + level + top - TARGET)


@triton.jit(do_not_specialize=ANY)
def _step_kernel(
    x_ptr, bulk_ptr, bound_ptr, level_ptr, ends_ptr, message_ptr, top_ptr, taken_ptr, leaving_ptr, doubt_ptr,
    counters_ptr, g, m, v, first, stride_xv, stride_xg, stride_xm, stride_xc, stride_bv, stride_bg,
    L: tl.constexpr,
):  # fmt: skip
    """One program computes its tile of the messages from `first` on."""
    DTYPE: tl.constexpr = message_ptr.dtype.element_ty
    NOTHING: tl.constexpr = float("-inf")
    stride_xv, stride_xg, stride_xm = multiples(stride_xv, stride_xg, stride_xm, L.width_x)
    stride_bv, stride_bg = multiples(stride_bv, stride_bg, 0, L.width_bulk)[:2]
    z, row, part, counter_ptr, ends = place(counters_ptr, ends_ptr, m, v, L)
    members, columns = tl.arange(0, L.rows), tl.arange(0, L.columns)
    inside, there = members < m - row, columns < L.c - part * L.columns
    own = inside[:, None] & there[None, :]
    sequence, column, sequences = z * m + row, part.to(tl.int64) * L.columns, g.to(tl.int64) * m
    tile = column + members[:, None] * L.c + columns[None, :]

    x_ptr += z * stride_xg + row * stride_xm + column * stride_xc
    bulk_ptr += z * stride_bg + column * L.stride_j
    bound_ptr += z
    level_ptr += sequence
    message_ptr += sequence * L.c
    top_ptr += sequence * L.parts
    taken = tl.load(taken_ptr + sequence + members, mask=inside, other=0)
    lost = members < 0
    for i in tl.range(first, v if L.together else first + 1):
        active, ending = i < ends, i == ends - 1
        level = tl.load(level_ptr + far(i, sequences) + members, mask=inside, other=0)
        bound_at = bound_ptr + tl.where(stride_bv == 0, 0, far(i - 1, g))
        bound, x_at = tl.load(bound_at), at(x_ptr + far(i, stride_xv), members, columns, stride_xm, stride_xc)
        x = tl.load(x_at, mask=own, other=NOTHING).to(DTYPE)
        if L.together:
            wait(counter_ptr, L.parts * (i - first), L.parts)
        shift = shift_from(tl.max(stored(top_ptr + (i - 1) % 2 * sequences * L.parts, inside, L), 1))
        u = product(
            message_ptr + far(slot(i - 1, L), sequences * L.c), bulk_ptr + far(i - 1, stride_bv), bound_at, inside,
            there, L.stride_k, L.stride_j, tl.where(i < tl.max(ends), L.c, 0), L,
        )  # fmt: skip
        admitted = x != NOTHING
        factor, rest = factors_of(x, level[:, None])
        new = weighed(u, power_of_two(-shift, DTYPE)[:, None], factor, rest, admitted)
        new = tl.where(active[:, None], new, 0.0)
        to = message_ptr + far(slot(i, L), sequences * L.c) + tile
        tl.store(to, new, mask=own & (active | L.kept)[:, None], cache_modifier=".cg")
        to = top_ptr + i % 2 * sequences * L.parts + members * L.parts + part
        tl.store(to, tl.max(new, 1), mask=inside, cache_modifier=".cg")
        if L.together:
            arrive(counter_ptr, L.parts)
        lost |= tl.max(doubtful(u, own & active[:, None] & admitted, bound & 1).to(tl.int32), 1) > 0
        if leaving_ptr is not None:
            if any_of(ending):  # logarithms of sums, in which nothing has been raised
                logs = log(u * 2.0 ** -target(DTYPE == tl.float64)).to(tl.float64) + below(x, level[:, None])
                tl.store(leaving_ptr + sequence * L.c + tile, logs.to(DTYPE), mask=own & ending[:, None])
        taken += tl.where(active, level + shift + (bound >> 1), 0).to(tl.int64)
    if part == 0:
        tl.store(taken_ptr + sequence + members, taken, mask=inside)
    tl.store(doubt_ptr + sequence + members, 1, mask=inside & lost)


@triton.jit(do_not_specialize=ANY)
def _last_kernel(message_ptr, ends_ptr, taken_ptr, log_norm_ptr, error_ptr, doubt_ptr, v, g, m, slots, C: tl.constexpr):
    """One program computes the log-partition of one sequence from its last message."""
    row = tl.program_id(0).to(tl.int64)
    end = v if ends_ptr is None else tl.load(ends_ptr + row)
    states = tl.arange(0, triton.next_power_of_2(C))
    message_ptr += (far((end - 1) % slots, g) * m + row) * C
    total = tl.sum(tl.load(message_ptr + states, mask=states < C, other=0.0).to(tl.float64))
    log_norm, error = log_scaled(total, tl.load(taken_ptr + row))
    tl.store(log_norm_ptr + row, log_norm)
    if error_ptr is not None:
        tl.store(error_ptr + row, error)
    tl.store(doubt_ptr + row, 1, mask=doubtful(total.to(message_ptr.dtype.element_ty), True, 0))


def forward(
    chain: Operands, messages: Tensor, log_norm: Tensor, leaving: Tensor | None = None, error: Tensor | None = None, *,
    tile: Tile | None = None, together: bool | None = None,
) -> Tensor:  # fmt: skip
    """Which sequences are doubtful (g, m), after messages and the log-partitions (g, m) of the others are written.

    Arguments are those of `chain_forward.forward`, but that `tile` and `together` (one launch, whose programs wait for
    each other) are chosen by default.
    """
    v, g, m, c = chain.shape
    fixed, programs, options = layout(chain, messages, tile, together)
    bound, level, doubt, counters = room(chain, words(programs // fixed.parts))
    top = messages.new_empty(2, g, m, fixed.parts)
    taken = torch.empty(g, m, dtype=torch.int64, device=messages.device)
    launch.run(
        _first_kernel, (g * m,), chain.x, level, chain.start, messages, top, taken, leaving, m,
        *chain.x.stride()[1:], C=c, PARTS=fixed.parts, num_warps=8,
    )  # fmt: skip
    for first in range(1, min(v, 2) if fixed.together else v):
        launch.run(
            _step_kernel, (programs,), chain.x, chain.bulk, bound, level, chain.ends, messages, top, taken, leaving,
            doubt, counters, g, m, v, first, *chain.strides[:6], L=fixed, **options,
        )  # fmt: skip
    launch.run(
        _last_kernel, (g * m,), messages, chain.ends, taken, log_norm, error, doubt, v, g, m, len(messages),
        C=c, num_warps=8,
    )  # fmt: skip
    return doubt
