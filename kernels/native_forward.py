"""The forward messages of `kernels.linear_chain` compiled for the CPU: a loop over steps for one sequence, or for four.

    U_i = S_{i-1} P_i        W_i = U_i exp(x_i - max x_i)        S_i = W_i / 2^k,  k so that max S_i is in [2^-8, 1]

Emissions are made for a block of steps at a time, in vectors however few states there are. A scale is a power of two,
which loses nothing and needs no logarithm: that of the step before, where it does, for it is known early. A sequence is
lossy where some U_i(j) that a path reaches is smaller than what may have been lost of it. W and the exponentials are
float64: emissions, however sharp, lose nothing but entries of S, which are looked for in U.

Shapes: messages (slots, g, m, c), flat. Cost: c^2 multiply-adds a step and sequence. Tested against
`logchain.reference.product` and `kernels.linear_chain`.
"""

from collections.abc import Callable
from functools import cache

import numba
import numpy as np
import torch
from torch import Tensor

from .chain import Chain
from .linear_chain import Kept
from .native import compiled, spread
from .native_chain import block_of, linear_matrix, operands, ranges, usable
from .native_exp import LN2
from .native_steps import emissions, emissions_reached, ending, four_rows, one_row, room, settle, unit, weigh
from .native_vectors import borrowed


def forward(chain: Chain, kept: Kept) -> tuple[Tensor, Tensor | None]:
    """See `kernels.linear_chain`; the backward pass needs no scales, and those kept are 1."""
    given, messages = operands(chain), kept.messages
    kept.scales.fill_(1.0)
    rests = kept.total.fill_(0.0).view(-1).numpy()
    g, m = chain.g, chain.m
    found, lossy = np.zeros(g * m), np.zeros(g * m, np.bool_)
    outputs = messages.view(-1).numpy(), rests, found, lossy
    spread(_compiled(chain.dtype), ranges(chain), len(messages), *given, *outputs)
    marked = torch.from_numpy(lossy).view(g, m) if lossy.any() else None
    return torch.from_numpy(found).view(g, m), marked


@numba.njit(fastmath={"contract"}, forceinline=True)
def _add(total, lost, term):
    """A sum, and what its roundings lost, with another term (D. E. Knuth's two-sum)."""
    found = total + term
    part = found - total
    rounded = (total - (found - part)) + (term - part)
    # infinity less infinity is no rounding
    return found, lost + rounded if np.isfinite(found) else lost


@numba.njit(fastmath={"contract"}, forceinline=True)
def _sum(total, lost, terms, first, count):
    for t in range(first, first + count):
        total, lost = _add(total, lost, terms[t])
    return total, lost


@numba.njit
def _enters(step, q, first, last, low, sizes, x, raw, initial, sums, threshold, reach, reached):
    """Whether some path reaches a state whose sum is below the threshold.

    First those of any of some sequences (`first` to before `last`) of the set are asked for, whatever x forbids, which
    is done once for all of them.
    """
    c, half = sizes[3], len(reached) // 2
    at = first - low
    _advance(step, first, last, sizes, x[:0], raw, initial, reach[at * c : (at + 1) * c], reached[at : at + 1])
    found = False
    for j in range(c):
        found |= sums[j] < threshold and reach[at * c + j]
    if not found:
        return False
    at = q - low + half
    alive = reach[at * c : (at + 1) * c]
    _advance(step, q, q + 1, sizes, x, raw, initial, alive, reached[at : at + 1])
    for j in range(c):
        if sums[j] < threshold and alive[j]:
            return True
    return False


@numba.njit
def _advance(step, first, last, sizes, x, raw, initial, alive, reached):
    """Which states any of some sequences of a set can be in at a step, from what is known of an earlier one."""
    m, c, zero, one = sizes[2], sizes[3], -np.inf if sizes[4] else 0.0, sizes[5] != 0
    i, r = first // m, first % m
    before = np.empty(c, np.bool_)
    while reached[0] < step:
        now = reached[0] + 1
        if now == 0:
            alive[:] = False
            for q in range(first, last):
                for j in range(c):
                    alive[j] |= initial[q * c + j] > 0
        else:
            before[:] = alive
            alive[:] = False
            begin = sizes[9] * (now - 1) + sizes[10] * i
            for k in range(c):
                if before[k]:
                    if sizes[12] == 1:
                        row = raw[begin + k * sizes[11] : begin + k * sizes[11] + c]
                        for j in range(c):
                            alive[j] |= row[j] > zero
                    else:
                        for j in range(c):
                            alive[j] |= raw[begin + k * sizes[11] + j * sizes[12]] > zero
        if len(x):
            at = now * sizes[6] + i * sizes[7] + r * sizes[8]
            for j in range(c):
                alive[j] &= x[at + j] > -np.inf
        elif one and now > 0 and (alive == before).all():
            now = sizes[0]  # and so it stays
        reached[0] = now


@numba.njit(inline="always")
def _walk(rows, q, i, r, low, high, start, slots, block, given, rooms, messages, lossy, final):
    """A block of steps of the q-th sequence, the r-th of the i-th set, or of four from there on."""
    sizes, x, raw, matrix, top, initial, faint, ends, limits = given
    sums, state, shifts, taken, emitted, linear, held, powers, factors, exponents, rest, reach, reached = rooms
    raw, matrix, linear = borrowed(raw), borrowed(matrix), borrowed(linear)
    g, m, c, log, one = sizes[1], sizes[2], sizes[3], sizes[4] != 0, sizes[5] != 0
    stride_x, stride_step, stride_from, stride_to = sizes[6], sizes[9], sizes[11], sizes[12]
    trusted, flush, shallow = limits
    size, apart, steps = g * m * c, room(c), min(block, sizes[0] - start)
    first, last = (q, q + rows) if block > 1 else (max(low, i * m), min(high, (i + 1) * m))
    longest = 0
    for row in range(rows):
        p, at = q + row, start * stride_x + i * sizes[7] + (r + row) * sizes[8]
        count = min(steps, ends[p] - start)
        longest = max(longest, count)
        emissions(x, at, stride_x, count, c, shifts, row * block, emitted, row * block * c)
        if start > 0:
            behind = (start - 1) % slots * size + p * c
            state[row * apart : row * apart + c] = messages[behind : behind + c]
        elif count > 0:
            here, now = row * block, p * c
            z, _ = weigh(initial, now, emitted, here * c, c)
            if z < 2.0**-24:
                shifts[here] = emissions_reached(x, at, initial, now, c, emitted, here * c)
                z, _ = weigh(initial, now, emitted, here * c, c)
            lossy[p] |= 0 < z < shallow
            if faint[p]:
                lossy[p] |= z < 2.0**-600
                for j in range(c):
                    lossy[p] |= x[at + j] > shifts[here]
            factor, powers[p - low] = unit(z)
            settle(initial, now, emitted, here * c, c, factor, flush, state, row * apart, messages, now)
            if not 0 < z < np.inf:
                shifts[here] += np.log(z)
    source, begin, width, most = matrix, i * c * c, c, top[i] if one else 1.0
    for t in range(1 if start == 0 else 0, longest):
        step = start + t
        if not one:
            source, begin, width = raw, (step - 1) * stride_step + i * sizes[10], stride_from
            if held[0] != step or held[1] != i:
                here, most = usable(raw, begin, stride_from, stride_to, c, log)
                taken[t] = 0.0
                if not here:
                    taken[t], most = linear_matrix(raw, begin, stride_from, stride_to, c, log, linear)
                held[0], held[1], held[2], held[3] = step, i, here, most
            most = held[3]
            if held[2] == 0:
                source, begin, width = linear, 0, c
        if rows == 4:
            four_rows(state, source, begin, width, c, sums)
        else:
            one_row(state, source, begin, width, c, sums)
        threshold = trusted * (most if most > 1 else 1.0)
        for row in range(rows):
            p, sum_, here = q + row, row * apart, row * block + t
            if step >= ends[p]:
                continue
            factor, exponent = factors[p - low], powers[p - low] + exponents[p - low]
            z, least = weigh(sums, sum_, emitted, here * c, c)
            if z * factor < 2.0**-24:
                at = step * stride_x + i * sizes[7] + (r + row) * sizes[8]
                shifts[here] = emissions_reached(x, at, sums, sum_, c, emitted, here * c)
                z, _ = weigh(sums, sum_, emitted, here * c, c)
            z *= factor
            if least < threshold and not lossy[p]:
                near = first, last, low, sizes, x, raw, initial
                lossy[p] = _enters(step, p, *near, sums[sum_ : sum_ + c], threshold, reach, reached)
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
    for row in range(rows):
        p = q + row
        if start < ends[p] <= start + steps:
            rest[p - low] = ending(state, row * apart, final[p * c : (p + 1) * c], c)
            lossy[p] |= len(final) > 0 and 0 < rest[p - low] < trusted
        for step in range(max(start, ends[p]), start + steps):
            now = step % slots * size + p * c
            messages[now : now + c] = 0


def _forward(
    low, high, slots, sizes, x, raw, matrix, scale, top, initial, log_top, faint, final, ends, limits, messages, rests,
    found, lossy,
):  # fmt: skip
    """The sequences from `low` to before `high`."""
    v, m, c, one, block = sizes[0], sizes[2], sizes[3], sizes[5] != 0, block_of(sizes)
    total, lost, rest = np.zeros(high - low), np.zeros(high - low), np.zeros(high - low)
    # each sequence's power of two so far; the next factor, and its exponent
    powers, factors, exponents = np.zeros(high - low, np.int64), np.ones(high - low), np.zeros(high - low, np.int64)
    known = np.empty(2 * (high - low) * c, np.bool_), np.full(2 * (high - low), -1)
    sums, state = np.empty(4 * room(c), messages.dtype), np.zeros(4 * room(c), messages.dtype)
    shifts, taken, emitted = np.empty(4 * block), np.zeros(block), np.empty(4 * block * c)
    # the step and the set whose matrix was looked at last, whether it is used where it lies, its largest entry
    linear, held = np.empty(0 if one else c * c, messages.dtype), np.full(4, -1.0)
    given = sizes, x, raw, matrix, top, initial, faint, ends, limits
    rooms = sums, state, shifts, taken, emitted, linear, held, powers, factors, exponents, rest, *known
    for start in range(0, v, block):
        q = low
        while q < high:
            i, r = q // m, q % m
            rows = 4 if r + 4 <= m and q + 4 <= high else 1
            _walk(rows, q, i, r, low, high, start, slots, block, given, rooms, messages, lossy, final)
            for row in range(rows):
                at, count = q + row - low, min(start + block, ends[q + row]) - start
                total[at], lost[at] = _sum(total[at], lost[at], shifts, row * block, count)
                if not one:
                    total[at], lost[at] = _sum(total[at], lost[at], taken, 0, count)
            q += rows
    for q in range(low, high):
        if ends[q] == 0:
            continue
        sum_, rounded = _add(total[q - low], lost[q - low], log_top[q])
        if one and ends[q] > 1:
            sum_, rounded = _add(sum_, rounded, scale[q // m] * (ends[q] - 1))
        rests[q] = left = rest[q - low]
        power = powers[q - low]
        if 0 < left < np.inf:  # so that the logarithm of a power of two is exactly its exponent's
            factor, more = unit(left)
            left, power = 2.0 * factor * left, power + more - 1
        sum_, rounded = _add(sum_, rounded, power * LN2[0])
        sum_, rounded = _add(sum_, rounded, np.log(left))
        found[q] = sum_ + (rounded + power * LN2[1])


walk = numba.njit(inline="always")(_forward)


@cache
def _compiled(dtype: torch.dtype) -> Callable[..., None]:
    real = numba.float64 if dtype == torch.float64 else numba.float32
    many, wide, size, flags = real[::1], numba.float64[::1], numba.int64, numba.boolean[::1]
    whole = numba.int64[::1]
    operands = whole, many, many, many, wide, wide, wide, wide, flags, many, whole, wide
    return compiled(_forward, numba.void(*(size,) * 3, *operands, many, many, wide, flags))
