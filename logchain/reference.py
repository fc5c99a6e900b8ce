"""Definitions of the library's operations in float64: slow and plain.

Arguments are anything that `numpy.asarray` takes; `bulk` may be a structure of `logchain.transitions`. Leading axes
broadcast; results are natural logarithms (nats) or probabilities in float64. The fast versions are tested against
these, and these against sums over all state paths.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Operands = tuple[ArrayLike, ArrayLike, ArrayLike]


class Messages(NamedTuple):
    """Forward messages [*B, v, c], backward messages [*B, v, c] and the log-partition [*B], in nats."""

    forward: Array
    backward: Array
    log_norm: Array


class Marginals(NamedTuple):
    """State posteriors [*B, v, c], transition posteriors [*B, v-1, c, c] and the log-partition [*B] in nats."""

    states: Array
    transitions: Array
    log_norm: Array


class Path(NamedTuple):
    """State paths [*B, v] and their log-weights [*B] in nats."""

    states: NDArray[np.int64]
    score: Array


class Paths(NamedTuple):
    """State paths [*B, k, v] and their log-weights [*B, k] in nats."""

    states: NDArray[np.int64]
    scores: Array


def matmul(a: ArrayLike, b: ArrayLike) -> Array:
    """The log-semiring matrix product `log(exp(a) @ exp(b))`: [..., m, k] and [..., k, n] give [..., m, n].

    >>> matmul([[0.0, -np.inf]], [[1.0], [5.0]])
    array([[1.]])
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return _logsumexp(a[..., :, :, None] + b[..., None, :, :], axis=-2)


def matrix_product(stack: ArrayLike) -> Array:
    """The ordered product `log(exp(M_1) @ ... @ exp(M_s))`: [..., s, c, c] gives [..., c, c].

    >>> np.exp(matrix_product(np.zeros((3, 2, 2))))
    array([[4., 4.],
           [4., 4.]])
    """
    return prefix_products(stack)[..., -1, :, :]


def prefix_products(stack: ArrayLike) -> Array:
    """The products of the first i matrices, i from 1 to s: [..., s, c, c] gives [..., s, c, c].

    >>> prefix_products([[[1.0]], [[2.0]], [[3.0]]]).ravel()
    array([1., 3., 6.])
    """
    prefixes = np.asarray(stack, np.float64).copy()
    for i in range(1, prefixes.shape[-3]):
        prefixes[..., i, :, :] = matmul(prefixes[..., i - 1, :, :], prefixes[..., i, :, :])
    return prefixes


def product(
    x: ArrayLike, bulk: ArrayLike, p0: ArrayLike, *, log_params: bool = False, lengths: ArrayLike | None = None
) -> Array:
    """The log-partition `log(p0 D_0 P_1 D_1 ... P_{v-1} d_{v-1})` with `D_i = diag(exp x_i)`: see `logchain.product`.

    >>> float(product(np.zeros((3, 2)), np.full((1, 2, 2), 0.5), [0.5, 0.5]))
    0.0
    """
    return forward_backward(x, bulk, p0, log_params=log_params, lengths=lengths).log_norm


def forward_backward(
    x: ArrayLike, bulk: ArrayLike, p0: ArrayLike, *, log_params: bool = False, lengths: ArrayLike | None = None
) -> Messages:
    """The forward and backward messages, whose sum is the joint log-weight of a variable's states.

    A forward message includes its variable's potential, a backward message does not. Past the end both are -inf.

    >>> m = forward_backward(np.zeros((2, 2)), np.full((1, 2, 2), 0.5), [0.5, 0.5])
    >>> np.exp(m.forward[1]), np.exp(m.backward[0])
    (array([0.5, 0.5]), array([1., 1.]))
    """
    x, log_bulk, log_p0, ends = _logs(x, bulk, p0, log_params, lengths)
    v, forward = x.shape[-2], np.full(x.shape, -np.inf)
    forward[..., 0, :] = log_p0 + x[..., 0, :]
    for i in range(1, v):
        step = _logsumexp(forward[..., i - 1, :, None] + log_bulk[..., i - 1, :, :], axis=-2)
        forward[..., i, :] = np.where((ends > i)[..., None], step + x[..., i, :], -np.inf)
    last = np.arange(v) == ends[..., None] - 1
    backward = np.where(last[..., None], np.zeros_like(x), -np.inf)
    for i in reversed(range(v - 1)):
        after = x[..., i + 1, :] + backward[..., i + 1, :]
        step = _logsumexp(log_bulk[..., i, :, :] + after[..., None, :], axis=-1)
        backward[..., i, :] = np.where((ends > i + 1)[..., None], step, backward[..., i, :])
    log_norm = _logsumexp(np.take_along_axis(forward, (ends - 1)[..., None, None], axis=-2)[..., 0, :], axis=-1)
    return Messages(forward, backward, log_norm)


def marginals(
    x: ArrayLike, bulk: ArrayLike, p0: ArrayLike, *, log_params: bool = False, lengths: ArrayLike | None = None
) -> Marginals:
    """The posterior marginals of states and of transitions; all are 0 for an impossible sequence.

    These are the gradients of `product` with respect to `x` and to `log(bulk)`.

    >>> marginals(np.zeros((2, 2)), [[[1.0, 0.0], [0.0, 1.0]]], [0.25, 0.75]).states
    array([[0.25, 0.75],
           [0.25, 0.75]])
    """
    forward, backward, log_norm = forward_backward(x, bulk, p0, log_params=log_params, lengths=lengths)
    x, log_bulk, _, _ = _logs(x, bulk, p0, log_params, lengths)
    norm = np.where(log_norm == -np.inf, 0.0, log_norm)[..., None, None]
    after = x[..., 1:, :] + backward[..., 1:, :]
    transitions = np.exp(forward[..., :-1, :, None] + log_bulk + after[..., None, :] - norm[..., None])
    return Marginals(np.exp(forward + backward - norm), transitions, log_norm)


def log_prob(
    x: ArrayLike,
    bulk: ArrayLike,
    p0: ArrayLike,
    states: ArrayLike,
    *,
    log_params: bool = False,
    lengths: ArrayLike | None = None,
) -> Array:
    """The log posterior probabilities [*S, *B] of paths [*S, *B, v], in which -1 is no state.

    >>> log_prob(np.zeros((2, 2)), [[[1.0, 0.0], [0.0, 1.0]]], [0.25, 0.75], [[1, 1], [0, 1]])
    array([-0.28768207,        -inf])
    """
    log_norm = product(x, bulk, p0, log_params=log_params, lengths=lengths)
    x, log_bulk, log_p0, ends = _logs(x, bulk, p0, log_params, lengths)
    states = np.asarray(states)
    log_probs = np.full(states.shape[:-1], -np.inf)
    log_p0 = np.broadcast_to(log_p0, (*ends.shape, x.shape[-1]))
    log_bulk = np.broadcast_to(log_bulk, (*ends.shape, *log_bulk.shape[-3:]))
    for index in np.ndindex(*log_probs.shape):
        b = index[states.ndim - x.ndim + 1 :]
        path, steps = states[index][: ends[b]], np.arange(int(ends[b]))
        if path.min() >= 0:
            weight = log_p0[b][path[0]] + x[b][steps, path].sum() + log_bulk[b][steps[:-1], path[:-1], path[1:]].sum()
            log_probs[index] = weight if weight == -np.inf else weight - log_norm[b]
    return log_probs


def viterbi(
    x: ArrayLike, bulk: ArrayLike, p0: ArrayLike, *, log_params: bool = False, lengths: ArrayLike | None = None
) -> Path:
    """The path of the largest weight; ties go to the lowest state, at the last variable first. -1 is no state.

    >>> path = viterbi(np.zeros((3, 2)), [[[0.9, 0.1], [0.2, 0.8]]], [0.4, 0.6])
    >>> path.states, path.score.round(4)
    (array([1, 1, 1]), np.float64(-0.9571))
    """
    x, log_bulk, log_p0, ends = _logs(x, bulk, p0, log_params, lengths)
    c, message = x.shape[-1], log_p0 + x[..., 0, :]
    before, states = np.zeros(x.shape, np.int64), np.full(x.shape[:-1], -1)
    for i in range(1, x.shape[-2]):
        terms, inside = message[..., :, None] + log_bulk[..., i - 1, :, :], (ends > i)[..., None]
        before[..., i, :] = np.where(inside, terms.argmax(-2), np.arange(c))
        message = np.where(inside, terms.max(-2) + x[..., i, :], message)
    state, score = message.argmax(-1), message.max(-1)
    for i in reversed(range(x.shape[-2])):
        states[..., i] = np.where((ends > i) & (score > -np.inf), state, -1)
        state = np.take_along_axis(before[..., i, :], state[..., None], -1)[..., 0]
    return Path(states, score)


def topk_paths(
    x: ArrayLike, bulk: ArrayLike, p0: ArrayLike, k: int, *, log_params: bool = False, lengths: ArrayLike | None = None
) -> Paths:
    """The k paths of the largest weights, in falling order; states -1 and score -inf where fewer are possible.

    >>> topk_paths(np.zeros((2, 2)), [[[0.9, 0.1], [0.2, 0.8]]], [0.4, 0.6], 2).states
    array([[1, 1],
           [0, 0]])
    """
    x, log_bulk, log_p0, ends = _logs(x, bulk, p0, log_params, lengths)
    states, scores = np.full((*x.shape[:-2], k, x.shape[-2]), -1), np.full((*x.shape[:-2], k), -np.inf)
    log_p0 = np.broadcast_to(log_p0, (*x.shape[:-2], x.shape[-1]))
    log_bulk = np.broadcast_to(log_bulk, (*x.shape[:-2], *log_bulk.shape[-3:]))
    for b in np.ndindex(*ends.shape):
        # the k best paths, with their weights, that end in each state
        best: list[list[tuple[float, tuple[int, ...]]]] = [[(w, (j,))] for j, w in enumerate(log_p0[b] + x[b][0])]
        for i in range(1, int(ends[b])):
            longer = [
                [
                    (weight + log_step + x[b][i, j], (*path, j))
                    for paths, log_step in zip(best, log_bulk[b][i - 1, :, j], strict=True)
                    for weight, path in paths
                ]
                for j in range(x.shape[-1])
            ]
            best = [sorted(paths, key=lambda path: -path[0])[:k] for paths in longer]
        possible = (path for paths in best for path in paths if path[0] > -np.inf)
        ranked = sorted(possible, key=lambda path: -path[0])[:k]
        for rank, (scores[b][rank], path) in enumerate(ranked):
            states[b][rank, : ends[b]] = path
    return Paths(states, scores)


def entropy(
    x: ArrayLike, bulk: ArrayLike, p0: ArrayLike, *, log_params: bool = False, lengths: ArrayLike | None = None
) -> Array:
    """The entropy `-sum p log p` of the posterior over state paths: the log-partition minus their mean log-weight.

    >>> float(entropy(np.zeros((3, 2)), np.full((1, 2, 2), 0.5), [1.0, 0.0]).round(4))
    1.3863
    """
    chain = x, bulk, p0
    return 0.0 - _mean_log_prob(chain, chain, log_params, lengths)


def kl_divergence(p: Operands, q: Operands, *, log_params: bool = False, lengths: ArrayLike | None = None) -> Array:
    """The divergence `sum p log(p / q)` of the posteriors over state paths; +inf if `q` forbids a path that `p` allows.

    >>> x, bulk = np.zeros((3, 2)), np.full((1, 2, 2), 0.5)
    >>> float(kl_divergence((x, bulk, [0.5, 0.5]), (x, bulk, [0.75, 0.25])).round(4))
    0.1438
    """
    p_under_p, p_under_q = (_mean_log_prob(p, chain, log_params, lengths) for chain in (p, q))
    return p_under_p - p_under_q


def _mean_log_prob(p: Operands, q: Operands, log_params: bool, lengths: ArrayLike | None) -> Array:
    """The expected log-probability in q of a path of p; 0 where none is possible in p, -inf where q forbids one."""
    p, q = ((_lowered(chain[0]), *chain[1:]) for chain in (p, q))
    states, transitions, log_norm = marginals(*p, log_params=log_params, lengths=lengths)
    x, log_bulk, log_p0, ends = _logs(*q, log_params, lengths)
    mean, norm = np.zeros(ends.shape), product(*q, log_params=log_params, lengths=lengths)
    for shares, weight in ((states, x), (transitions, log_bulk), (states[..., 0, :], log_p0)):
        terms = np.where(shares > 0, shares, 0.0) * np.where(shares > 0, weight, 0.0)
        mean += terms.sum(tuple(range(ends.ndim, terms.ndim)))
    possible = mean - np.where(mean == -np.inf, 0.0, norm)
    return np.where(log_norm == -np.inf, 0.0, possible)


def _lowered(x: ArrayLike) -> Array:
    """Potentials shifted to a largest entry of 0 in each step (if it is finite), which leaves posteriors unchanged."""
    x = np.asarray(x, np.float64)
    top = x.max(-1, keepdims=True)
    lowered: Array = x - np.where(np.isneginf(top), 0.0, top)
    return lowered


def _logs(
    x: ArrayLike, bulk: ArrayLike, p0: ArrayLike, log_params: bool, lengths: ArrayLike | None
) -> tuple[Array, Array, Array, NDArray[np.int64]]:
    """The operands as float64 logarithms, 0 past a sequence's end, and the lengths in the shape of the batch."""
    bulk = _dense(bulk, log_params)
    x, bulk, p0 = (np.asarray(array, np.float64) for array in (x, bulk, p0))
    if not log_params:
        with np.errstate(divide="ignore"):
            bulk, p0 = np.log(bulk), np.log(p0)
    batch, (v, c) = x.shape[:-2], x.shape[-2:]
    bulk = np.broadcast_to(bulk, (*bulk.shape[:-3], v - 1, c, c))
    ends = np.full(batch, v) if lengths is None else np.asarray(lengths)
    ends = np.broadcast_to(ends.reshape(ends.shape + (1,) * (len(batch) - ends.ndim)), batch)
    if lengths is not None:
        inside = (np.arange(v) < ends[..., None])[..., None]
        x, bulk = np.where(inside, x, 0.0), np.where(inside[..., 1:, :, None], bulk, 0.0)
    return x, bulk, p0, ends


def _dense(bulk: Any, log_params: bool) -> Any:
    """The matrices of a structure of `logchain.transitions`, which its `to_dense` defines; others as they are."""
    if not hasattr(bulk, "map"):
        return bulk
    dense = bulk.map(lambda parameter: parameter.detach().double()).to_dense(log_params=log_params)
    return dense.unsqueeze(0) if dense.dim() == 2 else dense


def _logsumexp(array: Array, axis: int) -> Array:
    """`scipy.special.logsumexp` without its warnings where every term is -inf."""
    from scipy.special import logsumexp  # takes longer to import than all of logchain

    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(logsumexp(array, axis=axis))
