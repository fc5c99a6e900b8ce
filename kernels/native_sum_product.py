"""`kernels.sum_product` with the linear recursion that numba compiles, but for wide chains, which are the BLAS's."""

import torch
from torch import Tensor

from . import linear_chain, log_chain, native_backward, native_forward, sum_product
from .chain import Chain
from .exponentials import near_one
from .linear_chain import Kept
from .native_chain import wide


def forward(chain: Chain, *, keep: bool, steps: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kernels.sum_product`; of the scales, only the sum of the last message is not 1."""
    if wide(chain):
        return sum_product.forward(chain, keep=keep, steps=steps)
    g, m, c = chain.g, chain.m, chain.c
    slots = chain.kept(steps) if keep else chain.new(min(chain.v, 2), g, m, c)
    scales = chain.new(steps + 1, g, m, 1)
    kept = Kept(slots[: chain.v] if keep and steps > chain.v else slots, scales[:-1], scales[-1])
    log_norm, lossy = native_forward.forward(chain, kept)
    redone = torch.zeros(g, m, dtype=torch.bool, device=chain.x.device)
    messages = slots if keep else chain.new(0)
    if lossy is not None:
        exact = log_chain.forward(chain, lossy, messages if keep else None)
        log_norm[exact.sets[:, None], exact.members] = exact.log_norm
        redone[exact.sets[:, None], exact.members] = True
    return log_norm, messages, scales, redone


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
    """See `kernels.sum_product`."""
    if wide(chain):
        return sum_product.backward(chain, log_norm, messages, scales, redone, weight, grad_x, grad_bulk)
    weight, scale = near_one(weight)
    some = bool(redone.any())
    rest = weight.masked_fill(redone, 0.0) if some else weight
    kept = Kept(messages[: chain.v], scales[: chain.v], scales[-1])
    source = native_backward.backward(chain, kept, rest, grad_x, grad_bulk)
    grad_p0 = linear_chain.start_gradient(chain, source)
    if some:
        sets, members = log_chain.rectangle(redone)
        done = log_chain.Forward(sets, members, log_norm[sets][:, members])
        log_chain.backward(chain, done, messages, weight.to(chain.dtype), grad_x, grad_bulk, grad_p0)
    if scale != 1.0:
        for gradient in (grad_x, grad_bulk):
            if gradient is not None:
                gradient.mul_(scale)
        grad_p0 = grad_p0 * scale
    return grad_p0
