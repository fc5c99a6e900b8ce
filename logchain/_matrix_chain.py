"""Products of a stack of matrices as nodes of autograd: what is kept for the backward pass, and what is recomputed.

Kept is the stack alone. The backward pass recomputes the nodes of the tree and goes down it, with the gradients in the
slots of the result. A second derivative is taken through products of `_log_matmul` in the same order.
"""

import math
from collections.abc import Callable
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
        with torch.autocast(stack.device.type, enabled=False):
            result, rescued = _product(stack, inplace)
        report(Rescues(outputs=rescued))
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (stack,) = ctx.saved_tensors
        with torch.autocast(stack.device.type, enabled=False):
            if torch.is_grad_enabled():
                return _by_composition(_composed_product, grad, stack), None
            return _product_gradient(grad, stack), None


class _Prefixes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stack: Tensor) -> Tensor:
        ctx.save_for_backward(stack)
        with torch.autocast(stack.device.type, enabled=False):
            result, rescued = _prefixes(stack)
        report(Rescues(outputs=rescued))
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (stack,) = ctx.saved_tensors
        with torch.autocast(stack.device.type, enabled=False):
            if torch.is_grad_enabled():
                return _by_composition(_composed_prefixes, grad, stack)
            return _prefixes_gradient(grad, stack)


def _product(stack: Tensor, inplace: bool) -> tuple[Tensor, int]:
    """The product, and how many entries of nodes were rescued."""
    result = _empty(stack, stack.shape[:-3] + stack.shape[-2:])
    if result.numel() == 0:
        return result, 0
    whole = _sets(stack)
    g, s, c, _ = whole.shape
    copied = whole.data_ptr() != stack.data_ptr()
    if (inplace or copied) and whole.dtype == result.dtype:
        memory = whole[:, : s // 2 * 2 : 2]
    else:
        memory = result.new_empty(g, s // 2, c, c)
    tree = _Tree(whole, result.dtype)
    nodes = Nodes.over(memory)
    for step in reduction(s):
        left = tree.leaves.at(step.left) if step.left_at is None else nodes.at(halved(step.left))
        right = tree.leaves.at(step.right) if step.right_at is None else nodes.at(halved(step.right))
        tree.arithmetic.multiply(left, right, nodes.at(halved(step.left)))
    root = (nodes if s > 1 else tree.leaves).at(slice(0, 1))
    tree.arithmetic.logarithms(root, result.view(g, 1, c, c))
    return result, tree.arithmetic.rescued


def _product_gradient(grad: Tensor, stack: Tensor) -> Tensor:
    """All nodes stay, each where its right operand had been; gradients lie in the slots that `_product` computes in."""
    result = _empty(stack, stack.shape)
    if result.numel() == 0:
        return result.to(stack.dtype)
    whole = _sets(stack)
    gradient = result.view(whole.shape)
    gradient[:, 0] = grad.reshape(gradient[:, 0].shape)
    if whole.shape[1] == 1:
        gradient.masked_fill_(whole == -math.inf, 0.0)
    tree = _Tree(whole, result.dtype)
    nodes = Nodes.over(torch.empty_like(gradient))
    steps = list(reduction(whole.shape[1]))
    for step in steps:
        tree.arithmetic.multiply(*tree.operands(step, nodes, nodes), nodes.at(step.right))
    for step in reversed(steps):
        operands = tree.operands(step, nodes, nodes)
        grads = gradient[:, step.left], gradient[:, step.right]
        tree.arithmetic.gradient(grads[0], *operands, nodes.at(step.right), *grads)
    return result.to(stack.dtype)


def _prefixes(stack: Tensor) -> tuple[Tensor, int]:
    """The prefixes, written over the nodes of the first sweep, and how many entries were rescued."""
    result = _empty(stack, stack.shape)
    if result.numel() == 0:
        return result, 0
    whole = _sets(stack)
    s = whole.shape[1]
    tree, nodes = _Tree(whole, result.dtype), Nodes.over(result.view(whole.shape))
    for step in (*upward(s), *downward(s)):
        left = (tree.leaves if step.left_at is None else nodes).at(step.left)
        right = (tree.leaves if step.right_at is None else nodes).at(step.right)
        tree.arithmetic.multiply(left, right, nodes.at(step.right))
    tree.arithmetic.logarithms(nodes.at(slice(1, s)), nodes.values[:, 1:])
    nodes.values[:, 0] = whole[:, 0]
    return result, tree.arithmetic.rescued


def _prefixes_gradient(grad: Tensor, stack: Tensor) -> Tensor:
    """Both sweeps backwards: a product's gradient becomes its right operand's, and what its left receives is added."""
    result = _empty(stack, stack.shape)
    if result.numel() == 0:
        return result.to(stack.dtype)
    whole = _sets(stack)
    s = whole.shape[1]
    tree, gradient = _Tree(whole, result.dtype), result.copy_(grad).view(whole.shape)
    nodes, prefixes = (Nodes.over(torch.empty_like(gradient)) for _ in range(2))
    up, down = list(upward(s)), list(downward(s))
    for step in up:
        tree.arithmetic.multiply(*tree.operands(step, nodes, nodes), nodes.at(step.left))
        first = step.left.start  # the first node of each level is a prefix
        prefixes.at(slice(step.right.start, step.right.start + 1)).copy_(nodes.at(slice(first, first + 1)))
    for step in down:
        tree.arithmetic.multiply(*tree.operands(step, prefixes, nodes), prefixes.at(step.right))
    for step in reversed(up + down):
        if step.left_at == 0:
            operands, out = tree.operands(step, prefixes, nodes), prefixes.at(step.right)
        else:
            operands, out = tree.operands(step, nodes, nodes), nodes.at(step.left)
        grads = gradient[:, step.left], gradient[:, step.right]
        tree.arithmetic.gradient(grads[1], *operands, out, *grads, add_left=True)
    gradient[:, 0].masked_fill_(whole[:, 0] == -math.inf, 0.0)
    return result.to(stack.dtype)


class _Tree:
    """The leaves and the arithmetic of a stack (g, s, c, c)."""

    def __init__(self, whole: Tensor, dtype: torch.dtype) -> None:
        self.leaves = Nodes.leaves(whole)
        self.arithmetic = Arithmetic(whole.shape[-1], dtype, whole.device)

    def operands(self, step: Step, lefts: Nodes, rights: Nodes) -> tuple[Nodes, Nodes]:
        """The operands of a step in layouts in which nodes stay."""
        left = self.leaves.at(step.left) if step.left_at is None else lefts.at(shifted(step.left, step.left_at))
        right = self.leaves.at(step.right) if step.right_at is None else rights.at(shifted(step.right, step.right_at))
        return left, right


def _empty(stack: Tensor, shape: torch.Size) -> Tensor:
    """A result: float64 for float64, otherwise float32."""
    return stack.new_empty(shape, dtype=torch.promote_types(stack.dtype, torch.float32))


def _sets(stack: Tensor) -> Tensor:
    """(g, s, c, c): a view, or a copy where the batch axes cannot be joined."""
    return stack.reshape(-1, *stack.shape[-3:])


def _by_composition(function: Callable[[Tensor], Tensor], grad: Tensor, stack: Tensor) -> Tensor:
    """The gradient with a graph of its own, in float64."""
    leaf = stack.view_as(stack)
    if leaf.numel() == 0:
        return torch.zeros_like(leaf)
    found = function(_sets(leaf).double()).view(grad.shape)
    return torch.autograd.grad(found, leaf, grad.double(), create_graph=True)[0]


def _composed_product(nodes: Tensor) -> Tensor:
    """(g, s, c, c) to (g, c, c), level by level."""
    nodes = _no_gradient_at_zero(nodes)
    while nodes.shape[1] > 1:
        pairs = nodes.shape[1] // 2
        left, right = nodes[:, : 2 * pairs : 2], nodes[:, 1 : 2 * pairs : 2]
        products = log_matmul(left.flatten(0, 1), right.flatten(0, 1)).view(left.shape)
        nodes = torch.cat([products, nodes[:, 2 * pairs :]], 1)
    return nodes[:, 0]


def _composed_prefixes(stack: Tensor) -> Tensor:
    """(g, s, c, c) to the same, one after the other."""
    first, *others = _no_gradient_at_zero(stack).unbind(1)
    prefixes = [first]
    for matrix in others:
        prefixes.append(log_matmul(prefixes[-1], matrix))
    return torch.stack(prefixes, 1)


def _no_gradient_at_zero(logs: Tensor) -> Tensor:
    return logs.masked_fill(logs == -math.inf, -math.inf)
