"""The entropy of the posterior over paths, and the divergence of two, from forward messages S and posteriors g.

With t the sum of the logarithms of all weights along a path of the posterior, and t' of those under a second chain:

    H = log Z - E[t]        KL = (log Z' - E[t']) - (log Z - E[t])
    E[t] = <g_0, log p0> + sum_i <g_i, x_i> + sum_i <g_i, S_{i-1} (P_i log P_i) / (S_{i-1} P_i)>

The largest of each x_i, P_i and p0 is taken out of them and out of log Z beforehand: no large numbers are subtracted.
Loops in C, whose messages are linear, compute with the floats of the chain. A sequence that these cannot hold is
computed again in float64, and where float64 cannot hold it either, and on other devices, by logarithms of messages pair
by pair of states. An entropy is then that of the last state and the mean of each state's given the next one, which are
r_i(k | j) = S_{i-1}(k) P_i(k, j) / sum over k.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .. import chain_kernels, in_c, means, message_kernels, messages_of
from ..chain import Chain
from ..message import Kept
from ..numbers import exact_sum, relative_logs

# entries of messages, and of pairs of states, that are computed together
_MESSAGES, _PAIRS = 2**18, 2**20


def values(chains: Sequence[Chain]) -> tuple[Tensor, Tensor]:
    """The entropy (g, m) of a chain, or the divergence of a first from a second, and which sequences underflow."""
    p, c_loops = chains[0], in_c(chains[0].x)
    forward, backward = chain_kernels(p.x)
    states = messages_of(p, p.v)
    kept, leaving = forward(p, keep=messages_of(p, p.v), leave=True)
    again = kept.redone if c_loops and p.dtype == torch.float32 else torch.zeros_like(kept.redone)
    backward(p, kept, (~again).double(), None, states, None)
    passes = [(kept, leaving), *(forward(chain, leave=True) for chain in chains[1:])]
    norms, redone = (torch.stack(each) for each in zip(*((one.log_norm, one.redone) for one, _ in passes), strict=True))
    scales = [message.scale for _, message in passes]
    infinite = torch.zeros_like(redone[0]) if len(chains) == 1 else _misses(*chains) | (norms[1] == -math.inf)
    value, axis = torch.full_like(norms[0], math.nan), int(p.g == 1)
    index = torch.arange(value.shape[axis], device=value.device)
    if c_loops and not kept.redone.all():
        value = _value(chains, scales, states, kept.redone, _linear(chains, kept.messages, states))
    if c_loops:
        index = ((kept.redone | ~value.isfinite()) & norms.isfinite().all(0) & ~infinite).any(1 - axis).nonzero()[:, 0]
    if len(index):
        parts = [_part(chain, index) for chain in chains]
        if c_loops and p.dtype == torch.float32:
            exact = values(parts)[0]
        else:
            messages, ended = _take(kept.messages, index), kept.redone.index_select(axis, index)
            chosen = kept._replace(messages=messages, redone=ended)
            exact = _by_pairs(
                parts, [one.index_select(axis + 1, index) for one in scales], chosen, _take(states, index)
            )
        value.index_copy_(axis, index, exact)
    value = value.masked_fill(infinite, math.inf).masked_fill(norms[-1].isnan(), math.nan)
    value = value.masked_fill(norms[0] == -math.inf, 0.0).masked_fill(norms[0].isnan(), math.nan)
    return value, redone.any(0)


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


def _take(values: Tensor, index: Tensor) -> Tensor:
    """The values (..., g, m, c) of some members of the only set, or of some sets."""
    return values[..., index, :] if values.shape[-3] == 1 else values[..., index, :, :]


def _value(chains: Sequence[Chain], scales: list[Tensor], states: Tensor, exact: Tensor, mean: Tensor) -> Tensor:
    """The value (g, m) from log-partitions, posteriors (v, g, m, c) and the mean of transitions.

    Log-partitions and the mean are sums and their errors (2, g, m). `exact`: sequences without raised emissions.
    """
    p, terms = chains[0], [-mean]
    x = [chain.x.to(p.dtype).reshape(states.shape) for chain in chains]
    signs = (1.0,) if len(chains) == 1 else (-1.0, 1.0)
    for sign, chain, scale, one in zip(signs, chains, scales, x, strict=True):
        logs, top = chain.relative_log_p0()
        start = (logs * states[0]).masked_fill_(states[0] == 0, 0.0).sum(-1)
        of_x = torch.zeros_like(mean)
        if in_c(states):
            means().add_potentials(one, x[0], states, exact, of_x)
        else:
            for steps in _blocks(0, len(one), one[0].numel(), _MESSAGES):
                relative, tops = relative_logs(one[steps].double(), -1, log=True)
                of_x += _sum(tops[..., 0], p, steps)
                of_x[0] += _mean(relative, states[steps])
        terms += [part * sign for part in (scale, -of_x, -top[..., 0][None], -start[None])]
    return torch.stack(exact_sum(torch.cat(terms))).sum(0)


def _blocks(first: int, stop: int, entries: int, most: int) -> Iterator[slice]:
    """Ranges of steps with so many entries each that are computed together."""
    count = max(1, most // max(1, entries))
    return (slice(start, min(stop, start + count)) for start in range(first, stop, count))


def _mean(terms: Tensor, states: Tensor) -> Tensor:
    """The sum (g, m) of terms (k, g, m, c) times posteriors: 0 where these are."""
    return (terms * states).masked_fill(states == 0, 0.0).sum((0, -1), dtype=torch.float64)


def _sum(tops: Tensor, chain: Chain, steps: slice) -> Tensor:
    """The sum of float64 terms (k, g, m) of the steps that a sequence has, and its rounding error (2, g, m)."""
    return torch.stack(
        exact_sum(tops.clone() if chain.ended is None else tops.masked_fill(chain.ended[steps][..., 0], 0))
    )


def _linear(chains: Sequence[Chain], messages: Tensor, states: Tensor) -> Tensor:
    """The mean of logarithms of matrices and its rounding error (2, g, m), from messages of C loops.

    NaN where a matrix has lost an entry that counts, but for those that lose it in C loops too, which flag them.
    """
    (v, g, m, c), p, factors = states.shape, chains[0], None
    out = torch.zeros(2, g, m, dtype=torch.float64)
    one_matrix, near = (all((len(chain.bulk) == 1) == one for chain in chains) for one in (True, False))
    for steps in _blocks(1, v, g * c * (m if one_matrix else max(m, c)), _MESSAGES):
        before = slice(steps.start - 1, steps.stop - 1)
        if near and not p.log_params:
            matrices = [chain.bulk[before].to(p.dtype).reshape(-1, g, c, c) for chain in chains]
            factors = means().by_logs(matrices[0], matrices[1] if len(chains) > 1 else None)
            near = factors is not None
        if factors is None or not (one_matrix or near):
            logs, terms, tops = _weights(chains, before)
            matrix = logs.exp()
            factors = torch.cat([matrix, matrix * terms], -1).to(p.dtype)
            if one_matrix:
                top = tops[0]
                high = (top * (2**27 + 1)) - (top * (2**27 + 1) - top)  # half its digits, whose products are exact
                count = v - 1 if p.ends is None else (p.ends - 1)[..., 0]
                out += torch.stack([(high * count).expand(g, m), ((top - high) * count).expand(g, m)])
            else:
                out += _sum(tops.expand(steps.stop - steps.start, g, m), p, steps)
        means().add_quotients(_times(messages[before], factors), states[steps], out)
    return out


def _times(rows: Tensor, matrices: Tensor) -> Tensor:
    """Products (k, g, m, -1) of rows (k, g, m, c) and matrices (k or 1, g, c, -1)."""
    k, g, m, c = rows.shape
    if len(matrices) > 1:
        return rows @ matrices
    if g == 1:  # a third of the time of a stack of one product
        return rows @ matrices[0, 0]
    return (rows.movedim(1, 0).reshape(g, -1, c) @ matrices[0]).view(g, k, m, -1).movedim(0, 1)


def _weights(chains: Sequence[Chain], before: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Of matrices that lead on from these steps: log P over the largest (s, g, c, c), L of the mean, and its largest.

    In L 0 is in place of -inf. All are float64.
    """
    found: list[tuple[Tensor, Tensor]] = []
    for chain in chains:
        weights = (chain.bulk if len(chain.bulk) == 1 else chain.bulk[before]).reshape(-1, chain.g, chain.c, chain.c)
        found.append(relative_logs(weights.double(), (-2, -1), log=chain.log_params))
    logs = [one.masked_fill(one == -math.inf, 0.0) for one, _ in found]
    terms = logs[0] if len(chains) == 1 else logs[1] - logs[0]
    top = found[0][1] if len(chains) == 1 else found[1][1] - found[0][1]
    return found[0][0], terms, top[..., 0]


def _by_pairs(chains: Sequence[Chain], scales: list[Tensor], kept: Kept, states: Tensor) -> Tensor:
    """The value (g, m) from kept messages as logarithms and posteriors (v, g, m, c)."""
    (v, g, m, c), p, weights = states.shape, chains[0], None
    one_matrix = all(len(chain.bulk) == 1 for chain in chains)
    mean = torch.zeros(2, g, m, dtype=torch.float64, device=states.device)
    sources, to = torch.arange(c, device=mean.device)[:, None].expand(c, c), torch.arange(c, device=mean.device)
    for steps in _blocks(1, v, g * c**2 * (m if one_matrix else max(m, c)), _PAIRS):
        before, k = slice(steps.start - 1, steps.stop - 1), steps.stop - steps.start
        if weights is None or not one_matrix:
            weights = _weights(chains, before)
            if in_c(mean):  # elsewhere no value is read
                possible = (weights[0] > -math.inf).flatten(0, 1).any(0)
                sources = possible.to(torch.uint8).argsort(0, descending=True)[: int(possible.sum(0).amax())]
        rows = kept.logs(before).index_select(-1, sources.flatten()).view(k, g, m, *sources.shape)
        logs, ratios = (one[:, :, None][..., sources, to] for one in weights[:2])
        chances = torch.log_softmax(rows + logs, -2)
        shares, terms = chances.exp(), chances if len(chains) == 1 else ratios
        mean[0] += _mean((shares * terms).masked_fill_(shares == 0, 0.0).sum(-2), states[steps])
        if len(chains) > 1:
            mean += _sum(weights[2].expand(k, g, m), p, steps)
    if len(chains) > 1:
        return _value(chains, scales, states, kept.redone, mean)
    last, posterior = _at_ends(kept.logs(slice(None)), p.ends), _at_ends(states, p.ends)
    return -mean[0] - (torch.log_softmax(last, -1) * posterior).masked_fill(posterior == 0, 0.0).sum(-1)


def _misses(p: Chain, q: Chain) -> Tensor:
    """Whether a path (g, m) is possible in p and forbidden by q, however improbable it is."""
    g, m, c, v = p.g, p.m, p.c, p.v
    x, other_x = (chain.x.reshape(v, g, m, c) for chain in (p, q))
    bulk, other = (chain.bulk.reshape(-1, g, c, c) for chain in (p, q))
    starts, closed_starts = (chain.p0.expand(*chain.lead, c).reshape(g, m, c) for chain in (p, q))
    pairs = (bulk, p.zero, other, q.zero), (starts, p.zero, closed_starts, q.zero), (x, -math.inf, other_x, -math.inf)
    if in_c(p.x) and not any(
        b.numel() and not b.amin() > low and ((b <= low) & (a > least)).any() for a, least, b, low in pairs
    ):
        return torch.zeros(g, m, dtype=torch.bool)
    closed, closed_starts, shut = (other <= q.zero) & (bulk > p.zero), closed_starts <= q.zero, other_x == -math.inf
    forward, backward = (p.x.new_empty(v, *p.lead, c, dtype=p.dtype) for _ in range(2))
    message_kernels(p.x).messages(p, forward, backward)
    reached, continued = (each.reshape(v, g, m, c) > -math.inf for each in (forward, backward))
    missed = ((reached & continued & shut).any(0) | (reached[0] & continued[0] & closed_starts)).any(-1)
    for step in range(1, v):
        into = reached[step - 1].to(p.dtype) @ closed[min(step, len(closed)) - 1].to(p.dtype)
        missed |= ((into > 0) & continued[step] & (x[step] > -math.inf)).any(-1)
    return missed
