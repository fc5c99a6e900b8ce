"""One step of eight sequences in log space, for the loops that numba compiles: sums over the entries that are not zero.

A message is float64, a vector of eight sequences for each state (c, 8), flat. Each sum is taken relative to its own
largest term, so that it is exact whatever distances a message spans. -inf is zero; NaN stays.
"""

from typing import NamedTuple

import numba
import numpy as np

from .native import INNER, called, inlined
from .native_chain import Array
from .native_exp import LN2, bits, exp64, from_bits
from .native_vectors import LANES, everywhere, larger, load, store, total

# added to an integer's bits, and taken from the float that they make, it leaves the integer as a float
_ROUND = 1.5 * 2.0**52

# the bits of sqrt(1/2), rounded down
_HALF = 0x3FE6A09E667F3BCC

_dividing = numba.njit(forceinline=True, error_model="numpy", **INNER)


class Links(NamedTuple):
    """The entries of a matrix that are not zero: where the states before and after lie in messages, and logarithms."""

    before: Array
    after: Array
    logs: Array


class Rooms(NamedTuple):
    """Of each link its `terms`; of each state the `tops` and `sums` of its terms; vectors all. `one`: one."""

    terms: Array
    tops: Array
    sums: Array
    one: Array


@called
def rooms_of(c):
    """Memory for any matrix; what a sparse one does not need is not touched."""
    states, pairs = c * LANES, c * c
    links = Links(np.empty(pairs, np.int64), np.empty(pairs, np.int64), np.empty(pairs))
    rooms = Rooms(np.empty(pairs * LANES), np.empty(states), np.empty(states), np.empty(LANES))
    return links, rooms


@called
def find_links(raw, step, i, log, links):
    """List a matrix's entries that are not zero; how many there are."""
    c, count, zero = raw.shape[-1], 0, -np.inf if log else 0.0
    for j in range(c):
        for k in range(c):
            entry = np.float64(raw[step, i, j, k])
            if entry != zero:
                links.before[count], links.after[count] = j * LANES, k * LANES
                links.logs[count] = entry if log else np.log(entry)
                count += 1
    return count


@_dividing
def over(a, b):
    """`a / b`, and 0 where either is."""
    return a / b if a != 0 and b != 0 else 0.0


@_dividing
def _log(s):
    """`log(s)` of 0, a normal number or NaN: 2 atanh((m - 1) / (m + 1)) + k log(2) for s = 2^k m, m near 1."""
    number = bits(s)
    k = (number - np.int64(_HALF)) >> np.int64(52)
    m = from_bits(number - (k << np.int64(52)))
    exponent = from_bits(bits(_ROUND) + k) - _ROUND
    r = (m - 1.0) / (m + 1.0)
    z = r * r
    p = z * (1 / 19) + 1 / 17
    p = p * z + 1 / 15
    p = p * z + 1 / 13
    p = p * z + 1 / 11
    p = p * z + 1 / 9
    p = p * z + 1 / 7
    p = p * z + 1 / 5
    p = p * z + 1 / 3
    found = exponent * LN2[0] + (2.0 * r + (2.0 * r * z * p + exponent * LN2[1]))
    return found if s > 0 else s - np.inf


@inlined
def pass_on(message, at, source, target, logs, count, rooms):
    """`message[at:]` (c, 8) = `log sum exp(message + log P)` over the links from each source to a target.

    The terms, as shares of the largest, and their sums stay in the rooms.
    """
    terms, tops, sums = rooms.terms, rooms.tops, rooms.sums
    tops[:] = -np.inf
    sums[:] = 0.0
    for e in range(count):
        term, to = load(message, at + source[e], LANES, 0.0) + logs[e], target[e]
        store(terms, e * LANES, LANES, term)
        store(tops, to, LANES, larger(load(tops, to, LANES, 0.0), term))
    for k in range(len(tops)):  # -inf less -inf is no zero
        tops[k] = 0.0 if tops[k] == -np.inf else tops[k]
    for e in range(count):
        store(terms, e * LANES, LANES, load(terms, e * LANES, LANES, 0.0) - load(tops, target[e], LANES, 0.0))
    exponentiate(terms[: max(0, count) * LANES])
    for e in range(count):
        to = target[e]
        store(sums, to, LANES, load(sums, to, LANES, 0.0) + load(terms, e * LANES, LANES, 0.0))
    found = message[at : at + len(sums)]
    for k in range(len(found)):
        found[k] = _log(sums[k]) + tops[k]


@inlined
def exponentiate(values):
    """In place; of at most 0."""
    for k in range(len(values)):
        values[k] = exp64(values[k])


@inlined
def weigh(message, at, lane, x, step, i, r, live):
    """Add x of a step, less its largest entry at a state that is not zero, to a lane of a message, and return that.

    A sequence that is not alive is -inf and 0.
    """
    c, shift = x.shape[-1], -np.inf
    for j in range(c if live else 0):
        entry, reached = np.float64(x[step, i, r, j]), message[at + j * LANES + lane] > -np.inf
        shift = entry if (entry > shift and reached) or entry != entry else shift
    shift = 0.0 if shift == -np.inf else shift
    for j in range(c):
        here = at + j * LANES + lane
        message[here] = message[here] + (np.float64(x[step, i, r, j]) - shift) if live else -np.inf
    return shift


@inlined
def normalise(message, at, rooms):
    """Take the largest state of each sequence, which is left in `rooms.one`, out of a message; -inf stays.

    One state that is NaN makes all so.
    """
    top, c = rooms.one, len(rooms.sums) // LANES
    top[:] = -np.inf
    for j in range(c):
        for lane in range(LANES):
            entry = message[at + j * LANES + lane]
            top[lane] = entry if entry > top[lane] or entry != entry else top[lane]
    for lane in range(LANES):
        top[lane] = 0.0 if top[lane] == -np.inf else top[lane]
    shift = load(top, 0, LANES, 0.0)
    for j in range(c):
        store(message, at + j * LANES, LANES, load(message, at + j * LANES, LANES, 0.0) - shift)


@inlined
def shared(states, s, terms, t):
    """The sum over the sequences of a state's vector times a term's."""
    return total(load(states, s, LANES, 0.0) * load(terms, t, LANES, 0.0))


@inlined
def share_out(states, active, rooms):
    """`states = active softmax(states)` over the states of each sequence, for weights `active` (8)."""
    normalise(states, 0, rooms)
    exponentiate(states)
    sums = everywhere(states, 0.0)
    for j in range(0, len(states), LANES):
        sums = sums + load(states, j, LANES, 0.0)
    store(rooms.one, 0, LANES, sums)
    for lane in range(LANES):
        rooms.one[lane] = over(active[lane], rooms.one[lane])
    scale = load(rooms.one, 0, LANES, 0.0)
    for j in range(0, len(states), LANES):
        store(states, j, LANES, load(states, j, LANES, 0.0) * scale)
