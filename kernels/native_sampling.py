"""`sampling.draw_block` compiled for the CPU by numba: one loop over sequences, steps and draws.

Where there are draws enough, a step's cumulated weights are made for all states that come after it, a vector of them at
a time, and each draw counts in one column, first every eighth sum and then those between; otherwise columns are
made as they are first asked for.
Shapes and numerics are those of `sampling`, from which it differs by the rounding of sums. Sequences, or where there
are few of them draws, are divided among `torch.get_num_threads()` threads.
Cost: v c^2 multiply-adds a sequence and v c / 8 comparisons a draw, or v c a draw. In log space each
multiply-add is an exponential. Tested against `sampling.draw_block`.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from .chain import Chain
from .native import compiled, cut, spread
from .plain.sample import Transitions

# draws to a state from which on all columns are made: made alone, one takes as long as eight of them
_FULL = 0.125

# multiply-adds from which on another thread is worth its start
_SHARE = 2**20

# of so many sums one is compared first
_WIDTH = 8

# a weight that many nats below the largest is zero
_FLUSH = 80.0


def draw_block(
    chain: Chain,
    start: int,
    stop: int,
    messages: Tensor,
    redone: Tensor | None,
    transitions: Transitions,
    uniform: Tensor,
    drawn: Tensor,
) -> None:
    """The states of a block of steps, as in `sampling`."""
    assert redone is not None
    steps, g, m, count = uniform.shape
    none = chain.new(0, 0, 0, 0)
    some, every = bool(redone.any()), bool(redone.all())
    linear = none if every else transitions(start, stop, log=False)
    logs = transitions(start, stop, log=True) if some else none
    ends = torch.full((g, m), chain.v, device="cpu") if chain.ends is None else chain.ends[..., 0].contiguous()
    operands = (messages, redone, linear, logs, ends, uniform, drawn)
    arrays = tuple(tensor.numpy() for tensor in operands)
    least = torch.finfo(chain.dtype).tiny
    full = count >= _FULL * chain.c
    work = steps * g * m * chain.c * (chain.c if full else count)
    parts = max(1, min(torch.get_num_threads(), work // _SHARE, g * m * count))
    sets = min(parts, g * m)
    ranges = [(*q, *d) for q in cut(g * m, sets) for d in cut(count, min(count, parts // sets))]
    spread(_compiled(), ranges, start, full, least, *arrays)


@cache
def _compiled() -> Callable[..., None]:
    return compiled(_draw)


def _draw(low, high, begin, end, start, full, least, messages, redone, linear, logs, ends, uniform, drawn):  # type: ignore[no-untyped-def]
    """The sequences from `low` to before `high`, and of each the draws from `begin` to before `end`."""
    m, c = messages.shape[2:]
    length = -(-c // _WIDTH) * _WIDTH
    zeros = np.zeros(c, messages.dtype)
    # behind the last sums lie some that no threshold passes
    all_rows = np.full(length * c if full else 0, np.inf, messages.dtype)
    columns = np.full(min(c, end - begin) * length, np.inf, messages.dtype)
    slots, made = np.empty(c, np.int64), np.empty(c, np.int64)
    for q in range(low, high):
        g, r = q // m, q % m
        log, final = redone[g, r], ends[g, r] - 1
        made[:] = -1
        for i in range(uniform.shape[0] - 1, -1, -1):
            step = start + i
            if step > final:
                drawn[g, r, begin:end, i] = 0
                continue
            message, u = messages[step, g, r], uniform[i, g, r]
            every = full and not log and step < final
            if every:
                matrix, rows = linear[i % linear.shape[0], g], all_rows.reshape(length, c)
                above, k = zeros, 0
                while k + 4 <= c:  # four rows at a time, so that what is above is read once for four
                    a0, a1, a2, a3 = message[k], message[k + 1], message[k + 2], message[k + 3]
                    row0, row1, row2, row3 = matrix[k], matrix[k + 1], matrix[k + 2], matrix[k + 3]
                    sum0, sum1, sum2, sum3 = rows[k], rows[k + 1], rows[k + 2], rows[k + 3]
                    for j in range(c):
                        total = above[j] + a0 * row0[j]
                        sum0[j] = total
                        total += a1 * row1[j]
                        sum1[j] = total
                        total += a2 * row2[j]
                        sum2[j] = total
                        total += a3 * row3[j]
                        sum3[j] = total
                    above = sum3
                    k += 4
                while k < c:
                    a0, row0, sum0 = message[k], matrix[k], rows[k]
                    for j in range(c):
                        sum0[j] = above[j] + a0 * row0[j]
                    above = sum0
                    k += 1
            table, stride, count = (all_rows, c, 0) if every else (columns, 1, 0)
            for d in range(begin, end):
                z = 0 if step == final else drawn[g, r, d, i + 1]
                if not every and made[z] != step:
                    made[z], slots[z] = step, count * length
                    column = columns[slots[z] : slots[z] + c]
                    count += 1
                    total = zeros[0]
                    if log:
                        top = -np.inf
                        for k in range(c):
                            column[k] = message[k] if step == final else message[k] + logs[i % logs.shape[0], g, k, z]
                            top = column[k] if column[k] > top else top
                        for k in range(c):
                            if column[k] - top > -_FLUSH:
                                total += math.exp(column[k] - top)
                            column[k] = total
                    elif step == final:
                        for k in range(c):
                            total += message[k]
                            column[k] = total
                    else:
                        matrix = linear[i % linear.shape[0], g]
                        for k in range(c):
                            total += message[k] * matrix[k, z]
                            column[k] = total
                at = z if every else slots[z]
                # rounded to zero the threshold would take in a state of weight zero
                threshold = messages.dtype.type(max((1.0 - u[d]) * table[at + (c - 1) * stride], least))
                threshold = min(threshold, table[at + (c - 1) * stride])
                # counted, not searched: what a draw decides is not to be predicted
                first = 0
                for k in range(_WIDTH - 1, length - 1, _WIDTH):
                    first += table[at + k * stride] < threshold
                first *= _WIDTH
                found = first
                for k in range(_WIDTH - 1):
                    found += table[at + (first + k) * stride] < threshold
                drawn[g, r, d, i] = found
