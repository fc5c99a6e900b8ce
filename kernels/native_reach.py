"""Which states some path can be in: asked only where a sum is so small that something may have been lost of it."""

import numpy as np

from .native import called


@called
def enters(step, q, first, last, low, chain, sums, threshold, rooms):
    """Whether some path reaches a state whose sum is below the threshold.

    First those of any of some sequences (`first` to before `last`) of the set are asked for, whatever x forbids, which
    is done once for all of them: `rooms.reach` has a slot for each step of a block if one group of them comes after the
    other. Then the sequence's own: `rooms.own_reach`. `rooms.reached` says up to which step each is known.
    """
    c, half, at = chain.c, len(rooms.reached) // 2, first - low
    size = len(rooms.reach) // half
    any_, own = rooms.reach[at * size : (at + 1) * size], rooms.own_reach[(q - low) * c : (q - low + 1) * c]
    _advance(step, first, last, chain, chain.x[:0], any_, rooms.reached[at : at + 1])
    if not _small(sums, threshold, any_, step % (size // c) * c):
        return False
    _advance(step, q, q + 1, chain, chain.x, own, rooms.reached[q - low + half : q - low + half + 1])
    return _small(sums, threshold, own, 0)


@called
def _small(sums, threshold, alive, begin):
    """Whether a sum below the threshold is of a state that is `alive[begin:]`."""
    found = False
    for j in range(len(sums)):
        found |= sums[j] < threshold and alive[begin + j]
    return found


@called
def _advance(step, first, last, chain, x, alive, reached):
    """Which states any of some sequences of a set can be in at a step, from what is known of an earlier one.

    `alive` (slots, c): those of the last steps, of which the i-th is in slot `i % slots`.
    """
    c, zero, raw = chain.c, -np.inf if chain.log else 0.0, chain.raw
    i, r, before = first // chain.m, first % chain.m, np.empty(c, np.bool_)
    while reached[0] < step:
        now, same = reached[0] + 1, len(x) == 0 and chain.one and reached[0] >= 0
        slots = len(alive) // c
        old, new = (now - 1) % slots * c, now % slots * c
        for j in range(c):
            before[j], alive[new + j] = alive[old + j], False
        if now == 0:
            for q in range(first, last):
                for j in range(c):
                    alive[new + j] |= chain.initial[q * c + j] > 0
        begin = chain.set * i + (0 if chain.one else chain.step * (now - 1))
        for k in range(c if now > 0 else 0):
            row = begin + k * chain.row
            for j in range(c if before[k] else 0):
                alive[new + j] |= raw[row + j * chain.column] > zero
        for j in range(c):
            if len(x):
                alive[new + j] &= x[now * chain.x_step + i * chain.x_set + r * chain.x_member + j] > -np.inf
            same &= alive[new + j] == before[j]
        # and so it stays
        reached[0] = chain.v if same else now
