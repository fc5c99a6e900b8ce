"""What a stream asks of the forward loop: to begin behind a message, posteriors on the way, the message at the end."""

import numpy as np

from .native import called, inlined
from .native_exp import exp64
from .native_vectors import LANES, everywhere, load, store, total

# what is too small for float64 is not impossible
_SMALLEST = np.nextafter(0.0, 1.0)


@called
def continued(q, before, first, chain):
    """Write, in place of p0, what the logarithm of a message, `before`, and a matrix lead to; whether that has failed.

    All of it is float64, and fails for matrices whose entries are near its limits.
    """
    c, log, initial = chain.c, chain.log, chain.initial
    begin, top, zero = q // chain.m * chain.set, -np.inf, -np.inf if log else 0.0
    for k in range(c):
        high = 0.0
        if log:
            high = -np.inf
            for j in range(c):
                high = max(high, float(first[begin + k * chain.row + j * chain.column]))
        top = max(top, before[q * c + k] + high)
    away = 0.0 if top == -np.inf else top
    initial[q * c : (q + 1) * c] = 0.0
    for k in range(c):
        entry = before[q * c + k]
        weight = 1.0 if log else exp64(entry - away)
        for j in range(c):
            raw = float(first[begin + k * chain.row + j * chain.column])
            initial[q * c + j] += exp64(entry + raw - away) if log else weight * raw
    most = 0.0
    for j in range(c):
        most = max(most, initial[q * c + j])
    scale = 1.0 / most if most > 0 else 1.0
    chain.log_top[q] = away + (np.log(most) if most > 0 else 0.0)
    chain.faint[q] = False
    for j in range(c):
        share = initial[q * c + j] * scale
        if share < 2.0**-900:
            for k in range(c):
                some = first[begin + k * chain.row + j * chain.column] > zero and before[q * c + k] > -np.inf
                share = _SMALLEST if some and share < _SMALLEST else share
                chain.faint[q] |= some
        initial[q * c + j] = share
    return not 2.0**-900 < scale < 2.0**900


@inlined
def shares(row, r, c, out, o):
    """`out[o:]` = a row of a room, with zeros behind it, over its sum; 0 where that is 0."""
    sums = everywhere(row, 0.0)
    for j in range(0, c, LANES):
        sums = sums + load(row, r + j, LANES, 0.0)
    found, one = total(sums), row.dtype.type(1)
    factor = one / found if found != 0 else one
    for j in range(0, c, LANES):
        store(out, o + j, c - j, load(row, r + j, LANES, 0.0) * factor)


@called
def logarithm(row, r, x, begin, c, out, o):
    """`out[o:]` = log(row) + x less the logarithm of what it sums to, in float64; -inf where that is -inf."""
    shift = top = -np.inf
    for j in range(c):
        if row[r + j] > 0 and x[begin + j] > shift:
            shift = float(x[begin + j])
    shift = 0.0 if shift == -np.inf else shift
    for j in range(c):
        # the difference first: large x are close to each other
        out[o + j] = entry = np.log(float(row[r + j])) + (x[begin + j] - shift)
        top = entry if entry > top else top
    sum_, away = 0.0, 0.0 if top == -np.inf else top
    for j in range(c):
        sum_ += np.exp(out[o + j] - away)
    away += 0.0 if sum_ == 0 else np.log(sum_)
    for j in range(c):
        out[o + j] -= away
