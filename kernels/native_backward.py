"""The gradients of `kernels.linear_chain` compiled for the CPU, from the forward messages alone.

With B_i = d log Z / d S_i and R_i = d log Z / d U_i:

    R_i = B_i exp(x_i - max x_i) up to a factor        B_{i-1} = R_i P_i^T
    d/dx_i = S_i B_i                                   d/dP_i = S_{i-1}^T R_i

The factor is the one with which S_{i-1} B_{i-1}, the posterior of a step, sums to 1: so nothing but the messages S has
been kept, and no error adds up along the chain. What no path enters has an R of any size, and no influence: it is
looked at where S is not zero. Counts of transitions that all steps share are summed in float64.

Shapes: messages (v, g, m, c), flat. Cost: 6 c^2 operations a step and sequence. Tested against `logchain.reference`
and `kernels.linear_chain`.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from .chain import Chain
from .linear_chain import Kept
from .native import called, compiled, inlined, spread
from .native_chain import MANY, Array, address, at, block_of, empty, matrix_at, operands, ranges, round_matrices, walked
from .native_counts import count_transitions, from_linear
from .native_narrow import narrow_back, ordinary_steps_back
from .native_precision import sums_of
from .native_rows import copy, room, row_by_rows, rows_times, scaled, turn, without_diagonal
from .native_steps import emissions, ending, posterior, pull, return_to
from .native_vectors import LANES, borrowed


def backward(chain: Chain, kept: Kept, weight: Tensor, grad_x: Tensor | None, grad_bulk: Tensor | None) -> Tensor:
    """See `kernels.sum_product`; sequences with a weight of 0 are not looked at."""
    (given, sizes), messages = operands(chain), kept.messages
    v, g, m, c = chain.v, chain.g, chain.m, chain.c
    counted, one = grad_bulk is not None and v > 1, len(chain.bulk) == 1
    into_x = into_bulk = counts = None
    strides = [0] * 5
    if grad_x is not None:
        into_x = grad_x if _walkable(grad_x, chain) else messages.new_empty(v, *chain.lead, c)
        strides[:3] = into_x.view(v, g, m, c).stride()[:3]
    # a matrix's counts are one thread's, but for those that all sequences share: there each thread has its own
    shared = g == 1 and one
    spans = ranges(chain, whole_sets=counted and not shared)
    jobs = [(*span, 0) for span in spans]
    if counted and one:
        counts = torch.zeros(len(spans) if shared else 1, g * c * c, dtype=torch.float64)
        jobs = [(*span, address(counts[i if shared else 0])) for i, span in enumerate(spans)]
    elif counted and grad_bulk is not None:
        into_bulk, strides[3:] = grad_bulk, grad_bulk.stride()[:2]
    weight, grad_p0 = weight.double().contiguous(), torch.zeros(g * m * c, dtype=torch.float64)
    places = map(address, (*given, messages, weight, into_x, into_bulk, grad_p0))
    into = np.array([*strides, 0, 0, 0, 0])
    sums = sums_of(chain.dtype, address(given[1]), sizes)
    fixed = chain.by_log, sizes, into, sums, empty(chain.dtype)
    spread(walk_back(chain.dtype, sums.itemsize), jobs, *places, 0, *fixed)
    if grad_bulk is not None and counts is not None:
        grad_bulk[0].copy_(counts.sum(0).view(g, c, c))
    elif grad_bulk is not None and not counted:
        grad_bulk.zero_()
    if grad_x is not None and into_x is not None and into_x is not grad_x:
        grad_x.copy_(into_x)
    return grad_p0.view(*chain.lead, c)


def _walkable(gradient: Tensor, chain: Chain) -> bool:
    if gradient.dtype != chain.dtype or (gradient.stride(-1) != 1 and chain.c > 1):
        return False
    try:
        gradient.view(chain.v, chain.g, chain.m, chain.c)
    except RuntimeError:
        return False
    return True


class _Into(NamedTuple):
    """What is written: gradients, empty if they are not asked for, and their strides (v, g, m) and (s, g)."""

    x: Array
    x_step: int
    x_set: int
    x_member: int
    bulk: Array
    step: int
    set: int
    counts: Array
    start: Array
    by_log: bool


class _Rooms(NamedTuple):
    """What a walk writes besides. Of four sequences: `source` R and `ahead` B, in rooms; `emitted` (4, block, c).

    `linear` and `held`: see `matrix_at`. `behind`: B of each sequence, in rooms. `turned` (g, c, c), with states after
    first, and apart from it the `diagonal` (g, c), in rooms: of the matrices that all steps share, or of one, and
    where that begins, `turned_at`. What is to be counted, in rooms: `counted` R of four sequences and a block of
    steps, or of one step of all that share its matrix; and how many `terms` a sequence has.
    """

    source: Array
    ahead: Array
    shifts: Array
    emitted: Array
    linear: Array
    held: Array
    behind: Array
    turned: Array
    turned_at: Array
    diagonal: Array
    counted: Array
    terms: Array


@inlined
def _walk(rows, q, low, start, chain, rooms, messages, weight, into):
    """A block of steps of the q-th sequence, or of four from there on."""
    v, g, m, c, one, x, ends = chain.v, chain.g, chain.m, chain.c, chain.one, chain.x, chain.ends
    source, ahead, behind, emitted = rooms.source, rooms.ahead, rooms.behind, rooms.emitted
    counted, terms = rooms.counted, rooms.terms
    raw, linear, held = chain.raw, rooms.linear, rooms.held
    i, r, block = q // m, q % m, len(rooms.shifts)
    size, apart, steps = g * m * c, room(c), min(block, v - start)
    each, shared = len(into.bulk) > 0, len(into.counts) > 0
    longest = 0
    for row in range(rows):
        p, at = q + row, start * chain.x_step + i * chain.x_set + (r + row) * chain.x_member
        count = max(0, min(steps, ends[p] - start)) if weight[p] != 0 else 0
        longest = max(longest, count)
        emissions(x, at, chain.x_step, count, c, rooms.shifts, 0, emitted, row * block * c, start, -chain.x_step)
        source[row * apart : row * apart + c] = 0
        if start < ends[p] <= start + steps and count > 0:
            rest = ending(messages, (ends[p] - 1) * size + p * c, chain.final, p * c, c)
            factor = 0.0 if rest == 0 else 1.0 / rest
            for j in range(c):
                behind[(p - low) * apart + j] = factor * (
                    float(chain.final[p * c + j]) if len(chain.final) > 0 else 1.0
                )
        if len(into.x):
            for step in range(start + count, start + steps):
                out = step * into.x_step + i * into.x_set + (r + row) * into.x_member
                into.x[out : out + c] = 0
    if each and m > 1:
        longest = steps
    matrix, begin, width, taken, raw_at = raw, 0, c, 0.0, 0
    # many sequences, group after group, are multiplied with a matrix that only one step has
    turning = not one and block == 1
    last = longest - 1
    if rows == 1 and narrow_back(chain, rooms, into):
        last = ordinary_steps_back(last, start, q, low, chain, rooms, messages, weight, into)
    for t in range(last, -1, -1):
        step = start + t
        now, before = step * size, (step - 1) * size
        for row in range(rows):
            p, part, back, here = q + row, row * apart, (q + row - low) * apart, (row * block + t) * c
            if weight[p] == 0 or step >= ends[p]:
                continue
            message, at = now + p * c, step * chain.x_step + i * chain.x_set + (r + row) * chain.x_member
            if len(into.x):
                out = step * into.x_step + i * into.x_set + (r + row) * into.x_member
                posterior(messages, message, behind, back, weight[p], c, into.x, out)
            if step == 0:
                return_to(behind, back, chain.initial, p * c, x, at, emitted, here, c, source, part)
                pull(chain.initial, p * c, source, part, weight[p], c, behind, back)
                copy(behind, back, c, into.start, p * c)
            else:
                return_to(behind, back, messages, message, x, at, emitted, here, c, source, part)
        if step == 0:
            continue
        out = (step - 1) * into.step + i * into.set
        if not one:
            raw_at = (step - 1) * chain.step + i * chain.set
            matrix, begin, width = matrix_at(raw, raw_at, chain.row, chain.column, c, chain.log, linear, held)
            taken = held[2]
            if turning and rooms.turned_at[0] != raw_at:
                rooms.turned_at[0] = raw_at
                turn(matrix, begin, width, c, rooms.turned, 0)
                without_diagonal(rooms.turned, 0, c, rooms.turned, 0, rooms.diagonal, 0)
        which = i if one else 0
        if not (one or turning):
            for row in range(rows):
                row_by_rows(source, row * apart, matrix, begin, width, c, ahead, row * apart)
        else:
            rows_times(rows, source, rooms.turned, which * c * c, c, c, rooms.diagonal, which * apart, ahead)
        for row in range(rows):
            p, here = q + row, row * block + t if shared else row if block > 1 else r + row
            some = weight[p] != 0 and step < ends[p]
            if some:
                factor = pull(messages, before + p * c, ahead, row * apart, 1.0, c, behind, (p - low) * apart)
                if shared or each:
                    scaled(source, row * apart, c, factor * weight[p], counted, here * apart)
            if each:
                terms[here] = some
        if each and m > 1 and (block > 1 or r + rows == m):
            # all that share the matrix, or those that are walked together
            some = rows if block > 1 else m
            place = messages, before + (q + rows - some) * c, c, 0, counted, 0, apart, 0
            count_transitions(some, terms, *place, c, r + rows > some, into.bulk, out)
        if each and r + rows == m:
            for k in range(c):
                gradient, linear_at, at = out + k * c, begin + k * width, raw_at + k * chain.row
                place = matrix, linear_at, raw, at, chain.column, c, taken, into.by_log
                if m > 1:
                    from_linear(into.bulk, gradient, 1.0, into.bulk, gradient, *place)
                else:
                    from_linear(into.bulk, gradient, messages[before + q * c + k], counted, 0, *place)
    if shared:
        begun = 1 if start == 0 else 0
        for row in range(rows):
            p = q + row
            terms[row] = min(last + 1, ends[p] - start) - begun if weight[p] != 0 else 0
        before = (start + begun - 1) * size + q * c
        place = messages, before, c, size, counted, begun * apart, block * apart, apart
        count_transitions(rows, terms, *place, c, True, into.counts, i * c * c)
    if each and m == 1:
        for step in range(max(start, start + longest, 1), start + steps):
            out = (step - 1) * into.step + i * into.set
            into.bulk[out : out + c * c] = 0


def _backward(
    low, high, counts_at, x_at, raw_at, p0_at, ends_at, final_at, messages_at, weight_at, into_x_at, into_bulk_at,
    start_at, into_p0_at, by_log, sizes, strides, fine, none,
):  # fmt: skip
    """The sequences from `low` to before `high`; without an address for their counts and `start`, all of them at once.

    Then the gradients of matrices that all steps share and of p0 are written as the caller wants them, in his dtype:
    weights for which that is too narrow are refused, and nothing written. `fine`: see `native_forward`.
    """
    g, m, c, all_ = sizes[1], sizes[2], sizes[3], sizes[1] * sizes[2]
    wide = np.empty(0)
    weight, messages = at(weight_at, all_, wide), at(messages_at, MANY, none)
    if not start_at:
        largest = np.abs(weight).max()
        if not (2.0**-20 <= largest <= 2.0**20 or largest == 0):
            return False
    chain = walked(low, high, x_at, raw_at, p0_at, ends_at, final_at, sizes, none)
    one, block, sets = chain.one, block_of(chain, 0), range(low // m, (high - 1) // m + 1 if chain.one else 0)
    rooms = _Rooms(
        source=np.empty(4 * room(c), fine.dtype),
        ahead=np.empty(4 * room(c)),
        shifts=np.empty(block),
        emitted=np.empty(4 * block * c + LANES),
        linear=np.empty(0 if one else c * c, none.dtype),
        held=np.full(4, -1.0),
        behind=np.empty((high - low) * room(c)),
        turned=np.empty(len(chain.matrix) if one else c * c, none.dtype),
        turned_at=np.full(1, -1),
        diagonal=np.zeros((g if one else 1) * room(c), fine.dtype),
        counted=np.zeros(max(4 * block, m) * room(c), none.dtype),
        terms=np.zeros(max(4, m), np.int64),
    )
    round_matrices(chain, low, high, 0)
    for i in sets:
        turn(chain.matrix, i * c * c, c, c, rooms.turned, i * c * c)
        if c > LANES:  # few states are walked with the whole matrix
            without_diagonal(rooms.turned, i * c * c, c, rooms.turned, i * c * c, rooms.diagonal, i * room(c))
    into = _Into(
        x=at(into_x_at, MANY, none) if into_x_at else none,
        x_step=strides[0],
        x_set=strides[1],
        x_member=strides[2],
        bulk=at(into_bulk_at, MANY, none) if into_bulk_at and not one else none,
        step=strides[3],
        set=strides[4],
        counts=at(counts_at, g * c * c, wide) if counts_at else np.zeros(len(chain.matrix) if into_bulk_at else 0),
        start=at(start_at, all_ * c, wide) if start_at else np.zeros(all_ * c),
        by_log=by_log or chain.log,
    )
    for start in range((chain.v - 1) // block * block, -1, -block):
        q = low
        while q < high:
            # the number is known where the loop is compiled, twice, but not a type of its own
            if q % m + 4 <= m and q + 4 <= high and not narrow_back(chain, rooms, into):
                rows = np.int64(4)
                _walk(rows, q, low, start, borrowed(chain), borrowed(rooms), messages, weight, borrowed(into))
            else:
                rows = np.int64(1)
                _walk(rows, q, low, start, borrowed(chain), borrowed(rooms), messages, weight, borrowed(into))
            q += rows
    for e in range(sets.start * c, sets.stop * c if len(into.counts) else 0):
        i, k = e // c, e % c
        place = chain.matrix, e * c, chain.raw, i * chain.set + k * chain.row, chain.column, c, chain.scale[i]
        from_linear(into.counts, e * c, 1.0, into.counts, e * c, *place, into.by_log)
    for q in range(low, high):
        factor = np.exp(-chain.log_top[q])
        for e in range(q * c, (q + 1) * c):
            share = chain.initial[e]
            into.start[e] = 0.0 if share == 0 else into.start[e] * (share if into.by_log else factor)
    if not start_at:
        _write(chain, into, into_bulk_at if one else 0, into_p0_at, strides, none)
    return True


@called
def _write(chain, into, bulk_at, p0_at, strides, none):
    """The gradients of what all steps, and sequences, share, in the caller's dtype."""
    if bulk_at:
        bulk = at(bulk_at, MANY, none)
        for e in range(len(into.counts)):
            bulk[e] = into.counts[e]
    if p0_at:
        p0, sums = at(p0_at, MANY, none), np.zeros(strides[8])
        for e in range(len(into.start)):
            q, j = e // chain.c, e % chain.c
            sums[q // chain.m * strides[5] + q % chain.m * strides[6] + j * strides[7]] += into.start[e]
        for e in range(len(sums)):
            p0[e] = sums[e]


@cache
def walk_back(dtype: torch.dtype, sums: int) -> Callable[..., bool]:
    """The loop for float32 or float64, with sums of so many bytes, from numba's cache on disk where there is one."""
    real, fine = (numba.float64 if size == 8 else numba.float32 for size in (dtype.itemsize, sums))
    fixed = numba.boolean, numba.int64[::1], numba.int64[::1], fine[::1], real[::1]
    return compiled(_backward, numba.boolean(*(numba.int64,) * 14, *fixed))
