"""Gradients of log-partitions of structures by autograd through the scan, in about sqrt(v) pieces of sqrt(v) steps.

The messages between pieces are stored; those within a piece are computed again, with a graph.
"""

import math

import torch
from torch import Tensor

from ..kernels.numbers import log_weights
from ..kernels.structured import Gradients
from ..operands import Operands
from ..transitions import LINEAR, LOG
from .scan import ScaledMessage, forward_messages


def gradients(operands: Operands, weight: Tensor, *, by_log: bool) -> Gradients:
    """The gradients of `sum(weight * log_norm)`, of logarithms of parameters and p0 if `by_log`."""
    dtype, v = operands.dtype, operands.x.shape[-2]
    operands = _without(operands, weight == 0)
    if by_log and not operands.log_params:
        x, p0, *weights = operands.tensors
        logs = [log_weights(values, False, torch.float64) for values in (p0, *weights)]
        operands = operands.of(x, *logs)._replace(log_params=True)
    # gradients of parameters that pieces share are summed in float64
    shared = [False, True, *(lead[-1] == 1 for lead in operands.transition.leads)]
    pairs = zip(operands.tensors, shared, strict=True)
    totals = operands.of(*(torch.zeros_like(a, dtype=torch.float64 if is_shared else dtype) for a, is_shared in pairs))
    every = math.isqrt(v) + 1
    starts, entering = range(0, v, every), list[ScaledMessage]()
    for start in starts[:-1]:
        steps = operands.part(start, start + every).steps(entered=start > 0)
        for message in forward_messages(steps, entering[-1] if entering else None):
            last = message
        entering.append(last)
    adjoint = None
    for start in reversed(starts):
        stop = min(start + every, v)
        adjoint = _add_piece(
            operands.part(start, stop), totals.part(start, stop), weight, adjoint, entering.pop() if start else None
        )
    return tuple(total.to(dtype) for total in totals.tensors)


def _add_piece(
    piece: Operands, into: Operands, weight: Tensor, adjoint: Tensor | None, entering: ScaledMessage | None
) -> Tensor | None:
    """Add the gradients of a piece, by the adjoint of its last message (g, m, c); None: by that of the log-partition.

    Returns the adjoint of the entering message, or None if there is none.
    """
    leaves = [tensor.detach().double().requires_grad_() for tensor in piece.tensors]
    message = None if entering is None else entering.values.requires_grad_()
    with torch.enable_grad():
        steps = piece.of(*leaves).steps(entered=entering is not None)
        start = None if entering is None or message is None else entering._replace(values=message)
        for reached in forward_messages(steps, start):
            last = reached.values
        output = LOG.sum(last, -1) if adjoint is None else last
        cotangent = steps.layout.grouped(weight.double()) if adjoint is None else adjoint
        sources = leaves if message is None else [*leaves, message]
        gradients = torch.autograd.grad(output, sources, cotangent, materialize_grads=True, allow_unused=True)
    for total, gradient in zip(into.tensors, gradients, strict=False):
        total += gradient
    return None if message is None else gradients[-1]


def _without(operands: Operands, unused: Tensor) -> Operands:
    """Operands with weights of 1 in sequences [*B] that are not used, whose values may be NaN."""

    def filled(tensor: Tensor, weight: float) -> Tensor:
        axes = unused.dim()
        shared = [axis for axis in range(axes) if tensor.shape[axis] == 1]
        mask = unused.all(shared, keepdim=True) if shared else unused
        return tensor.masked_fill(mask.view(*mask.shape, *(1,) * (tensor.dim() - axes)), weight)

    x, *weights = operands.detached().tensors
    unit = LOG.one if operands.log_params else LINEAR.one
    return operands.of(filled(x, 0.0), *(filled(values, unit) for values in weights))
