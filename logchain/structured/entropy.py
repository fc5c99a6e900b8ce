"""The entropy of the posterior over the state paths of a chain of structures."""

import math

import torch
from torch import Tensor

from ..autograd.entropy import entropy as entropy_of_dense
from ..kernels.plain.semiring import log_weights, shifted
from ..transitions import LOG, Transition
from .operands import Operands, Steps
from .product import log_norm, posteriors
from .walk import first


def entropy(operands: Operands) -> Tensor:
    """`log Z - E[log w(z)]` [*B] in float64, differentiable once; 0 where no path is possible.

    The mean log-weight of a path is the sum of all logarithms, each times the expected number of its uses. That holds
    where entries are products of parameters; see `entropy_of_sums` for others.
    """
    if operands.x.numel() == 0:
        return log_norm(operands)
    x, p0, *parameters = operands.tensors
    batch, sequence = operands.x.shape[:-2], range(operands.x.dim() - 2)
    # potentials relative to the largest leave posteriors as they are, and log Z small
    top = x.detach().amax(-1, keepdim=True)
    x = x.double() - top.double().masked_fill(~top.isfinite(), 0.0)
    if operands.lengths is not None:
        inside = torch.arange(x.shape[-2], device=x.device) < operands.lengths[..., None]
        x = torch.where(inside[..., None], x, 0.0)
    logs = [log_weights(one, operands.log_params, torch.float64) for one in (p0, *parameters)]
    # each sequence has counts of its own
    logs = [one.expand(*batch, *one.shape[len(batch) :]) for one in logs]
    own = operands.of(x, *logs)._replace(log_params=True)
    total, (states, counts, starts) = posteriors(own, (True, True, True))
    assert states is not None and counts is not None and starts is not None
    mean = torch.zeros_like(total)
    for used, log in zip((states, starts, *counts), (x, *logs), strict=True):
        terms = used * torch.where((used == 0) | (log == -math.inf), 0.0, log)
        mean = mean + terms.sum([axis for axis in range(terms.dim()) if axis not in sequence])
    return torch.where(total == -math.inf, 0.0, total - mean)


def entropy_of_sums(operands: Operands) -> Tensor:
    """The entropy [*B] of a chain whose entries are sums, multiplied out as logarithms in float64."""
    x, transition, p0, ends, log_params = operands
    logs = transition.map(lambda weight: log_weights(weight, log_params, torch.float64))
    p0 = log_weights(p0, log_params, torch.float64)
    return entropy_of_dense(x.double(), logs.to_dense(log_params=True), p0, ends, True)


def entropy_by_steps(operands: Operands) -> Tensor:
    """The entropy [*B] in float64, a step at a time, of entries that are parameters, some of them on other ranks.

    With r(k, j) = exp(a(k)) P(k, j) / exp(b(j)), the odds of state k before state j, entropies of what is before are

        h'(j) = sum over k of r(k, j) (h(k) - log r(k, j))        -log r(k, j) = b(j) - a(k) - log P(k, j)

    whose terms are made positive, and summed as weights.

    Source: D. Hernando, V. Crespi and G. Cybenko, "Efficient computation of the hidden Markov model entropy for a given
    observation sequence", IEEE Trans. Inf. Theory 51 (2005).
    """
    steps = Steps(operands)
    message = first(steps).values
    entropies, known = torch.zeros_like(message), None
    for step in range(1, steps.v):
        transition = steps.transition(step)
        if transition is not known:
            known, (surprising, top) = transition, _surprising(transition)
        sums = transition.apply(message, LOG)
        base = sums.masked_fill(sums == -math.inf, 0.0)
        of_messages = (transition.apply(message + _log_one_more(entropies - message), LOG) - base).exp()
        of_entries = (surprising.apply(message, LOG) - base).exp()
        after = (of_messages + of_entries + base - top - 2.0).masked_fill(sums == -math.inf, 0.0)
        potential, _ = shifted(steps.potential(step))
        moved, _ = shifted(sums + potential)
        inside = steps.inside(step)
        entropies = after if inside is None else torch.where(inside, after, entropies)
        message = moved if inside is None else torch.where(inside, moved, message)
    total = LOG.sum(message, -1)[..., None]
    chances = (message - total.masked_fill(total == -math.inf, 0.0)).exp()
    logs = torch.where(message == -math.inf, 0.0, message - total)
    terms = torch.where(message == -math.inf, 0.0, chances * (entropies - logs))
    return steps.sets.batched(terms.sum(-1)) + (steps.unused() if terms.requires_grad else 0.0)


def _log_one_more(values: Tensor) -> Tensor:
    """`log(1 + value)`, 0 for +inf."""
    return values.masked_fill(values == math.inf, 0.0).log1p()


def _surprising(transition: Transition) -> tuple[Transition, Tensor]:
    """The structure of `P(k, j) (1 + top - log P(k, j))`, and top (g or 1, 1, 1), the largest logarithm of all."""
    (logs,) = transition.parameters
    top = logs.detach().flatten(1)
    top = torch.cat([top, top.new_full((len(top), 1), -math.inf)], -1).amax(-1)
    top = transition.ranks.exchange.stacked(top).amax(0)
    top = top.masked_fill(top.isinf(), 0.0).view(-1, 1, 1)
    return transition.map(lambda logs: logs + _log_one_more(top - logs)), top
