"""Any structure's forward and backward pass, in float64 logarithms: the definition of the kernels, and slower.

    a_0 = log p0 + x_0        a_i = apply(a_{i-1}) + x_i        log Z = log(sum of exp(a_{v-1}))

Each message is held less its largest entry, with the sum of what was subtracted and that sum's rounding error. The
backward pass propagates posteriors: those of step i are the gradient of a_i, and torch's autograd takes them through
one step to a_{i-1} and the parameters. Each is normalised by its own sum, so that errors do not add up.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.plain.semiring import shifted, two_sum
from ..kernels.structured import Gradients, Walk
from ..transitions import LOG, Transition
from .operands import Operands, Steps

# the message behind a structure, of logarithms
Through = Callable[[Transition, Tensor], Tensor]


class Message(NamedTuple):
    """A forward message: logarithms `values` (g, m, c) with the largest 0, plus `scale` and `lost` (g, m, 1)."""

    values: Tensor
    scale: Tensor
    lost: Tensor

    @property
    def logs(self) -> Tensor:
        """The logarithms (g, m, c)."""
        return self.values + (self.lost + self.scale)


def _sums(transition: Transition, message: Tensor) -> Tensor:
    return transition.apply(message, LOG)


def messages(steps: Steps, through: Through = _sums) -> Iterator[Message]:
    """The forward message of each step, which torch's autograd differentiates; behind a sequence's end, its last."""
    message, scale = shifted(steps.start() + steps.potential(0))
    lost = torch.zeros_like(scale)
    yield Message(message, scale, lost)
    for step in range(1, steps.v):
        # the largest potential is taken out first: a sum is rounded by its own size
        potential, shift = shifted(steps.potential(step))
        after, top = shifted(through(steps.transition(step), message) + potential)
        inside = steps.inside(step)
        if inside is not None:
            after = torch.where(inside, after, message)
            shift, top = shift.masked_fill(~inside, 0.0), top.masked_fill(~inside, 0.0)
        message = after
        scale, lost = two_sum(*two_sum(scale, lost, shift), top)
        yield Message(message, scale, lost)


def log_norm(steps: Steps, *, keep: Tensor | None = None) -> Tensor:
    """The log-partition [*B]; values of messages are written to `keep` (v, g, m, c)."""
    for step, message in enumerate(messages(steps)):
        if keep is not None:
            keep[step] = message.values.detach()
    total = LOG.sum(message.values, -1) + message.lost[..., 0] + message.scale[..., 0]
    return steps.sets.batched(total) + (steps.unused() if total.requires_grad else 0.0)


def forward(operands: Operands, keep: bool) -> Walk:
    """The log-partitions, and the messages (v, g, m, c) that `backward` reads if they are to be kept."""
    steps = Steps(operands.detached())
    kept = operands.x.new_empty((steps.v, *steps.shape), dtype=torch.float64) if keep else None
    value = log_norm(steps, keep=kept).contiguous()
    return Walk(value, () if kept is None else (kept,), torch.zeros_like(value, dtype=torch.bool))


def backward(
    operands: Operands, walk: Walk, weight: Tensor, needs: tuple[bool, bool, bool], *, by_log: bool = False
) -> Gradients:
    """The gradients of `sum(weight * log_norm)`, of logarithms of parameters and p0 if `by_log`."""
    steps = Steps(operands.detached())
    sets, (kept,), (x, p0, *parameters) = steps.sets, walk.kept, operands.tensors
    weight = sets.grouped(weight.masked_fill(walk.log_norm == -math.inf, 0.0))[..., None]
    posterior = torch.zeros(steps.shape, dtype=torch.float64, device=x.device)
    grad_x = x.new_empty(x.shape, dtype=operands.dtype)
    counts = [torch.zeros_like(sets.parameter(one), dtype=torch.float64) for one in parameters]
    for step in reversed(range(steps.v)):
        inside = steps.inside(step)
        if steps.ends is not None:
            begins = steps.ends == step + 1
        else:
            begins = torch.full_like(weight, step == steps.v - 1, dtype=torch.bool)
        posterior = torch.where(begins, torch.softmax(kept[step], -1), posterior)
        posterior = _weighted(posterior, weight if inside is None else weight.masked_fill(~inside, 0.0))
        grad_x[..., step, :] = sets.batched(posterior)
        if step == 0:
            break
        # what sequences of weight 0 hold has no influence
        before = kept[step - 1].masked_fill(weight == 0, 0.0)
        posterior, used = _step_back(steps, step, before, posterior)
        for count, more in zip(counts, used, strict=True):
            count[step - 1 if len(count) > 1 else 0] += more
    logs = operands.log_params or by_log
    grads = [sets.as_parameter(one, weights.shape) for one, weights in zip(counts, parameters, strict=True)]
    pairs = zip([sets.batched(posterior).sum_to_size(p0.shape), *grads], [p0, *parameters], strict=True)
    grad_p0, *grads = (_of_weights(one, weights, logs).to(operands.dtype) for one, weights in pairs)
    return Gradients(grad_x if needs[0] else None, tuple(grads) if needs[1] else None, grad_p0 if needs[2] else None)


def _weighted(posterior: Tensor, weight: Tensor) -> Tensor:
    """A posterior (g, m, c) normalised to sum to a weight (g, m, 1); 0 where that is 0."""
    posterior = posterior / posterior.sum(-1, keepdim=True) * weight
    return posterior.masked_fill(weight == 0, 0.0)


def _step_back(steps: Steps, step: int, before: Tensor, posterior: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The posterior of the step before, up to rounding, and how often each parameter is used."""
    transition = steps.transition(step)
    leaves = [leaf.detach().requires_grad_() for leaf in (before, *transition.parameters)]
    with torch.enable_grad():
        after = transition.with_parameters(*leaves[1:]).apply(leaves[0], LOG)
        earlier, *used = torch.autograd.grad(after, leaves, posterior)
    return earlier, used


def _of_weights(counts: Tensor, weights: Tensor, logs: bool) -> Tensor:
    """The gradient of weights, or of their logarithms, from the latter; exactly 0 at weight 0."""
    return counts if logs else (counts / weights.double()).masked_fill(counts == 0, 0.0)
