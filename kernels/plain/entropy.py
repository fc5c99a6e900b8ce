"""The entropy of the posterior over paths, and the divergence of two, from forward messages S and posteriors g.

With the weights of a chain and the paths of a posterior, of states g and of pairs of states xi,

    F = log Z - E[log w] = sum_i log s_i - <g_i, x_i> - <xi_i, log P_i>        s_i = sum_j (S_{i-1} P_i)_j exp(x_i(j))

is the entropy if both are of one chain. The divergence is F with the weights of the second chain less F with those of
the first. What log Z and the expectation have in common is subtracted in each step. With V = S_i exp(-x_i), a multiple
of S_{i-1} P_i, one matrix product for all steps gives

    s_i = sum_j (S_{i-1} P_i)_j / sum_j V_j        <xi_i, D> = <g_i / V, S_{i-1} (P_i D)> / s_i

Where floats cannot hold that, it is done in logarithms, pair by pair of states:

    H = H(g_last) + sum_i <g_i, -sum_k r_i log r_i>        r_i(k, j) = S_{i-1}(k) P_i(k, j) / (S_{i-1} P_i)_j

and with log(r_i / r'_i) in place of -log r_i, r' of the second chain, the divergence. Everything is float64.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import chain_kernels, in_c, messages_of
from ..chain import Chain
from ..message import Kept
from ..numbers import relative_logs
from . import backward, forward

# entries that are computed together: of messages, of pairs of states, and of x in one part of a batch
_MESSAGES, _PAIRS, _PART = 2**17, 2**20, 2**20

# nats between the potentials of a step, up to which no exponential underflows
_SPREAD = 600.0

# of F of each chain, by the number of chains
_SIGNS = {1: (1.0,), 2: (-1.0, 1.0)}


class _Side(NamedTuple):
    """A chain: x and forward messages (v, g, m, c), bulk (s, g, c, c), log p0 (g, m, c)."""

    x: Tensor
    messages: Tensor
    bulk: Tensor
    p0: Tensor
    log_params: bool

    @classmethod
    def of(cls, chain: Chain, messages: Tensor) -> "_Side":
        return cls(chain.x, messages, chain.bulk, chain.relative_log_p0()[0], chain.log_params)

    def matrices(self, steps: slice, one_matrix: bool) -> Tensor:
        """Logarithms (stack, c, c) of the matrices into steps, less the largest of each."""
        before = slice(steps.start - 1, steps.stop - 1) if len(self.bulk) > 1 else slice(None)
        logs = relative_logs(self.bulk[before], (-2, -1), log=self.log_params)[0]
        return logs[0] if one_matrix else logs.expand(steps.stop - steps.start, *logs.shape[1:]).flatten(0, 1)


class _Step(NamedTuple):
    """Messages before and after some steps, and x, as (stack, rows, c), where a stack has one matrix."""

    before: Tensor
    after: Tensor
    x: Tensor


class _Weights(NamedTuple):
    """The matrices (stack, c, c) of the chain of the posterior, and all else that linear steps read.

    `columns` are the transposed matrices, and `sums` (stack, c, 1) those of their rows, of each chain; `weighted` the
    entries of the first times logarithms, or logarithms of ratios; `forbidden` its entries that the second chain
    forbids, or None.
    """

    columns: list[Tensor]
    sums: list[Tensor]
    weighted: Tensor
    forbidden: Tensor | None


def values(chains: Sequence[Chain]) -> tuple[Tensor, Tensor]:
    """The entropy (g, m) of a chain, or the divergence of a first from a second, and which sequences underflow."""
    g, m, v, c = chains[0].g, chains[0].m, chains[0].v, chains[0].c
    alone = v * c if g == 1 else v * m * c + max(len(chain.bulk) for chain in chains) * c * c
    size = max(1, _PART // alone)
    whole = [_flat(chain) for chain in chains]
    parts = [
        _values([_part(chain, slice(start, start + size)) for chain in whole])
        for start in range(0, m if g == 1 else g, size)
    ]
    value, redone = (torch.cat(each, int(g == 1)) for each in zip(*parts, strict=True))
    return value, redone


def _flat(chain: Chain) -> Chain:
    g, m, c = chain.g, chain.m, chain.c
    x, bulk = chain.x.reshape(chain.v, g, m, c), chain.bulk.reshape(len(chain.bulk), g, c, c)
    p0 = chain.p0.expand(*chain.lead, c).reshape(g, m, c)
    return replace(chain, x=x, bulk=bulk.double() if g == 1 else bulk, p0=p0, dtype=torch.float64)


def _part(chain: Chain, index: slice | Tensor) -> Chain:
    """Some members of the only set, or some sets, in float64."""
    bulk = chain.bulk if chain.g == 1 else chain.bulk[:, index].double()
    ends = None if chain.ends is None else _take(chain.ends, index)
    part = replace(chain, x=_take(chain.x, index), bulk=bulk, p0=_take(chain.p0, index).double(), ends=ends)
    return replace(part, x=messages_of(part, part.v).copy_(part.x))


def _take(values: Tensor, index: slice | Tensor) -> Tensor:
    return values[..., index, :] if values.shape[-3] == 1 else values[..., index, :, :]


def _values(chains: list[Chain]) -> tuple[Tensor, Tensor]:
    """The results of `values` for chains in float64."""
    first, axis = chains[0], int(chains[0].g == 1)
    kept, states = _passes(chains, *chain_kernels(first.x))
    norm, redone = kept[0].log_norm, torch.stack([one.redone for one in kept]).any(0)
    if in_c(norm):
        sides = [_Side.of(chain, one.messages) for chain, one in zip(chains, kept, strict=True)]
        value = _linear(sides, states, first.ends)
        # a number that is not finite says that some float was not
        index = (redone | ~value.isfinite() & norm.isfinite()).any(1 - axis).nonzero()[:, 0]
    else:
        value, index = torch.empty_like(norm), torch.arange(norm.shape[axis], device=norm.device)
    for some in index.split(max(1, _PAIRS // first.c**2)) if len(index) else ():
        parts = [_part(chain, some) for chain in chains]
        if len(chains) > 1 and in_c(norm):  # in every entry right, however small
            chosen, posterior = _passes(parts, forward.forward, backward.backward)
        else:
            chosen, posterior = [_chosen(one, some) for one in kept], _take(states, some)
        logs = (relative_logs(one.logs(slice(None)), -1, log=True)[0] for one in chosen)
        sides = [_Side.of(part, each) for part, each in zip(parts, logs, strict=True)]
        value.index_copy_(axis, some, _by_pairs(sides, posterior, parts[0].ends))
    for other in (one.log_norm for one in kept[1:]):
        value = torch.where(other == -math.inf, math.inf, torch.where(other.isnan(), math.nan, value))
    value = torch.where(norm == -math.inf, 0.0, value)
    return torch.where(norm.isnan(), math.nan, value), redone


def _passes(chains: list[Chain], forth: Callable[..., Any], back: Callable[..., Any]) -> tuple[list[Kept], Tensor]:
    """The messages of each chain, and the posteriors (v, g, m, c) of the first."""
    first = chains[0]
    kept: list[Kept] = [forth(chain, keep=messages_of(chain, chain.v))[0] for chain in chains]
    states = messages_of(first, first.v)
    back(first, kept[0], torch.ones_like(kept[0].log_norm), None, states, None)
    return kept, states


def _chosen(kept: Kept, index: Tensor) -> Kept:
    redone = _take(kept.redone[..., None], index)[..., 0]
    return kept._replace(messages=_take(kept.messages, index), redone=redone)


def _linear(sides: list[_Side], states: Tensor, ends: Tensor | None) -> Tensor:
    """The values (g, m) for posteriors (v, g, m, c), from linear messages; not finite where floats cannot hold them."""
    value = _over_steps(sides, states, ends, _MESSAGES // states.shape[-1], _weights, _linear_terms)
    for sign, side in zip(_SIGNS[len(sides)], sides, strict=True):
        top, best = side.messages[0].max(-1, keepdim=True)
        logs = side.p0 + (side.x[0] - side.x[0].gather(-1, best))
        first = logs.gather(-1, best)[..., 0] - _dot(states[0], logs.masked_fill(states[0] == 0, 0.0))
        first.masked_fill_(_unseen(logs == -math.inf, states[0], sides[0].messages[0]), math.nan)
        value += sign * (first + (_at_ends(side.messages, ends) / top).sum(-1).log())
    return value


def _by_pairs(sides: list[_Side], states: Tensor, ends: Tensor | None) -> Tensor:
    """The values (g, m) for posteriors (v, g, m, c), from logarithms of messages."""
    posterior = _at_ends(states, ends)
    logs = [torch.log_softmax(_at_ends(side.messages, ends), -1) for side in sides]
    rows = _PAIRS // states.shape[-1] ** 2
    return _over_steps(sides, states, ends, rows, _Pairs.of, _pair_terms) + _mean(posterior, _surprise(logs))


def _at_ends(values: Tensor, ends: Tensor | None) -> Tensor:
    """Values (g, m, c) of each sequence's last step."""
    v, *grid, c = values.shape
    return values[-1] if ends is None else values.gather(0, (ends - 1).clamp(0, v - 1).expand(1, *grid, c))[0]


def _over_steps(
    sides: list[_Side],
    states: Tensor,
    ends: Tensor | None,
    rows: int,
    prepare: Callable[..., object],
    terms: Callable[..., Tensor],
) -> Tensor:
    """The sum (g, m) over all steps but the first of `terms`, for so many rows at a time."""
    v, g, m, c = states.shape
    one_matrix, value, prepared = all(len(side.bulk) == 1 for side in sides), torch.zeros_like(states[0, ..., 0]), None

    def stacked(values: Tensor) -> Tensor:
        return values.movedim(1, 0).flatten(1, 2) if one_matrix else values.flatten(0, 1)

    scratch = value.new_empty(2, 0)
    count = max(1, rows // (g * (m if one_matrix else max(m, c))))
    for start in range(1, v, count):
        here = slice(start, min(v, start + count))
        if prepared is None or not one_matrix:
            prepared = prepare([side.matrices(here, one_matrix) for side in sides])
        before = slice(here.start - 1, here.stop - 1)
        steps = [_Step(*map(stacked, (side.messages[before], side.messages[here], side.x[here]))) for side in sides]
        posterior = stacked(states[here])
        if scratch.shape[1:] != posterior.shape:  # new memory at each step would take longer than the arithmetic
            scratch = posterior.new_empty(2, *posterior.shape)
        each = terms(steps, posterior, prepared, scratch)
        each = each.view(g, -1, m).movedim(1, 0) if one_matrix else each.view(-1, g, m)
        if ends is not None:
            step = torch.arange(here.start, here.stop, device=ends.device).view(-1, 1, 1)
            each = each.masked_fill(step >= ends[..., 0], 0.0)
        value += each.sum(0)
    return value


def _weights(logs: list[Tensor]) -> _Weights:
    columns = [each.exp().mT for each in logs]
    weights, ratios = columns[0].mT, logs[-1]
    if len(logs) > 1:
        ratios = ratios - logs[0].masked_fill(logs[0] == -math.inf, 0.0)
    forbidden = (logs[0] > -math.inf) & (ratios == -math.inf)
    weighted = (weights * ratios).masked_fill_((weights == 0) | forbidden, 0.0)
    weighted.masked_fill_((weights == 0) & forbidden, math.nan)  # underflows, and is not to be missed
    sums = [each.sum(-2)[..., None] for each in columns]
    return _Weights(columns, sums, weighted, weights * forbidden if forbidden.any() else None)


def _linear_terms(steps: list[_Step], states: Tensor, weights: _Weights, scratch: Tensor) -> Tensor:
    """The terms (stack, rows) of F of steps with posteriors (stack, rows, c)."""
    below, through = scratch
    terms, far = torch.zeros_like(states[..., 0]), False
    for i, (before, after, x) in reversed([*enumerate(steps)]):
        torch.sub(x.amax(-1, keepdim=True), x, out=below)
        if below.amax() < _SPREAD:
            torch.exp(below, out=through).mul_(after)
            scale = (before @ weights.sums[i])[..., 0] / through.sum(-1)
        else:  # from the most probable state alone
            best, far = after.argmax(-1, keepdim=True), True
            stack = torch.arange(len(states))[:, None]
            scale = _dot(before, weights.columns[i][stack, best[..., 0]]) / after.gather(-1, best)[..., 0]
            torch.sub(x.gather(-1, best), x, out=below).masked_fill_(states == 0, 0.0)
            torch.exp(below, out=through).mul_(after)
            if i > 0:
                terms[_unseen(x == -math.inf, states, steps[0].after)] = math.nan
        terms += _SIGNS[len(steps)][i] * (below.mul_(states).sum(-1) + scale.log())
    # of the first chain, S_{i-1} P_i = through * scale
    masked = far or not through.amin() > 0
    share = torch.div(states, through, out=through)
    if masked:
        share.masked_fill_(states == 0, 0.0)
    terms -= torch.matmul(before, weights.weighted, out=below).mul_(share).sum(-1) / scale
    if weights.forbidden is not None:
        terms[_dot(before @ weights.forbidden, share) > 0] = math.inf
        terms[_unseen(True, share, after)] = math.nan
    return terms


class _Pairs(NamedTuple):
    """Logarithms (stack, c, k) of transitions to each state, of each chain, from the `sources` (c, k) of any."""

    logs: list[Tensor]
    sources: Tensor

    @classmethod
    def of(cls, logs: list[Tensor]) -> "_Pairs":
        c = logs[0].shape[-1]
        states = torch.arange(c, device=logs[0].device)
        sources = states.expand(c, c)
        if in_c(states):  # elsewhere no value is read
            possible = (torch.cat(logs) > -math.inf).any(0)
            sources = possible.mT.to(torch.uint8).argsort(-1, descending=True)[:, : int(possible.sum(0).amax())]
        return cls([each[:, sources, states[:, None]] for each in logs], sources)


def _pair_terms(steps: list[_Step], states: Tensor, pairs: _Pairs, _: Tensor) -> Tensor:
    """The terms (stack, rows) of steps with posteriors (stack, rows, c)."""
    chances = []
    for (before, _, _), logs in zip(steps, pairs.logs, strict=True):
        terms = before[..., pairs.sources].add_(logs[:, None])  # (stack, rows, c, k)
        total = torch.logsumexp(terms, -1, keepdim=True)
        chances.append(terms.sub_(total.masked_fill_(total == -math.inf, 0.0)))
    return _mean(states, _mean(chances[0].exp(), _surprise(chances)))


def _unseen(forbidden: Tensor | bool, chances: Tensor, messages: Tensor) -> Tensor:
    """Where a forbidden state may have a chance that is so small that it is 0."""
    return (forbidden & (chances == 0) & (messages > 0)).any(-1)


def _surprise(logs: list[Tensor]) -> Tensor:
    """Minus the logarithms of probabilities, or the logarithms of their ratios to those of a second chain."""
    return -logs[0] if len(logs) == 1 else logs[0] - logs[1]


def _mean(weights: Tensor, values: Tensor) -> Tensor:
    """The sum of weighted values over the last axis; of those that have a weight."""
    return torch.where(weights == 0, 0.0, weights * values).sum(-1)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner products (stack, rows) of rows (stack, rows, c)."""
    products: Tensor = torch.linalg.vecdot(a, b)
    return products
