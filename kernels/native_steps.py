"""What one step of a chain does to a message, for the loops that numba compiles: emission, scale, posterior.

Arrays are as in `native_rows`. Messages are float32 or float64; an emission's exponential and the weight that it gives
are float64, so that neither underflows where the message does not.
"""

import numpy as np

from .native import called, inlined
from .native_dither import jitter
from .native_exp import bits, exp_for, from_bits
from .native_vectors import (
    LANES,
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
    where,
    wide,
)

# bytes that come from memory together
_LINE = 64


@inlined
def largest_of(row, begin, c):
    """The largest entry; of NaNs nothing is known."""
    high = everywhere(row, -np.inf)
    for j in range(0, c, LANES):
        high = larger(high, load(row, begin + j, c - j, -np.inf))
    return largest(high)


@inlined
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


@called
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


@inlined
def weigh(rows, r, emission, e, c):
    """The largest of the rows times the emission, in float64, and the least of the rows."""
    high, low = everywhere(emission, 0.0), everywhere(rows, np.inf)
    for j in range(0, c, LANES):
        row = load(rows, r + j, c - j, np.inf)
        low = smaller(low, row)
        high = larger(high, wide(load(rows, r + j, c - j, 0.0)) * load(emission, e + j, c - j, 0.0))
    return largest(high), least(low)


@inlined
def settle(rows, r, emission, e, c, factor, flush, state, a, message, s):
    """`state[a:]` and `message[s:]` = the rows times the emission times a factor, 0 where that is below `flush`."""
    for j in range(0, c, LANES):
        weight = wide(load(rows, r + j, c - j, 0.0)) * load(emission, e + j, c - j, 0.0) * factor
        found = flushed(weight, weight, flush)
        store(state, a + j, LANES, found)
        store(message, s + j, c - j, found)


@inlined
def unit(z):
    """A power of two that brings z to between 1/2 and 1, and minus its exponent.

    For 0, infinity and NaN it is 0, 0 and NaN, and minus its exponent 0.
    """
    if 0 < z < np.inf:
        return unit_of(z)
    return 1 / z if z != 0 else 0.0, np.int64(0)


@inlined
def unit_of(z):
    """The same where z is known to be positive and finite."""
    exponent = min((bits(z) >> np.int64(52)) - np.int64(1022), np.int64(1022))
    return from_bits((np.int64(1023) - exponent) << np.int64(52)), exponent


@inlined
def ending(message, s, final, f, c):
    """The sum of a last message, weighted where there are weights."""
    found = 0.0
    for j in range(c):
        found += float(message[s + j]) * (float(final[f + j]) if len(final) > 0 else 1.0)
    return found


@inlined
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


@inlined
def _weigh_reached(rows, b, reached, r, emission, e, c):
    """The largest of the rows times the emission, and of the emission, where something is reached."""
    high = most = everywhere(emission, 0.0)
    for j in range(0, c, LANES):
        some, here = load(reached, r + j, c - j, 0.0), load(emission, e + j, c - j, 0.0)
        high = larger(high, where(some, load(rows, b + j, c - j, 0.0) * here))
        most = larger(most, where(some, here))
    return largest(high), largest(most)


@inlined
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


@inlined
def posterior(message, s, behind, b, weight, c, out, o):
    """`out` = message times B times the weight; 0 where the message is, whatever B is."""
    for j in range(0, c, LANES):
        row = load(message, s + j, c - j, 0.0)
        store(out, o + j, c - j, where(row, wide(row) * load(behind, b + j, c - j, 0.0) * weight))
