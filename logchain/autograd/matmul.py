"""The matrix product in the log semiring as an operator of torch, which can be differentiated twice.

Only the operands are saved for the backward pass.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..kernels.plain import matmul as plain
from ..kernels.plain.matmul import Groups
from ..rescues import report_outputs
from .operator import Final, Saving, if_needed, operator


def broadcast_log_matmul(a: Tensor, b: Tensor) -> Tensor:
    """`log(exp(a) exp(b))` for [..., m, k] and [..., k, n] whose leading axes broadcast; no size is 0."""
    axes = max(a.dim(), b.dim())
    return log_matmul(*(operand[(None,) * (axes - operand.dim())] for operand in (a, b)))


class _LogMatmul(Saving):
    """a, b -> `log(exp(a) exp(b))`."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        return if_needed(_log_matmul_backward(grad, *ctx.saved_tensors, *needs), needs)


class _Gradient(Saving):
    """weight, a, b, need_a, need_b -> gradients of `sum(weight * log_matmul(a, b))`, empty for one not needed."""

    @staticmethod
    def backward(ctx: Any, *along: Tensor) -> tuple[Tensor | None, ...]:
        weight, a, b = ctx.saved_tensors
        along_a, along_b = (
            tangent if need else torch.zeros_like(operand)
            for tangent, operand, need in zip(along, (a, b), ctx.options, strict=True)
        )
        return (*_log_matmul_second(weight, a, b, along_a, along_b), None, None)


def _forward(a: Tensor, b: Tensor) -> Tensor:
    product: Tensor
    if kernels.on_gpu(a):
        groups = Groups.of(a, b)
        matrices, recomputed = kernels.module("matmul", a).forward(*_matrices(groups, a, b))
        product = _ungrouped(matrices, groups.right_order, groups.shape)
    else:
        product, recomputed = kernels.module("matmul", a).forward(a, b)
    report_outputs(recomputed)
    return product


def _backward(weight: Tensor, a: Tensor, b: Tensor, need_a: bool, need_b: bool) -> tuple[Tensor, Tensor]:
    if weight.numel() == 0:
        return torch.zeros_like(a) if need_a else a.new_empty(0), torch.zeros_like(b) if need_b else b.new_empty(0)
    backend = kernels.module("matmul", a)
    if kernels.on_gpu(a):
        groups = Groups.of(a, b)
        left, right = _matrices(groups, a, b)
        joint = groups.joint(weight).reshape(left.shape[0], left.shape[1], right.shape[2])
        grad_a, grad_b = backend.backward(joint, left, right, need_a, need_b)
        grad_a = None if grad_a is None else _ungrouped(grad_a.contiguous(), groups.left_order, a.shape)
        grad_b = None if grad_b is None else _ungrouped(grad_b.contiguous(), groups.right_order, b.shape)
    else:
        grad_a, grad_b = backend.backward(weight, a, b, need_a, need_b)
    return a.new_empty(0) if grad_a is None else grad_a, b.new_empty(0) if grad_b is None else grad_b


def _matrices(groups: Groups, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The operands as (g, m, k) and (g, k, n), which the GPU's kernels take; copies where batch axes do not merge."""
    g = math.prod(groups.shape[axis] for axis in groups.sets)
    return groups.left(a).reshape(g, -1, a.shape[-1]), groups.right(b).reshape(g, b.shape[-2], -1)


def _ungrouped(matrices: Tensor, order: tuple[int, ...], shape: Sequence[int]) -> Tensor:
    """The matrices as a view of a shape whose axes are in this order in memory."""
    return matrices.view([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(len(order))])


def _shape(a: Tensor, b: Tensor) -> Tensor:
    groups = Groups.of(a, b)
    product = a.new_empty(groups.shape)
    return _ungrouped(product, groups.right_order, groups.shape) if kernels.on_gpu(a) else product


def _gradient_shapes(weight: Tensor, a: Tensor, b: Tensor, need_a: bool, need_b: bool) -> tuple[Tensor, Tensor]:
    if kernels.on_gpu(a):
        groups = Groups.of(a, b)
        grad_a = _ungrouped(a.new_empty(a.shape), groups.left_order, a.shape)
        grad_b = _ungrouped(b.new_empty(b.shape), groups.right_order, b.shape)
    else:
        grad_a, grad_b = torch.empty_like(a), torch.empty_like(b)
    return grad_a if need_a else a.new_empty(0), grad_b if need_b else b.new_empty(0)


# `log(exp(a) exp(b))` for (*batch, m, k) and (*batch, k, n) of one dtype, float32 or float64, no size being 0: a batch
# axis is of the same size in both operands or of size 1 in one of them
log_matmul: Callable[..., Tensor] = operator("log_matmul(Tensor a, Tensor b) -> Tensor", _forward, _shape, _LogMatmul)
_log_matmul_backward = operator(
    "log_matmul_backward(Tensor weight, Tensor a, Tensor b, bool need_a, bool need_b) -> (Tensor, Tensor)",
    _backward,
    _gradient_shapes,
    _Gradient,
    gradients=True,
)
_log_matmul_second = operator(
    "log_matmul_second(Tensor weight, Tensor a, Tensor b, Tensor along_a, Tensor along_b) -> (Tensor, Tensor, Tensor)",
    plain.second,
    lambda weight, a, b, *_: (weight.new_empty(weight.shape), torch.empty_like(a), torch.empty_like(b)),
    Final,
    gradients=True,
)
