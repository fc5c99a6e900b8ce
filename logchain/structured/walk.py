"""Any structure's forward and backward pass, in float64 logarithms: the definition of the kernels, and slower.

    a_0 = log p0 + x_0        a_i = apply(a_{i-1}) + x_i        log Z = log(sum of exp(a_{v-1}))

Each message is held less its largest entry, with the sum of what was subtracted and that sum's rounding error. The
backward pass propagates posteriors: those of step i are the gradient of a_i, and torch's autograd takes them through
one step to a_{i-1} and the parameters. Each is normalised by its own sum, so that errors do not add up.
"""

import math

import torch
from torch import Tensor

from ..kernels.plain.forward import shifted
from ..kernels.plain.semiring import log_weights, two_sum
from ..kernels.structured import Gradients, Walk
from ..transitions import LOG
from .operands import Operands, Steps


def log_norm(steps: Steps, *, messages: Tensor | None = None) -> Tensor:
    """The log-partition [*B], which torch's autograd differentiates.

    Messages less their largest entries are written to `messages` (v, g, m, c); behind a sequence's end, its last one.
    """
    message, top = relative(steps.start() + steps.potential(0))
    scale, lost = top, torch.zeros_like(top)
    for step in range(steps.v):
        if step > 0:
            # the largest potential is taken out first: a sum is rounded by its own size
            potential, shift = relative(steps.potential(step))
            after, top = relative(steps.transition(step).apply(message, LOG) + potential)
            inside = steps.inside(step)
            if inside is not None:
                after = torch.where(inside, after, message)
                shift, top = shift.masked_fill(~inside, 0.0), top.masked_fill(~inside, 0.0)
            message = after
            scale, lost = two_sum(*two_sum(scale, lost, shift), top)
        if messages is not None:
            messages[step] = message.detach()
    total = LOG.sum(message, -1) + lost[..., 0] + scale[..., 0]
    return steps.layout.batched(total) + (steps.unused() if total.requires_grad else 0.0)


def forward(operands: Operands, keep: bool) -> Walk:
    """The log-partitions, and the messages (v, g, m, c) that `backward` reads if they are to be kept."""
    steps = Steps(operands.detached())
    messages = operands.x.new_empty((steps.v, *steps.shape), dtype=torch.float64) if keep else None
    value = log_norm(steps, messages=messages).contiguous()
    return Walk(value, () if messages is None else (messages,), torch.zeros_like(value, dtype=torch.bool))


def backward(
    operands: Operands, walk: Walk, weight: Tensor, needs: tuple[bool, bool, bool], *, by_log: bool = False
) -> Gradients:
    """The gradients of `sum(weight * log_norm)`, of logarithms of parameters and p0 if `by_log`."""
    steps = Steps(operands.detached())
    (messages,), (x, p0, *parameters) = walk.kept, operands.tensors
    weight = steps.layout.sequences(weight.masked_fill(walk.log_norm == -math.inf, 0.0))[..., None]
    posterior = torch.zeros(steps.shape, dtype=torch.float64, device=x.device)
    grad_x = x.new_empty(x.shape, dtype=operands.dtype)
    counts = [torch.zeros_like(one, dtype=torch.float64, memory_format=torch.contiguous_format) for one in parameters]
    for step in reversed(range(steps.v)):
        inside = steps.inside(step)
        if inside is None or step == steps.v - 1:
            begins = torch.full_like(weight, step == steps.v - 1, dtype=torch.bool)
        if inside is not None:
            assert steps.ends is not None
            begins = steps.ends == step + 1
        posterior = torch.where(begins, torch.softmax(messages[step], -1), posterior)
        posterior = _weighted(posterior, weight if inside is None else weight.masked_fill(~inside, 0.0))
        steps.layout.steps_first(grad_x)[step] = posterior.view(steps.layout.steps_first(grad_x).shape[1:])
        if step == 0:
            break
        # what sequences of weight 0 hold has no influence
        before = messages[step - 1].masked_fill(weight == 0, 0.0)
        posterior, used = _step_back(steps, step, before, posterior)
        if needs[1]:
            steps.counts(step - 1, used, counts)
    first = steps.states(posterior).sum_to_size(p0.shape)
    logs = operands.log_params or by_log
    grads = [
        _of_weights(one, weights, logs).to(operands.dtype) for one, weights in zip(counts, parameters, strict=True)
    ]
    grad_p0 = _of_weights(first, p0, logs).to(operands.dtype)
    return Gradients(grad_x if needs[0] else None, tuple(grads) if needs[1] else None, grad_p0 if needs[2] else None)


def _weighted(posterior: Tensor, weight: Tensor) -> Tensor:
    """A posterior (g, m, c) normalised to sum to a weight (g, m, 1); 0 where that is 0."""
    posterior = posterior / posterior.sum(-1, keepdim=True) * weight
    return posterior.masked_fill(weight == 0, 0.0)


def _step_back(steps: Steps, step: int, before: Tensor, posterior: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The posterior of the step before, up to rounding, and how often each parameter is used."""
    transition = steps.transition(step)
    leaves = [before, *transition.parameters]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    with torch.enable_grad():
        after = transition.with_parameters(*leaves[1:]).apply(leaves[0], LOG)
        earlier, *used = torch.autograd.grad(after, leaves, posterior)
    return earlier, used


def _of_weights(counts: Tensor, weights: Tensor, logs: bool) -> Tensor:
    """The gradient of weights, or of their logarithms, from the latter; exactly 0 at weight 0."""
    return counts if logs else (counts / weights.double()).masked_fill(counts == 0, 0.0)


def relative(message: Tensor) -> tuple[Tensor, Tensor]:
    """A message (..., c) less its largest entry, and that entry (..., 1); 0 in place of -inf."""
    top = shifted(message.detach())[1]
    return message - top, top


__all__ = ["backward", "forward", "log_norm", "log_weights", "relative"]
