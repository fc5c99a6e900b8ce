"""`kernels.log_chain` compiled for the CPU: a loop over the entries of each step's matrix that are not zero.

    a_i(k) = log sum_j exp(a_{i-1}(j) + log P_i(j, k)) + x_i(k)
    b_{i-1}(j) = log sum_k exp(log P_i(j, k) + x_i(k) + b_i(k))

A step's posterior is softmax(a_i + b_i). The expected count of a transition is the posterior of the state before it
times its share of the sum b_{i-1}: each is normalised over its own terms, so that no rounding adds up along the chain.

Eight sequences with the same matrices are walked together, and what is not zero in a matrix is looked for once for all
of a thread's. Messages have largest entry 0 and are kept in the chain's own dtype. Cost: an exponential for each
sequence and entry of a matrix that is not zero, and as many for gradients. Matrices with many such entries are left to
`kernels.log_chain`, whose products are the BLAS's. Tested against `logchain.reference` and `kernels.log_chain`.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from . import log_chain
from .chain import Chain
from .native import called, compiled, cut, spread
from .native_chain import Array
from .native_log_steps import (
    find_links,
    normalise,
    over,
    pass_on,
    rooms_of,
    share_out,
    shared,
    weigh,
)
from .native_summation import added
from .native_vectors import LANES

# exponentials from which on another thread is worth its start
_SHARE = 2**18

# entries of a column up to which a loop over them is faster than products
_FEW = 48


def forward(chain: Chain, lossy: Tensor, log_norm: Tensor, messages: Tensor | None) -> Tensor:
    """See `kernels.log_chain`; just the sequences marked are redone."""
    if _dense(chain):
        return log_chain.forward(chain, lossy, log_norm, messages)
    places = lossy.nonzero().numpy()
    kept = chain.new(0, 0, 0, 0) if messages is None else messages
    jobs = _jobs(chain, places, whole_sets=False)
    spread(_walk(chain.dtype), jobs, places, *_operands(chain), kept.numpy(), log_norm.numpy())
    return lossy


def backward(
    chain: Chain,
    redone: Tensor,
    log_norm: Tensor,
    messages: Tensor,
    weight: Tensor,
    grad_x: Tensor | None,
    grad_bulk: Tensor | None,
    grad_p0: Tensor,
) -> None:
    """See `kernels.log_chain`."""
    if _dense(chain):
        log_chain.backward(chain, redone, log_norm, messages, weight, grad_x, grad_bulk, grad_p0)
        return
    v, g, m, c = chain.v, chain.g, chain.m, chain.c
    places, weight = redone.nonzero().numpy(), weight.double().masked_fill(log_norm == -torch.inf, 0.0)
    into_x = chain.new(0, 0, 0, 0) if grad_x is None else grad_x.to(chain.dtype).reshape(v, g, m, c)
    # a matrix's gradient is one thread's, but for that all sequences share: there each thread has its own
    shared = grad_bulk is not None and g == len(grad_bulk) == 1
    jobs = _jobs(chain, places, whole_sets=grad_bulk is not None and not shared)
    if grad_bulk is None:
        into_bulk = [chain.new(0, 0, 0, 0)] * len(jobs)
    else:
        into_bulk = [grad_bulk] + [torch.zeros_like(grad_bulk) if shared else grad_bulk for _ in jobs[1:]]
    jobs = [(*job, into.numpy()) for job, into in zip(jobs, into_bulk, strict=True)]
    outputs = into_x.numpy(), grad_p0.view(g, m, c).numpy()
    by_log = chain.log_params or chain.by_log
    spread(_walk_back(chain.dtype), jobs, places, *_operands(chain), messages.numpy(), weight.numpy(), by_log, *outputs)
    if grad_x is not None and into_x.data_ptr() != grad_x.data_ptr():
        grad_x.copy_(into_x.view(grad_x.shape))
    if grad_bulk is not None and shared:
        for more in into_bulk[1:]:
            grad_bulk += more


def _dense(chain: Chain) -> bool:
    """Whether matrices, as far as a few of them show, have many entries that are not zero."""
    bulk = chain.bulk.flatten(1, -3) if chain.bulk.dim() > 3 else chain.bulk[:, None]
    some = bulk[:: max(1, len(bulk) // 4), :: max(1, bulk.shape[1] // 4)]
    return bool(some.numel()) and (some != chain.zero).double().mean().item() * chain.c > _FEW


def _operands(chain: Chain) -> list[Any]:
    v, g, m, c, dtype = chain.v, chain.g, chain.m, chain.c, chain.dtype
    x = chain.x.detach().to(dtype).reshape(v, g, m, c)
    raw = chain.bulk.detach().to(dtype).reshape(len(chain.bulk), g, c, c)
    p0 = chain.p0.detach().expand(*chain.lead, c).to(dtype).reshape(g, m, c)
    ends = torch.full((g, m), v) if chain.ends is None else chain.ends.view(g, m)
    return [x.numpy(), raw.numpy(), p0.numpy(), ends.numpy(), chain.log_params]


def _jobs(chain: Chain, places: Array, *, whole_sets: bool) -> list[tuple[Any, ...]]:
    """The ranges of places that each thread walks, whole sets of them if need be."""
    parts = max(1, min(torch.get_num_threads(), len(places), len(places) * chain.v * chain.c // _SHARE))
    edges = [low for low, _ in cut(len(places), parts)]
    if whole_sets:
        edges = sorted({int(np.searchsorted(places[:, 0], places[low, 0])) for low in edges})
    return list(zip(edges, [*edges[1:], len(places)], strict=True))


@called
def _end_of_set(places, begin, high):
    """Before which place those of a set end."""
    end = begin
    while end < high and places[end, 0] == places[begin, 0]:
        end += 1
    return end


@called
def _state(x, low, high):
    """A message for each eight of as many sequences as may share a set."""
    return np.zeros((min(x.shape[2], high - low) // LANES + 1) * x.shape[-1] * LANES)


@called
def _longest(ends, places, first, count):
    """The number of steps of the longest of some sequences."""
    most = 0
    for p in range(first, first + count):
        most = max(most, ends[places[p, 0], places[p, 1]])
    return most


def _forward(low, high, places, x, raw, p0, ends, log, messages, log_norm):
    """The sequences (set, member) at the places from `low` to before `high`."""
    v, c, one, keep = x.shape[0], x.shape[-1], len(raw) == 1, len(messages) > 0
    state, (links, rooms) = _state(x, low, high), rooms_of(c)
    whole, lost = np.zeros(high - low), np.zeros(high - low)
    begin, count = low, 0
    while begin < high:
        i, end = places[begin, 0], _end_of_set(places, begin, high)
        for step in range(v):
            if step == 1 or (step > 1 and not one):
                count = find_links(raw, step - 1, i, log, links)
            for first in range(begin, end, LANES):
                at, some = (first - begin) * c, min(LANES, end - first)
                if 0 < step < _longest(ends, places, first, some):
                    pass_on(state, at, links.before, links.after, links.logs, count, rooms)
                for lane in range(some):
                    r = places[first + lane, 1]
                    for j in range(c if step == 0 else 0):
                        entry = np.float64(p0[i, r, j])
                        state[at + j * LANES + lane] = entry if log else np.log(entry)
                    shift = weigh(state, at, lane, x, step, i, r, step < ends[i, r])
                    p = first + lane - low
                    whole[p], lost[p] = added(whole[p], lost[p], shift)
                normalise(state, at, rooms)
                for lane in range(some):
                    p, r, rest = first + lane - low, places[first + lane, 1], 0.0
                    whole[p], lost[p] = added(whole[p], lost[p], rooms.one[lane])
                    for j in range(c if keep else 0):
                        messages[step, i, r, j] = state[at + j * LANES + lane]
                    if step + 1 == ends[i, r]:
                        for j in range(c):
                            rest += np.exp(state[at + j * LANES + lane])
                        whole[p], lost[p] = added(whole[p], lost[p], np.log(rest))
                        log_norm[i, r] = whole[p] + lost[p]
        begin = end


def _backward(low, high, into_bulk, places, x, raw, p0, ends, log, messages, weight, by_log, into_x, into_p0):
    """The sequences (set, member) at the places from `low` to before `high`. An empty `into_...` is not asked for."""
    v, c, one, counted = x.shape[0], x.shape[-1], len(raw) == 1, len(into_bulk) > 0
    state, (links, rooms) = _state(x, low, high), rooms_of(c)
    counts, states, active = np.zeros(c * c), np.empty(c * LANES), np.empty(LANES)
    begin, count = low, 0
    while begin < high:
        i, end = places[begin, 0], _end_of_set(places, begin, high)
        for step in range(v - 1, -1, -1):
            if step == v - 2 or (step < v - 2 and not one):
                count = find_links(raw, 0 if one else step, i, log, links)
                counts[:count] = 0.0
            for first in range(begin, end, LANES):
                at, some = (first - begin) * c, min(LANES, end - first)
                onward = step + 1 < _longest(ends, places, first, some)
                if onward:  # x + b of the step behind becomes b
                    pass_on(state, at, links.after, links.before, links.logs, count, rooms)
                    normalise(state, at, rooms)
                for lane in range(LANES):
                    r = places[first + lane, 1] if lane < some else 0
                    active[lane] = weight[i, r] if lane < some and step < ends[i, r] else 0.0
                    for j in range(c if lane >= some or step + 1 >= ends[i, r] else 0):
                        state[at + j * LANES + lane] = 0.0
                    for j in range(c):
                        here = j * LANES + lane
                        states[here] = messages[step, i, r, j] + state[at + here] if active[lane] != 0 else -np.inf
                    weigh(state, at, lane, x, step, i, r, active[lane] != 0)
                share_out(states, active, rooms)
                for lane in range(some):
                    r = places[first + lane, 1]
                    for j in range(c if len(into_x) > 0 else 0):
                        into_x[step, i, r, j] = states[j * LANES + lane]
                    for j in range(c if step == 0 else 0):
                        found = states[j * LANES + lane]
                        into_p0[i, r, j] = found if by_log else over(found, np.float64(p0[i, r, j]))
                if counted and onward:
                    for k in range(len(states)):
                        states[k] = over(states[k], rooms.sums[k])
                    for e in range(count):
                        counts[e] += shared(states, links.before[e], rooms.terms, e * LANES)
            if counted and step < v - 1 and (step == 0 or not one):
                for e in range(count):
                    j, k = links.before[e] // LANES, links.after[e] // LANES
                    found = counts[e] if by_log else over(counts[e], np.float64(raw[step, i, j, k]))
                    into_bulk[step, i, j, k] += found
        begin = end


def _types(dtype: torch.dtype) -> tuple[Any, ...]:
    """Of a range, of arrays (k, g, m, c) and of the operands of either loop."""
    real = numba.float64 if dtype == torch.float64 else numba.float32
    grid, whole = numba.int64[:, :], real[:, :, :, :]
    operands = grid, whole, whole, real[:, :, :], grid, numba.boolean, whole, numba.float64[:, :]
    return (numba.int64, numba.int64), whole, operands


@cache
def _walk(dtype: torch.dtype) -> Callable[..., None]:
    """The loop for float32 or float64, from numba's cache on disk where there is one."""
    span, _, operands = _types(dtype)
    return compiled(_forward, numba.void(*span, *operands))


@cache
def _walk_back(dtype: torch.dtype) -> Callable[..., None]:
    """The other one."""
    span, whole, operands = _types(dtype)
    outputs = numba.boolean, whole, numba.float64[:, :, :]
    return compiled(_backward, numba.void(*span, whole, *operands, *outputs))
