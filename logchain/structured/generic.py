"""The two passes through a chain of any structure, in float64 logarithms."""

import torch
from torch import Tensor

from ..kernels.plain import structured as plain
from ..kernels.structured import Gradients, Walk
from ..transitions import LOG, Transition
from .operands import Operands


def forward(operands: Operands, keep: bool) -> Walk:
    """The log-partitions, and the messages that `backward` reads if `keep`."""
    return plain.forward(operands.chain(generic=True), _passing(operands.transition), keep)


def backward(
    operands: Operands, walk: Walk, weight: Tensor, needs: tuple[bool, bool, bool], *, by_log: bool = False
) -> Gradients:
    """The gradients of `sum(weight * log_norm)`, of logarithms of parameters and p0 if `by_log`."""
    chain = operands.chain(by_log=by_log, generic=True)
    return plain.backward(chain, _passing(operands.transition), walk, weight, needs)


def _passing(transition: Transition) -> plain.Passing:
    """How messages pass, and backward what torch's autograd finds of that."""

    def forward_step(message: Tensor, parameters: list[Tensor]) -> Tensor:
        return transition.with_parameters(*parameters).apply(message, LOG)

    def backward_step(message: Tensor, weight: Tensor, parameters: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        leaves = [leaf.detach().requires_grad_() for leaf in (message, *parameters)]
        with torch.enable_grad():
            after = forward_step(leaves[0], leaves[1:])
            earlier, *counts = torch.autograd.grad(after, leaves, weight)
        return earlier, counts

    return plain.Passing(forward_step, backward_step, apart=False)
