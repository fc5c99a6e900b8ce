"""The entropy of the posterior over paths, and the divergence of two, from forward messages S and posteriors g.

With t the sum of the logarithms of all weights along a path of the posterior, and t' of those under a second chain:

    H = log Z - E[t]        KL = (log Z' - E[t']) - (log Z - E[t])
    E[t] = <g_0, log p0> + sum_i <g_i, x_i> + sum_i <g_i, S_{i-1} (P_i log P_i) / (S_{i-1} P_i)>

The largest of each x_i, P_i and p0 is taken out of them and out of log Z beforehand: no large numbers are subtracted.
Products of messages have the dtype of the chain. For sequences whose messages its floats cannot hold they are float64,
and where these cannot either, means are taken pair by pair of states, from logarithms.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .. import chain_kernels, finite_logs, in_c, log_matmul_kernels, message_kernels, messages_of
from ..chain import Chain
from ..numbers import exact_sum, relative_logs

# entries of messages, and of pairs of states, that are computed together
_MESSAGES, _PAIRS = 2**18, 2**20

# of messages of C loops: the largest, and of their emissions, the logarithm of the least, see kernels/cpu/c/forward.h
_LARGEST = {torch.float32: 2.0**100, torch.float64: 2.0**900}
_DEEPEST = {torch.float32: -108 * math.log(2), torch.float64: -960 * math.log(2)}


class _Weights(NamedTuple):
    """The first chain's P (s, g, c, c) over the largest entry, its logarithm, and L (s, g, c, c) of the mean.

    `top`: what the mean of L lacks because each chain's matrices were divided (s, g, 1). In L, 0 is in place of -inf.
    """

    matrices: Tensor
    logs: Tensor
    terms: Tensor
    top: Tensor
    entropy: bool


# (before, weights, states) to the means of L (k, g, m, c) of a block of steps
Means = Callable[[Tensor, _Weights, Tensor], Tensor]


def values(chains: Sequence[Chain]) -> tuple[Tensor, Tensor]:
    """The entropy (g, m) of a chain, or the divergence of a first from a second, and which sequences underflow."""
    p, signs = chains[0], (1.0,) if len(chains) == 1 else (-1.0, 1.0)
    forward, backward = chain_kernels(p.x)
    states, c_loops = messages_of(p, p.v), in_c(p.x)
    kept, leaving = forward(p, keep=messages_of(p, p.v), leave=True)
    again = kept.redone if c_loops and p.dtype == torch.float32 else torch.zeros_like(kept.redone)
    backward(p, kept, (~again).double(), None, states, None)
    passes = [(kept, leaving), *(forward(chain, leave=True) for chain in chains[1:])]
    norms = torch.stack([one.log_norm for one, _ in passes])
    terms = [sign * message.scale for sign, (_, message) in zip(signs, passes, strict=True)]
    mean = _potentials(chains, signs, kept.redone, states, terms)
    value, axis = torch.full_like(mean, math.nan), int(p.g == 1)
    index = torch.arange(value.shape[axis], device=value.device)
    if c_loops:
        if not kept.redone.all():
            found = _transitions(chains, kept.messages, states, index, _linear)
            value = _total(terms, found) - mean
        index = ((kept.redone | ~value.isfinite()) & norms.isfinite().all(0)).any(1 - axis).nonzero()[:, 0]
    if len(index) and c_loops and p.dtype == torch.float32:
        value.index_copy_(axis, index, values([_part(chain, index) for chain in chains])[0])
    elif len(index):
        chosen = kept._replace(messages=_take(kept.messages, index), redone=kept.redone.index_select(axis, index))
        states, logs = _take(states, index), chosen.logs(slice(None))
        found = _transitions(chains, logs, states, index, _by_pairs)
        if len(chains) > 1:
            exact = _total([term.index_select(axis + 1, index) for term in terms], found)
            exact -= mean.index_select(axis, index)
        else:
            last, posterior = (
                _at_ends(one, p.ends if p.ends is None else _take(p.ends, index)) for one in (logs, states)
            )
            exact = -found[0] - (torch.log_softmax(last, -1) * posterior).masked_fill(posterior == 0, 0.0).sum(-1)
        value.index_copy_(axis, index, exact)
    if len(chains) > 1:
        infinite = _misses(*chains) | (norms[1] == -math.inf)
        value = torch.where(norms[1].isnan(), math.nan, value.masked_fill(infinite, math.inf))
    redone = torch.stack([one.redone for one, _ in passes]).any(0)
    return torch.where(norms[0].isnan(), math.nan, value.masked_fill(norms[0] == -math.inf, 0.0)), redone


def _total(terms: list[Tensor], found: Tensor) -> Tensor:
    """The sum (g, m) of terms (2, g, m), less the three parts of a mean."""
    return torch.stack(exact_sum(torch.cat([*terms, -found[1:]]))).sum(0) - found[0]


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


def _at_ends(values: Tensor, ends: Tensor | None) -> Tensor:
    """Values (g, m, c) of each sequence's last step."""
    if ends is None:
        return values[-1]
    return values.gather(0, (ends - 1).clamp(0, len(values) - 1).expand(1, *values.shape[1:]))[0]


def _potentials(
    chains: Sequence[Chain], signs: Sequence[float], redone: Tensor, states: Tensor, terms: list[Tensor]
) -> Tensor:
    """The mean (g, m) of log-potentials and of log p0; `terms` get the largest ones, with the opposite sign."""
    (v, g, m, c), p = states.shape, chains[0]
    mean = torch.zeros(g, m, dtype=torch.float64, device=states.device)
    count = max(1, _MESSAGES // (g * m * c))
    for start in range(0, v, count):
        steps = slice(start, min(v, start + count))
        total = None
        for sign, chain in zip(signs, chains, strict=True):
            x = chain.x[steps].to(chain.dtype).reshape(-1, g, m, c)
            top = x.amax(-1, keepdim=True)
            x = x - top
            posteriors = states[steps]
            if chain is p and in_c(x) and not x.amin() > _DEEPEST[x.dtype]:  # the loops have raised emissions
                raised = (
                    (x - _DEEPEST[x.dtype]).clamp_(max=0.0).nan_to_num_(0.0).masked_fill_(redone[..., None], 0.0).exp_()
                )
                posteriors = raised.mul_(states[steps])
            top = top[..., 0].double()
            terms.append(
                _sum(top if p.ended is None else top.masked_fill(p.ended[steps][..., 0], 0.0), x.dtype) * -sign
            )
            total = x.mul_(sign) if total is None else total.add_(x, alpha=sign)
            if chain is p:
                weights = posteriors
        mean += _mean(total, weights)
    for sign, chain in zip(signs, chains, strict=True):
        logs, top = chain.relative_log_p0()
        terms.append(top[..., 0][None] * -sign)
        mean += (logs * states[0]).masked_fill_(states[0] == 0, 0.0).sum(-1) * sign
    return mean


def _mean(terms: Tensor, states: Tensor) -> Tensor:
    """The sum (g, m) over steps and states of terms (k, g, m, c), which are overwritten, times posteriors.

    Terms of posterior 0, which may be of any value, are 0.
    """
    mean = terms.mul_(states).sum(-1).sum(0, dtype=torch.float64)
    if in_c(mean) and math.isfinite(mean.sum()):
        return mean
    return terms.masked_fill_(states == 0, 0.0).sum(-1).sum(0, dtype=torch.float64)


def _sum(terms: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of float64 terms (n, g, m) and its rounding error, which is 0 for an arithmetic of float32."""
    return torch.stack(
        exact_sum(terms.clone()) if dtype == torch.float64 else (terms.sum(0), torch.zeros_like(terms[0]))
    )


def _take(values: Tensor, index: Tensor) -> Tensor:
    """The values (..., g, m, c) of some members of the only set, or of some sets."""
    return values[..., index, :] if values.shape[-3] == 1 else values[..., index, :, :]


def _transitions(chains: Sequence[Chain], messages: Tensor, states: Tensor, index: Tensor, means: Means) -> Tensor:
    """The mean of logarithms of matrices over the largest entries, and the sum of those and its error (3, g, m).

    Of the sequences or sets of an index, from their messages and posteriors (v, g, m, c). The mean is NaN where `means`
    fail, and for an entropy by pairs it is the negative entropy of all states given the next ones.
    """
    (v, g, m, c), p = states.shape, chains[0]
    ended = None if p.ended is None else _take(p.ended, index)[..., 0]
    one_matrix, linear = all(len(chain.bulk) == 1 for chain in chains), means is _linear
    mean, tops, weights = torch.zeros(g, m, dtype=torch.float64, device=states.device), [], None
    count = max(1, (_MESSAGES if linear else _PAIRS // c) // (g * c * (m if one_matrix else max(m, c))))
    for start in range(1, v, count):
        steps, before = slice(start, min(v, start + count)), slice(start - 1, min(v, start + count) - 1)
        if weights is None or not one_matrix:
            weights = _weights(chains, before, index if 1 < p.g != g else slice(None), linear)
        mean += _mean(means(messages[before], weights, states[steps]), states[steps])
        top = weights.top.expand(len(states[steps]), g, m)
        tops.append(_sum(top if ended is None else top.masked_fill(ended[steps], 0.0), p.dtype))
    return torch.cat([mean[None], torch.stack(tops).sum(0) if tops else mean.new_zeros(2, g, m)])


def _weights(chains: Sequence[Chain], before: slice, sets: Tensor | slice, linear: bool) -> _Weights:
    """The matrices of some sets that lead on from these steps, or the only ones."""
    found = [_matrices(chain, before, sets, linear) for chain in chains]
    (matrices, logs, terms, top), entropy = found[0], len(chains) == 1
    if not entropy:
        terms, top = found[1][2] - terms, found[1][3] - top
    return _Weights(matrices, logs, terms, top, entropy)


def _matrices(chain: Chain, before: slice, sets: Tensor | slice, linear: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """P, its logarithms in float64 unless they are not needed, these with 0 for -inf, and the largest."""
    weights = (chain.bulk if len(chain.bulk) == 1 else chain.bulk[before]).reshape(-1, chain.g, chain.c, chain.c)
    dtype = chain.dtype if linear else torch.float64
    if linear and len(chain.bulk) > 1 and not chain.log_params and weights.numel() >= 16:
        weights = weights[:, sets].to(dtype).contiguous()
        top = weights.amax((-2, -1))[..., None]
        if top.amin() > math.exp(-5) and top.amax() < math.exp(5):  # as good as relative to the largest
            return weights, weights, finite_logs(weights), top.new_zeros(1).double()
    logs, top = relative_logs(weights[:, sets].double(), (-2, -1), log=chain.log_params)
    return logs.exp().to(dtype), logs, logs.masked_fill(logs == -math.inf, 0.0).to(dtype), top[..., 0]


def _linear(before: Tensor, weights: _Weights, states: Tensor) -> Tensor:
    """The means (k, g, m, c) from messages of C loops; NaN where a sum may have lost terms."""
    c = states.shape[-1]
    arrived = _times(before, weights.matrices)
    terms = _times(before, weights.matrices * weights.terms).div_(arrived)
    limits = torch.finfo(terms.dtype)
    limit = c * _LARGEST[terms.dtype] * limits.tiny / limits.eps
    if not arrived.amin() >= limit:
        terms.masked_fill_(~(arrived >= limit) & (states > 0), math.nan)
    return terms


def _times(rows: Tensor, matrices: Tensor) -> Tensor:
    """Products (k, g, m, -1) of rows (k, g, m, c) and matrices (k or 1, g, c, -1)."""
    k, g, m, c = rows.shape
    if len(matrices) > 1:
        return rows @ matrices
    if g == 1:  # a third of the time of a stack of one product
        return rows @ matrices[0, 0]
    return (rows.movedim(1, 0).reshape(g, -1, c) @ matrices[0]).view(g, k, m, -1).movedim(0, 1)


def _by_pairs(before: Tensor, weights: _Weights, _: Tensor) -> Tensor:
    """The means (k, g, m, c) from logarithms of messages."""
    k, g, m, c = before.shape
    matmul, logs, terms = log_matmul_kernels(before), weights.logs, weights.terms
    rows = before.movedim(0, 1).reshape(1, g, k * m, c) if len(logs) == 1 else before
    if weights.entropy:
        means = matmul.tangent(rows, logs, rows.masked_fill(rows == -math.inf, 0.0), terms)
        means -= matmul.forward(rows, logs)[0]
    else:
        means = matmul.tangent(rows, logs, torch.zeros_like(rows), terms)
    return means.view(g, k, m, c).movedim(0, 1) if len(logs) == 1 else means


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
