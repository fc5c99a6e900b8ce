"""Products of a stack of matrices in log space, as operators of torch.

Only the stack is saved for the backward pass, which computes the partial products of the tree again, and their
gradients down the tree in the memory of the result. A second derivative is torch's, through products by
`autograd.matmul` in the same order.
"""

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..rescues import report_outputs
from ..tensors import is_plain
from .matmul import log_matmul
from .operator import Saving, operator


def log_product(stack: Tensor, *, inplace: bool) -> Tensor:
    """The product [..., c, c] of a stack [..., s, c, c] of logarithms, which `inplace` overwrites in eager mode."""
    if inplace and is_plain((stack,)) and not stack.is_meta:
        with kernels.arithmetic_on(stack):
            return _forward(stack, False, inplace=True)
    return log_products(stack, False)


class _Products(Saving):
    """stack, prefixes -> the product of all matrices, or the products of the first 1, 2, ... of them."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _log_products_backward(grad, *ctx.saved_tensors, *ctx.options), None


class _Gradient(Saving):
    """grad, stack, prefixes -> the gradient of `sum(grad * products)` with respect to the stack."""

    @staticmethod
    def backward(ctx: Any, along: Tensor) -> tuple[Tensor | None, ...]:
        (grad, stack), (prefixes,) = ctx.saved_tensors, ctx.options
        return (*_by_composition(grad, stack, prefixes, along), None)


def _forward(stack: Tensor, prefixes: bool, *, inplace: bool = False) -> Tensor:
    result = _shape(stack, prefixes)
    if result.numel():
        whole, backend = sets(stack), kernels.module("product", stack)
        if prefixes:
            recomputed = backend.prefixes(whole, result.view(whole.shape))
        else:
            out, is_copy = result.view(-1, *result.shape[-2:]), whole.data_ptr() != stack.data_ptr()
            recomputed = backend.write_product(whole, out, inplace=inplace or is_copy)
        report_outputs(recomputed)
    return result


def _backward(grad: Tensor, stack: Tensor, prefixes: bool) -> Tensor:
    result = stack.new_empty(stack.shape, dtype=grad.dtype)
    if result.numel():
        whole, backend = sets(stack), kernels.module("product", stack)
        write = backend.prefixes_gradient if prefixes else backend.product_gradient
        weight = grad.resolve_neg().reshape(whole.shape if prefixes else whole[:, 0].shape)
        write(weight, whole, result.view(whole.shape))
    return result.to(stack.dtype)


def _shape(stack: Tensor, prefixes: bool) -> Tensor:
    """Uninitialized memory for the products: float64 for a stack in float64, otherwise float32."""
    shape = stack.shape if prefixes else stack.shape[:-3] + stack.shape[-2:]
    return stack.new_empty(shape, dtype=torch.promote_types(stack.dtype, torch.float32))


def _by_composition(grad: Tensor, stack: Tensor, prefixes: bool, along: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients with respect to grad and stack of `sum(along * gradient)`, where `_Gradient` gives the gradient."""
    if stack.numel() == 0:
        return None, None
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        grad, stack = operands = [
            operand.view_as(operand) if differentiable and operand.requires_grad else operand.detach().requires_grad_()
            for operand in (grad, stack)
        ]
        compose = _composed_prefixes if prefixes else _composed_product
        result = compose(sets(stack).double()).view(grad.shape)
        (first,) = torch.autograd.grad(result, stack, grad.double(), create_graph=True)
        return torch.autograd.grad(first, operands, along, create_graph=differentiable, allow_unused=True)


def sets(stack: Tensor) -> Tensor:
    """The stack [..., s, c, c] as (g, s, c, c); a copy where its batch axes do not merge or it is a negative view."""
    return stack.resolve_neg().reshape(-1, *stack.shape[-3:])


def _composed_product(nodes: Tensor) -> Tensor:
    """The products (g, c, c) of stacks (g, s, c, c), of pairs of matrices level by level."""
    nodes = _no_gradient_at_zero(nodes)
    while nodes.shape[1] > 1:
        pairs = nodes.shape[1] // 2
        left, right = nodes[:, : 2 * pairs : 2], nodes[:, 1 : 2 * pairs : 2]
        products = log_matmul(left.flatten(0, 1), right.flatten(0, 1)).view(left.shape)
        nodes = torch.cat([products, nodes[:, 2 * pairs :]], 1)
    return nodes[:, 0]


def _composed_prefixes(stack: Tensor) -> Tensor:
    """The prefixes of stacks, both (g, s, c, c), one matrix after the other."""
    prefixes = accumulate(_no_gradient_at_zero(stack).unbind(1), log_matmul)
    return torch.stack(list(prefixes), 1)


def _no_gradient_at_zero(logs: Tensor) -> Tensor:
    """The same logarithms, with gradient 0 where they are -inf."""
    return logs.masked_fill(logs == -math.inf, -math.inf)


# the product [..., c, c] of a stack [..., s, c, c] of logarithms, or those of the first 1 to s matrices [..., s, c, c]
log_products: Callable[..., Tensor] = operator(
    "log_products(Tensor stack, bool prefixes) -> Tensor", _forward, _shape, _Products
)
_log_products_backward: Callable[..., Tensor] = operator(
    "log_products_backward(Tensor grad, Tensor stack, bool prefixes) -> Tensor",
    _backward,
    lambda grad, stack, prefixes: stack.new_empty(stack.shape),
    _Gradient,
)
