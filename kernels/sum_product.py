"""The log-partition of a batch of chains in linear space, and in log space where that cannot represent a sequence.

What a backward pass needs lies in tensors of fixed shapes: `messages` (v, g, m, c), linear ones over their scale or, of
the sequences redone, logarithms; `scales` (v + 1, g, m, 1), the last being the sum of the last message; and which
sequences were `redone` (g, m).
"""

from typing import Any

import torch
from torch import Tensor

from . import linear_chain, log_chain
from .chain import Chain
from .exponentials import near_one


def forward(chain: Chain, *, keep: bool, steps: int, exact: Any = log_chain) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The log-partition (g, m) in float64; messages and scales, with room for so many `steps`; what was redone.

    Without `keep` the messages of two steps are held, and none returned. `exact`: `log_chain`, or what does the same.
    """
    g, m, c = chain.g, chain.m, chain.c
    messages = chain.kept(steps) if keep else chain.new(0)
    scales = chain.new(steps + 1, g, m, 1)
    slots = messages[: chain.v] if keep else chain.new(min(chain.v, 2), g, m, c)
    log_norm, lossy = linear_chain.forward(chain, linear_chain.Kept(slots, scales[: chain.v], scales[-1]))
    return log_norm, messages, scales, redo(chain, lossy, log_norm, messages if keep else None, exact)


def redo(
    chain: Chain, lossy: Tensor | None, log_norm: Tensor, messages: Tensor | None, exact: Any = log_chain
) -> Tensor:
    """Write the log-partition, and the messages, of the sequences that are lossy; which have been written (g, m)."""
    if lossy is None:
        return torch.zeros_like(log_norm, dtype=torch.bool)
    redone: Tensor = exact.forward(chain, lossy, log_norm, messages)
    return redone


def backward(
    chain: Chain,
    log_norm: Tensor,
    messages: Tensor,
    scales: Tensor,
    redone: Tensor,
    weight: Tensor,
    grad_x: Tensor | None,
    grad_bulk: Tensor | None,
    exact: Any = log_chain,
) -> Tensor:
    """Gradients of `sum(weight * log_norm)` for weights (g, m).

    `grad_x` (v, *lead, c) and `grad_bulk` (s, g, c, c) are written where they are wanted; that of `p0` is returned, one
    per sequence (*lead, c), in float64: what one sequence gives may exceed float32 though the sum does not.
    """
    weight, scale = near_one(weight)
    weight = weight.to(chain.dtype)
    grad_p0 = torch.zeros(*chain.lead, chain.c, dtype=torch.float64, device=weight.device)
    some, every = bool(redone.any()), bool(redone.all())
    if every:
        for gradient in (grad_x, grad_bulk):
            if gradient is not None:
                gradient.zero_()
    else:
        slots, rest = messages[: chain.v], weight
        if some:
            slots, rest = slots.masked_fill(redone[..., None], 0.0), weight.masked_fill(redone, 0.0)
        linear = linear_chain.Kept(slots, scales[: chain.v], scales[-1])
        source = linear_chain.backward(chain, linear, rest, grad_x, grad_bulk)
        grad_p0 = linear_chain.start_gradient(chain, source).double()
    return with_redone(chain, log_norm, messages, redone, weight, scale, grad_x, grad_bulk, grad_p0, exact)


def with_redone(
    chain: Chain,
    log_norm: Tensor,
    messages: Tensor,
    redone: Tensor,
    weight: Tensor,
    scale: float,
    grad_x: Tensor | None,
    grad_bulk: Tensor | None,
    grad_p0: Tensor,
    exact: Any = log_chain,
) -> Tensor:
    """Add the gradients of the sequences redone to the others', and multiply all with the scale; see `near_one`."""
    if redone.any():
        exact.backward(chain, redone, log_norm, messages, weight.to(chain.dtype), grad_x, grad_bulk, grad_p0)
    if scale != 1.0:
        for gradient in (grad_x, grad_bulk):
            if gradient is not None:
                gradient.mul_(scale)
        grad_p0 = grad_p0 * scale
    return grad_p0
