"""The log-semiring matrix product with one batch axis, as in `kernels.plain.matmul`, on the Triton kernels."""

import torch
from torch import Tensor

from ..plain.matmul import second, tangent
from . import log_matmul, log_matmul_gradient

__all__ = ["backward", "forward", "second", "tangent"]


def forward(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """`log(exp(a) exp(b))` (g, m, n), and the number (1) of its entries that were recomputed, on the device."""
    rescued = torch.zeros(1, dtype=torch.int64, device=a.device)
    out = log_matmul.forward(a[:, None], b[:, None], rescued=rescued)
    return out[:, 0], rescued


def backward(weight: Tensor, a: Tensor, b: Tensor, need_a: bool, need_b: bool) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `sum(weight * c)`: `weight_ij exp(a_ik + b_kj - c_ij)` summed over j for a, and over i for b."""
    grad_a = torch.empty(a.shape, dtype=a.dtype, device=a.device) if need_a else None
    grad_b = torch.empty(b.shape, dtype=b.dtype, device=b.device) if need_b else None
    into_a, into_b = (None if grad is None else grad[:, None] for grad in (grad_a, grad_b))
    log_matmul_gradient.backward(weight[:, None], a[:, None], b[:, None], grad_a=into_a, grad_b=into_b)
    return grad_a, grad_b
