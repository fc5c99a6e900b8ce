"""The forward and backward messages of a chain of structures: in C, or by steps that autograd follows."""

import math

import torch
from torch import Tensor

from ..kernels.plain.semiring import shifted
from ..operands import differentiated
from ..transitions import LOG
from . import walk
from .operands import Operands, Steps


def messages(operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Forward and backward messages [*B, v, c], -inf behind a sequence's end, and the log-partition [*B].

    All are computed in float64, and of the dtype of the arithmetic.
    """
    found = None if differentiated(*operands.tensors) else operands.in_c("messages")
    if found is not None:
        first, second, value = (each.to(operands.dtype) for each in found)
        return first, second, value
    steps = Steps(operands)
    ahead, behind = torch.stack([message.logs for message in walk.messages(steps)]), _backward(steps)
    log_norm = steps.sets.batched(LOG.sum(ahead[-1], -1))
    if steps.ends is not None:
        inside = torch.arange(steps.v, device=ahead.device).view(-1, 1, 1, 1) < steps.ends
        ahead, behind = (torch.where(inside, each, -math.inf) for each in (ahead, behind))
    first, second = (steps.by_step(each).to(operands.dtype) for each in (ahead, behind))
    return first, second, log_norm.to(operands.dtype)


def filtered(operands: Operands) -> tuple[Tensor, Tensor] | None:
    """Forward messages [*B, v, c] with sum 1, or 0 if impossible, and the log-partition [*B], where C computes them."""
    found = None if differentiated(*operands.tensors) else operands.in_c("filtered")
    if found is None:
        return None
    states, log_norm = (each.to(operands.dtype) for each in found)
    return states, log_norm


def _backward(steps: Steps) -> Tensor:
    """The backward messages (v, g, m, c), 0 at and behind a sequence's last step."""
    message = torch.zeros(steps.shape, dtype=torch.float64, device=steps.operands.x.device)
    found = [message]
    for step in reversed(range(1, steps.v)):
        low, top = shifted(message + steps.potential(step))
        before = steps.transition(step).mT.apply(low, LOG) + top
        inside = steps.inside(step)
        message = before if inside is None else torch.where(inside, before, message)
        found.append(message)
    return torch.stack(found[::-1])
