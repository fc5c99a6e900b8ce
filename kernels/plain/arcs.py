"""The log-partition of chains whose transitions are arcs, and its gradients, in float64 logarithms.

An arc k leads from state s(k) to state t(k) with weight w_i(k) into step i:

    a_0 = log p0 + x_0       a_i(j) = x_i(j) + logsumexp over arcs k to j of a_{i-1}(s(k)) + log w_i(k)
    b_{v-1} = 0              b_{i-1}(j) = logsumexp over arcs k from j of log w_i(k) + x_i(t(k)) + b_i(t(k))

    posterior_i = softmax(a_i + b_i)
    d log Z / d log w_i(k) = exp(a_{i-1}(s(k)) + log w_i(k) + x_i(t(k)) + b_i(t(k)) - logsumexp(a_{i-1} + b_{i-1}))

The largest entry of each message and of each x is subtracted before they are used. This defines what kernels/cpu and
kernels/gpu compute.
"""

import math

import torch
from torch import Tensor

from ..numbers import exact_sum
from ..structured import Gradients, Structured, Walk


def forward(chain: Structured, keep: bool) -> Walk:
    """The log-partitions; kept are forward messages [*B, v, c], float64 logarithms less the largest of each."""
    v, batch = chain.v, chain.batch
    terms = torch.zeros(2 * v + 1, *batch, dtype=torch.float64, device=chain.x.device)
    kept = terms.new_empty(*batch, v if keep else 0, chain.c)
    message = _logs(chain, chain.p0).expand(*batch, chain.c)
    for step in range(v):
        inside = _inside(chain, step)
        sums = message if step == 0 else _log_sum(message, _log_weights(chain, step), chain.pattern, chain.c)
        x, terms[2 * step] = _less_largest(_x(chain, step))
        after, terms[2 * step + 1] = _less_largest(sums + x)
        message = torch.where(inside, after, message)
        terms[2 * step : 2 * step + 2].masked_fill_(~inside[..., 0], 0.0)
        if keep:
            kept[..., step, :] = message
    terms[-1] = torch.logsumexp(message, -1)
    total, error = exact_sum(terms)
    redone = torch.zeros(batch, dtype=torch.bool, device=chain.x.device)
    return Walk(total + error, (kept,) if keep else (), redone)


def backward(chain: Structured, walk: Walk, weight: Tensor, needs: tuple[bool, bool, bool]) -> Gradients:
    """The gradients of `sum(weight * log_norm)` with respect to x, the arcs' weights and p0, where `needs` says so."""
    (parameter,), (source, target), kept = chain.parameters, chain.pattern, walk.kept[0]
    live = (weight != 0) & (walk.log_norm != -math.inf)
    weight = weight.double().masked_fill(~live, 0.0)[..., None]
    grad_x = chain.x.new_zeros(chain.x.shape, dtype=torch.float64)
    counts = parameter.new_zeros(parameter.shape, dtype=torch.float64)
    message = kept.new_zeros(*chain.batch, chain.c)
    for step in reversed(range(chain.v)):
        inside = _inside(chain, step) & live[..., None]
        posterior = weight * torch.softmax(kept[..., step, :] + message, -1)
        grad_x[..., step, :] = torch.where(inside, posterior, 0.0)
        if step == 0:
            break
        weights = _log_weights(chain, step)
        into = _less_largest(_x(chain, step) + message)[0]
        earlier = _log_sum(into, weights, (target, source), chain.c)
        total = torch.logsumexp(kept[..., step - 1, :] + earlier, -1, keepdim=True)
        shares = kept[..., step - 1, source] + into[..., target] - total
        if chain.log_params or chain.by_log:
            shares = shares + weights
        shares = (weight * shares.exp()).masked_fill(~inside | (weights == -math.inf), 0.0)
        counts[..., _index(chain, step), :] += shares.sum_to_size(*parameter.shape[:-2], parameter.shape[-1])
        message = torch.where(inside, _less_largest(earlier)[0], message)
    return Gradients(
        grad_x.to(chain.dtype) if needs[0] else None,
        (counts.to(chain.dtype),) if needs[1] else None,
        _initial_gradient(chain, grad_x[..., 0, :]) if needs[2] else None,
    )


def _logs(chain: Structured, weights: Tensor) -> Tensor:
    return weights.double() if chain.log_params else weights.double().log()


def _index(chain: Structured, step: int) -> int:
    """Which weights lead into a step."""
    return step - 1 if chain.parameters[0].shape[-2] > 1 else 0


def _log_weights(chain: Structured, step: int) -> Tensor:
    """The logarithms of the weights into a step [*B or ones, arcs]."""
    return _logs(chain, chain.parameters[0][..., _index(chain, step), :])


def _inside(chain: Structured, step: int) -> Tensor:
    """Whether a sequence has a step [*B, 1]."""
    if chain.ends is None:
        return torch.ones(*chain.batch, 1, dtype=torch.bool, device=chain.x.device)
    return chain.ends[..., None] > step


def _x(chain: Structured, step: int) -> Tensor:
    """The log-potentials of a step [*B, c]; 0 behind the end."""
    return chain.x[..., step, :].double().masked_fill(~_inside(chain, step), 0.0)


def _less_largest(logs: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithms (..., c) less the largest, and the largest (...), 0 in place of -inf."""
    top = logs.amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)
    return logs - top, top[..., 0]


def _log_sum(message: Tensor, weights: Tensor, ends: tuple[Tensor, Tensor], c: int) -> Tensor:
    """For each state the logsumexp of message and weight over the arcs that lead there from `ends[0]` to `ends[1]`."""
    terms = message[..., ends[0]] + weights
    to = ends[1].expand(terms.shape)
    top = terms.new_full((*terms.shape[:-1], c), -math.inf).scatter_reduce(-1, to, terms, "amax")
    top = top.masked_fill(top == -math.inf, 0.0)
    sums = torch.zeros_like(top).scatter_add(-1, to, (terms - top.gather(-1, to)).exp())
    return top + sums.log()


def _initial_gradient(chain: Structured, posterior: Tensor) -> Tensor:
    """The gradient of p0 from weighted posteriors of the first step [*B, c]."""
    if not (chain.log_params or chain.by_log):
        posterior = (posterior / chain.p0.double()).masked_fill(posterior == 0, 0.0)
    return posterior.sum_to_size(chain.p0.shape).to(chain.dtype)
