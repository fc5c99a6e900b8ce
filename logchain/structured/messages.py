"""The forward and backward messages of a chain of structures, as natural logarithms, by steps that autograd follows."""

import math

import torch
from torch import Tensor

from ..transitions import LOG
from .operands import Operands, Steps
from .walk import relative


def messages(operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Forward and backward messages [*B, v, c], -inf behind a sequence's end, and the log-partition [*B].

    All are computed in float64, and of the dtype of the arithmetic.
    """
    steps = Steps(operands)
    ahead, behind = _forward(steps), _backward(steps)
    last = ahead[-1]
    log_norm = steps.layout.batched(LOG.sum(last, -1))
    if steps.ends is not None:
        inside = torch.arange(steps.v, device=last.device).view(-1, 1, 1, 1) < steps.ends
        ahead, behind = (torch.where(inside, each, -math.inf) for each in (ahead, behind))
    first, second = (steps.by_step(each).to(operands.dtype) for each in (ahead, behind))
    return first, second, log_norm.to(operands.dtype)


def _forward(steps: Steps) -> Tensor:
    """The forward messages (v, g, m, c); behind a sequence's end, its last."""
    message = steps.start() + steps.potential(0)
    found = [message]
    for step in range(1, steps.v):
        low, top = relative(message)
        after = steps.transition(step).apply(low, LOG) + top + steps.potential(step)
        inside = steps.inside(step)
        message = after if inside is None else torch.where(inside, after, message)
        found.append(message)
    return torch.stack(found)


def _backward(steps: Steps) -> Tensor:
    """The backward messages (v, g, m, c), 0 at and behind a sequence's last step."""
    message = torch.zeros(steps.shape, dtype=torch.float64, device=steps.operands.x.device)
    found = [message]
    for step in reversed(range(1, steps.v)):
        low, top = relative(message + steps.potential(step))
        before = steps.transition(step).mT.apply(low, LOG) + top
        inside = steps.inside(step)
        message = before if inside is None else torch.where(inside, before, message)
        found.append(message)
    return torch.stack(found[::-1])
