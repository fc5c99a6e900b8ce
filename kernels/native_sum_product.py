"""`kernels.sum_product` with the linear recursion that numba compiles, but for the gradients of wide chains.

What is redone is redone by `native_log_chain`, in either case.
"""

from torch import Tensor

from . import native_backward, native_forward, native_log_chain, sum_product
from .chain import Chain
from .exponentials import near_one
from .linear_chain import Kept
from .native_chain import wide
from .native_precision import needs_float64


def forward(chain: Chain, *, keep: bool, steps: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kernels.sum_product`; of the scales, only the sum of the last message is not 1."""
    if keep and _by_products(chain):
        return sum_product.forward(chain, keep=keep, steps=steps, exact=native_log_chain)
    g, m, c = chain.g, chain.m, chain.c
    slots = chain.kept(steps) if keep else chain.new(min(chain.v, 2), g, m, c)
    scales = chain.new(steps + 1, g, m, 1)
    kept = Kept(slots[: chain.v] if keep and steps > chain.v else slots, scales[:-1], scales[-1])
    log_norm, lossy = native_forward.forward(chain, kept)
    redone = redo(chain, lossy, log_norm, slots if keep else None)
    return log_norm, slots if keep else chain.new(0), scales, redone


def redo(chain: Chain, lossy: Tensor | None, log_norm: Tensor, messages: Tensor | None) -> Tensor:
    """See `kernels.sum_product`."""
    return sum_product.redo(chain, lossy, log_norm, messages, native_log_chain)


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
    if _by_products(chain) or redone.all():  # then no linear message is left to walk along
        return sum_product.backward(
            chain, log_norm, messages, scales, redone, weight, grad_x, grad_bulk, native_log_chain
        )
    weight, scale = near_one(weight)
    kept = Kept(messages[: chain.v], scales[: chain.v], scales[-1])
    grad_p0 = native_backward.backward(chain, kept, weight.masked_fill(redone, 0.0), grad_x, grad_bulk)
    return sum_product.with_redone(
        chain, log_norm, messages, redone, weight, scale, grad_x, grad_bulk, grad_p0, native_log_chain
    )


def _by_products(chain: Chain) -> bool:
    """Whether gradients come from torch's products, whose sums are of the chain's dtype."""
    return wide(chain) and not needs_float64(chain)
