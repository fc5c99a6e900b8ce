"""Steps of chains of at most eight states, whose message stays in a register: each step waits for the one before.

    U_i = S_{i-1} P_i      S_i = U_i exp(x_i - max x_i)      and back      B_{i-1} = (B_i exp(x_i - max x_i)) P_i^T

S and B are float64, whatever the arithmetic's dtype, and so have room for many steps between two scales. Messages are
brought to 1, and posteriors to their sum, where they are stored, which holds up no other step. A step that is not
ordinary (see `native_forward`: sums that are small, emissions where nothing is reached, what is no number) is left to
the loops for any chain, with the rest of its block. Tested against `logchain.reference`.
"""

import numpy as np

from .native import called, inlined
from .native_rows import room
from .native_steps import unit, unit_of
from .native_vectors import (
    LANES,
    flushed,
    lane,
    larger,
    largest,
    least,
    load,
    load_few,
    store,
    store_few,
    total,
    turned,
    where,
    wide,
)

# the largest entry of S is kept within these, and brought to what is between where it leaves them: it mostly falls
_LOW, _SCALE, _HIGH = 1.0, 2.0**100, 2.0**200
_EXPONENT = 100


@inlined
def rows_of(matrix, p, width, c):
    """The rows of a matrix (c, c) that begins at `p`, `width` apart, in float64; zeros behind them."""
    row0, row1 = wide(load_few(matrix, p, c, 0.0)), wide(load_few(matrix, p + width, c if c > 1 else 0, 0.0))
    row2 = wide(load_few(matrix, p + 2 * width, c if c > 2 else 0, 0.0))
    row3 = wide(load_few(matrix, p + 3 * width, c if c > 3 else 0, 0.0))
    row4 = wide(load_few(matrix, p + 4 * width, c if c > 4 else 0, 0.0))
    row5 = wide(load_few(matrix, p + 5 * width, c if c > 5 else 0, 0.0))
    row6 = wide(load_few(matrix, p + 6 * width, c if c > 6 else 0, 0.0))
    row7 = wide(load_few(matrix, p + 7 * width, c if c > 7 else 0, 0.0))
    return row0, row1, row2, row3, row4, row5, row6, row7


@inlined
def times(row, rows, c):
    """A row times a matrix."""
    found = (lane(row, 0) * rows[0] + lane(row, 1) * rows[1]) + (lane(row, 2) * rows[2] + lane(row, 3) * rows[3])
    if c > 4:
        right = (lane(row, 4) * rows[4] + lane(row, 5) * rows[5]) + (lane(row, 6) * rows[6] + lane(row, 7) * rows[7])
        found = found + right
    return found


@inlined
def narrow(chain):
    """Whether a chain's steps are walked here: few states, and matrices that can be used where they lie."""
    return chain.c <= LANES and (chain.one or not chain.log and (chain.column == 1 or chain.c == 1))


@called
def beyond_reach(chain):
    """What, added to sums, leaves out of a minimum lanes behind their end, and states that none leads to.

    Of each set (g, lanes) where all steps share a matrix; else of all, whatever their matrices.
    """
    c, zero = chain.c, -np.inf if chain.log else 0.0
    found = np.full((chain.g if chain.one else 1) * LANES, np.inf)
    for e in range(len(found) // LANES * c if narrow(chain) else 0):
        i, j = e // c, e % c
        for k in range(c):
            if not chain.one or chain.raw[i * chain.set + k * chain.row + j * chain.column] > zero:
                found[i * LANES + j] = 0.0
    return found


@inlined
def _largest_in(rows):
    high0, high1 = larger(rows[0], rows[1]), larger(rows[2], rows[3])
    high2, high3 = larger(rows[4], rows[5]), larger(rows[6], rows[7])
    return largest(larger(larger(high0, high1), larger(high2, high3)))


@called
def ordinary_steps(t, count, start, q, low, chain, rooms, limits, out):
    """Walk the q-th sequence on, from the t-th step of a block that begins at `start`; at which step it stops.

    That is `count`, or where a step is not ordinary.
    """
    g, m, c, one, raw = chain.g, chain.m, chain.c, chain.one, chain.raw
    i, r, p = q // m, q % m, q - low
    emitted, state, messages, posteriors = rooms.emitted, rooms.state, out.messages, out.posteriors
    trusted, flush, shallow = limits
    rows = rows_of(chain.matrix, i * c * c if one else 0, c, c if one else 0)
    if len(chain.exact) > 0:
        rows = rows_of(chain.exact, i * c * c, c, c)
    most = chain.top[i] if one else 1.0
    beyond = load(rooms.beyond, i * LANES if one else 0, LANES, 0.0)
    row = wide(load(state, 0, LANES, 0.0)) * (rooms.factors[p] * _SCALE)
    high, power = largest(row), rooms.powers[p] + rooms.exponents[p] - _EXPONENT
    if t >= count or not 0 < high < np.inf:
        return t
    floor, threshold = max(2.0**-24, shallow * most), trusted * max(most, 1.0)
    size, place = g * m * c, (start + t) % out.slots * g * m * c + q * c
    behind = out.slots * size
    while t < count:
        if not one:
            rows = rows_of(raw, (start + t - 1) * chain.step + i * chain.set, chain.row, c)
            most = _largest_in(rows)
            if not 2.0**-60 <= most <= 2.0**60:
                break
            rooms.taken[t], floor, threshold = 0.0, max(2.0**-24, shallow * most), trusted * max(most, 1.0)
        sums = times(row, rows, c)
        weights = sums * load_few(emitted, t * c, c, 0.0)
        z = largest(weights)
        if not (high * floor < z < np.inf and least(sums + beyond) >= high * threshold):
            break
        factor, more = unit_of(z)
        message = weights * factor
        message = flushed(message, message, flush)
        store_few(messages, place, c, message)
        if len(posteriors):
            at = (start + t) * out.step + i * out.set + r * out.member
            store_few(posteriors, at, c, message * (1.0 / total(message)))
        row, high = weights, z
        if not _LOW < z < _HIGH:
            factor *= _SCALE
            row, high, power = weights * factor, z * factor, power + more - _EXPONENT
        t, place = t + 1, place + size
        if place >= behind:
            place -= behind
    factor, more = unit(high)
    left = row * factor
    store(state, 0, LANES, flushed(left, left, flush))
    rooms.powers[p], rooms.exponents[p], rooms.factors[p] = power + more, 0, 1.0
    return t


@inlined
def narrow_back(chain, rooms, into):
    """The same on the way back, where float64's exponents are wider than the messages', and no gradients are added."""
    return narrow(chain) and rooms.source.itemsize == 4 and (len(into.bulk) == 0 or chain.m == 1)


@inlined
def _counted(counts, before, source, c):
    """Counts, a tuple of rows, and the message before, transposed, times `source`."""
    n0, n1 = counts[0] + lane(before, 0) * source, counts[1] + lane(before, 1) * source
    n2, n3 = counts[2] + lane(before, 2) * source, counts[3] + lane(before, 3) * source
    n4, n5, n6, n7 = counts[4], counts[5], counts[6], counts[7]
    if c > 4:
        n4, n5 = n4 + lane(before, 4) * source, n5 + lane(before, 5) * source
        n6, n7 = n6 + lane(before, 6) * source, n7 + lane(before, 7) * source
    return n0, n1, n2, n3, n4, n5, n6, n7


@inlined
def _write(row, linear, by_log, n, out, o):
    store_few(out, o, n, where(row, row * linear) if by_log else where(linear, row))


@inlined
def _write_counts(before, source, rows, by_log, c, out, o):
    """`out[o:]` (c, c) = the message before, transposed, times `source`: see `from_linear`."""
    _write(lane(before, 0) * source, rows[0], by_log, c, out, o)
    _write(lane(before, 1) * source, rows[1], by_log, c if c > 1 else 0, out, o + c)
    _write(lane(before, 2) * source, rows[2], by_log, c if c > 2 else 0, out, o + 2 * c)
    _write(lane(before, 3) * source, rows[3], by_log, c if c > 3 else 0, out, o + 3 * c)
    if c > 4:
        _write(lane(before, 4) * source, rows[4], by_log, c, out, o + 4 * c)
        _write(lane(before, 5) * source, rows[5], by_log, c if c > 5 else 0, out, o + 5 * c)
        _write(lane(before, 6) * source, rows[6], by_log, c if c > 6 else 0, out, o + 6 * c)
        _write(lane(before, 7) * source, rows[7], by_log, c if c > 7 else 0, out, o + 7 * c)


@called
def ordinary_steps_back(t, start, q, low, chain, rooms, messages, weight, into):
    """Walk the q-th sequence back, from the t-th step of a block that begins at `start`; at which step it stops.

    That is -1, or the chain's first step, or where a step is not ordinary.
    """
    g, m, c, one, raw, emitted = chain.g, chain.m, chain.c, chain.one, chain.raw, rooms.emitted
    i, r, own, size, given = q // m, q % m, (q - low) * room(c), g * m * c, weight[q]
    end = 0 if start == 0 else -1
    if given == 0 or t <= end:
        return t
    rows = rows_of(raw, 0, 0, 0)
    columns = rows_of(rooms.turned, i * c * c if one else 0, c, c if one else 0)
    counts, behind, factor = rows, load_few(rooms.behind, own, c, 0.0), given
    while t > end:
        step, now = start + t, (start + t) * size + q * c
        message, before = wide(load_few(messages, now, c, 0.0)), wide(load_few(messages, now - size, c, 0.0))
        emission = load_few(emitted, t * c, c, 0.0)
        source = where(message, behind * emission)
        if not one:
            rows = rows_of(raw, (step - 1) * chain.step + i * chain.set, chain.row, c)
            if not 2.0**-60 <= _largest_in(rows) <= 2.0**60:
                break
            columns = turned(rows)
        ahead = times(source, columns, c)
        found = total(before * ahead)
        if not (2.0**-500 < found < 2.0**500 and largest(where(message, emission)) >= 2.0**-24):
            break
        if len(into.x):
            at = step * into.x_step + i * into.x_set + r * into.x_member
            store_few(into.x, at, c, where(message, message * behind * factor))
        behind, factor = ahead, given / found
        if not 2.0**-100 < found < 2.0**100:
            behind, factor = ahead * (1.0 / found), given
        if len(into.counts):
            counts = _counted(counts, before, source * (given / found), c)
        if len(into.bulk):
            at = (step - 1) * into.step + i * into.set
            _write_counts(before, source * (given / found), rows, into.by_log, c, into.bulk, at)
        t -= 1
    store(rooms.behind, own, LANES, behind * (factor / given))
    for k in range(c if len(into.counts) else 0):
        at = i * c * c + k * c
        store_few(into.counts, at, c, load_few(into.counts, at, c, 0.0) + counts[k])
    return t
