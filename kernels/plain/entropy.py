"""The entropy of the posterior over paths, and the divergence of two, from posteriors g and expected counts C.

With t the sum of the logarithms of all weights along a path of the posterior, and t' of those under a second chain:

    H = log Z - E[t]        KL = (log Z' - E[t']) - (log Z - E[t])
    E[t] = <g_0, log p0> + sum_i <g_i, x_i> + sum_i <C_i, log P_i>

The largest of each x_i, P_i and p0 is divided by beforehand, so that no large numbers are subtracted. C loops add up
E[t] in their backward pass; what underflows there is computed again in float64, and then from g and C. From these an
entropy is that of the last state, and of each state under the next one.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .. import backward, forward, in_c, in_triton, messages_of, on_gpu
from ..chain import Chain
from ..choice import load

# entries that are computed together, and counts of transitions that are in memory at a time
_BLOCK, _COUNTS = 2**18, 2**24

# kernels in C and Triton raise no float64 emissions but those further below the largest
_DEEPEST = -960 * math.log(2)


def values(chains: Sequence[Chain], of_float32: bool = False) -> tuple[Tensor, Tensor]:
    """The entropy (g, m) of a chain, or the divergence of a first from a second, and which sequences underflow.

    `of_float32`: the chains are float64, but their operands were not.
    """
    p = chains[0]
    most = max(1, _COUNTS // max(1, (p.v - 1) * p.c**2))
    if not in_c(p.x):
        indices = torch.arange(p.g * p.m, device=p.x.device).split(most)
        parts = [_by_counts(_part(chains, index)) for index in indices]
        value, underflows = (torch.cat(part).view(p.g, p.m) for part in zip(*parts, strict=True))
        return value, underflows
    relative = [_relative(chain) for chain in chains]
    log_norm, mean, recomputed = load("cpu.dense").means(relative)
    value, underflows = _finished(relative, log_norm, mean, recomputed)
    # a log-partition of -inf may be due to underflow where the mean is NaN
    missing, wide, together = mean.isnan().view(-1).nonzero()[:, 0], p.dtype == torch.float64, p.g == 1
    size = most if wide or not together else len(missing)
    for index in missing.split(size) if len(missing) else ():
        part = _part(chains, index, together and not wide)
        exact = _by_counts(part, of_float32) if wide else values(part, True)
        value.view(-1)[index] = exact[0].view(-1)
    return value, underflows


def _finished(chains: Sequence[Chain], log_norm: Tensor, mean: Tensor, recomputed: Tensor) -> tuple[Tensor, Tensor]:
    """The values from log-partitions and mean log-weights, and which sequences underflow."""
    value = log_norm - mean
    for q in chains[1:]:
        second = forward(q)[0]
        infinite, recomputed = _misses(chains[0], q) | (second.log_norm == -math.inf), recomputed | second.recomputed
        value = (second.log_norm - value).masked_fill(infinite, math.inf)
        value = value.masked_fill(second.log_norm.isnan(), math.nan)
    return value.masked_fill(log_norm == -math.inf, 0.0).masked_fill(log_norm.isnan(), math.nan), recomputed


def _part(chains: Sequence[Chain], index: Tensor, together: bool = False) -> list[Chain]:
    """The sequences of an index, in float64 but for Triton, `together` as one set, or in a set each."""
    parts, lead = [], (1, len(index)) if together else (len(index), 1)
    for chain in chains:
        m, c, dtype = chain.m, chain.c, chain.dtype if in_triton(chain.x) else torch.float64
        if m == 1 and len(index) == chain.g:
            x, bulk, p0 = (tensor.to(dtype) for tensor in (chain.x, chain.bulk, chain.p0))
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
    for tensor, axes, log in (
        (chain.x, -1, True), (chain.bulk, (-2, -1), chain.log_params), (chain.p0, -1, chain.log_params),
    ):  # fmt: skip
        weight = tensor.to(chain.dtype)
        top = weight.amax(axes, keepdim=True)
        if log and (on_gpu(top) or not (top.abs() < 8).all()):
            weight = weight - top.masked_fill(~top.isfinite(), 0.0)
        elif not log and not on_gpu(top) and not ((top > 2.0**-16) & (top < 2.0**12)).all():
            over = weight / top.masked_fill(top == 0, 1.0)
            weight = over if ((over >= torch.finfo(over.dtype).tiny) | (weight == 0)).all() else weight
        weights.append(weight)
    return replace(chain, x=weights[0], bulk=weights[1], p0=weights[2])


def _by_counts(chains: Sequence[Chain], by_means: bool = False) -> tuple[Tensor, Tensor]:
    """The values (g, 1) from posteriors and expected counts, and which sequences underflow.

    `by_means`: under one matrix, an entropy from the sum of its counts, which takes less time and keeps fewer digits.
    """
    chains = [_relative(chain) for chain in chains]
    p = chains[0]
    conditional = len(chains) == 1 and not (by_means and len(p.bulk) == 1)
    if conditional and len(p.bulk) == 1:
        p = replace(p, bulk=p.bulk.expand(p.v - 1, *p.bulk.shape[1:]))
    v, g, c = p.v, p.g, p.c
    states, counts = messages_of(p, v), p.bulk.new_empty(p.bulk.shape, dtype=p.dtype)
    residuals = forward(p, keep=messages_of(p, v))[0]
    backward(replace(p, by_log=True), residuals, torch.ones_like(residuals.log_norm), None, states, counts)
    if conditional:
        entropy = _conditional(counts.view(-1, g, 1, c, c), states, p.ends)
        return _finished(chains, residuals.log_norm, residuals.log_norm - entropy, residuals.recomputed)
    exact = residuals.recomputed if in_triton(p.x) or in_c(p.x) else None
    # log-potentials first, because these correct posteriors
    mean = _means([chain.x.reshape(v, g, 1, c) for chain in chains], True, states, exact)
    exact = exact if p.log_params else None
    starts = [chain.p0.expand(*chain.lead, c).reshape(1, g, 1, c) for chain in chains]
    mean += _means(starts, p.log_params, states[:1], exact)
    if v > 1:
        bulks = [tensor.reshape(-1, g, 1, c**2) for tensor in (*(chain.bulk for chain in chains), counts)]
        of_bulk = _means(bulks[:-1], p.log_params, bulks[-1], exact)
        mean += of_bulk if len(p.bulk) > 1 else of_bulk * (v - 1 if p.ends is None else p.ends[..., 0] - 1)
    return _finished(chains, residuals.log_norm, mean, residuals.recomputed)


def _conditional(pairs: Tensor, states: Tensor, ends: Tensor | None) -> Tensor:
    """The entropy (g, m) from posteriors of pairs of states (v - 1, g, m, c, c) and of states (v, g, m, c)."""
    if ends is None:
        last = states[-1]
    else:
        last = states.gather(0, (ends - 1).clamp(0, len(states) - 1).expand(1, *states.shape[1:]))[0]
    entropy = -(last * last.double().log()).nansum(-1)
    for steps in _blocks(len(pairs), pairs[0].numel() if len(pairs) else 1):
        block = pairs[steps].double()
        entropy -= (block * (block / block.sum(-2, keepdim=True)).log()).nansum((0, -2, -1))
    return entropy


def _means(weights: Sequence[Tensor], log: bool, shares: Tensor, exact: Tensor | None) -> Tensor:
    """The mean of each step's logarithms of weights (s, g, m, k), or those of two chains' quotients, added up (g, m).

    Shares (s, g, m, k) need not add up to 1. Kernels raise them where weights are tiny; they are corrected in place,
    unless `exact` (g, m). None: none is raised.
    """
    mean = torch.zeros(shares.shape[1:3], dtype=torch.float64, device=shares.device)
    for steps in _blocks(len(shares), shares[0].numel()):
        logs, *of_second = (weight[steps].double() if log else weight[steps].double().log() for weight in weights)
        if exact is not None:
            shares[steps] *= (logs - _DEEPEST).clamp_(max=0.0).masked_fill_(exact[..., None], 0.0).exp_()
        terms, total = logs - of_second[0] if of_second else logs, shares[steps].sum(-1, dtype=torch.float64)
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
    bulk, other_bulk = (chain.bulk.reshape(-1, g, c, c) for chain in (p, q))
    start, other_start = (chain.p0.expand(*chain.lead, c).reshape(g, m, c) for chain in (p, q))
    pairs = (bulk, p.zero, other_bulk, q.zero), (start, p.zero, other_start, q.zero), (x, -math.inf, other_x, -math.inf)
    if in_c(p.x) and not any(
        b.numel() and not b.amin() > low and ((b <= low) & (a > least)).any() for a, least, b, low in pairs
    ):
        return torch.zeros(g, m, dtype=torch.bool)
    allowed = (bulk > p.zero).float()
    closed = allowed * (other_bulk <= q.zero)
    # states that a path of p leads to, and those to which one leads that q forbids
    reached = (start > p.zero) & (x[0] > -math.inf)
    missed = reached & ((other_start <= q.zero) | (other_x[0] == -math.inf))
    for step in range(1, v):
        at = step - 1 if len(bulk) > 1 else 0
        possible, (before, before_missed) = x[step] > -math.inf, (reached.float(), missed.float())
        after = (before @ allowed[at] > 0) & possible
        into = before_missed @ allowed[at] + before @ closed[at]
        after_missed = after & ((into > 0) | (other_x[step] == -math.inf))
        if p.ended is not None:
            after = torch.where(p.ended[step], reached, after)
            after_missed = torch.where(p.ended[step], missed, after_missed)
        reached, missed = after, after_missed
    return missed.any(-1)
