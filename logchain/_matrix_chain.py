"""Products of a stack of matrices as operators of torch: what is kept for the backward pass, and what is recomputed.

Kept is the stack alone. The backward pass recomputes the nodes of the tree and goes down it, with the gradients in the
slots of the result. A second derivative is taken through products of `_log_matmul` in the same order.
"""

import math
from typing import Any

import torch
from torch import Tensor

from . import _device
from ._log_matmul import log_matmul
from ._operators import apply, operator, transform
from ._rescues import report_outputs
from ._tree import Step, downward, halved, reduction, shifted, upward
from .kernels.exponentials import near_one


def log_product(stack: Tensor, *, inplace: bool) -> Tensor:
    """The product [..., c, c] of a stack [..., s, c, c] of logarithms. Arguments have been checked."""
    result: Tensor = _log_product_(stack) if inplace else apply(_Products, _log_products, stack, False)
    return result


def log_prefixes(stack: Tensor) -> Tensor:
    """The products [..., s, c, c] of the first 1 to s matrices of a stack [..., s, c, c] of logarithms."""
    result: Tensor = apply(_Products, _log_products, stack, True)
    return result


class _Products(torch.autograd.Function):
    """The product of all matrices, or all `prefixes`."""

    @staticmethod
    def forward(stack: Tensor, prefixes: bool) -> Tensor:
        found: Tensor = _log_products(stack, prefixes)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        stack, ctx.prefixes = inputs
        ctx.save_for_backward(stack)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Gradient.apply(grad, *ctx.saved_tensors, ctx.prefixes), None  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], stack: Tensor, prefixes: bool) -> tuple[Tensor, int]:
        return _Products.apply(stack.movedim(in_dims[0], 0), prefixes), 0  # type: ignore[no-untyped-call]


class _Gradient(torch.autograd.Function):
    """The gradient of `sum(grad * products)`."""

    @staticmethod
    def forward(grad: Tensor, stack: Tensor, prefixes: bool) -> Tensor:
        found: Tensor = _log_products_backward(grad, stack, prefixes)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        grad, stack, ctx.prefixes = inputs
        ctx.save_for_backward(grad, stack)

    @staticmethod
    def backward(ctx: Any, along: Tensor) -> tuple[Tensor | None, ...]:
        grad, stack = ctx.saved_tensors
        return (*_by_composition(grad, stack, ctx.prefixes, along), None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        grad, stack = (
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(args[:2], in_dims[:2], strict=True)
        )
        return _Gradient.apply(grad, stack, args[2]), 0  # type: ignore[no-untyped-call]


def _forward(stack: Tensor, prefixes: bool) -> Tensor:
    result, rescued = _prefixes(stack) if prefixes else _product(stack, inplace=False)
    report_outputs(rescued)
    return result


def _forward_(stack: Tensor) -> Tensor:
    result, rescued = _product(stack, inplace=True)
    report_outputs(rescued)
    return result


def _backward(grad: Tensor, stack: Tensor, prefixes: bool) -> Tensor:
    scale = 1.0
    if grad.numel() and not _device.on_gpu(grad):
        grad, scale = near_one(grad)  # what is divided by small sums
    found = _prefixes_gradient(grad, stack) if prefixes else _product_gradient(grad, stack)
    return found if scale == 1.0 else found.mul_(scale)


def _shape(stack: Tensor, prefixes: bool = False) -> Tensor:
    """A result: float64 for float64, otherwise float32."""
    shape = stack.shape if prefixes else stack.shape[:-3] + stack.shape[-2:]
    return stack.new_empty(shape, dtype=torch.promote_types(stack.dtype, torch.float32))


def _gradient_shape(grad: Tensor, stack: Tensor, prefixes: bool) -> Tensor:
    return stack.new_empty(stack.shape)


def _product(stack: Tensor, *, inplace: bool) -> tuple[Tensor, int]:
    """The product, and how many entries of nodes were rescued."""
    result = _shape(stack)
    if result.numel() == 0:
        return result, 0
    whole = _sets(stack)
    kernels, arithmetic = _arithmetic(whole, result.dtype)
    leaves = arithmetic.leaves_for_root(whole)
    g, s, c, _ = leaves.values.shape
    copied = whole.data_ptr() != stack.data_ptr()
    if (inplace or copied) and whole.dtype == result.dtype:
        memory = whole[:, : s // 2 * 2 : 2]
    else:
        memory = result.new_empty(g, s // 2, c, c)
    nodes = kernels.Nodes.over(memory)
    for step in reduction(s):
        left = leaves.at(step.left) if step.left_at is None else nodes.at(halved(step.left))
        right = leaves.at(step.right) if step.right_at is None else nodes.at(halved(step.right))
        arithmetic.multiply(left, right, nodes.at(halved(step.left)))
    root = (nodes if s > 1 else leaves).at(slice(0, 1))
    arithmetic.logarithms(root, result.view(g, 1, c, c))
    return result, arithmetic.rescued


def _product_gradient(grad: Tensor, stack: Tensor) -> Tensor:
    """All nodes stay, each where its right operand had been; gradients lie in the slots that `_product` computes in."""
    result = _shape(stack, prefixes=True)
    if result.numel() == 0:
        return result.to(stack.dtype)
    whole = _sets(stack)
    gradient = result.view(whole.shape)
    gradient[:, 0] = grad.reshape(gradient[:, 0].shape)
    if whole.shape[1] == 1:
        gradient.masked_fill_(whole == -math.inf, 0.0)
    kernels, arithmetic = _arithmetic(whole, result.dtype)
    leaves, nodes = kernels.Nodes.leaves(whole), kernels.Nodes.over(torch.empty_like(gradient))
    steps = list(reduction(whole.shape[1]))
    for step in steps:
        arithmetic.multiply(*_operands(step, leaves, nodes, nodes), nodes.at(step.right))
    for step in reversed(steps):
        operands = _operands(step, leaves, nodes, nodes)
        grads = gradient[:, step.left], gradient[:, step.right]
        arithmetic.gradient(grads[0], *operands, nodes.at(step.right), *grads)
    return result.to(stack.dtype)


def _prefixes(stack: Tensor) -> tuple[Tensor, int]:
    """The prefixes, written over the nodes of the first sweep, and how many entries were rescued."""
    result = _shape(stack, prefixes=True)
    if result.numel() == 0:
        return result, 0
    whole = _sets(stack)
    s = whole.shape[1]
    kernels, arithmetic = _arithmetic(whole, result.dtype)
    leaves, nodes = kernels.Nodes.leaves(whole), kernels.Nodes.over(result.view(whole.shape))
    for step in (*upward(s), *downward(s)):
        left = (leaves if step.left_at is None else nodes).at(step.left)
        right = (leaves if step.right_at is None else nodes).at(step.right)
        arithmetic.multiply(left, right, nodes.at(step.right))
    arithmetic.logarithms(nodes.at(slice(1, s)), nodes.values[:, 1:])
    nodes.values[:, 0] = whole[:, 0]
    return result, arithmetic.rescued


def _prefixes_gradient(grad: Tensor, stack: Tensor) -> Tensor:
    """Both sweeps backwards: a product's gradient becomes its right operand's, and what its left receives is added."""
    result = _shape(stack, prefixes=True)
    if result.numel() == 0:
        return result.to(stack.dtype)
    whole = _sets(stack)
    s = whole.shape[1]
    gradient = result.copy_(grad).view(whole.shape)
    kernels, arithmetic = _arithmetic(whole, result.dtype)
    leaves = kernels.Nodes.leaves(whole)
    nodes, prefixes = (kernels.Nodes.over(torch.empty_like(gradient)) for _ in range(2))
    up, down = list(upward(s)), list(downward(s))
    for step in up:
        arithmetic.multiply(*_operands(step, leaves, nodes, nodes), nodes.at(step.left))
        first = step.left.start  # the first node of each level is a prefix
        prefixes.at(slice(step.right.start, step.right.start + 1)).copy_(nodes.at(slice(first, first + 1)))
    for step in down:
        arithmetic.multiply(*_operands(step, leaves, prefixes, nodes), prefixes.at(step.right))
    for step in reversed(up + down):
        if step.left_at == 0:
            operands, out = _operands(step, leaves, prefixes, nodes), prefixes.at(step.right)
        else:
            operands, out = _operands(step, leaves, nodes, nodes), nodes.at(step.left)
        grads = gradient[:, step.left], gradient[:, step.right]
        arithmetic.gradient(grads[1], *operands, out, *grads, add_left=True)
    gradient[:, 0].masked_fill_(whole[:, 0] == -math.inf, 0.0)
    return result.to(stack.dtype)


def _arithmetic(whole: Tensor, dtype: torch.dtype) -> tuple[Any, Any]:
    """The kernels for nodes of a stack (g, s, c, c), and room for a level of them."""
    g, s, c, _ = whole.shape
    kernels: Any = _device.tree_kernels(whole)
    return kernels, kernels.Arithmetic(c, g * max(1, s // 2), dtype, whole.device)


def _operands(step: Step, leaves: Any, lefts: Any, rights: Any) -> tuple[Any, Any]:
    """The operands of a step in layouts in which nodes stay."""
    left = leaves.at(step.left) if step.left_at is None else lefts.at(shifted(step.left, step.left_at))
    right = leaves.at(step.right) if step.right_at is None else rights.at(shifted(step.right, step.right_at))
    return left, right


def _sets(stack: Tensor) -> Tensor:
    """(g, s, c, c): a view, or a copy where the batch axes cannot be joined."""
    return stack.reshape(-1, *stack.shape[-3:])


def _by_composition(grad: Tensor, stack: Tensor, prefixes: bool, along: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients, with respect to grad and stack, of the gradient's product with `along`."""
    if stack.numel() == 0:
        return None, None
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        grad, stack = operands = [
            operand.view_as(operand) if again and operand.requires_grad else operand.detach().requires_grad_()
            for operand in (grad, stack)
        ]
        compose = _composed_prefixes if prefixes else _composed_product
        result = compose(_sets(stack).double()).view(grad.shape)
        (first,) = torch.autograd.grad(result, stack, grad.double(), create_graph=True)
        return torch.autograd.grad(first, operands, along, create_graph=again, allow_unused=True)


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


_log_products = operator("log_products(Tensor stack, bool prefixes) -> Tensor", _forward, _shape)
_log_product_ = operator("log_product_(Tensor(a!) stack) -> Tensor", _forward_, _shape)
_log_products_backward = operator(
    "log_products_backward(Tensor grad, Tensor stack, bool prefixes) -> Tensor", _backward, _gradient_shape
)
transform("log_products", _Products)
transform("log_products_backward", _Gradient)
