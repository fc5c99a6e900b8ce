"""The entropy of the posterior over paths, and the divergence of two, from forward messages S and posteriors g.

Its last state has the probability S(z) / sum S under S of the last step, and each state before, given the next one,

    r_i(k | j) = S_{i-1}(k) P_i(k, j) / U_i(j)      U_i = S_{i-1} P_i      sum_j r_i(k | j) g_i(j) = g_{i-1}(k)

so that a path z of the posterior has, with a sum over all steps i but the first,

    -E[log p(z)] = log sum S_last - <g_0, log S_0> + sum_i <g_i, log(U_i / S_i) - S_{i-1} (P_i log P_i) / U_i>

which is the entropy. The divergence is the same with S, U and log P of the second chain, less the entropy. Scales of S
cancel in each step, and no large log Z is subtracted. Arithmetic has the dtype of the chain. Where its floats cannot
hold that, it is done in float64 from logarithms of messages, pair by pair of states: the last state's entropy, and the
mean of -log r_i, or for the divergence that of log(r_i / r'_i).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import chain_kernels, in_c, message_kernels, messages_of
from ..chain import Chain
from ..message import Kept
from ..numbers import exp_shifted, relative_logs, trusted_sum
from . import backward as plain_backward
from . import forward as plain_forward

# entries of messages, and of pairs of states, that are computed together
_MESSAGES, _PAIRS = 2**17, 2**20

# logarithms of entries between which no sum of products underflows
_SPREAD = {torch.float32: 40.0, torch.float64: 400.0}

# of messages of C loops: the inverse of what their sums are scaled to, and 2 * 2^(TOP - DEEPEST), the least that holds
# no raised emission, see kernels/cpu/c/forward.h
_SCALE = {torch.float32: 2.0**-100, torch.float64: 2.0**-900}
_LEAST = {torch.float32: 2.0**-7, torch.float64: 2.0**-59}


class _Weights(NamedTuple):
    """P (s, g, c, c) of each chain and its logarithms, L of the mean, and factors P and P L, or one of both together.

    `deep`: a chain has entries that may be lost in sums. `sources`: the states (k, c) that some matrix leads from.
    """

    matrices: list[Tensor]
    logs: list[Tensor]
    terms: Tensor
    factors: list[Tensor]
    deep: bool
    sources: Tensor


# (before, after, weights, states) to the terms of a block of steps
Terms = Callable[[list[Tensor], list[Tensor], _Weights, Tensor], Tensor]


def values(chains: Sequence[Chain]) -> tuple[Tensor, Tensor]:
    """The entropy (g, m) of a chain, or the divergence of a first from a second, and which sequences underflow."""
    p = chains[0]
    kept, states = _passes(chains, *chain_kernels(p.x))
    norms = torch.stack([one.log_norm for one in kept])
    redone = torch.stack([one.redone for one in kept]).any(0)
    infinite = _misses(*chains) if len(chains) > 1 else torch.zeros_like(redone)
    axis, value = int(p.g == 1), torch.full_like(norms[0], math.nan)
    index = torch.arange(value.shape[axis], device=value.device)
    if in_c(value):
        if not redone.all():
            value = _value(chains, [one.messages for one in kept], states, _linear)
        exact = (redone | ~value.isfinite()) & norms.isfinite().all(0) & ~infinite
        index = exact.any(1 - axis).nonzero()[:, 0]
    for some in index.split(max(1, _PAIRS // (p.c**2 * value.shape[1 - axis]))) if len(index) else ():
        parts = [_part(chain, some) for chain in chains]
        if len(chains) > 1 and in_c(value):  # right in every entry, also where the first chain alone has paths
            chosen, posteriors = _passes(parts, plain_forward.forward, plain_backward.backward)
        else:
            chosen, posteriors = [_chosen(one, some) for one in kept], _take(states, some)
        logs = [one.logs(slice(None)) for one in chosen]
        value.index_copy_(axis, some, _value(parts, logs, posteriors, _by_pairs))
    for other in norms[1:]:
        infinite = infinite | (other == -math.inf)
        value = torch.where(other.isnan(), math.nan, value.masked_fill(infinite, math.inf))
    return torch.where(norms[0].isnan(), math.nan, value.masked_fill(norms[0] == -math.inf, 0.0)), redone


def _passes(
    chains: Sequence[Chain], forward: Callable[..., Any], backward: Callable[..., Any]
) -> tuple[list[Kept], Tensor]:
    """The messages of each chain, and the posteriors (v, g, m, c) of the first."""
    p = chains[0]
    kept: list[Kept] = [forward(chain, keep=messages_of(chain, chain.v))[0] for chain in chains]
    states = messages_of(p, p.v)
    backward(p, kept[0], torch.ones_like(kept[0].log_norm), None, states, None)
    return kept, states


def _part(chain: Chain, index: Tensor) -> Chain:
    """Some members of the only set, or some sets, in float64."""
    g, m, c = chain.g, chain.m, chain.c
    bulk, x = chain.bulk.reshape(-1, g, c, c), chain.x.reshape(-1, g, m, c)
    return replace(
        chain,
        x=_take(x, index),
        bulk=bulk if g == 1 else bulk[:, index],
        p0=_take(chain.p0.expand(*chain.lead, c).reshape(g, m, c), index),
        ends=None if chain.ends is None else _take(chain.ends, index),
        dtype=torch.float64,
    )


def _chosen(kept: Kept, index: Tensor) -> Kept:
    redone = _take(kept.redone[..., None], index)[..., 0]
    return kept._replace(messages=_take(kept.messages, index), redone=redone)


def _take(values: Tensor, index: Tensor) -> Tensor:
    return values[..., index, :] if values.shape[-3] == 1 else values[..., index, :, :]


def _value(chains: Sequence[Chain], messages: list[Tensor], states: Tensor, terms: Terms) -> Tensor:
    """The values (g, m), not finite where `terms` fail, from messages and posteriors (v, g, m, c)."""
    p, (v, g, m, c) = chains[0], states.shape
    rare, linear = torch.finfo(p.dtype).eps ** 2, terms is _linear
    value = torch.zeros(g, m, dtype=torch.float64, device=states.device)
    for i, each in enumerate(messages):
        last, posterior = _at_ends(each, p), states[0] if linear else _at_ends(states, p)
        if linear:
            outer = (torch.stack([each[0], last]).double() * _SCALE[p.dtype]).log_()
            logs, top = relative_logs(outer[0], -1, log=True)
            if i > 0:
                logs.masked_fill_(each[0] < _LEAST[p.dtype], math.nan)
            total = torch.logsumexp(outer[1], -1) - top[..., 0]
        else:
            logs, total = torch.log_softmax(last, -1), torch.zeros_like(value)
        total -= (logs * posterior).masked_fill_(posterior <= rare, 0.0).sum(-1)
        value = total if i == 0 else total - value
    one_matrix, weights = all(len(chain.bulk) == 1 for chain in chains), None
    count = max(1, (_MESSAGES if linear else _PAIRS // c) // (g * c * (m if one_matrix else max(m, c))))
    for start in range(1, v, count):
        steps, before = slice(start, min(v, start + count)), slice(start - 1, min(v, start + count) - 1)
        if weights is None or not one_matrix:
            weights = _weights(chains, before, g, linear)
        sides = [each[before] for each in messages], [each[steps] for each in messages]
        each = terms(*sides, weights, states[steps]).mul_(states[steps])
        mean = each.sum(-1)
        if not in_c(mean) or not mean.isfinite().all():  # for impossible states and padding
            mean = each.masked_fill_(states[steps] <= rare, 0.0).sum(-1)
        value += mean.sum(0, dtype=torch.float64)
    return value


def _at_ends(values: Tensor, chain: Chain) -> Tensor:
    """Values (g, m, c) of each sequence's last step."""
    if chain.ends is None:
        return values[-1]
    return values.gather(0, (chain.ends - 1).clamp(0, len(values) - 1).expand(1, *values.shape[1:]))[0]


def _weights(chains: Sequence[Chain], before: slice, g: int, linear: bool) -> _Weights:
    """The matrices that lead on from these steps, or the only ones."""
    matrices: list[Tensor] = []
    logs: list[Tensor] = []
    lows: list[Tensor] = []
    deep = False
    for chain in chains:
        weights = (chain.bulk if len(chain.bulk) == 1 else chain.bulk[before]).to(chain.dtype)
        weights = weights.reshape(-1, g, chain.c, chain.c)
        top, far = weights.amax((-2, -1), keepdim=True), _SPREAD[chain.dtype]
        if chain.log_params:
            log = weights - top.masked_fill_(top == -math.inf, 0.0)
            weights = exp_shifted(log, log.new_zeros(()), torch.empty_like(log), torch.empty_like(log))
        else:
            if not (top.amin() > math.exp(-5) and top.amax() < math.exp(5)):
                weights = weights / top.masked_fill_(top == 0, 1.0)
            log = weights.log()
        low = log.amin()
        deep |= bool(low < -far) and bool(((log < -far) & (log > -math.inf)).any())
        matrices, logs, lows = [*matrices, weights], [*logs, log], [*lows, low]
    terms = logs[0] if len(logs) == 1 else logs[1] - logs[0]
    if not min(lows) > -math.inf:  # `_misses` looks for what the second chain alone forbids
        terms = terms.masked_fill(~terms.isfinite(), 0.0)
    sources = torch.arange(weights.shape[-1], device=weights.device)[:, None].expand(weights.shape[-2:])
    if linear:
        factors = [matrices[0], terms.mul_(matrices[0])]  # the logarithms are not read again
        return _Weights(matrices, logs, terms, [torch.cat(factors, -1)] if len(terms) == 1 else factors, deep, sources)
    if in_c(terms):  # elsewhere no value is read
        possible = (torch.cat(logs) > -math.inf).flatten(0, 1).any(0)
        sources = possible.to(torch.uint8).argsort(0, descending=True)[: int(possible.sum(0).amax())]
    return _Weights(matrices, logs, terms, [], deep, sources)


def _linear(before: list[Tensor], after: list[Tensor], weights: _Weights, states: Tensor) -> Tensor:
    """The terms (k, g, m, c) of each state, from linear messages."""
    c = states.shape[-1]
    arrived, weighted = (part for one in weights.factors for part in _times(before[0], one).split(c, -1))
    sums = [arrived, *map(_times, before[1:], weights.matrices[1:])]
    terms = torch.div(sums[-1], after[-1]).log_()
    if len(sums) > 1:
        terms -= torch.div(arrived, after[0]).log_()
        if after[1].amin() < _LEAST[terms.dtype]:
            terms.masked_fill_((after[1] < _LEAST[terms.dtype]) & (states > 0), math.nan)
    terms.addcdiv_(weighted, arrived, value=-1)
    for i in range(len(sums) if weights.deep else 0):
        top = weights.matrices[i].amax((-2, -1))[..., None, None] * before[i].amax(-1, keepdim=True)
        terms.masked_fill_((sums[i] < trusted_sum(terms.dtype, c) * top) & (states > 0), math.nan)
    return terms


def _times(rows: Tensor, matrices: Tensor) -> Tensor:
    """Products (k, g, m, -1) of rows (k, g, m, c) and matrices (k or 1, g, c, -1)."""
    k, g, m, c = rows.shape
    if len(matrices) > 1:
        return rows @ matrices
    if g == 1:  # a third of the time of a stack of one product
        return rows @ matrices[0, 0]
    return (rows.movedim(1, 0).reshape(g, -1, c) @ matrices[0]).view(g, k, m, -1).movedim(0, 1)


def _by_pairs(before: list[Tensor], after: list[Tensor], weights: _Weights, states: Tensor) -> Tensor:
    """The mean (k, g, m, c) over the states before of -log r, or of the difference, from logarithms of messages."""
    shape, picked = (*states.shape[:-1], *weights.sources.shape), weights.sources.flatten()  # (k, g, m, sources, c)
    to = torch.arange(states.shape[-1], device=states.device)
    chances = [
        torch.log_softmax(one.index_select(-1, picked).view(shape) + log[:, :, None, weights.sources, to], -2)
        for one, log in zip(before, weights.logs, strict=True)
    ]
    shares, surprise = chances[0].exp(), -chances[0] if len(chances) == 1 else chances[0] - chances[1]
    return surprise.masked_fill_(shares == 0, 0.0).mul_(shares).sum(-2)


def _misses(p: Chain, q: Chain) -> Tensor:
    """Whether a path (g, m) is possible in p and forbidden by q, however improbable it is."""
    g, m, c, v = p.g, p.m, p.c, p.v
    x, other_x = (chain.x.reshape(v, g, m, c) for chain in (p, q))
    bulk, other = (chain.bulk.reshape(-1, g, c, c) for chain in (p, q))
    closed = (other <= q.zero) & (bulk > p.zero)
    closed_starts = (q.p0 <= q.zero).expand(*q.lead, c).reshape(g, m, c)
    shut = other_x == -math.inf
    if in_c(p.x) and not (closed.any() or (closed_starts & (p.p0 > p.zero).expand(*p.lead, c).reshape(g, m, c)).any()
                          or (shut & (x > -math.inf)).any()):  # fmt: skip
        return torch.zeros(g, m, dtype=torch.bool)
    forward, backward = (p.x.new_empty(v, *p.lead, c, dtype=p.dtype) for _ in range(2))
    message_kernels(p.x).messages(p, forward, backward)
    reached, continued = (each.reshape(v, g, m, c) > -math.inf for each in (forward, backward))
    missed = ((reached & continued & shut).any(0) | (reached[0] & continued[0] & closed_starts)).any(-1)
    for step in range(1, v):
        into = reached[step - 1].to(p.dtype) @ closed[min(step, len(closed)) - 1].to(p.dtype)
        missed |= ((into > 0) & continued[step] & (x[step] > -math.inf)).any(-1)
    return missed
