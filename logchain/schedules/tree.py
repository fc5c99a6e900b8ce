"""The products of sets of stacked matrices of logarithms, and their gradients, on trees of nodes: no autograd.

What is kept where follows `schedules.order`; the arithmetic of two nodes is a room's `product`.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from .order import Step, downward, halved, reduction, shifted, upward


def product(stack: Tensor, *, inplace: bool) -> tuple[Tensor, int]:
    """The product (..., c, c) of a stack (..., s, c, c), and how many entries of nodes were rescued."""
    result = product_shape(stack)
    if result.numel() == 0:
        return result, 0
    whole = sets(stack)
    inplace |= whole.data_ptr() != stack.data_ptr()
    out = result.view(-1, *stack.shape[-2:])
    fold = kernels.fold_kernels(whole)
    lossy = None if fold is None else fold.product(whole, out)
    if fold is None or lossy is not None and lossy.all():
        return result, _root(whole, out, inplace=inplace)
    if lossy is None:
        return result, 0
    left, rescued = lossy.nonzero()[:, 0], 0
    if inplace:
        _to_the_front(whole, left.tolist())
    # no more than half of them at a time
    for first, numbers in enumerate(left.split(len(whole) // 2)):
        begin = first * (len(whole) // 2)
        part = whole[begin : begin + len(numbers)] if inplace else whole[numbers]
        found = torch.empty_like(out[: len(numbers)])
        rescued += _root(part, found, inplace=True)
        out[numbers] = found
    return result, rescued


def _root(whole: Tensor, out: Tensor, *, inplace: bool) -> int:
    """Write the products (g, c, c) of stacks (g, s, c, c) by a tree; how many entries of nodes were rescued."""
    root, arithmetic = _reduced(whole, out.dtype, inplace=inplace)
    arithmetic.logarithms(root, out[:, None])
    rescued: int = arithmetic.rescued
    return rescued


def _to_the_front(whole: Tensor, numbers: list[int]) -> None:
    """Move the stacks (g, s, c, c) with these numbers, which ascend, within their own memory."""
    for place, number in enumerate(numbers):
        if place != number:
            whole[place] = whole[number]


def relative_product(whole: Tensor) -> tuple[Tensor, Tensor, Any]:
    """The product (g, c, c) of a stack (g, s, c, c) in its own memory, less its offset in float64 (parts, g).

    The third is how many entries were rescued.
    """
    root, arithmetic = _reduced(whole, whole.dtype, inplace=True)
    return *_relative(root, arithmetic), arithmetic.rescued


def product_gradient(grad: Tensor, stack: Tensor) -> Tensor:
    """The gradient of `sum(grad * product)`, in the slots that `product` computes in."""
    result = prefixes_shape(stack)
    if result.numel() == 0:
        return result.to(stack.dtype)
    whole = sets(stack)
    gradient = result.view(whole.shape)
    grad = grad.resolve_neg().reshape(gradient[:, 0].shape)
    fold = kernels.fold_kernels(whole)
    lossy = None if fold is None else fold.gradient(grad.contiguous(), whole, gradient)
    if fold is None or lossy is not None and lossy.all():
        _back(grad, whole, gradient)
    elif lossy is not None:
        # so few at a time that copies, too, are no more than all stacks; one needs none
        for numbers in lossy.nonzero()[:, 0].split(max(1, len(whole) // 4)):
            one = slice(int(numbers[0]), int(numbers[0]) + 1)
            if len(numbers) == 1:
                _back(grad[one], whole[one], gradient[one])
            else:
                found = torch.empty_like(gradient[: len(numbers)])
                _back(grad[numbers], whole[numbers], found)
                gradient[numbers] = found
    return result.to(stack.dtype)


def _back(grad: Tensor, whole: Tensor, into: Tensor) -> None:
    """Write the gradients (g, s, c, c) of the products' (g, c, c) by a tree."""
    into[:, 0] = grad
    Tree(whole, torch.empty_like(into)).gradient(into)


class Tree:
    """All products of a stack (g, s, c, c), each where its right operand had been, in `memory` of that shape."""

    def __init__(self, whole: Tensor, memory: Tensor) -> None:
        backend, self._arithmetic = _arithmetic(whole, memory.dtype)
        self._leaves, self._nodes = backend.Nodes.leaves(whole), backend.Nodes.over(memory)
        self._steps = list(reduction(whole.shape[1]))
        for step in self._steps:
            self._arithmetic.multiply(*self._operands(step), self._nodes.at(step.right))

    def root(self) -> tuple[Tensor, Tensor]:
        """The product (g, c, c) less its offset in float64 (parts, g)."""
        root = self._nodes.at(self._steps[-1].right) if self._steps else self._leaves
        return _relative(root, self._arithmetic)

    def gradient(self, into: Tensor) -> None:
        """Gradients (g, s, c, c) of the leaves, from that of the root in the first slot, in place."""
        if not self._steps:
            into.masked_fill_(self._leaves.values == -math.inf, 0.0)
        for step in reversed(self._steps):
            grads = into[:, step.left], into[:, step.right]
            self._arithmetic.gradient(grads[0], *self._operands(step), self._nodes.at(step.right), *grads)

    def _operands(self, step: Step) -> tuple[Any, Any]:
        return _operands(step, self._leaves, self._nodes, self._nodes)


def prefixes(stack: Tensor) -> tuple[Tensor, int]:
    """The products of the first 1 to s matrices of a stack (..., s, c, c), and how many entries were rescued.

    They are written over the nodes of the first sweep.
    """
    result = prefixes_shape(stack)
    if result.numel() == 0:
        return result, 0
    whole = sets(stack)
    s = whole.shape[1]
    backend, arithmetic = _arithmetic(whole, result.dtype)
    leaves, nodes = backend.Nodes.leaves(whole), backend.Nodes.over(result.view(whole.shape))
    for step in (*upward(s), *downward(s)):
        left = (leaves if step.left_at is None else nodes).at(step.left)
        right = (leaves if step.right_at is None else nodes).at(step.right)
        arithmetic.multiply(left, right, nodes.at(step.right))
    arithmetic.logarithms(nodes.at(slice(1, s)), nodes.values[:, 1:])
    nodes.values[:, 0] = whole[:, 0]
    return result, arithmetic.rescued


def prefixes_gradient(grad: Tensor, stack: Tensor) -> Tensor:
    """The gradient of `sum(grad * prefixes)`.

    Both sweeps backwards: a product's gradient becomes its right operand's, and what its left receives is added.
    """
    result = prefixes_shape(stack)
    if result.numel() == 0:
        return result.to(stack.dtype)
    whole = sets(stack)
    s = whole.shape[1]
    gradient = result.copy_(grad).view(whole.shape)
    backend, arithmetic = _arithmetic(whole, result.dtype)
    leaves = backend.Nodes.leaves(whole)
    nodes, found = (backend.Nodes.over(torch.empty_like(gradient)) for _ in range(2))
    up, down = list(upward(s)), list(downward(s))
    for step in up:
        arithmetic.multiply(*_operands(step, leaves, nodes, nodes), nodes.at(step.left))
        first = step.left.start  # the first node of each level is a prefix
        found.at(slice(step.right.start, step.right.start + 1)).copy_(nodes.at(slice(first, first + 1)))
    for step in down:
        arithmetic.multiply(*_operands(step, leaves, found, nodes), found.at(step.right))
    for step in reversed(up + down):
        if step.left_at == 0:
            operands, out = _operands(step, leaves, found, nodes), found.at(step.right)
        else:
            operands, out = _operands(step, leaves, nodes, nodes), nodes.at(step.left)
        grads = gradient[:, step.left], gradient[:, step.right]
        arithmetic.gradient(grads[1], *operands, out, *grads, add_left=True)
    gradient[:, 0].masked_fill_(whole[:, 0] == -math.inf, 0.0)
    return result.to(stack.dtype)


def product_shape(stack: Tensor) -> Tensor:
    """A product, unwritten: float64 for float64, otherwise float32."""
    return stack.new_empty(stack.shape[:-3] + stack.shape[-2:], dtype=torch.promote_types(stack.dtype, torch.float32))


def prefixes_shape(stack: Tensor) -> Tensor:
    """All prefixes, unwritten."""
    return stack.new_empty(stack.shape, dtype=torch.promote_types(stack.dtype, torch.float32))


def sets(stack: Tensor) -> Tensor:
    """(g, s, c, c): a view, or a copy where the batch axes cannot be joined or the stack is a negative view."""
    return stack.resolve_neg().reshape(-1, *stack.shape[-3:])


def _reduced(whole: Tensor, dtype: torch.dtype, *, inplace: bool) -> tuple[Any, Any]:
    """The root of a stack (g, s, c, c), a slot of nodes, and the arithmetic that made it."""
    backend, arithmetic = _arithmetic(whole, dtype)
    leaves = arithmetic.leaves_for_root(whole)
    g, s, c, _ = leaves.values.shape
    if inplace and whole.dtype == dtype:
        memory = whole[:, : s // 2 * 2 : 2]
    else:
        memory = whole.new_empty(g, s // 2, c, c, dtype=dtype)
    nodes = backend.Nodes.over(memory)
    for step in reduction(s):
        left = leaves.at(step.left) if step.left_at is None else nodes.at(halved(step.left))
        right = leaves.at(step.right) if step.right_at is None else nodes.at(halved(step.right))
        arithmetic.multiply(left, right, nodes.at(halved(step.left)))
    return (nodes if s > 1 else leaves).at(slice(0, 1)), arithmetic


def _relative(root: Any, arithmetic: Any) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(root.values)
    arithmetic.logarithms(replace(root, offset=torch.zeros_like(root.offset)), out)
    return out[:, 0], root.offset[:, 0].T


def _arithmetic(whole: Tensor, dtype: torch.dtype) -> tuple[Any, Any]:
    """The kernels for nodes of a stack (g, s, c, c), and room for a level of them."""
    g, s, c, _ = whole.shape
    backend: Any = kernels.tree_kernels(whole)
    return backend, backend.Arithmetic(c, g * max(1, s // 2), dtype, whole.device)


def _operands(step: Step, leaves: Any, lefts: Any, rights: Any) -> tuple[Any, Any]:
    """The operands of a step in layouts in which nodes stay."""
    left = leaves.at(step.left) if step.left_at is None else lefts.at(shifted(step.left, step.left_at))
    right = leaves.at(step.right) if step.right_at is None else rights.at(shifted(step.right, step.right_at))
    return left, right
