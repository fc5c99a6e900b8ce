"""`kernels.sum_product` with the linear recursion that numba compiles, but for wide chains, which are the BLAS's."""

from torch import Tensor

from . import linear_chain, native_backward, native_forward, sum_product
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
    redone = sum_product.redo(chain, lossy, log_norm, slots if keep else None)
    return log_norm, slots if keep else chain.new(0), scales, redone


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
    kept = Kept(messages[: chain.v], scales[: chain.v], scales[-1])
    source = native_backward.backward(chain, kept, weight.masked_fill(redone, 0.0), grad_x, grad_bulk)
    grad_p0 = linear_chain.start_gradient(chain, source)
    return sum_product.with_redone(chain, log_norm, messages, redone, weight, scale, grad_x, grad_bulk, grad_p0)
