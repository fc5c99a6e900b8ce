"""The log-partition of a batch of chains, as `kernels.plain.sum_product` has it, on the Triton kernels.

Kept for the backward pass are the forward messages (v, g, m, c), logarithms; there are no scales. Nothing here waits
for the device.
"""

import math

import torch
from torch import Tensor

from ..chain import Chain
from . import backward_chain, forward_chain, transitions


def forward(chain: Chain, *, keep: bool, steps: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The log-partition (g, m) in float64; messages; no scales; how many sums of its steps were redone pairwise.

    A length that is out of range makes its sequence NaN. The chain has all its `steps`: lengths are not looked at.
    """
    assert chain.v == steps
    rescued = torch.zeros(1, dtype=torch.int64, device=chain.x.device)
    x, bulk, start, ends = operands(chain)
    log_norm, messages = forward_chain.forward(
        x,
        bulk,
        start,
        ends,
        log_params=chain.log_params,
        keep=keep,
        dtype=chain.dtype,
        rescued=rescued,
        room=chain.room if keep else None,
    )
    if chain.ends is not None:
        log_norm.masked_fill_(((chain.ends < 1) | (chain.ends > chain.v))[..., 0], math.nan)
    if messages is None:
        messages = chain.new(0)
    return log_norm, messages, chain.new(0), rescued


def backward(
    chain: Chain,
    log_norm: Tensor,
    messages: Tensor,
    scales: Tensor,
    redone: Tensor,
    weight: Tensor,
    grad_x: Tensor | None,
    grad_bulk: Tensor | None,
) -> Tensor:
    """Gradients of `sum(weight * log_norm)` for weights (g, m), as in `kernels.plain.sum_product`."""
    x, bulk, _, ends = operands(chain)
    flat_x = None if grad_x is None else grad_x.reshape(x.shape)
    grad_start, r = backward_chain.backward(
        x,
        bulk,
        ends,
        messages,
        log_norm.contiguous(),
        weight,
        log_params=chain.log_params,
        grad_x=flat_x,
        want_r=grad_bulk is not None,
    )
    if grad_bulk is not None and r is not None:
        count_transitions(chain, messages, r, weight, bulk, grad_bulk)
    return written(chain, grad_start, flat_x, grad_x)


def count_transitions(chain: Chain, messages: Tensor, r: Tensor, weight: Tensor, bulk: Tensor, out: Tensor) -> None:
    """Write the gradient with respect to matrices, or to their logarithms where the chain says so."""
    by_log = chain.by_log and not chain.log_params
    bulk = bulk.to(chain.dtype).log() if by_log else bulk
    transitions.gradient(messages, r, weight, bulk, out, log_params=chain.log_params or by_log)


def written(chain: Chain, grad_start: Tensor, flat_x: Tensor | None, grad_x: Tensor | None) -> Tensor:
    """The gradient with respect to p0, from that of its logarithms (g, m, c); that of x is where it belongs."""
    if grad_x is not None and flat_x is not None and flat_x.data_ptr() != grad_x.data_ptr():
        grad_x.copy_(flat_x.view(grad_x.shape))  # axes that do not fold into sets and members
    grad_p0 = grad_start.double().view(*chain.lead, chain.c)
    if chain.log_params or chain.by_log:
        return grad_p0
    return (grad_p0 / chain.p0.double()).masked_fill_(chain.p0 == 0, 0.0)


def operands(chain: Chain) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """x (v, g, m, c), bulk (s, g, c, c), log p0 (g, m, c) in float64 and ends (g, m)."""
    v, g, m, c = chain.v, chain.g, chain.m, chain.c
    start = chain.p0.double() if chain.log_params else chain.p0.double().log()
    return (
        chain.x.reshape(v, g, m, c),
        chain.bulk.reshape(len(chain.bulk), g, c, c),
        start.expand(*chain.lead, c).reshape(g, m, c),
        None if chain.ends is None else chain.ends.reshape(g, m).clamp(1, v),
    )
