"""The log-semiring matrix product with one batch axis, as in `kernels.plain.matmul`, by Triton kernels."""

import torch
from torch import Tensor

from . import log_matmul


def forward(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """`log(exp(a) exp(b))` (g, m, n), and the number of its entries that were recomputed, on the device."""
    (g, m, k), n = a.shape, b.shape[-1]
    tiles = log_matmul.tiles(m, n, k, torch.promote_types(a.dtype, b.dtype))[0]
    counts = torch.zeros(g * tiles + 1, dtype=torch.int32, device=a.device)
    zero = counts[-1]  # of no program
    a, b = (tensor.resolve_neg()[:, None] for tensor in (a, b))
    out = log_matmul.forward(a, b, (zero.expand(g, 1, m), zero.expand(g, 1, n)), counts=counts)
    return out[:, 0], counts.sum()


def backward(weight: Tensor, a: Tensor, b: Tensor, need_a: bool, need_b: bool) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `sum(weight * c)`: `weight_ij exp(a_ik + b_kj - c_ij)` summed over j for a, and over i for b."""
    grad_a = torch.empty(a.shape, dtype=a.dtype, device=a.device) if need_a else None
    grad_b = torch.empty(b.shape, dtype=b.dtype, device=b.device) if need_b else None
    weight, a, b = (tensor.resolve_neg()[:, None] for tensor in (weight, a, b))
    rows, columns = a.amax(-1), b.amax(-2)
    c = log_matmul.forward(a, b, (rows, columns))
    if grad_a is not None:
        log_matmul.backward(grad_a[:, None], weight, a, b, c, (rows, columns))
    if grad_b is not None:
        log_matmul.backward(grad_b[:, None].mT, weight.mT, b.mT, a.mT, c.mT, (columns, rows))
    return grad_a, grad_b
