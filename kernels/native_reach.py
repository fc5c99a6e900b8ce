"""Which states some path can be in: asked only where a sum is so small that something may have been lost of it."""

import numpy as np

from .native import called


@called
def enters(step, q, first, last, low, chain, sums, threshold, rooms):
    """Whether some path reaches a state whose sum is below the threshold.

    First those of any of some sequences (`first` to before `last`) of the set are asked for, whatever x forbids, which
    is done once for all of them.
    """
    c, reach, reached = chain.c, rooms.reach, rooms.reached
    at, half = first - low, len(reached) // 2
    _advance(step, first, last, chain, chain.x[:0], reach[at * c : (at + 1) * c], reached[at : at + 1])
    found = False
    for j in range(c):
        found |= sums[j] < threshold and reach[at * c + j]
    if not found:
        return False
    at = q - low + half
    alive = reach[at * c : (at + 1) * c]
    _advance(step, q, q + 1, chain, chain.x, alive, reached[at : at + 1])
    for j in range(c):
        if sums[j] < threshold and alive[j]:
            return True
    return False


@called
def _advance(step, first, last, chain, x, alive, reached):
    """Which states any of some sequences of a set can be in at a step, from what is known of an earlier one."""
    c, zero, raw = chain.c, -np.inf if chain.log else 0.0, chain.raw
    i, r, before = first // chain.m, first % chain.m, np.empty(c, np.bool_)
    while reached[0] < step:
        now, same = reached[0] + 1, len(x) == 0 and chain.one and reached[0] >= 0
        for j in range(c):
            before[j], alive[j] = alive[j], False
        if now == 0:
            for q in range(first, last):
                for j in range(c):
                    alive[j] |= chain.initial[q * c + j] > 0
        begin = chain.set * i + (0 if chain.one else chain.step * (now - 1))
        for k in range(c if now > 0 else 0):
            row = begin + k * chain.row
            for j in range(c if before[k] else 0):
                alive[j] |= raw[row + j * chain.column] > zero
        for j in range(c):
            if len(x):
                alive[j] &= x[now * chain.x_step + i * chain.x_set + r * chain.x_member + j] > -np.inf
            same &= alive[j] == before[j]
        # and so it stays
        reached[0] = chain.v if same else now
