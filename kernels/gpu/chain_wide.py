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
from .chain_wide_tiles import ANY, Tile, grid, launches, layout, place, product, shift_from, strides, tile_of
from .chains import Operands, room
from .meeting import arrive, wait, words
from .scaled import below, doubtful, factors_of, level_of, log_scaled, power_of_two, started, target, weighed
from .tiles import at, far, log

# columns of a row that kernels look at together
_BLOCK = tl.constexpr(1024)


@triton.jit(do_not_specialize=ANY)
def _first_kernel(
    x_ptr, level_ptr, start_ptr, message_ptr, top_ptr, taken_ptr, leaving_ptr, m, stride_xg, stride_xm, stride_xc,
    C: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program writes the first message of one sequence."""
    DTYPE: tl.constexpr = message_ptr.dtype.element_ty
    TARGET: tl.constexpr = target(DTYPE == tl.float64)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row // m * stride_xg + row % m * stride_xm
    start_ptr += row * C
    states = tl.arange(0, _BLOCK)
    level = tl.load(level_ptr + row)
    tops = tl.full((_BLOCK,), float("-inf"), tl.float64)
    for k in tl.range(0, C, _BLOCK):
        tops = tl.maximum(tops, tl.load(start_ptr + k + states, mask=k + states < C, other=float("-inf")))
    start_level = level_of(tl.max(tops))
    tops = tl.full((_BLOCK,), float("-inf"), tl.float64)
    for k in tl.range(0, C, _BLOCK):
        tops = tl.maximum(tops, _first(x_ptr, start_ptr, k + states, stride_xc, start_level, level, C))
    top = level_of(tl.max(tops))
    for k in tl.range(0, C, _BLOCK):
        logs = _first(x_ptr, start_ptr, k + states, stride_xc, start_level, level, C)
        tl.store(message_ptr + row * C + k + states, started(logs, top, DTYPE), mask=k + states < C)
        if leaving_ptr is not None:
            tl.store(leaving_ptr + row * C + k + states, below(logs, top).to(DTYPE), mask=k + states < C)
    parts = tl.arange(0, triton.next_power_of_2(PARTS))
    tl.store(
        top_ptr + row * PARTS + parts, tl.full((triton.next_power_of_2(PARTS),), 2.0**TARGET, DTYPE), mask=parts < PARTS
    )
    tl.store(taken_ptr + row, start_level.to(tl.int64) + level + top - TARGET)


@triton.jit
def _first(x_ptr, start_ptr, states, stride_xc, start_level, level, C: tl.constexpr):
    """log(start exp(x_0)) less both levels, in float64."""
    start = tl.load(start_ptr + states, mask=states < C, other=float("-inf"))
    x = tl.load(x_ptr + states.to(tl.int64) * stride_xc, mask=states < C, other=float("-inf"))
    return below(start, start_level) + below(x, level)


@triton.jit(do_not_specialize=ANY)
def _step_kernel(
    x_ptr, bulk_ptr, bound_ptr, level_ptr, ends_ptr, message_ptr, top_ptr, taken_ptr, leaving_ptr, doubt_ptr,
    counters_ptr,
    g, m, v, first, slots, stride_xv, stride_xg, stride_xm, stride_xc, stride_bv, stride_bg, stride_bk, stride_bj,
    L: tl.constexpr,
):  # fmt: skip
    """One program computes its tile of the messages from `first` on."""
    DTYPE: tl.constexpr = message_ptr.dtype.element_ty
    ROWS: tl.constexpr = L.rows
    COLUMNS: tl.constexpr = L.columns
    ALL: tl.constexpr = triton.next_power_of_2(L.parts)
    NOTHING: tl.constexpr = float("-inf")
    stride_xv, stride_xg, stride_xm, stride_bv, stride_bg, stride_bk, stride_bj = strides(
        stride_xv, stride_xg, stride_xm, stride_bv, stride_bg, stride_bk, stride_bj, L
    )
    z, row, part, counter_ptr = place(counters_ptr, m, L)
    members, columns, parts = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, ALL)
    inside, there = members < m - row, columns < L.c - part * COLUMNS
    own = inside[:, None] & there[None, :]
    sequence, column, sequences = z * m + row, part.to(tl.int64) * COLUMNS, g.to(tl.int64) * m
    tile = members[:, None] * L.c + columns[None, :]

    x_ptr += z * stride_xg + row * stride_xm + column * stride_xc
    bulk_ptr += z * stride_bg + column * stride_bj
    bound_ptr += z
    level_ptr += sequence
    message_ptr += sequence * L.c
    top_ptr += sequence * L.parts
    if ends_ptr is None:
        ends = tl.full((ROWS,), 0, tl.int32) + v
    else:
        ends = tl.load(ends_ptr + sequence + members, mask=inside, other=1).to(tl.int32)
    taken = tl.load(taken_ptr + sequence + members, mask=inside, other=0)
    lost = members < 0
    last = v if L.together else first + 1
    until = tl.minimum(last, tl.max(ends))
    for i in tl.range(first, until):
        active = i < ends
        level = tl.load(level_ptr + far(i, sequences) + members, mask=inside, other=0)
        bound = tl.load(bound_ptr + tl.where(stride_bv == 0, 0, far(i - 1, g)))
        k = bound >> 1
        if L.early:
            x = tl.load(at(x_ptr + far(i, stride_xv), members, columns, stride_xm, stride_xc), mask=own, other=NOTHING)
        if L.together:
            wait(counter_ptr, L.parts * (i - first), L.parts)
        tops = tl.load(
            top_ptr + (i - 1) % 2 * sequences * L.parts + members[:, None] * L.parts + parts[None, :],
            mask=inside[:, None] & (parts < L.parts)[None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        shift = shift_from(tl.max(tops, 1))
        before = message_ptr + far((i - 1) % slots, sequences * L.c)
        u = product(before, bulk_ptr + far(i - 1, stride_bv), inside, there, stride_bk, stride_bj, k, L.c, L)
        if not L.early:
            x = tl.load(at(x_ptr + far(i, stride_xv), members, columns, stride_xm, stride_xc), mask=own, other=NOTHING)
        x = x.to(DTYPE)
        admitted = x != NOTHING
        exponent, scale = level + shift, power_of_two(-shift, DTYPE)[:, None]
        factor, rest = factors_of(x, level[:, None])
        new = tl.where(active[:, None], weighed(u, scale, factor, rest, admitted), 0.0)
        now = message_ptr + far(i % slots, sequences * L.c) + column
        tl.store(now + tile, new, mask=own & (active | (slots == v))[:, None], cache_modifier=".cg")
        now = top_ptr + i % 2 * sequences * L.parts + part
        tl.store(now + members * L.parts, tl.max(new, 1), mask=inside, cache_modifier=".cg")
        if L.together:
            arrive(counter_ptr, L.parts)
        lost |= tl.max(doubtful(u, own & active[:, None] & admitted, bound & 1).to(tl.int32), 1) > 0
        if leaving_ptr is not None:
            ending = i == ends - 1
            if tl.max(ending.to(tl.int32)) > 0:  # logarithms of sums, in which nothing has been raised
                logs = log(u * 2.0 ** -target(DTYPE == tl.float64)).to(tl.float64) + below(x, level[:, None])
                to = leaving_ptr + sequence * L.c + column + tile
                tl.store(to, logs.to(DTYPE), mask=own & ending[:, None])
        taken += tl.where(active, exponent + k, 0).to(tl.int64)
    if slots == v:
        for i in tl.range(tl.maximum(first, until), last):
            now = message_ptr + far(i, sequences * L.c) + column
            tl.store(now + tile, tl.zeros((ROWS, COLUMNS), DTYPE), mask=own)
    if part == 0:
        tl.store(taken_ptr + sequence + members, taken, mask=inside)
    tl.store(doubt_ptr + sequence + members, tl.full((ROWS,), 1, tl.int8), mask=inside & lost)


@triton.jit(do_not_specialize=ANY)
def _last_kernel(message_ptr, ends_ptr, taken_ptr, log_norm_ptr, error_ptr, doubt_ptr, v, g, m, slots, C: tl.constexpr):
    """One program computes the log-partition of one sequence from its last message."""
    row = tl.program_id(0).to(tl.int64)
    end = v if ends_ptr is None else tl.load(ends_ptr + row)
    states = tl.arange(0, _BLOCK)
    message_ptr += (far((end - 1) % slots, g) * m + row) * C
    sums = tl.zeros((_BLOCK,), tl.float64)
    for k in tl.range(0, C, _BLOCK):
        sums += tl.load(message_ptr + k + states, mask=k + states < C, other=0.0).to(tl.float64)
    total = tl.sum(sums)
    log_norm, error = log_scaled(total, tl.load(taken_ptr + row))
    tl.store(log_norm_ptr + row, log_norm)
    if error_ptr is not None:
        tl.store(error_ptr + row, error)
    lost = doubtful(total.to(message_ptr.dtype.element_ty), True, 0)
    tl.store(doubt_ptr + row, tl.full((), 1, tl.int8), mask=lost)


def forward(
    chain: Operands,
    messages: Tensor,
    log_norm: Tensor,
    leaving: Tensor | None = None,
    error: Tensor | None = None,
    *,
    tile: Tile | None = None,
    together: bool | None = None,
) -> Tensor:
    """Which sequences are doubtful (g, m), after messages and the log-partitions (g, m) of the others are written.

    `messages` (v or min(v, 2), g, m, c), contiguous: with v slots all messages are kept, and are 0 after a sequence's
    end. `leaving` (g, m, c), contiguous, receives the last messages as logarithms up to a constant, exact to rounding
    where messages may have been raised. `error` (g, m) receives the rounding errors of the log-partitions. `tile` and
    `together` (one launch, whose programs wait for each other) are chosen by default.
    """
    v, g, m, c = chain.shape
    fixed, options = layout(chain, tile or tile_of(chain), together)
    bound, level, doubt, counters = room(chain, words(grid(chain, fixed) // fixed.parts))
    top = messages.new_empty(2, g, m, fixed.parts)
    taken = torch.empty(g, m, dtype=torch.int64, device=messages.device)
    launch.run(
        _first_kernel, (g * m,), chain.x, level, chain.start, messages, top, taken, leaving, m,
        *chain.x.stride()[1:], C=c, PARTS=fixed.parts, num_warps=4,
    )  # fmt: skip
    for first in launches(v, fixed):
        launch.run(
            _step_kernel, (grid(chain, fixed),), chain.x, chain.bulk, bound, level, chain.ends, messages, top, taken,
            leaving, doubt, counters, g, m, v, first, len(messages), *chain.strides, L=fixed, **options,
        )  # fmt: skip
    launch.run(
        _last_kernel,
        (g * m,),
        messages,
        chain.ends,
        taken,
        log_norm,
        error,
        doubt,
        v,
        g,
        m,
        len(messages),
        C=c,
        num_warps=4,
    )
    return doubt
