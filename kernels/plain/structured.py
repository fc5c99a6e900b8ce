"""Chains of structures in float64 logarithms: the recursions that bands, arcs and products have in common.

    a_0 = log p0 + x_0        a_i = log(exp(a_{i-1}) P_i) + x_i        log Z = log(sum of exp(a_{v-1}))

Backward, the posterior of step i is propagated: a weight w(j) on `b = log(exp(a) P)` puts the sum over j of
`w(j) P(k, j) exp(a(k) - b(j))` on a(k), and the same terms are the expected counts of what P is made of. Each posterior
is normalised by its own sum. This defines what kernels/cpu and kernels/gpu compute.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import on_gpu
from ..numbers import exact_sum, relative_logs, shifted
from ..sets import Sets
from ..structured import Gradients, Structured, Walk, gradient_of_p0


class Passing(NamedTuple):
    """How messages pass through one step of a structure, of logarithmic parameters (g or 1, *own).

    `forward_step(message, parameters)`: the message (g, m, c) after the step. `backward_step(message, weight,
    parameters)`: weights (g, m, c) on the message before, from those after, and the expected counts (g, *own) of each
    parameter. `apart`: whether the largest can be taken out of each parameter.
    """

    forward_step: Callable[[Tensor, list[Tensor]], Tensor]
    backward_step: Callable[[Tensor, Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]]
    apart: bool = True


def forward(chain: Structured, passing: Passing, keep: bool) -> Walk:
    """The log-partitions, and the messages (v, g, m, c) that `backward` reads."""
    sets = Sets.of(chain.batch, chain.parameters)
    ended = ended_before(chain, sets)
    kept = chain.x.new_empty((chain.v if keep else 0, sets.g, sets.m, chain.c), dtype=torch.float64)
    message, first = relative_logs(sets.grouped(chain.p0).double(), -1, log=chain.log_params)
    x, x_top = _potentials(chain, sets, 0)
    message, top = shifted(message + x)
    # what has been subtracted in each step
    scales = torch.empty(chain.v, 3, *top.shape, dtype=torch.float64, device=chain.x.device)
    scales[0] = torch.stack([first, x_top, top])
    if keep:
        kept[0] = message
    for step in range(1, chain.v):
        before, (x, x_top) = message, _potentials(chain, sets, step)
        parameters, shift = _transitions(chain, sets, step, ended, passing)
        message, top = shifted(passing.forward_step(before, parameters) + x)
        scales[step, 0], scales[step, 1], scales[step, 2] = x_top, shift, top
        if ended is not None:  # a sequence that has ended keeps its last message and scale
            message = torch.where(ended[step], before, message)
            scales[step].masked_fill_(ended[step], 0.0)
        if keep:
            kept[step] = message
    total, error = exact_sum(scales.flatten(0, 1))
    log_norm = torch.stack(exact_sum(torch.stack([total, torch.logsumexp(message, -1, keepdim=True), error]))).sum(0)
    log_norm = sets.batched(log_norm[..., 0]).contiguous()
    return Walk(log_norm, (kept,) if keep else (), torch.zeros_like(log_norm, dtype=torch.bool))


def backward(
    chain: Structured, passing: Passing, walk: Walk, weight: Tensor, needs: tuple[bool, bool, bool]
) -> Gradients:
    """The gradients of `sum(weight * log_norm)`; see `Gradients`."""
    sets = Sets.of(chain.batch, chain.parameters)
    ended, messages = ended_before(chain, sets), walk.kept[0]
    weight = sets.grouped(weight.double().masked_fill(walk.log_norm == -math.inf, 0.0))[..., None]
    grad_x = chain.x.new_empty(chain.batch + (chain.v, chain.c), dtype=chain.dtype)
    counts = [torch.zeros_like(sets.parameter(one), dtype=torch.float64) for one in chain.parameters]
    posterior = torch.zeros(sets.g, sets.m, chain.c, dtype=torch.float64, device=chain.x.device)
    for step in reversed(range(chain.v)):
        inside = weight if ended is None else weight.masked_fill(ended[step], 0.0)
        begins = _begins(chain, ended, step, weight)
        posterior = torch.where(begins, torch.softmax(messages[step], -1), posterior)
        posterior = (posterior / posterior.sum(-1, keepdim=True) * inside).masked_fill(inside == 0, 0.0)
        grad_x[..., step, :] = sets.batched(posterior)
        if step == 0:
            break
        parameters, _ = _transitions(chain, sets, step, ended, passing)
        before = messages[step - 1].masked_fill(inside == 0, -math.inf)
        posterior, used = passing.backward_step(before, posterior, parameters)
        for count, more in zip(counts, used, strict=True):
            into = count[step - 1 if len(count) > 1 else 0]
            into += more.sum_to_size(into.shape)
    parameter_grads = []
    for count, weights in zip(counts, chain.parameters, strict=True):
        gradient = sets.as_parameter(count, weights.shape)
        if not (chain.log_params or chain.by_log):
            gradient = (gradient / weights.double()).masked_fill(gradient == 0, 0.0)
        parameter_grads.append(gradient.to(chain.dtype))
    return Gradients(
        grad_x if needs[0] else None,
        tuple(parameter_grads) if needs[1] else None,
        gradient_of_p0(chain, sets.batched(posterior).contiguous()) if needs[2] else None,
    )


def ended_before(chain: Structured, sets: Sets) -> Tensor | None:
    """Whether a sequence has ended before a step (v, g, m, 1); None where all have v steps."""
    if chain.ends is None:
        return None
    return sets.grouped(chain.ends)[..., None] <= torch.arange(chain.v, device=chain.x.device).view(-1, 1, 1, 1)


def _begins(chain: Structured, ended: Tensor | None, step: int, like: Tensor) -> Tensor:
    """Whether a step is a sequence's last one, (g, m, 1)."""
    if step == chain.v - 1:
        return torch.ones_like(like, dtype=torch.bool) if ended is None else ~ended[step]
    return torch.zeros_like(like, dtype=torch.bool) if ended is None else ended[step + 1] & ~ended[step]


def _potentials(chain: Structured, sets: Sets, step: int) -> tuple[Tensor, Tensor]:
    """The log-potentials of a step less their largest (g, m, c), and the largest (g, m, 1)."""
    return shifted(sets.grouped(chain.x[..., step, :]).double())


def _transitions(
    chain: Structured, sets: Sets, step: int, ended: Tensor | None, passing: Passing
) -> tuple[list[Tensor], Tensor]:
    """The logarithms of a step's parameters (g or 1, *own), and what has to be added to those of P (g or 1, 1, 1).

    The largest is taken out of each, if it can be.
    """
    parameters, shift = [], torch.zeros(1, 1, 1, dtype=torch.float64, device=chain.x.device)
    for parameter in chain.parameters:
        weights = weights_at(sets.parameter(parameter), step, ended, chain.log_params).double()
        if not weights.numel():  # a structure without an entry
            parameters.append(weights)
            continue
        logs, top = relative_logs(weights, tuple(range(1, weights.dim())), log=chain.log_params)
        parameters.append(logs if passing.apart else logs + top)
        shift = shift + top.view(-1, 1, 1) if passing.apart else shift
    return parameters, shift


def weights_at(values: Tensor, step: int, ended: Tensor | None, log: bool) -> Tensor:
    """The weights (g or 1, *own) of a step of a parameter (s, g or 1, *own), zero in sets that have ended."""
    weights = values[step - 1 if len(values) > 1 else 0]
    if ended is None:
        return weights
    # parameters that no sequence of a set uses may hold NaN
    unused = ended[step].all(1) if len(weights) > 1 else ended[step].all().view(1, 1)
    if not (on_gpu(unused) or unused.any()):
        return weights
    return weights.masked_fill(unused.view(-1, *(1 for _ in weights.shape[1:])), -math.inf if log else 0.0)
