"""The truth in 34-digit decimals, whose exponents do not run out: sums over all state paths and plain linear chains.

Nothing here takes a maximum, a shift or a logarithm on the way; no line is shared with the library or its reference.
"""

import itertools
from collections.abc import Callable
from decimal import Context, Decimal, localcontext
from typing import NamedTuple

import numpy as np

DIGITS = Context(prec=34)


class Truth(NamedTuple):
    """Log-partition [*B] in nats, state posteriors [*B, v, c] and transition posteriors [*B, v-1, c, c]."""

    log_norm: np.ndarray
    states: np.ndarray
    transitions: np.ndarray


def all_paths(x, bulk, p0, *, log_params=False, lengths=None) -> Truth:
    """Visit each of the `c**v` state paths: for small chains only."""
    return _each_sequence(_all_paths, x, bulk, p0, log_params, lengths)


def paths(x, bulk, p0, *, log_params=False) -> dict[tuple[int, ...], Decimal]:
    """The weight of each of the `c**v` state paths of one sequence: x (v, c), bulk (v - 1 or 1, c, c), p0 (c)."""
    with localcontext(DIGITS):
        return _paths(*_weights(x, bulk, p0, log_params))


def chain(x, bulk, p0, *, log_params=False, lengths=None) -> Truth:
    """The recursion forward and backward on linear weights: checked against `all_paths`, for larger chains."""
    return _each_sequence(_chain, x, bulk, p0, log_params, lengths)


def matmul(a, b) -> tuple[np.ndarray, np.ndarray]:
    """`log(exp(a) @ exp(b))` [..., m, n] and every term's share of its sum [..., m, k, n], 0 where the sum is 0."""
    with localcontext(DIGITS):
        terms = _exp(a)[..., :, :, None] * _exp(b)[..., None, :, :]
        sums = terms.sum(-2)
        shares = terms / np.where(sums > 0, sums, Decimal(1))[..., None, :]
        return _log(sums), shares.astype(np.float64)


def messages(x, bulk, p0, *, log_params=False) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward messages (v, c) of one sequence in nats."""
    with localcontext(DIGITS):
        forward, backward = _messages(*_weights(x, bulk, p0, log_params))
        return _log(np.array(forward)), _log(np.array(backward))


def entropy(x, bulk, p0, *, log_params=False) -> float:
    """The entropy of the paths of one sequence in nats."""
    with localcontext(DIGITS):
        weights = _weights(x, bulk, p0, log_params)
        total, states, transitions = _chain(*weights)
        if not total:
            return 0.0
        found = total.ln()
        for chances, weight in zip((states, transitions, states[0]), weights, strict=True):
            found -= sum(
                (chance / total * w.ln() for chance, w in zip(chances.flat, weight.flat, strict=True) if chance),
                Decimal(0),
            )
        return float(found)


def _weights(x, bulk, p0, log_params) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x (v, c), bulk (v - 1, c, c) and p0 (c) as decimals, of one sequence."""
    x, bulk, p0 = (np.asarray(array, np.float64) for array in (x, bulk, p0))
    v, c = x.shape
    weights = _exp if log_params else np.vectorize(Decimal, otypes=[object])
    bulk = np.broadcast_to(weights(bulk) if bulk.size else bulk, (v - 1, c, c))
    return _exp(x), bulk, weights(p0)


def _paths(x, bulk, p0):
    (v, c), found = x.shape, {}
    for path in itertools.product(range(c), repeat=v):
        found[path] = p0[path[0]] * x[0, path[0]]
        for i in range(1, v):
            found[path] *= bulk[i - 1, path[i - 1], path[i]] * x[i, path[i]]
    return found


def _all_paths(x, bulk, p0):
    v, c = x.shape
    total, states, transitions = Decimal(0), _zeros(v, c), _zeros(v - 1, c, c)
    for path, weight in _paths(x, bulk, p0).items():
        total += weight
        for i in range(v):
            states[i, path[i]] += weight
        for i in range(v - 1):
            transitions[i, path[i], path[i + 1]] += weight
    return total, states, transitions


def _chain(x, bulk, p0):
    v, c = x.shape
    states, transitions = _zeros(v, c), _zeros(v - 1, c, c)
    forward, backward = _messages(x, bulk, p0)
    for i in range(v):
        states[i] = forward[i] * backward[i]
    for i in range(v - 1):
        transitions[i] = forward[i][:, None] * bulk[i] * (x[i + 1] * backward[i + 1])[None, :]
    return forward[-1].sum(), states, transitions


def _messages(x, bulk, p0):
    v, c = x.shape
    forward, backward = [p0 * x[0]], [_zeros(c) + 1]
    for i in range(1, v):
        forward.append((forward[-1] @ bulk[i - 1]) * x[i])
    for i in range(v - 1, 0, -1):
        backward.insert(0, bulk[i - 1] @ (x[i] * backward[0]))
    return forward, backward


def _each_sequence(one: Callable, x, bulk, p0, log_params, lengths) -> Truth:
    """Run `one` on every sequence, cut to its length; posteriors are 0 behind the end and where nothing is possible."""
    x, bulk, p0 = (np.asarray(array, np.float64) for array in (x, bulk, p0))
    batch, (v, c) = x.shape[:-2], x.shape[-2:]
    ends = np.full(batch, v)
    if lengths is not None:
        lengths = np.asarray(lengths)
        ends[...] = lengths.reshape(lengths.shape + (1,) * (len(batch) - lengths.ndim))
    out = Truth(np.zeros(batch), np.zeros((*batch, v, c)), np.zeros((*batch, v - 1, c, c)))
    with localcontext(DIGITS):
        weights = _exp if log_params else np.vectorize(Decimal, otypes=[object])
        bulk = np.broadcast_to(weights(bulk) if bulk.size else bulk, (*batch, v - 1, c, c))
        p0 = np.broadcast_to(weights(p0), (*batch, c))
        for index in np.ndindex(batch):
            end = ends[index]
            total, states, transitions = one(_exp(x[index][:end]), bulk[index][: end - 1], p0[index])
            out.log_norm[index] = float(total.ln())
            if total > 0:
                out.states[index][:end] = (states / total).astype(np.float64)
                out.transitions[index][: end - 1] = (transitions / total).astype(np.float64)
    return out


def _zeros(*shape: int) -> np.ndarray:
    return np.full(shape, Decimal(0), dtype=object)


def _exp(array) -> np.ndarray:
    array = np.asarray(array, np.float64)
    return np.vectorize(lambda value: Decimal(value).exp(), otypes=[object])(array) if array.size else array


def _log(array: np.ndarray) -> np.ndarray:
    return np.vectorize(lambda value: float(Decimal(value).ln()), otypes=[np.float64])(array) if array.size else array
