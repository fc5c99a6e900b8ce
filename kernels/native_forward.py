"""The forward messages of `kernels.linear_chain` compiled for the CPU: a loop over steps for one sequence, or for four.

    U_i = S_{i-1} P_i        W_i = U_i exp(x_i - max x_i)        S_i = W_i / 2^k,  k so that max S_i is in [2^-8, 1]

Emissions are made for a block of steps at a time, in vectors however few states there are. A scale is a power of two,
which loses nothing and needs no logarithm: that of the step before, where it does, for it is known early. A sequence is
lossy where some U_i(j) that a path reaches is smaller than what may have been lost of it. W and the exponentials are
float64: emissions, however sharp, lose nothing but entries of S, which are looked for in U. Chains of few states are
walked by `native_narrow`, as far as their steps are ordinary.

Shapes: messages (slots, g, m, c), flat. Cost: c^2 multiply-adds a step and sequence. Tested against
`logchain.reference.product` and `kernels.linear_chain`.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from .chain import Chain
from .dither import ROUNDED_ANEW
from .linear_chain import Kept
from .native import compiled, inlined, spread
from .native_chain import (
    MANY,
    Array,
    address,
    at,
    block_of,
    empty,
    in_sets,
    limits_of,
    matrix_at,
    operands,
    ranges,
    round_matrices,
    walked,
)
from .native_exp import LN2
from .native_filter import continued, logarithm, shares
from .native_narrow import beyond_reach, narrow, ordinary_steps
from .native_precision import sums_of
from .native_reach import enters
from .native_rows import copy, room, rows_times, without_diagonal
from .native_steps import emissions, emissions_reached, ending, settle, unit, weigh
from .native_summation import added
from .native_vectors import LANES, borrowed


def forward(chain: Chain, kept: Kept) -> tuple[Tensor, Tensor | None]:
    """See `kernels.linear_chain`; the backward pass needs no scales, and those kept are 1."""
    given, sizes = operands(chain)
    kept.scales.fill_(1.0)
    g, m = chain.g, chain.m
    found, lossy = torch.zeros(g, m, dtype=torch.float64), torch.zeros(g, m, dtype=torch.bool)
    outputs = map(address, (kept.messages, kept.total.fill_(0.0), found, lossy))
    sums = sums_of(chain.dtype, address(given[1]), sizes)
    fixed = sizes, limits_of(chain.dtype, chain.c), sums, empty(chain.dtype)
    places = *map(address, given), *outputs, *(0,) * 7
    each = len(kept.messages), chain.number, *places, *fixed
    some = any(spread(walk(chain.dtype, sums.itemsize), ranges(chain), *each))
    return found, lossy if some else None


# entries of matrices: half of a small second-level cache, in float32
_MATRICES = 2**15


class _Out(NamedTuple):
    """The results: `messages` (slots, g, m, c), `lossy` (g, m), and two that are empty unless asked for.

    `posteriors` (v, g, m, c) given all up to each step, with strides (v, g, m), and the logarithm of the `last`
    (g, m, c) in float64.
    """

    messages: Array
    slots: int
    lossy: Array
    posteriors: Array
    step: int
    set: int
    member: int
    last: Array


class _Rooms(NamedTuple):
    """What a walk writes besides its results.

    Of a block of steps: `emitted` (4, block, c), `shifts` (4, block), and `taken` (block) out of the matrices. Of a
    step: `sums` U and `state` S, four rooms each, and `linear` (slots, c, c), with `held` (slots, 4) as in `matrix_at`;
    a slot for each step of a block where sets share matrices, else one. Of each sequence: its `powers` of two so far,
    the next factor, and its exponent; the `rest` at its end. `reach` (sequences, slots, c), `own_reach` (sequences, c)
    and `reached` (2, sequences): see `native_reach`. `beyond`: see `native_narrow`.
    `others` (g, c, c) and `diagonal` (g, c), in rooms: the matrices that all steps share, in two parts; else zeros.
    """

    sums: Array
    state: Array
    shifts: Array
    taken: Array
    emitted: Array
    linear: Array
    held: Array
    powers: Array
    factors: Array
    exponents: Array
    rest: Array
    reach: Array
    own_reach: Array
    reached: Array
    beyond: Array
    others: Array
    diagonal: Array


@inlined
def _sum(total, lost, terms, first, count):
    for t in range(first, first + count):
        total, lost = added(total, lost, terms[t])
    return total, lost


@inlined
def _walk(rows, q, low, high, start, number, chain, rooms, limits, out):
    """A block of steps of the q-th sequence, or of four from there on."""
    v, g, m, c, one, x, ends = chain.v, chain.g, chain.m, chain.c, chain.one, chain.x, chain.ends
    sums, state, shifts, emitted = rooms.sums, rooms.state, rooms.shifts, rooms.emitted
    held = rooms.held
    messages, slots, lossy, posteriors = out.messages, out.slots, out.lossy, out.posteriors
    powers, factors, exponents = rooms.powers, rooms.factors, rooms.exponents
    trusted, flush, shallow = limits
    i, r, block = q // m, q % m, len(rooms.taken)
    size, apart, steps = g * m * c, room(c), min(block, v - start)
    first, last = (max(low, i * m), min(high, (i + 1) * m)) if in_sets(chain) else (q, q + rows)
    longest = 0
    for row in range(rows):
        p, at = q + row, start * chain.x_step + i * chain.x_set + (r + row) * chain.x_member
        count = min(steps, ends[p] - start)
        longest = max(longest, count)
        emissions(x, at, chain.x_step, count, c, shifts, row * block, emitted, row * block * c, number, chain.x_step)
        if start > 0:
            copy(messages, (start - 1) % slots * size + p * c, c, state, row * apart)
        elif count > 0:
            here, now = row * block, p * c
            z, _ = weigh(chain.initial, now, emitted, here * c, c)
            if z < 2.0**-24:
                shifts[here] = emissions_reached(x, at, chain.initial, now, c, emitted, here * c, number)
                z, _ = weigh(chain.initial, now, emitted, here * c, c)
            lossy[p] |= 0 < z < shallow
            if chain.faint[p]:
                lossy[p] |= z < 2.0**-600
                for j in range(c):
                    lossy[p] |= x[at + j] > shifts[here]
            factor, powers[p - low] = unit(z)
            settle(chain.initial, now, emitted, here * c, c, factor, flush, state, row * apart, messages, now)
            if not 0 < z < np.inf:
                shifts[here] += np.log(z)
            if len(posteriors):
                shares(state, row * apart, c, posteriors, i * out.set + (r + row) * out.member)
    source, begin, width, most = rooms.others, i * c * c, c, chain.top[i] if one else 1.0
    diagonal = i * apart if one else 0
    begun = 1 if start == 0 else 0
    if rows == 1 and narrow(chain):
        # the last message's logarithm is taken from what the loop for any chain leaves
        ordinary = longest - (len(out.last) > 0 and ends[q] <= start + steps)
        begun = ordinary_steps(begun, ordinary, start, q, low, chain, rooms, limits, out)
    for t in range(begun, longest):
        step = start + t
        if not one:
            begin = (step - 1) * chain.step + i * chain.set
            slot = t % (len(held) // 4)
            linear, kept = rooms.linear[slot * c * c : (slot + 1) * c * c], held[4 * slot : 4 * slot + 4]
            source, begin, width = matrix_at(chain.raw, begin, chain.row, chain.column, c, chain.log, linear, kept)
            rooms.taken[t], most = kept[2], kept[3]
        rows_times(rows, state, source, begin, width, c, rooms.diagonal, diagonal, sums)
        threshold = trusted * (most if most > 1 else 1.0)
        for row in range(rows):
            p, sum_, here = q + row, row * apart, row * block + t
            if step >= ends[p]:
                continue
            factor, exponent = factors[p - low], powers[p - low] + exponents[p - low]
            z, least = weigh(sums, sum_, emitted, here * c, c)
            if z * factor < 2.0**-24:
                at = step * chain.x_step + i * chain.x_set + (r + row) * chain.x_member
                shifts[here] = emissions_reached(x, at, sums, sum_, c, emitted, here * c, number + t)
                z, _ = weigh(sums, sum_, emitted, here * c, c)
            z *= factor
            if least < threshold and not lossy[p]:
                lossy[p] = enters(step, p, first, last, low, chain, sums[sum_ : sum_ + c], threshold, rooms)
            if z < shallow * most:
                lossy[p] |= z > 0
            # what brings this step to 1 is taken to the next, which need not wait for it
            pending, more = unit(z)
            if not 2.0**-8 <= z <= 1.0:
                factor, exponent, pending, more = factor * pending, exponent + more, 1.0, 0
                if not 0 < z < np.inf:
                    shifts[here] += np.log(z)
            factors[p - low], powers[p - low], exponents[p - low] = pending, exponent, more
            now = step % slots * size + p * c
            settle(sums, sum_, emitted, here * c, c, factor, flush, state, sum_, messages, now)
            if len(posteriors):
                shares(state, sum_, c, posteriors, step * out.step + i * out.set + (r + row) * out.member)
    for row in range(rows):
        p = q + row
        if start < ends[p] <= start + steps:
            rooms.rest[p - low] = rest = ending(state, row * apart, chain.final, p * c, c)
            lossy[p] |= len(chain.final) > 0 and 0 < rest < trusted
            at = (ends[p] - 1) * chain.x_step + i * chain.x_set + (r + row) * chain.x_member
            if len(out.last) > 0 and v == 1:
                # no later step would find what is missing
                lossy[p] |= chain.faint[p]
                logarithm(chain.initial, p * c, x, at, c, out.last, p * c)
            elif len(out.last) > 0:
                logarithm(sums, row * apart, x, at, c, out.last, p * c)
        for step in range(max(start, ends[p]), start + steps):
            now = step % slots * size + p * c
            messages[now : now + c] = 0


def _forward(
    low, high, slots, number, x_at, raw_at, p0_at, ends_at, final_at, messages_at, rests_at, found_at, lossy_at,
    before_at, first_at, total_at, lost_at, posteriors_at, last_at, still_lost_at, sizes, limits, fine, none,
):  # fmt: skip
    """The sequences from `low` to before `high`: whether one of them is lossy.

    `number`: that of the first step, in a stream. `fine`: an empty array of the dtype of sums, see `native_precision`.
    Without addresses for them, messages and the like are in room of its own. With one for the logarithm of a message
    (g, m, c) before the first step, it and the matrices that lead into that step are there in place of p0. The
    log-partition is added to a `total` (g, m), of which some was `lost`, if there is one.
    """
    chain = walked(low, high, x_at, raw_at, p0_at, ends_at, final_at, sizes, none)
    v, m, c, one, ends, all_, some = chain.v, chain.m, chain.c, chain.one, chain.ends, chain.g * chain.m, high - low
    messages = at(messages_at, slots * all_ * c, none) if messages_at else np.empty(slots * all_ * c, none.dtype)
    rests, found = at(rests_at, all_, none) if rests_at else np.empty(all_, none.dtype), at(found_at, all_, limits)
    lossy = at(lossy_at, all_, chain.faint) if lossy_at else np.zeros(all_, np.bool_)
    if before_at:
        for q in range(low, high):
            lossy[q] |= continued(q, at(before_at, all_ * c, limits), at(first_at, MANY, none), chain)
    last = at(last_at, all_ * c, limits) if last_at else limits[:0]
    posteriors = at(posteriors_at, MANY, none) if posteriors_at else none
    over_steps, over_sets, over_members = (sizes[16], sizes[17], sizes[18]) if posteriors_at else (0, 0, 0)
    out = _Out(messages, slots, lossy, posteriors, over_steps, over_sets, over_members, last)
    block, total, lost, zeros = block_of(chain, _MATRICES), np.zeros(some), np.zeros(some), np.zeros(some, np.int64)
    # numba wants no choice within so long a call
    own, sets = (0, chain.g) if one else (1, 1)
    steps = block if in_sets(chain) else 1
    rooms = _Rooms(
        sums=np.empty(4 * room(c)),
        state=np.zeros(4 * room(c), fine.dtype),
        shifts=np.empty(4 * block),
        taken=np.zeros(block),
        emitted=np.empty(4 * block * c + LANES),
        linear=np.empty(own * steps * c * c, none.dtype),
        held=np.full(4 * steps, -1.0),
        powers=zeros,
        factors=np.ones(some),
        exponents=np.zeros(some, np.int64),
        rest=np.zeros(some),
        reach=np.empty(some * steps * c, np.bool_),
        own_reach=np.empty(some * c, np.bool_),
        reached=np.full(2 * some, -1),
        beyond=beyond_reach(chain),
        others=np.empty(len(chain.matrix), none.dtype),
        diagonal=np.zeros(sets * room(c), fine.dtype),
    )
    for start in range(0, v, block):
        later = number + start
        if start == 0 or len(chain.exact) > 0 and later // ROUNDED_ANEW != (later - block) // ROUNDED_ANEW:
            round_matrices(chain, low, high, later)
            for i in range(low // m, (high - 1) // m + 1 if one else 0):
                without_diagonal(chain.matrix, i * c * c, c, rooms.others, i * c * c, rooms.diagonal, i * room(c))
        q = low
        while q < high:
            rows = 4 if q % m + 4 <= m and q + 4 <= high and not narrow(chain) else 1
            _walk(rows, q, low, high, start, later, borrowed(chain), borrowed(rooms), limits, borrowed(out))
            for row in range(rows):
                p, count = q + row - low, min(start + block, ends[q + row]) - start
                total[p], lost[p] = _sum(total[p], lost[p], rooms.shifts, row * block, count)
                if not one:
                    total[p], lost[p] = _sum(total[p], lost[p], rooms.taken, 0, count)
            q += rows
    for q in range(low, high):
        if ends[q] == 0:
            continue
        sum_, rounded = added(total[q - low], lost[q - low], chain.log_top[q])
        if one and ends[q] > 1:
            sum_, rounded = added(sum_, rounded, chain.scale[q // m] * (ends[q] - 1))
        rests[q] = left = rooms.rest[q - low]
        power = rooms.powers[q - low]
        if 0 < left < np.inf:  # so that the logarithm of a power of two is exactly its exponent's
            factor, more = unit(left)
            left, power = 2.0 * factor * left, power + more - 1
        sum_, rounded = added(sum_, rounded, power * LN2[0])
        sum_, rounded = added(sum_, rounded, np.log(left))
        rounded += power * LN2[1]
        found[q] = sum_ + rounded
        if total_at:
            before, still_lost = at(total_at, all_, limits), at(still_lost_at, all_, limits)
            rest = rounded - (found[q] - sum_) if np.isfinite(found[q]) else 0.0
            found[q], still_lost[q] = added(before[q], at(lost_at, all_, limits)[q] + rest, found[q])
    return lossy[low:high].any()


@cache
def walk(dtype: torch.dtype, sums: int) -> Callable[..., bool]:
    """The loop for float32 or float64, with sums of so many bytes, from numba's cache on disk where there is one."""
    real, fine = (numba.float64 if size == 8 else numba.float32 for size in (dtype.itemsize, sums))
    fixed = numba.int64[::1], numba.float64[::1], fine[::1], real[::1]
    return compiled(_forward, numba.boolean(*(numba.int64,) * 20, *fixed))
