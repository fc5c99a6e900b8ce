"""The entropy of the posterior over paths, and the divergence of two, from posteriors g and expected counts C.

With t the sum of the logarithms of all weights along a path of the posterior, and t' of those under a second chain:

    H = log Z - E[t]        KL = (log Z' - E[t']) - (log Z - E[t])
    E[t] = <g_0, log p0> + sum_i <g_i, x_i> + sum_i <C_i, log P_i>

The largest of each x_i, P_i and p0 is divided by beforehand, so that no large numbers are subtracted. C loops add up
E[t] in their backward pass, from messages S and T = E B: that of P_i is S_{i-1} (P_i log P_i) T_i / (S_{i-1} P_i T_i).
What underflows there is computed again in float64, and then by the exact scan. On other devices, and in C where
logarithms are too far below 0, an entropy is that of the last state, and of each state given the next one, for which
C_i is enough.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .. import chain_kernels, in_c, in_triton, messages_of, on_gpu
from ..chain import Chain
from ..choice import load

# entries that are computed together, and counts of transitions that are kept
_BLOCK, _COUNTS = 2**18, 2**24

# sequences of a set that are computed together where there are others
_MANY = 16

# logarithms of entries on a path below which exponents in C are not exact
_FAR = -(2.0**20)

# Triton kernels raise no emissions but those further below the largest
_DEEPEST = -960 * math.log(2)


def values(chains: Sequence[Chain]) -> tuple[Tensor, Tensor]:
    """The entropy (g, m) of a chain, or the divergence of a first from a second, and which sequences underflow."""
    p, relative = chains[0], [_relative(chain) for chain in chains]
    most = max(1, _COUNTS // max(1, (p.v - 1) * p.c**2))
    if not in_c(p.x):
        indices = torch.arange(p.g * p.m, device=p.x.device).split(most)
        found = [_values(_part(relative, some)) for some in indices]
        value, underflows = (torch.cat(each).view(p.g, p.m) for each in zip(*found, strict=True))
        return value, underflows
    value, underflows, inexact = _by_loops(relative)
    if inexact.any():
        index, wide = inexact.view(-1).nonzero()[:, 0], p.dtype == torch.float64
        together = not wide and p.m > 1 and (p.g == 1 or p.m >= _MANY)
        sizes = torch.unique_consecutive(index // p.m, return_counts=True)[1].tolist() if together else most
        for some in index.split(sizes):
            part = _part(relative if wide else chains, some, together)
            exact = _by_loops(part, part[0].bulk.new_zeros(part[0].bulk.shape)) if wide else values(part)
            value.view(-1)[some] = exact[0].view(-1)
    return value, underflows


def _by_loops(chains: Sequence[Chain], counts: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The values (g, m) in C, which sequences underflow, and which have none; `counts`: see `kernels.cpu.entropy`."""
    log_norm, mean, redone = load("cpu.entropy").means(chains, counts)
    if counts is not None:
        mean += _mean_of_matrices(chains, counts, None)
    value, underflows = _finished(chains, log_norm - mean, log_norm, redone)
    if counts is not None and len(chains) == 1 and (log_norm < _FAR).any():
        value = torch.where(log_norm < _FAR, _values(chains)[0], value)
    return value, underflows, value.isnan() | mean.isnan()


def _finished(chains: Sequence[Chain], value: Tensor, log_norm: Tensor, redone: Tensor) -> tuple[Tensor, Tensor]:
    """The values from log-partitions less mean log-weights, and which sequences underflow."""
    for q in chains[1:]:
        second = chain_kernels(q.x).forward(q)[0]
        infinite, redone = _misses(chains[0], q) | (second.log_norm == -math.inf), redone | second.redone
        value = (second.log_norm - value).masked_fill(infinite, math.inf)
        value = value.masked_fill(second.log_norm.isnan(), math.nan)
    return value.masked_fill(log_norm == -math.inf, 0.0).masked_fill(log_norm.isnan(), math.nan), redone


def _part(chains: Sequence[Chain], index: Tensor, together: bool = False) -> list[Chain]:
    """Some sequences, in C in float64, `together` if they are of one set, or in a set each."""
    parts, lead = [], (1, len(index)) if together else (len(index), 1)
    for chain in chains:
        m, c, dtype = chain.m, chain.c, torch.float64 if in_c(chain.x) else chain.dtype
        if m == 1 and len(index) == chain.g:
            x, bulk, p0 = (one.to(dtype) for one in (chain.x, chain.bulk, chain.p0))
            parts.append(replace(chain, x=x, bulk=bulk, p0=p0, dtype=dtype))
            continue
        x, bulk = chain.x.reshape(chain.v, -1, c).index_select(1, index), chain.bulk.reshape(-1, chain.g, c, c)
        bulk, p0 = bulk.index_select(1, index[: lead[0]] // m), chain.p0.expand(*chain.lead, c).reshape(-1, c)[index]
        ends = None if chain.ends is None else chain.ends.reshape(-1)[index].view(*lead, 1)
        x, bulk, p0 = x.to(dtype).view(-1, *lead, c), bulk.to(dtype), p0.to(dtype).view(*lead, c)
        parts.append(replace(chain, x=x, bulk=bulk, p0=p0, ends=ends, dtype=dtype))
    return parts


def _relative(chain: Chain) -> Chain:
    """The chain with weights over the largest of their step unless these are near 1, which changes no posterior."""
    weights = []
    for one, axes, log in (
        (chain.x, -1, True), (chain.bulk, (-2, -1), chain.log_params), (chain.p0, -1, chain.log_params),
    ):  # fmt: skip
        one = one.to(chain.dtype)
        top = one.amax(axes, keepdim=True)
        if log and (on_gpu(one) or not (top.abs() < 8).all()):
            one = one - top.masked_fill(~top.isfinite(), 0.0)
        elif not log and not on_gpu(one) and not ((top > 2.0**-16) & (top < 2.0**12)).all():
            over = one / top.masked_fill(top == 0, 1.0)
            one = over if ((over >= torch.finfo(over.dtype).tiny) | (one == 0)).all() else one
        weights.append(one)
    return replace(chain, x=weights[0], bulk=weights[1], p0=weights[2])


def _values(chains: Sequence[Chain]) -> tuple[Tensor, Tensor]:
    """The values (g, 1) from posteriors and expected counts, and which sequences underflow."""
    p = chains[0]
    if len(chains) == 1 and len(p.bulk) == 1:
        p = replace(p, bulk=p.bulk.expand(p.v - 1, *p.bulk.shape[1:]))
    v, g, c = p.v, p.g, p.c
    forward, backward = chain_kernels(p.x)
    states, counts = messages_of(p, v), p.bulk.new_empty(p.bulk.shape, dtype=p.dtype)
    kept = forward(p, keep=messages_of(p, v))[0]
    backward(replace(p, by_log=True), kept, torch.ones_like(kept.log_norm), None, states, counts)
    if len(chains) == 1:
        value = _conditional(counts.view(-1, g, 1, c, c), states, p.ends)
    else:
        exact = kept.redone if in_triton(p.x) else None
        exact_weights = exact if p.log_params else None
        # log-potentials first, because these correct posteriors
        mean = _means([chain.x.reshape(v, g, 1, c) for chain in chains], True, states, exact)
        starts = [chain.p0.expand(*chain.lead, c).reshape(1, g, 1, c) for chain in chains]
        mean += _means(starts, p.log_params, states[:1], exact_weights)
        value = kept.log_norm - (mean + _mean_of_matrices(chains, counts, exact_weights))
    return _finished(chains, value, kept.log_norm, kept.redone)


def _conditional(pairs: Tensor, states: Tensor, ends: Tensor | None) -> Tensor:
    """The entropy (g, m) from posteriors of pairs of states (v - 1, g, m, c, c) and of states (v, g, m, c)."""
    if ends is None:
        last = states[-1]
    else:
        last = states.gather(0, (ends - 1).clamp(0, len(states) - 1).expand(1, *states.shape[1:]))[0]
    entropy = -(last * last.double().log()).nansum(-1)
    for steps in _blocks(len(pairs), pairs[0].numel() if len(pairs) else 1):
        some = pairs[steps].double()
        entropy -= (some * (some / some.sum(-2, keepdim=True)).log()).nansum((0, -2, -1))
    return entropy


def _mean_of_matrices(chains: Sequence[Chain], counts: Tensor, exact: Tensor | None) -> Tensor | float:
    """The means (g, 1) of matrices under expected counts of their shape, see `_means`."""
    p = chains[0]
    if p.v == 1:
        return 0.0
    flat = [one.reshape(-1, p.g, 1, p.c**2) for one in (*(chain.bulk for chain in chains), counts)]
    mean = _means(flat[:-1], p.log_params, flat[-1], exact)
    return mean if len(p.bulk) > 1 else mean * (p.v - 1 if p.ends is None else p.ends[..., 0] - 1)


def _means(weights: Sequence[Tensor], log: bool, shares: Tensor, exact: Tensor | None) -> Tensor:
    """The mean of each step's logarithms of weights (s, g, m, k), or those of two chains' quotients, added up (g, m).

    Shares (s, g, m, k) need not add up to 1. They are raised by loops where weights are tiny, and corrected in place,
    unless `exact` (g, m); None: they are not.
    """
    mean = torch.zeros(shares.shape[1:3], dtype=torch.float64, device=shares.device)
    for steps in _blocks(len(shares), shares[0].numel()):
        logs, *others = (one[steps].double() if log else one[steps].double().log() for one in weights)
        if exact is not None:
            shares[steps] *= (logs - _DEEPEST).clamp_(max=0.0).masked_fill_(exact[..., None], 0.0).exp_()
        terms, total = logs - others[0] if others else logs, shares[steps].sum(-1, dtype=torch.float64)
        # 0 times infinity is NaN
        mean += ((terms * shares[steps]).nansum(-1) / total).masked_fill_(total == 0, 0.0).sum(0)
    return mean


def _blocks(steps: int, entries: int) -> Iterator[slice]:
    """Ranges of steps with so many entries each that are computed together."""
    count = max(1, _BLOCK // max(1, entries))
    return (slice(start, min(steps, start + count)) for start in range(0, steps, count))


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
    reached, continued = _possible(x > -math.inf, bulk > p.zero, starts > p.zero, p.ends)
    missed = ((reached & continued & shut).any(0) | (reached[0] & continued[0] & closed_starts)).any(-1)
    into = reached[:-1].to(p.dtype) @ closed.to(p.dtype)
    return missed | ((into > 0) & continued[1:] & (x[1:] > -math.inf)).any(-1).any(0)


def _possible(x: Tensor, bulk: Tensor, start: Tensor, ends: Tensor | None) -> tuple[Tensor, Tensor]:
    """Whether a path leads to each state (v, g, m, c), and from it to its sequence's end, of what is not forbidden.

    `x` (v, g, m, c), `bulk` (s, g, c, c), `start` (g, m, c): which states and transitions are allowed.
    """
    v, allowed = len(x), bulk.float()
    steps = torch.arange(v, device=x.device).view(-1, 1, 1, 1)
    last, inside = (steps == v - 1, steps < v) if ends is None else (steps == ends - 1, steps < ends)
    reached, continued = [start & x[0]], [last[-1].expand_as(start)]
    for i in range(1, v):
        into, out = allowed[i - 1 if len(allowed) > 1 else 0], allowed[v - 1 - i if len(allowed) > 1 else 0]
        reached.append(((reached[-1].float() @ into) > 0) & x[i] & inside[i])
        following = (continued[-1] & x[v - i]).float() @ out.mT
        continued.append(((following > 0) | last[v - 1 - i]) & inside[v - 1 - i])
    return torch.stack(reached), torch.stack(continued[::-1])
