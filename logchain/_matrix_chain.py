"""Products of a stack of matrices as nodes of autograd: what is kept for the backward pass, and what is recomputed.

Kept is the stack alone. The backward pass recomputes the nodes of the tree and goes down it, with the gradients in the
slots of the result. A second derivative is taken through products of `_log_matmul` in the same order.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ._log_matmul import log_matmul
from ._rescues import Rescues, report
from ._tree import Step, downward, halved, reduction, shifted, upward
from .kernels.tree import Arithmetic, Nodes


def log_product(stack: Tensor, inplace: bool) -> Tensor:
    """The product [..., c, c] of a stack [..., s, c, c] of logarithms. Arguments have been checked."""
    result: Tensor = _Product.apply(stack, inplace)  # type: ignore[no-untyped-call]
    return result


def log_prefixes(stack: Tensor) -> Tensor:
    """The products [..., s, c, c] of the first 1 to s matrices of a stack [..., s, c, c] of logarithms."""
    result: Tensor = _Prefixes.apply(stack)  # type: ignore[no-untyped-call]
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stack: Tensor, inplace: bool) -> Tensor:
        ctx.save_for_backward(stack)
        return _product(stack, inplace)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (stack,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _by_composition(_composed_product, stack, grad), None
        return _product_gradient(grad, stack), None


class _Prefixes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stack: Tensor) -> Tensor:
        ctx.save_for_backward(stack)
        return _prefixes(stack)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (stack,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _by_composition(_composed_prefixes, stack, grad)
        return _prefixes_gradient(grad, stack)


def _product(stack: Tensor, inplace: bool) -> Tensor:
    result = _result(stack, stack.shape[:-3] + stack.shape[-2:])
    if result.numel() == 0:
        return result
    whole = _grid(stack)
    g, s, c, _ = whole.shape
    arithmetic, leaves = _arithmetic(whole), Nodes.leaves(whole)
    own = inplace or whole.data_ptr() != stack.data_ptr()  # a copy may be overwritten, too
    if own and whole.dtype == result.dtype:
        memory = whole[:, : s // 2 * 2 : 2]
    else:
        memory = result.new_empty(g, s // 2, c, c)
    nodes = Nodes.over(memory)
    for step in reduction(s):
        left = leaves.at(step.left) if step.left_at is None else nodes.at(halved(step.left))
        right = leaves.at(step.right) if step.right_at is None else nodes.at(halved(step.right))
        arithmetic.multiply(left, right, nodes.at(halved(step.left)))
    root = nodes if s > 1 else leaves
    arithmetic.logarithms(root.at(slice(0, 1)), result.view(g, 1, c, c))
    report(Rescues(outputs=arithmetic.rescued))
    return result


def _product_gradient(grad: Tensor, stack: Tensor) -> Tensor:
    """The nodes of the tree stay where their right operands had been; gradients lie where `_product` has the nodes."""
    result = _result(stack, stack.shape)
    if result.numel() == 0:
        return result.to(stack.dtype)
    whole = _grid(stack)
    g, s, c, _ = whole.shape
    gradient = result.view(whole.shape)
    gradient[:, 0] = grad.reshape(g, c, c)
    arithmetic, leaves = _arithmetic(whole), Nodes.leaves(whole)
    nodes = Nodes.over(torch.empty_like(gradient))
    steps = list(reduction(s))
    for step in steps:
        left, right = _operands(step, leaves, nodes)
        arithmetic.multiply(left, right, nodes.at(step.right))
    for step in reversed(steps):
        left, right = _operands(step, leaves, nodes)
        grads = gradient[:, step.left], gradient[:, step.right]
        arithmetic.gradient(grads[0], left, right, nodes.at(step.right), *grads)
    return result.to(stack.dtype)


def _prefixes(stack: Tensor) -> Tensor:
    result = _result(stack, stack.shape)
    if result.numel() == 0:
        return result
    whole = _grid(stack)
    s = whole.shape[1]
    arithmetic, leaves = _arithmetic(whole), Nodes.leaves(whole)
    prefixes = Nodes.over(result.view(whole.shape))
    for step in upward(s):
        left, right = ((leaves if at is None else prefixes) for at in (step.left_at, step.right_at))
        arithmetic.multiply(left.at(step.left), right.at(step.right), prefixes.at(step.right))
    prefixes.values[:, 0] = whole[:, 0]
    for step in downward(s):
        right = leaves if step.right_at is None else prefixes
        arithmetic.multiply(prefixes.at(step.left), right.at(step.right), prefixes.at(step.right))
    arithmetic.logarithms(prefixes, prefixes.values)
    report(Rescues(outputs=arithmetic.rescued))
    return result


def _prefixes_gradient(grad: Tensor, stack: Tensor) -> Tensor:
    """Both sweeps backwards: what a prefix receives goes to its operands, those of the first sweep come last."""
    result = _result(stack, stack.shape)
    if result.numel() == 0:
        return result.to(stack.dtype)
    whole = _grid(stack)
    s = whole.shape[1]
    gradient = result.copy_(grad).view(whole.shape)
    arithmetic, leaves = _arithmetic(whole), Nodes.leaves(whole)
    nodes, prefixes = (Nodes.over(torch.empty_like(gradient)) for _ in range(2))
    up, down = list(upward(s)), list(downward(s))
    for step in up:
        arithmetic.multiply(*_operands(step, leaves, nodes), nodes.at(step.left))
    _ = prefixes
    return result.to(stack.dtype)
