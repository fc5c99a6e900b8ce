"""The entropy of the posterior over paths, and the divergence of two, from forward messages S and posteriors g.

With w the weight of a path, and xi the posteriors of pairs of states,

    H = log Z - E[log w]       E[log w] = <g_0, log p0> + sum_i <g_i, x_i> + sum_i <xi_i, L_i>       L = log P
    <xi_i, L_i> = <g_i, (S_{i-1} (P_i L_i)) / (S_{i-1} P_i)>

The divergence from a chain q is log Z_q - log Z less the mean of log w_q - log w: all logarithms are differences then.
Each is relative to the largest of its step, and what that takes out of both terms is added in float64 with its rounding
errors, so that the size of log Z costs no digits. All else has the dtype of the chain. Where floats cannot hold the
products, means over pairs of states are computed from logarithms of messages, in float64.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .. import chain_kernels, in_c, message_kernels, messages_of
from ..chain import Chain
from ..numbers import exp_shifted, trusted_sum

# entries of messages, and of pairs of states, that are computed together
_MESSAGES, _PAIRS = 2**18, 2**20

# added to a float64 and subtracted again, it leaves multiples of 2^-20, whose sums are exact up to 2^33
_GRID = 1.5 * 2.0**32

# relative logarithms for which no product underflows, and no posterior of less than eps^2 matters
_SPREAD = {torch.float32: 40.0, torch.float64: 400.0}


class _Weights(NamedTuple):
    """Factors P and P L (s, g, c, c) of products, or both side by side, each matrix up to a factor, log P and L.

    `tops` are the signed logarithms (s, g, 1) of the largest entries. `deep`: entries are so small that sums underflow.
    """

    factors: tuple[Tensor, ...]
    logs: Tensor
    terms: Tensor
    tops: Tensor
    zeros: bool
    deep: bool


Mean = Callable[[Tensor, _Weights, Tensor, Tensor], Tensor]


def values(chains: Sequence[Chain]) -> tuple[Tensor, Tensor]:
    """The entropy (g, m) of a chain, or the divergence of a first from a second, and which sequences underflow."""
    p = chains[0]
    forward, backward = chain_kernels(p.x)
    kept, message = forward(p, keep=messages_of(p, p.v), leave=True)
    states = messages_of(p, p.v)
    backward(p, kept, torch.ones_like(kept.log_norm), None, states, None)
    others = [forward(chain, leave=True) for chain in chains[1:]]
    scales = torch.stack([message.scale, *(other.scale for _, other in others)])
    redone = torch.stack([kept.redone, *(other.redone for other, _ in others)]).any(0)
    norm, finite = kept.log_norm, scales[:, 0].isfinite().all(0)
    infinite = _misses(p, *chains[1:]) if others else torch.zeros_like(redone)
    axis, linear = int(p.g == 1), in_c(norm)
    value = _value(chains, scales, kept.messages, states, _linear) if linear else torch.full_like(norm, math.nan)
    exact = (kept.redone | ~value.isfinite()) & finite & ~infinite
    index = exact.any(1 - axis).nonzero()[:, 0] if linear else torch.arange(norm.shape[axis], device=norm.device)
    for some in index.split(max(1, _PAIRS // (p.c**2 * norm.shape[1 - axis]))) if len(index) else ():
        parts = [_part(chain, some) for chain in chains]
        logs = kept._replace(messages=_take(kept.messages, some), redone=kept.redone.index_select(axis, some))
        chosen = scales.index_select(2 + axis, some), logs.logs(slice(None)), _take(states, some)
        value.index_copy_(axis, some, _value(parts, *chosen, _by_pairs))
    for other, _ in others:
        infinite = infinite | (other.log_norm == -math.inf)
        value = torch.where(other.log_norm.isnan(), math.nan, value.masked_fill(infinite, math.inf))
    return torch.where(norm.isnan(), math.nan, value.masked_fill(norm == -math.inf, 0.0)), redone


def _part(chain: Chain, index: Tensor) -> Chain:
    """Some members of the only set, or some sets, in float64."""
    g, m, c = chain.g, chain.m, chain.c
    bulk = chain.bulk.reshape(-1, g, c, c)
    return replace(
        chain,
        x=_take(chain.x.reshape(-1, g, m, c), index),
        bulk=bulk if g == 1 else bulk[:, index],
        p0=_take(chain.p0.expand(*chain.lead, c).reshape(1, g, m, c), index)[0],
        ends=None if chain.ends is None else _take(chain.ends[None], index)[0],
        dtype=torch.float64,
    )


def _take(values: Tensor, index: Tensor) -> Tensor:
    return values[:, :, index] if values.shape[1] == 1 else values[:, index]


def _signed(chains: Sequence[Chain]) -> list[tuple[int, Chain]]:
    """The chains and the sign of each one's logarithms in the mean."""
    return [(1, chains[0])] if len(chains) == 1 else [(-1, chains[0]), (1, chains[1])]


def _value(chains: Sequence[Chain], scales: Tensor, messages: Tensor, states: Tensor, mean: Mean) -> Tensor:
    """The values (g, m), not finite where `mean` fails, from scales (chains, 2, g, m) and (v, g, m, c)."""
    p, (v, g, m, c) = chains[0], states.shape
    one_matrix = all(len(chain.bulk) == 1 for chain in chains)
    size = (_MESSAGES if mean is _linear else _PAIRS // c) // (g * c * (m if one_matrix else max(m, c)))
    terms = [sign * scale for sign, scale in zip((1,) if len(chains) == 1 else (-1, 1), scales, strict=True)]
    mean_log, weights = torch.zeros_like(scales[0, 0]), None

    def within(values: Tensor) -> Tensor:
        values = values.expand(steps.stop - steps.start, g, m)
        return values if p.ended is None else values.masked_fill(p.ended[steps, ..., 0], 0.0)

    for steps in (slice(0, 1), *(slice(i, min(v, i + max(1, size))) for i in range(1, v, max(1, size)))):
        logs, tops, masked = _potentials(chains, steps)
        terms.append(within(tops))
        if steps.start == 0:
            for sign, chain in _signed(chains):
                p0 = chain.p0.expand(*chain.lead, c).reshape(g, m, c).to(chain.dtype)
                start, top = _relative(p0, chain, -1)
                logs += sign * start
                terms.append(within(-sign * top[None, ..., 0]))
        else:
            if weights is None or not one_matrix:
                weights = _weights(chains, steps, mean is _linear)
            logs = mean(messages[steps.start - 1 : steps.stop - 1], weights, states[steps], logs)
            terms.append(within(weights.tops))
        if masked or weights is None or weights.zeros:
            logs.masked_fill_(states[steps] <= torch.finfo(p.dtype).eps ** 2, 0.0)
        mean_log += within(logs.mul_(states[steps]).sum(-1)).sum(0, dtype=torch.float64)
    sums = torch.cat(terms)
    whole = (sums + _GRID) - _GRID
    return whole.sum(0) + ((sums - whole).sum(0) - mean_log)


def _potentials(chains: Sequence[Chain], steps: slice) -> tuple[Tensor, Tensor, bool]:
    """Logarithms of potentials (k, g, m, c) less the largest, these (k, g, m), and whether some are far below."""
    parts = []
    for sign, chain in _signed(chains):
        x = chain.x[steps].reshape(-1, chain.g, chain.m, chain.c).to(chain.dtype)
        top = x.amax(-1, keepdim=True)
        top.masked_fill_(top == -math.inf, 0.0)
        logs = x - top
        parts.append((logs, -sign * top[..., 0].double(), not logs.amin() > -_SPREAD[chain.dtype]))
    if len(parts) == 1:
        return parts[0]
    (logs, top, far), (others, other_top, other_far) = parts
    return others.sub_(logs), top + other_top, far or other_far


def _relative(weights: Tensor, chain: Chain, axes: int | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Logarithms of weights relative to the largest, and the logarithm of that."""
    top = weights.amax(axes, keepdim=True)
    top.masked_fill_(top == chain.zero, 0.0 if chain.log_params else 1.0)
    if chain.log_params:
        return weights - top, top.double()
    return (weights / top).log_(), top.double().log_()


def _weights(chains: Sequence[Chain], steps: slice, linear: bool) -> _Weights:
    """The matrices into these steps, or the only ones."""
    parts = []
    for chain in reversed(chains):
        into = slice(None) if len(chain.bulk) == 1 else slice(steps.start - 1, steps.stop - 1)
        matrices = chain.bulk[into].reshape(-1, chain.g, chain.c, chain.c).to(chain.dtype)
        parts.append(_relative(matrices, chain, (-2, -1)))
    (logs, tops), signed = parts[-1], -parts[-1][1]
    lows, limit = [part.amin() for part, _ in parts], -_SPREAD[logs.dtype]
    zeros = not min(lows) > -math.inf
    deep = bool(lows[-1] < limit) and bool(((logs < limit) & (logs > -math.inf)).any())
    if chain.log_params or not tops.abs().amax() < _SPREAD[logs.dtype] / 4:
        matrices = exp_shifted(logs, tops.new_zeros((), dtype=logs.dtype), torch.empty_like(logs), torch.empty_like(logs))
    terms = logs
    if len(parts) > 1:
        terms, signed = parts[0][0] - logs, tops - parts[0][1]
    if zeros:  # what the second chain alone forbids is found by `_misses`
        terms = terms.masked_fill(~terms.isfinite(), 0.0)
    if not linear:
        return _Weights((), logs, terms, signed[..., 0], zeros, deep)
    factors = matrices, terms * matrices if len(parts) > 1 or zeros or deep else logs.mul_(matrices)
    if len(matrices) == 1 == len(terms):
        factors = (torch.cat(factors, -1),)
    return _Weights(factors, logs, terms, signed[..., 0], zeros, deep)


def _linear(before: Tensor, weights: _Weights, states: Tensor, logs: Tensor) -> Tensor:
    """The logarithms (k, g, m, c) plus means over the states before, from linear messages."""
    k, g, m, c = before.shape
    if len(weights.factors) > 1:
        arrived, weighted = (before @ factor for factor in weights.factors)
    else:
        rows, both = before.movedim(1, 0).reshape(g, -1, c), weights.factors[0][0]
        sums = rows @ both if g > 1 else rows @ both[0]  # one product takes a third of the time of a stack of one
        arrived, weighted = sums.view(g, k, m, 2 * c).movedim(0, 1).split(c, -1)
    logs = logs.addcdiv_(weighted, arrived)
    if weights.deep:
        largest = weights.factors[0][..., :c].amax((-2, -1))[..., None, None]
        least = trusted_sum(logs.dtype, c) * largest * before.amax(-1, keepdim=True)
        logs.masked_fill_((arrived < least) & (states > 0), math.nan)
    return logs


def _by_pairs(before: Tensor, weights: _Weights, states: Tensor, logs: Tensor) -> Tensor:
    """The logarithms (k, g, m, c) plus means over the states before, from logarithms of messages."""
    c = before.shape[-1]
    to = torch.arange(c, device=before.device)
    sources = to.expand(c, c)
    if in_c(before):  # elsewhere no value is read
        possible = (weights.logs > -math.inf).flatten(0, 1).any(0)
        count = int(possible.sum(0).amax())
        sources = possible.mT.to(torch.uint8).argsort(-1, descending=True)[:, :count]  # (c, count)
    pairs = before[..., sources] + weights.logs[:, :, None, sources, to[:, None]]
    shares = torch.softmax(pairs, -1).mul_(weights.terms[:, :, None, sources, to[:, None]])
    return logs.add_(shares.sum(-1))


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
    ahead, behind = (each.reshape(v, g, m, c) > -math.inf for each in (forward, backward))
    missed = ((ahead & behind & shut).any(0) | (ahead[0] & behind[0] & closed_starts)).any(-1)
    for step in range(1, v):
        into = ahead[step - 1].to(p.dtype) @ closed[min(step, len(closed)) - 1].to(p.dtype)
        missed |= ((into > 0) & behind[step] & (x[step] > -math.inf)).any(-1)
    return missed
