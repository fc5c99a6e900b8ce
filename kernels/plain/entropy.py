"""The entropy of the posterior over paths, and the divergence of two, from posteriors g and expected counts C.

With t the sum of the logarithms of all weights along a path of the posterior, and t' of those under a second chain:

    H = log Z - E[t]        KL = (log Z' - E[t']) - (log Z - E[t])
    E[t] = <g_0, log p0> + sum_i <g_i, x_i> + sum_i <C_i, log P_i>

The largest of each x_i, P_i and p0 is divided by beforehand, so that no large numbers are subtracted. `backward` counts
the uses of matrices that no other sequence has. Of others, C loops hold linear forward messages S, and the last sum is
that of <g_i, S_{i-1} (P_i log P_i) / (S_{i-1} P_i)>. What underflows in C loops is computed again in float64, and in
the end with matrices for each sequence, as all is on other devices. There an entropy is that of the last state, and of
each state given the next one, for which C_i is enough.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .. import chain_kernels, in_c, in_triton, message_kernels, messages_of, on_gpu
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
    p, c_loops = chains[0], in_c(chains[0].x)
    again, by_counts = c_loops and (p.m > 1 or p.dtype == torch.float32), not c_loops and len(chains) == 1
    size = (len(p.bulk) if again or len(chains) > 1 else p.v - 1) * p.c**2
    most, together = max(1, _COUNTS // max(1, size)), c_loops and p.m > 1 and (p.g == 1 or p.m >= _MANY)
    if p.g > (1 if p.m > 1 else most) or (p.m > 1 and not c_loops):  # by set, or a set for each sequence
        indices = torch.arange(p.g * p.m, device=p.x.device).split(p.m if together else most)
        found = [values(_part(chains, index, p.dtype, together)) for index in indices]
        value, underflows = (
            torch.cat([one.view(-1) for one in each]).view(p.g, p.m) for each in zip(*found, strict=True)
        )
        return value, underflows
    relative = [_relative(chain) for chain in chains]
    value, underflows, inexact = _values(relative, by_counts)
    if again and inexact.any():
        index = inexact.view(-1).nonzero()[:, 0]
        part = _part(chains, index, torch.float64, together and p.dtype == torch.float32)
        value.view(-1)[index] = values(part)[0].view(-1)
    elif c_loops and len(chains) == 1 and inexact.any():
        value = torch.where(inexact, _values(relative, True)[0], value)
    return value, underflows


def _part(chains: Sequence[Chain], index: Tensor, dtype: torch.dtype, together: bool) -> list[Chain]:
    """Some sequences, `together` if they are of one set, or in a set each."""
    parts, lead = [], (1, len(index)) if together else (len(index), 1)
    for chain in chains:
        m, c = chain.m, chain.c
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


def _values(chains: Sequence[Chain], by_counts: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The values (g, m), which sequences underflow, and which are to be computed again, if that helps."""
    p = chains[0]
    if by_counts and len(p.bulk) == 1:
        p = replace(p, bulk=p.bulk.expand(p.v - 1, *p.bulk.shape[1:]))
    v, g, m, c = p.v, p.g, p.m, p.c
    forward, backward = chain_kernels(p.x)
    states, counts = messages_of(p, v), p.bulk.new_empty(p.bulk.shape, dtype=p.dtype) if m == 1 else None
    kept = forward(p, keep=messages_of(p, v))[0]
    passes = [kept, *(forward(chain)[0] for chain in chains[1:])]
    again = in_c(p.x) and (m > 1 or p.dtype == torch.float32)
    weight = (~kept.redone if again else torch.ones_like(kept.redone)).double()
    backward(replace(p, by_log=True), kept, weight, None, states, counts)
    norms, underflows = (
        torch.stack([one.log_norm for one in passes]),
        torch.stack([one.redone for one in passes]).any(0),
    )
    infinite = torch.zeros_like(underflows) if len(chains) == 1 else _misses(*chains) | (norms[1] == -math.inf)
    if by_counts:
        assert counts is not None
        value = _conditional(counts.view(-1, g, m, c, c), states, p.ends)
    else:
        mean_of = load("cpu.means").means if in_c(p.x) else means
        steps = v - 1 if p.ends is None else p.ends[..., 0] - 1
        exact = kept.redone if in_c(p.x) or in_triton(p.x) else None
        exact_weights = exact if p.log_params else None
        # log-potentials first, because these correct posteriors
        mean = mean_of([chain.x.reshape(v, g, m, c) for chain in chains], True, states, exact)
        starts = [chain.p0.expand(*chain.lead, c).reshape(1, g, m, c) for chain in chains]
        mean += mean_of(starts, p.log_params, states[:1], exact_weights)
        if counts is None:
            mean += _of_shared_matrix(chains, kept.messages, states)
        elif v > 1:
            flat = [chain.bulk.reshape(-1, g, 1, c * c) for chain in chains]
            of_matrices = mean_of(flat, p.log_params, counts.view(-1, g, 1, c * c), exact_weights)
            mean += of_matrices if len(p.bulk) > 1 else of_matrices * steps
        value = norms[0] - mean if len(chains) == 1 else norms[1] - (norms[0] - mean)
    low = kept.redone | ~value.isfinite() if again else kept.redone & (norms[0] < _FAR)
    inexact = low & norms.isfinite().all(0) & ~infinite
    value = value.masked_fill(infinite, math.inf).masked_fill(norms[-1].isnan(), math.nan)
    value = value.masked_fill(norms[0] == -math.inf, 0.0).masked_fill(norms[0].isnan(), math.nan)
    return value, underflows, inexact


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


def means(weights: Sequence[Tensor], log: bool, shares: Tensor, exact: Tensor | None = None) -> Tensor:
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


def _of_shared_matrix(chains: Sequence[Chain], messages: Tensor, states: Tensor) -> Tensor:
    """The means (1, m) of a set's matrices by C loops, from linear messages and posteriors (v, 1, m, c)."""
    (v, _, m, c), log, means = states.shape, chains[0].log_params, load("cpu.means").means
    total, bulks = states.new_zeros(1, m, dtype=torch.float64), [chain.bulk.reshape(-1, 1, c, c) for chain in chains]
    for steps in _blocks(v - 1, c * (m if len(bulks[0]) == 1 else max(m, c))):
        if steps.start == 0 or len(bulks[0]) > 1:
            some = [(one if len(one) == 1 else one[steps]).contiguous() for one in bulks]
            matrix = some[0].exp() if log else some[0]
            by_log, flat = torch.empty_like(matrix), [one.view(-1, 1, 1, c * c) for one in (*some, matrix)]
            means(flat[:-1], log, flat[-1], None, by_log)
            if len(matrix) == 1:  # a third of the time of a stack of products
                matrix, by_log = matrix[0, 0], by_log[0, 0]
        quotient = (messages[:-1][steps] @ by_log).div_(messages[:-1][steps] @ matrix)
        total += means([quotient], True, states[1:][steps])
    return total


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
    into = reached[:-1].to(p.dtype) @ closed.to(p.dtype)
    return missed | ((into > 0) & continued[1:] & (x[1:] > -math.inf)).any(-1).any(0)
