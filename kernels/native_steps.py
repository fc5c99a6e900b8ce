"""What one step of a chain does, for the loops that numba compiles: messages times a matrix, emission, scale.

Arrays are flat and contiguous, and a row is told by where it begins. Rows of few states are taken in vectors
(`native_vectors`), and so are those products that need few columns; four long rows at a time are left to the compiler.
Products are float32 or float64, as the messages; an emission's exponential and the weight that it gives are float64, so
that neither underflows where the message does not.
"""

import numba
import numpy as np

from .native_dither import jitter
from .native_exp import bits, exp_for, from_bits
from .native_vectors import (
    LANES,
    entry,
    everywhere,
    fetch,
    flushed,
    larger,
    largest,
    least,
    load,
    load_few,
    smaller,
    store,
    total,
    turned,
    where,
    wide,
)

# bytes that come from memory together
_LINE = 64

_inlined = numba.njit(fastmath={"contract"}, forceinline=True)


@_inlined
def room(c):
    """How far apart rows lie in a room of our own, where whole vectors are written.

    What has been written under a mask is slow to read at once.
    """
    return -(-c // (2 * LANES)) * 2 * LANES


@_inlined
def without_diagonal(matrix, p, c, others, o, diagonal, d):
    """A matrix (c, c) that begins at `p` as its `diagonal[d:]`, a room, and what is beside it, `others[o:]`."""
    for k in range(c):
        copy(matrix, p + k * c, c, others, o + k * c)
        diagonal[d + k], others[o + k * c + k] = matrix[p + k * c + k], 0.0


@_inlined
def four_rows(a, matrix, p, width, c, diagonal, d, out):
    """`out` (4, c) = `a` (4, c) times the matrix (c, c) that begins at `p`, with rows `width` apart; both are rooms.

    And times a diagonal, a room, which comes last: states tend to stay, and behind a large term small ones would be
    lost, all of them and in each step. Last, in one operation with its sum, it leaves them to the rounding.
    """
    j = 0
    while j + 2 * LANES <= c:
        _four_columns(a, matrix, p, width, c, diagonal, d, out, j, LANES, LANES)
        j += 2 * LANES
    if j < c:
        _four_columns(a, matrix, p, width, c, diagonal, d, out, j, c - j, c - j - LANES)


@_inlined
def _four_columns(a, matrix, p, width, c, diagonal, d, out, j, n, rest):
    """The columns of two vectors from the j-th on, with `n` and `rest` entries at most."""
    apart, zero, at = len(a) // 4, everywhere(out, 0.0), p + j
    s00 = s01 = s10 = s11 = s20 = s21 = s30 = s31 = zero
    for k in range(c):
        left, right = load(matrix, at, n, 0.0), load(matrix, at + LANES, rest, 0.0)
        a0, a1, a2, a3 = entry(a, k), entry(a, k + apart), entry(a, k + 2 * apart), entry(a, k + 3 * apart)
        s00, s01, s10, s11 = s00 + a0 * left, s01 + a0 * right, s10 + a1 * left, s11 + a1 * right
        s20, s21, s30, s31 = s20 + a2 * left, s21 + a2 * right, s30 + a3 * left, s31 + a3 * right
        at += width
    left, right = load(diagonal, d + j, LANES, 0.0), load(diagonal, d + j + LANES, LANES, 0.0)
    _last(a, 0, left, right, s00, s01, out, j)
    _last(a, apart, left, right, s10, s11, out, j)
    _last(a, 2 * apart, left, right, s20, s21, out, j)
    _last(a, 3 * apart, left, right, s30, s31, out, j)


@_inlined
def _last(a, row, left, right, s0, s1, out, j):
    """Two vectors of a row of `out`: sums, and a diagonal's share."""
    store(out, row + j, LANES, s0 + load(a, row + j, LANES, 0.0) * left)
    store(out, row + j + LANES, LANES, s1 + load(a, row + j + LANES, LANES, 0.0) * right)


@_inlined
def one_row(a, matrix, p, width, c, diagonal, d, out):
    """The same for one row."""
    j = 0
    while j + 2 * LANES <= c:
        _one_columns(a, matrix, p, width, c, diagonal, d, out, j, LANES, LANES)
        j += 2 * LANES
    if j < c:
        _one_columns(a, matrix, p, width, c, diagonal, d, out, j, c - j, c - j - LANES)


@_inlined
def _one_columns(a, matrix, p, width, c, diagonal, d, out, j, n, rest):
    """As `_four_columns`; four terms at a time, so that none waits for another's sum."""
    zero, at, k = everywhere(out, 0.0), p + j, 0
    s0 = s1 = t0 = t1 = u0 = u1 = v0 = v1 = zero
    while k + 4 <= c:
        x, y, z, w, second, third = a[k], a[k + 1], a[k + 2], a[k + 3], at + width, at + 2 * width
        fourth = third + width
        s0, s1 = s0 + x * load(matrix, at, n, 0.0), s1 + x * load(matrix, at + LANES, rest, 0.0)
        t0, t1 = t0 + y * load(matrix, second, n, 0.0), t1 + y * load(matrix, second + LANES, rest, 0.0)
        u0, u1 = u0 + z * load(matrix, third, n, 0.0), u1 + z * load(matrix, third + LANES, rest, 0.0)
        v0, v1 = v0 + w * load(matrix, fourth, n, 0.0), v1 + w * load(matrix, fourth + LANES, rest, 0.0)
        k, at = k + 4, fourth + width
    while k < c:
        x = a[k]
        s0, s1 = s0 + x * load(matrix, at, n, 0.0), s1 + x * load(matrix, at + LANES, rest, 0.0)
        k, at = k + 1, at + width
    left, right = load(diagonal, d + j, LANES, 0.0), load(diagonal, d + j + LANES, LANES, 0.0)
    _last(a, 0, left, right, (s0 + t0) + (u0 + v0), (s1 + t1) + (u1 + v1), out, j)


@_inlined
def turn(matrix, p, width, c, out, o):
    """`out[o:]` (c, c) = the transpose of the matrix that begins at `p`, with rows `width` apart."""
    for k in range(0, c, LANES):
        for j in range(0, c, LANES):
            at, n = p + k * width + j, c - j
            row0, row1 = load(matrix, at, n, 0.0), load(matrix, at + width, n if k + 1 < c else 0, 0.0)
            at, left = at + 2 * width, c - k
            row2, row3 = (
                load(matrix, at, n if left > 2 else 0, 0.0),
                load(matrix, at + width, n if left > 3 else 0, 0.0),
            )
            at += 2 * width
            row4, row5 = (
                load(matrix, at, n if left > 4 else 0, 0.0),
                load(matrix, at + width, n if left > 5 else 0, 0.0),
            )
            at += 2 * width
            row6, row7 = (
                load(matrix, at, n if left > 6 else 0, 0.0),
                load(matrix, at + width, n if left > 7 else 0, 0.0),
            )
            columns, into = turned((row0, row1, row2, row3, row4, row5, row6, row7)), o + j * c + k
            store(out, into, left, columns[0])
            store(out, into + c, left if n > 1 else 0, columns[1])
            store(out, into + 2 * c, left if n > 2 else 0, columns[2])
            store(out, into + 3 * c, left if n > 3 else 0, columns[3])
            store(out, into + 4 * c, left if n > 4 else 0, columns[4])
            store(out, into + 5 * c, left if n > 5 else 0, columns[5])
            store(out, into + 6 * c, left if n > 6 else 0, columns[6])
            store(out, into + 7 * c, left if n > 7 else 0, columns[7])


@_inlined
def row_by_rows(a, begin, matrix, p, width, c, out, into):
    """`out[into:]` (c) = `a[begin:]` (c) times the matrix's transpose."""
    zero = everywhere(out, 0.0)
    k, at = 0, p
    while k + 4 <= c:
        s0 = s1 = s2 = s3 = zero
        for j in range(0, c, LANES):
            n, row, place = c - j, load(a, begin + j, c - j, 0.0), at + j
            s0 = s0 + row * load(matrix, place, n, 0.0)
            s1 = s1 + row * load(matrix, place + width, n, 0.0)
            s2 = s2 + row * load(matrix, place + 2 * width, n, 0.0)
            s3 = s3 + row * load(matrix, place + 3 * width, n, 0.0)
        here = into + k
        out[here], out[here + 1], out[here + 2], out[here + 3] = total(s0), total(s1), total(s2), total(s3)
        k, at = k + 4, at + 4 * width
    while k < c:
        s0 = zero
        for j in range(0, c, LANES):
            s0 = s0 + load(a, begin + j, c - j, 0.0) * load(matrix, at + j, c - j, 0.0)
        out[into + k] = total(s0)
        k, at = k + 1, at + width


@_inlined
def largest_of(row, begin, c):
    """The largest entry; of NaNs nothing is known."""
    high = everywhere(row, -np.inf)
    for j in range(0, c, LANES):
        high = larger(high, load(row, begin + j, c - j, -np.inf))
    return largest(high)


@_inlined
def emissions(x, begin, stride, steps, c, shifts, first, out, into, number, onward):
    """`out[into:]` (steps, c) = `exp(x - shift)` of rows `stride` apart, in float64, and a vector behind them.

    `shifts[first:]`: their largest, and the jitter of the steps from the one of a `number` on. A single row's next one
    lies `onward` from it, and the rows of other sequences, far away, come between.
    """
    if steps == 1:
        for j in range(0, c, _LINE // x.itemsize):
            fetch(x, begin + onward + j)
    for t in range(steps):
        at, place = begin + t * stride, into + t * c
        shift = float(largest_of(x, at, c)) + jitter(number + t, c)
        shifts[first + t] = shift
        # -inf - (-inf) is no zero
        away = 0.0 if shift == -np.inf else shift
        if c < LANES:
            store(out, place, LANES, wide(load_few(x, at, c, 0.0)) - away)
        else:
            for j in range(0, c, LANES):
                store(out, place + j, c - j, exp_for(wide(load(x, at + j, c - j, 0.0)) - away, x[begin]))
    if c < LANES:  # exponentials of several steps at once
        for e in range(into, into + steps * c, LANES):
            store(out, e, LANES, exp_for(load(out, e, LANES, 0.0), x[begin]))


@numba.njit(fastmath={"contract"})
def emissions_reached(x, begin, reached, r, c, out, into, number):
    """The same of one row, with the largest x where something is reached (`reached[r:]`) for the shift; 0 elsewhere."""
    shift = -np.inf
    for j in range(c):
        if reached[r + j] != 0 and not x[begin + j] <= shift:
            shift = float(x[begin + j])
    shift += jitter(number, c)
    away = 0.0 if shift == -np.inf else shift
    for j in range(c):
        entry = float(x[begin + j])
        out[into + j] = exp_for(entry - away, x[begin]) if reached[r + j] != 0 or np.isnan(entry) else 0.0
    return shift


@_inlined
def weigh(rows, r, emission, e, c):
    """The largest of the rows times the emission, in float64, and the least of the rows."""
    high, low = everywhere(emission, 0.0), everywhere(rows, np.inf)
    for j in range(0, c, LANES):
        row = load(rows, r + j, c - j, np.inf)
        low = smaller(low, row)
        high = larger(high, wide(load(rows, r + j, c - j, 0.0)) * load(emission, e + j, c - j, 0.0))
    return largest(high), least(low)


@_inlined
def settle(rows, r, emission, e, c, factor, flush, state, a, message, s):
    """`state[a:]` and `message[s:]` = the rows times the emission times a factor, 0 where that is below `flush`."""
    for j in range(0, c, LANES):
        weight = wide(load(rows, r + j, c - j, 0.0)) * load(emission, e + j, c - j, 0.0) * factor
        found = flushed(weight, weight, flush)
        store(state, a + j, LANES, found)
        store(message, s + j, c - j, found)


@_inlined
def unit(z):
    """A power of two that brings z to between 1/2 and 1, and minus its exponent.

    For 0, infinity and NaN it is 0, 0 and NaN, and minus its exponent 0.
    """
    if 0 < z < np.inf:
        return unit_of(z)
    return 1 / z if z != 0 else 0.0, np.int64(0)


@_inlined
def unit_of(z):
    """The same where z is known to be positive and finite."""
    exponent = min((bits(z) >> np.int64(52)) - np.int64(1022), np.int64(1022))
    return from_bits((np.int64(1023) - exponent) << np.int64(52)), exponent


@_inlined
def ending(message, s, final, f, c):
    """The sum of a last message, weighted where there are weights."""
    found = 0.0
    for j in range(c):
        found += float(message[s + j]) * (float(final[f + j]) if len(final) > 0 else 1.0)
    return found


@_inlined
def return_to(behind, b, reached, r, x, begin, emission, e, c, source, s):
    """`source` R = B times the emission, brought to 1, where something is reached; 0 elsewhere.

    `behind` B (c) float64; what no path enters has a B of any size, and no influence.
    """
    z, most = _weigh_reached(behind, b, reached, r, emission, e, c)
    if most < 2.0**-24:
        emissions_reached(x, begin, reached, r, c, emission, e, 0)
        z, most = _weigh_reached(behind, b, reached, r, emission, e, c)
    factor, _ = unit(z)
    for j in range(0, c, LANES):
        weight = load(behind, b + j, c - j, 0.0) * load(emission, e + j, c - j, 0.0) * factor
        store(source, s + j, LANES, where(load(reached, r + j, c - j, 0.0), weight))


@_inlined
def _weigh_reached(rows, b, reached, r, emission, e, c):
    """The largest of the rows times the emission, and of the emission, where something is reached."""
    high = most = everywhere(emission, 0.0)
    for j in range(0, c, LANES):
        some, here = load(reached, r + j, c - j, 0.0), load(emission, e + j, c - j, 0.0)
        high = larger(high, where(some, load(rows, b + j, c - j, 0.0) * here))
        most = larger(most, where(some, here))
    return largest(high), largest(most)


@_inlined
def pull(message, s, ahead, a, weight, c, behind, b):
    """`behind` B, so that the posterior, message times B, sums to the weight; the factor that does it.

    All is 0 where nothing comes back.
    """
    sums = everywhere(behind, 0.0)
    for j in range(0, c, LANES):
        sums = sums + wide(load(message, s + j, c - j, 0.0)) * wide(load(ahead, a + j, c - j, 0.0))
    found = total(sums)
    factor = 0.0 if found == 0 else weight / found
    for j in range(0, c, LANES):
        store(behind, b + j, LANES, wide(load(ahead, a + j, c - j, 0.0)) * factor)
    return factor


@_inlined
def posterior(message, s, behind, b, weight, c, out, o):
    """`out` = message times B times the weight; 0 where the message is, whatever B is."""
    for j in range(0, c, LANES):
        row = load(message, s + j, c - j, 0.0)
        store(out, o + j, c - j, where(row, wide(row) * load(behind, b + j, c - j, 0.0) * weight))


@_inlined
def copy(row, r, c, out, o):
    """`out[o:]` = a row."""
    for j in range(0, c, LANES):
        store(out, o + j, c - j, load(row, r + j, c - j, 0.0))


@_inlined
def scaled(row, r, c, factor, out, o):
    """`out[o:]` = a row times a factor, both in rooms."""
    for j in range(0, c, LANES):
        store(out, o + j, LANES, wide(load(row, r + j, LANES, 0.0)) * factor)
