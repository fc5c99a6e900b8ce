"""Chains whose matrices are products of factors, in float64 logarithms: the definition, on any device.

    a_0 = log p0 + x_0        a_i = log(exp(a_{i-1}) P_i) + x_i        log Z = log(sum of exp(a_{v-1}))

Backward, the posterior of step i is propagated: where `a` passes a matrix F, `b = log(exp(a) F)`, a weight w(j) on b
puts `sum_j w(j) F(k, j) exp(a(k) - b(j))` on a(k), and the same terms summed over rows are the expected counts of F.
Each posterior is normalised by its own sum.
"""

import math

import torch
from torch import Tensor

from ..numbers import exact_sum, relative_logs
from ..sets import Sets
from ..stages import from_rows, mapped, matrices, own_shape, rows_behind, through, to_rows
from ..structured import Factors, Gradients, Stage, Structured, Walk
from . import matmul as log_matmul
from .forward import shifted


def forward(chain: Structured, keep: bool) -> Walk:
    """The log-partitions, and the messages (v, g, m, c) that `backward` reads, logarithms of `chain.dtype`."""
    sets = Sets.of(chain)
    ended = _ended(chain, sets)
    kept = chain.x.new_empty((chain.v if keep else 0, sets.g, sets.m, chain.c), dtype=chain.dtype)
    message, first = relative_logs(sets.grouped(chain.p0).double(), -1, log=chain.log_params)
    x, x_top = _potentials(chain, sets, 0)
    message, top = shifted(message + x)
    total, error = exact_sum(torch.stack([first, x_top, top]))
    if keep:
        kept[0] = message
    for step in range(1, chain.v):
        before, (x, x_top) = message, _potentials(chain, sets, step)
        parameters, shift = _transitions(chain, sets, step, ended)
        message, top = shifted(through(before, parameters, chain.pattern, _matmul, torch.logaddexp, torch.add) + x)
        terms = torch.stack([total, x_top, shift.expand_as(total), top])
        if ended is not None:  # a sequence that has ended keeps its last message and scale
            message = torch.where(ended[step], before, message)
            terms[1:].masked_fill_(ended[step], 0.0)
        total, lost = exact_sum(terms)
        error = error + lost
        if keep:
            kept[step] = message
    log_norm = torch.stack(exact_sum(torch.stack([total, torch.logsumexp(message, -1, keepdim=True), error]))).sum(0)
    log_norm = sets.batched(log_norm[..., 0]).contiguous()
    return Walk(log_norm, (kept,) if keep else (), torch.zeros_like(log_norm, dtype=torch.bool))


def backward(chain: Structured, walk: Walk, weight: Tensor, needs: tuple[bool, bool, bool]) -> Gradients:
    """The gradients of `sum(weight * log_norm)`; see `Gradients`."""
    sets = Sets.of(chain)
    ended, (messages,) = _ended(chain, sets), walk.kept
    weight = sets.grouped(weight.double().masked_fill(walk.log_norm == -math.inf, 0.0))[..., None]
    grad_x = chain.x.new_empty(chain.batch + (chain.v, chain.c), dtype=chain.dtype)
    counts = [torch.zeros_like(sets.parameter(one), dtype=torch.float64) for one in chain.parameters]
    posterior = torch.zeros(sets.g, sets.m, chain.c, dtype=torch.float64, device=chain.x.device)
    for step in reversed(range(chain.v)):
        inside = weight if ended is None else weight.masked_fill(ended[step], 0.0)
        begins = _begins(chain, ended, step, weight)
        posterior = torch.where(begins, torch.softmax(messages[step].double(), -1), posterior)
        posterior = (posterior / posterior.sum(-1, keepdim=True) * inside).masked_fill(inside == 0, 0.0)
        grad_x[..., step, :] = sets.batched(posterior)
        if step == 0:
            break
        parameters, _ = _transitions(chain, sets, step, ended)
        before = messages[step - 1].double().masked_fill(inside == 0, -math.inf)
        posterior = _step_back(before, posterior, parameters, chain.pattern, step - 1, counts)
    logs = chain.log_params or chain.by_log
    parameter_grads = [
        _of_weights(sets.as_parameter(one, weights.shape), weights, logs).to(chain.dtype)
        for one, weights in zip(counts, chain.parameters, strict=True)
    ]
    first = sets.batched(posterior).sum_to_size(chain.p0.shape).contiguous()
    return Gradients(
        grad_x if needs[0] else None,
        tuple(parameter_grads) if needs[1] else None,
        _of_weights(first, chain.p0, logs).to(chain.dtype) if needs[2] else None,
    )


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    return log_matmul.forward(a, b, torch.float64)[0]


def _ended(chain: Structured, sets: Sets) -> Tensor | None:
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


def _transitions(chain: Structured, sets: Sets, step: int, ended: Tensor | None) -> tuple[list[Tensor], Tensor]:
    """The logarithms of a step's parameters (g or 1, *own), and what has to be added to those of P (g or 1, 1, 1).

    The largest is taken out of each factor; with a diagonal, which is added to their product, only of that.
    """
    pattern: Factors = chain.pattern
    zero = -math.inf if chain.log_params else 0.0
    parameters, shift = [], torch.zeros(1, 1, 1, dtype=torch.float64, device=chain.x.device)
    for parameter in chain.parameters:
        values = sets.parameter(parameter)
        weights = values[step - 1 if len(values) > 1 else 0].double()
        if ended is not None:  # parameters that no sequence of a set uses may hold NaN
            unused = ended[step].all(1) if len(weights) > 1 else ended[step].all().view(1, 1)
            weights = weights.masked_fill(unused.view(-1, *(1 for _ in weights.shape[1:])), zero)
        logs, top = relative_logs(weights, tuple(range(1, weights.dim())), log=chain.log_params)
        parameters.append(logs)
        shift = shift + top.view(-1, 1, 1)
        if pattern.diagonal:
            parameters[-1], shift = logs + top, torch.zeros_like(shift[:1])
    return parameters, shift


def _step_back(
    before: Tensor, weight: Tensor, parameters: list[Tensor], pattern: Factors, index: int, counts: list[Tensor]
) -> Tensor:
    """The weights on the message before a step, from those on the sums behind it; adds to the expected counts."""
    messages = [before]
    for stage, parameter in zip(pattern.stages, parameters, strict=False):
        messages.append(mapped(messages[-1], parameter, stage, _matmul))
    straight = torch.zeros_like(before)
    if pattern.diagonal:
        stays = before + parameters[-1][:, None]
        sums = torch.logaddexp(messages[-1], stays)
        sums = sums.masked_fill(sums == -math.inf, 0.0)
        straight = (stays - sums).exp_().mul_(weight).masked_fill_(weight == 0, 0.0)
        weight = (messages[-1] - sums).exp_().mul_(weight).masked_fill_(weight == 0, 0.0)
        _add(counts[-1], index, straight.sum(1))
    for place in reversed(range(len(pattern.stages))):
        stage, parameter, message = pattern.stages[place], parameters[place], messages[place]
        rows = rows_behind(weight, stage, parameter)
        of_rows, of_matrices = log_matmul.backward(
            rows, to_rows(message, stage), matrices(parameter, stage), True, True, torch.float64
        )
        assert of_rows is not None and of_matrices is not None
        _add(counts[place], index, own_shape(of_matrices, stage))
        weight = _in_front(of_rows, stage, before.shape[1])
    return weight + straight


def _in_front(rows: Tensor, stage: Stage, m: int) -> Tensor:
    """Rows (g, blocks or 1, rows, in) as the message (g, m, c) in front of a stage."""
    return from_rows(rows, stage._replace(order=tuple(range(len(stage.axes)))), m)


def _add(counts: Tensor, index: int, more: Tensor) -> None:
    """Add counts (g, *own) of a step to those (s, g or 1, *own) of all."""
    into = counts[index if len(counts) > 1 else 0]
    into += more.sum_to_size(into.shape)


def _of_weights(counts: Tensor, weights: Tensor, logs: bool) -> Tensor:
    """The gradient of weights, or of their logarithms, from the latter; exactly 0 at weight 0."""
    return counts if logs else (counts / weights.double()).masked_fill(counts == 0, 0.0)
