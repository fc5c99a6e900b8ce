"""Any structure's forward messages in float64 logarithms, as torch's autograd follows them, and its two passes.

    a_0 = log p0 + x_0        a_i = apply(a_{i-1}) + x_i        log Z = log(sum of exp(a_{v-1}))

Each message is held less its largest entry, with the sum of what was subtracted and that sum's rounding error.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.plain import structured as plain
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


def first(steps: Steps) -> Message:
    """The forward message of the first step."""
    weights, scale = shifted(steps.start())
    potential = steps.potential(0)
    # the largest x among possible first states
    _, shift = shifted(potential.masked_fill(weights == -math.inf, -math.inf))
    message, top = shifted(weights + (potential - shift))
    scale, lost = two_sum(*two_sum(scale, torch.zeros_like(scale), shift), top)
    return Message(message, scale, lost)


def messages(steps: Steps, through: Through = _sums) -> Iterator[Message]:
    """The forward message of each step, which torch's autograd differentiates; behind a sequence's end, its last."""
    message, scale, lost = first(steps)
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


def log_norm(steps: Steps) -> Tensor:
    """The log-partition [*B]."""
    for message in messages(steps):  # one at a time in memory, unless autograd keeps them
        last = message
    total = LOG.sum(last.values, -1) + last.lost[..., 0] + last.scale[..., 0]
    return steps.sets.batched(total) + (steps.unused() if total.requires_grad else 0.0)


def forward(operands: Operands, keep: bool) -> Walk:
    """The log-partitions, and the messages that `backward` reads if they are to be kept."""
    return plain.forward(operands.chain(generic=True), _passing(operands.transition), keep)


def backward(
    operands: Operands, walk: Walk, weight: Tensor, needs: tuple[bool, bool, bool], *, by_log: bool = False
) -> Gradients:
    """The gradients of `sum(weight * log_norm)`, of logarithms of parameters and p0 if `by_log`."""
    chain = operands.chain(by_log=by_log, generic=True)
    return plain.backward(chain, _passing(operands.transition), walk, weight, needs)


def _passing(transition: Transition) -> plain.Passing:
    """How messages pass, and backward what torch's autograd finds of that."""

    def forth(message: Tensor, parameters: list[Tensor]) -> Tensor:
        return transition.with_parameters(*parameters).apply(message, LOG)

    def back(message: Tensor, weight: Tensor, parameters: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        leaves = [leaf.detach().requires_grad_() for leaf in (message, *parameters)]
        with torch.enable_grad():
            after = forth(leaves[0], leaves[1:])
            earlier, *counts = torch.autograd.grad(after, leaves, weight)
        return earlier, counts

    return plain.Passing(forth, back, apart=False)
