"""The log-semiring matrix product of canonical operands as a node of autograd, differentiable twice.

Kept for the backward pass are the operands alone.
"""

from typing import Any

import torch
from torch import Tensor

from ._rescues import Rescues, report
from .kernels import log_matmul as kernel


def log_matmul(a: Tensor, b: Tensor) -> Tensor:
    """`log(exp(a) exp(b))` for (g, m, k) and (g, k, n) of one dtype, float32 or float64, none of the sizes 0."""
    result: Tensor = _LogMatmul.apply(a, b)  # type: ignore[no-untyped-call]
    return result


class _LogMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        with torch.autocast(a.device.type, enabled=False):
            out, rescued = kernel.forward(a, b)
        report(Rescues(outputs=rescued))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _Gradient.apply(grad, a, b)  # type: ignore[no-any-return, no-untyped-call]
        with torch.autocast(a.device.type, enabled=False):
            return kernel.backward(grad, a, b, *ctx.needs_input_grad)


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor | None, Tensor | None]:
        ctx.save_for_backward(weight, a, b)
        with torch.autocast(a.device.type, enabled=False):
            return kernel.backward(weight, a, b, True, True)

    @staticmethod
    def backward(ctx: Any, along_a: Tensor, along_b: Tensor) -> tuple[Tensor, ...]:
        operands = (*ctx.saved_tensors, along_a, along_b)
        with torch.no_grad(), torch.autocast(along_a.device.type, enabled=False):
            grads = kernel.second(*operands)
        if torch.is_grad_enabled():
            return tuple(_Last.apply(grad, *operands) for grad in grads)  # type: ignore[no-untyped-call]
        return grads


class _Last(torch.autograd.Function):
    """A second derivative as it is, but not to be differentiated again by its operands."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *operands: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError("logchain: expected at most two derivatives, got a third")
