"""Which chains need sums in float64 to keep float32's contract.

Where states mix, what a step's rounding does is forgotten a few steps later. Where they hardly do (transitions that are
nearly certain, groups of states that are seldom left, cycles), roundings add up for as long as a chain remembers, in
posteriors too. And what seldom happens may be less than the rounding of what mostly does, and be lost in each step.

Three looks at the matrices tell. How much do entries weigh together that a sum in float32 may lose? Do transitions
that are not much weaker than a state's likeliest one lead from all states to one group, and not in turns? And in long
chains: do two messages that start differently, passed on without emissions, come nearer to each other in each step? (A
contraction, after G. Birkhoff, which is measured here and not bounded.)

Cost: a few readings of up to eight matrices; in long chains a few products of the two messages with a matrix where
states mix, elsewhere 1/64 of the chain's, or 64 of them. Tested against `logchain.reference` through the chains.
"""

from collections.abc import Callable
from functools import cache

import numba
import numpy as np
import torch

from .chain import Chain
from .dither import phase
from .native import called, compiled
from .native_chain import MANY, Array, at, empty, linear_matrix
from .native_exp import from_bits
from .native_vectors import LANES

# variables times states up to which no rounding adds up to more than the contract has room for
_SHORT = 2**10

# beside the likeliest transition, the weakest that a sum does not lose; what the lost ones may weigh together, times
# the square root of a chain's length; and what is taken for a stream's length
_LOST, _SHARE, _STREAM = 2.0**-21, 2.0**-20, 2.0**20

# likewise, the weakest that leads anywhere: where each step has a matrix of its own, and where all have one, if the
# likeliest is to another state, or to the same: the diagonal is multiplied apart then
_WEAK, _WEAK_AWAY, _WEAK_AT_HOME = 2.0**-16, 2.0**-13, 2.0**-19

# variables from which on messages have to come nearer, by step, and by how little
_LONG, _LITTLE = 2**11, 2.0**-9

# steps from one look to the next, and in all: in a chain, at least, and in a stream
_LOOK, _LEAST, _ENDLESS = 32, 64, 512

# messages that are so near to each other are taken for equal
_EQUAL = 2.0**-10

# how many matrices are looked at: one for so many steps, and so many at most
_STEPS, _PROBES = 128, 8

_phase = called(phase)


def sums_of(dtype: torch.dtype, raw: int, sizes: Array, *, endless: bool = False) -> Array:
    """Nothing, of the dtype that the sums of a chain's steps need; `raw`, `sizes`: see `native_chain.walked`.

    `endless`: the chain is a piece of a stream with one matrix, of however many steps.
    """
    v, _, _, c = sizes[:4].tolist()
    if is_short(dtype, _LONG if endless else v, c):
        return empty(dtype)
    return empty(torch.float64 if _loop()(raw, sizes, endless, empty(dtype)) else dtype)


def needs_float64(chain: Chain) -> bool:
    """Whether sums are to be of more than the chain's dtype."""
    bulk = chain.bulk.to(chain.dtype).reshape(len(chain.bulk), chain.g, chain.c, chain.c)
    shape = chain.v, chain.g, chain.m, chain.c, int(chain.log_params), int(len(bulk) == 1)
    sizes = np.array([*shape, 0, 0, 0, *bulk.stride()])
    return sums_of(chain.dtype, bulk.data_ptr(), sizes).itemsize > chain.dtype.itemsize


def is_short(dtype: torch.dtype, v: int, c: int) -> bool:
    """Whether no rounding adds up to more than the contract has room for, or nothing is gained by another dtype."""
    return dtype == torch.float64 or c <= LANES or v * c <= _SHORT  # few states are walked in float64 anyway


def _needs(raw_at, sizes, endless, none):
    """Whether one of the looks says so; see `sums_of`."""
    v, g, m, c, log, one = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4] != 0, sizes[5] != 0
    raw, steps, shares = at(raw_at, MANY, none), 1 if one else v - 1, 0.0
    if steps == 0:
        return False
    probes = min(_PROBES, 1 + g * m * v // _STEPS, g * steps)
    for probe in range(probes):
        place = g * probe // probes * sizes[10] + steps * probe // probes * sizes[9]
        share, apart = _look_at(raw, place, sizes[11], sizes[12], c, log, one)
        shares = max(share, shares)
        if apart or shares * np.sqrt(_STREAM if endless else v) > _SHARE:
            return True
    if not endless and v <= _LONG:
        return False
    probes = min(probes, 4)
    most = _ENDLESS if endless else max(_LEAST, g * m * v // (128 * probes))
    for probe in range(probes):
        begin, first = g * probe // probes * sizes[10], steps * probe // probes
        if _stays_apart(raw, begin, first, steps, most, log, sizes):
            return True
    return False


@called
def _look_at(raw, place, stride_from, stride_to, c, log, one):
    """The share of a matrix that sums may lose, and whether what is not weak leads to several groups, or in turns."""
    strong, into, alive = np.zeros(c * c, np.bool_), np.zeros(c, np.int64), np.zeros(c, np.bool_)
    real = raw.dtype.type
    zero, lost, all_ = real(-np.inf if log else 0.0), 0.0, 0.0
    for k in range(c):
        begin, high = place + k * stride_from, zero
        for j in range(c):
            value = raw[begin + j * stride_to]
            high = value if value > high else high
        alive[k] = zero < high < np.inf
        if not alive[k]:
            continue
        weak = _WEAK
        if one:
            weak = _WEAK_AT_HOME if raw[begin + k * stride_to] == high else _WEAK_AWAY
        least, losing = (high + np.log(weak), high + np.log(_LOST)) if log else (high * weak, high * _LOST)
        least_, losing_, none = real(least), real(losing), real(high - 60.0 if log else zero)
        for j in range(c):
            value = raw[begin + j * stride_to]
            some = value > least_
            strong[k * c + j] = some
            into[j] += some
            if value > none:
                weight = _power(value - high) if log else value / high
                all_ += weight
                lost += weight if value < losing_ else 0.0
    share, living = lost / max(all_, 1.0), alive.sum()
    for j in range(c):
        if into[j] == living and alive[j]:
            return share, False
    return share, living > 0 and _apart(strong, alive, c)


@called
def _power(exponent):
    """e to a power above -700, but for 6 %: a float64 whose bits are linear in it."""
    return from_bits(np.int64((exponent * 1.4426950408889634 + 1023.0) * 2.0**52))


@called
def _apart(strong, alive, c):
    """Whether no living state can be reached from all others, or that only in turns."""
    known, queue, root = np.zeros(c, np.bool_), np.empty(c, np.int64), 0
    for k in range(c):  # the last state from which a search back had to begin is reached from all, if one is
        if alive[k] and not known[k]:
            root = k
            _search(strong, alive, c, k, True, known, queue, queue[:0])
    known[:] = False
    if _search(strong, alive, c, root, True, known, queue, queue[:0]) < alive.sum():
        return True
    level, period = np.zeros(c, np.int64), 0
    known[:] = False
    count = _search(strong, alive, c, root, False, known, queue, level)
    for k in queue[:count]:
        for j in range(c):
            if strong[k * c + j] and known[j]:
                a, b = abs(level[k] + 1 - level[j]), period
                while b > 0:
                    a, b = b, a % b
                period = a
    return period != 1


@called
def _search(strong, alive, c, root, backward, known, queue, level):
    """Mark what can be reached from a state, or leads to it, in the order of steps; how many there are."""
    known[root], queue[0], count, done = True, root, 1, 0
    while done < count:
        k, done = queue[done], done + 1
        for j in range(c):
            if alive[j] and not known[j] and strong[j * c + k if backward else k * c + j]:
                known[j], queue[count], count = True, j, count + 1
                if len(level) > 0:
                    level[j] = level[k] + 1
    return count


@called
def _stays_apart(raw, begin, first, steps, most, log, sizes):
    """Whether two messages hardly come nearer in a set's matrices (steps, c, c), `most` of them from the `first` on."""
    c = sizes[3]
    matrix, a, b = np.empty(c * c), np.empty(c), np.full(c, 1.0 / c)
    for j in range(c):
        a[j] = 1.0 + _phase(j * j)
    a /= a.sum()
    start = last = np.abs(a - b).sum()
    for k in range(most):
        if k == 0 or steps > 1:
            place = begin + (first + k) % steps * sizes[9]
            linear_matrix(raw, place, sizes[11], sizes[12], c, log, matrix)
        a, b = _passed_on(a, matrix), _passed_on(b, matrix)
        distance = np.abs(a - b).sum()
        if not distance > _EQUAL * start:  # nor where it is no number
            return False
        if (k + 1) % _LOOK == 0:
            if distance > (1.0 - _LITTLE) ** _LOOK * last:
                return True
            last = distance
    return False


@called
def _passed_on(message, matrix):
    """The message times the matrix, over its sum."""
    c = len(message)
    found = np.zeros(c)
    for k in range(c):
        for j in range(c):
            found[j] += message[k] * matrix[k * c + j]
    return found / found.sum()


@cache
def _loop() -> Callable[..., bool]:
    return compiled(_needs, numba.boolean(numba.int64, numba.int64[::1], numba.boolean, numba.float32[::1]))
