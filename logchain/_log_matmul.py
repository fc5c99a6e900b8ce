"""The log-semiring matrix product of canonical operands as an operator of torch, differentiable twice.

Kept for the backward pass are the operands alone.
"""

from typing import Any

import torch
from torch import Tensor

from . import _device
from ._operators import apply, operator, transform
from ._rescues import report_outputs


def log_matmul(a: Tensor, b: Tensor) -> Tensor:
    """`log(exp(a) exp(b))` for (g, m, k) and (g, k, n) of one dtype, float32 or float64, none of the sizes 0."""
    result: Tensor = apply(_LogMatmul, _log_matmul, a, b)
    return result


class _LogMatmul(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        found: Tensor = _log_matmul(a, b)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        found = _Gradient.apply(grad, *ctx.saved_tensors, *needs)  # type: ignore[no-untyped-call]
        return tuple(gradient if need else None for gradient, need in zip(found, needs, strict=True))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], a: Tensor, b: Tensor) -> tuple[Tensor, int]:
        a, b = _stacked(info.batch_size, in_dims, (a, b))
        return _LogMatmul.apply(a, b).unflatten(0, (info.batch_size, -1)), 0  # type: ignore[no-untyped-call]


class _Gradient(torch.autograd.Function):
    """The gradients of `sum(weight * log_matmul(a, b))`; an empty tensor for one that is not needed."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = _log_matmul_backward(*args)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.needs = inputs[3:]

    @staticmethod
    def backward(ctx: Any, *along: Tensor) -> tuple[Tensor | None, ...]:
        weight, a, b = operands = ctx.saved_tensors
        along_a, along_b = (
            tangent if need else torch.zeros_like(operand)
            for tangent, operand, need in zip(along, (a, b), ctx.needs, strict=True)
        )
        with torch.no_grad():
            grads = _log_matmul_second(*operands, along_a, along_b)
        if torch.is_grad_enabled():
            grads = [_Last.apply(grad, *operands, along_a, along_b) for grad in grads]  # type: ignore[no-untyped-call]
        return (*grads, None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
        stacked = _stacked(info.batch_size, in_dims[:3], args[:3])
        found = _Gradient.apply(*stacked, *args[3:])  # type: ignore[no-untyped-call]
        own = [
            gradient.unflatten(0, (info.batch_size, -1)) if need else gradient.expand(info.batch_size, 0)
            for gradient, need in zip(found, args[3:], strict=True)
        ]
        return (own[0], own[1]), (0, 0)


class _Last(torch.autograd.Function):
    """A second derivative as it is, but not to be differentiated again by its operands."""

    @staticmethod
    def forward(value: Tensor, *operands: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError("logchain: expected at most two derivatives, got a third")


def _stacked(size: int, in_dims: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """The mapped axis as more matrices of the batch."""
    return [
        (tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)).flatten(0, 1)
        for tensor, dim in zip(tensors, in_dims, strict=True)
    ]


def _forward(a: Tensor, b: Tensor) -> Tensor:
    out, rescued = _device.log_matmul_kernels(a).forward(a, b)
    report_outputs(rescued)
    found: Tensor = out
    return found


def _backward(weight: Tensor, a: Tensor, b: Tensor, need_a: bool, need_b: bool) -> tuple[Tensor, Tensor]:
    grads = _device.log_matmul_kernels(a).backward(weight, a, b, need_a, need_b)
    grad_a, grad_b = (a.new_empty(0) if grad is None else grad for grad in grads)
    return grad_a, grad_b


def _second(weight: Tensor, a: Tensor, b: Tensor, along_a: Tensor, along_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from .kernels import log_matmul as plain

    return plain.second(weight, a, b, along_a, along_b)


def _shape(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2])


def _gradient_shapes(weight: Tensor, a: Tensor, b: Tensor, need_a: bool, need_b: bool) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape if need_a else (0,)), b.new_empty(b.shape if need_b else (0,))


def _second_shapes(
    weight: Tensor, a: Tensor, b: Tensor, along_a: Tensor, along_b: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return weight.new_empty(weight.shape), a.new_empty(a.shape), b.new_empty(b.shape)


_log_matmul = operator("log_matmul(Tensor a, Tensor b) -> Tensor", _forward, _shape)
_log_matmul_backward = operator(
    "log_matmul_backward(Tensor weight, Tensor a, Tensor b, bool need_a, bool need_b) -> (Tensor, Tensor)",
    _backward,
    _gradient_shapes,
)
_log_matmul_second = operator(
    "log_matmul_second(Tensor weight, Tensor a, Tensor b, Tensor along_a, Tensor along_b) -> (Tensor, Tensor, Tensor)",
    _second,
    _second_shapes,
)
transform("log_matmul", _LogMatmul)
transform("log_matmul_backward", _Gradient)
