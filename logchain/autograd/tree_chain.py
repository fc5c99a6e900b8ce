"""How the tree schedule of the log-partition is differentiated, and mapped.

Kept for the backward pass are the operands and a few messages; the leaves are made again. Second derivatives, and
derivatives along tangents, do not depend on the order in which matrices are multiplied: see `autograd.chain`.
"""

from typing import Any

import torch
from torch import Tensor

from ..autograd import tree_operators as operators
from .chain import Along, Gradient, gradients_of_each, if_needed
from .operator import apply, call, transform, with_batch_first


def log_norm(x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool) -> Tensor:
    """The log-partition [*B] in float64. Arguments have been checked."""
    found: Tensor = apply(_LogNorm, operators.log_norm, x, bulk, p0, lengths, log_params)[0]
    return found


class _LogNorm(torch.autograd.Function):
    """x, bulk, p0, lengths, log_params -> the log-partition, and messages."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = operators.log_norm(*args)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *operands, ctx.log_params = inputs
        ctx.save_for_backward(*operands, output[1])
        ctx.save_for_forward(*operands)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        needs = ctx.needs_input_grad[:3]
        found = call(_Gradient, grad, *ctx.saved_tensors, ctx.log_params, *needs)
        return (*if_needed(found, needs), None, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
        return call(Along, *ctx.saved_tensors[:4], *tangents[:3], ctx.log_params, False), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        operands = with_batch_first(info.batch_size, in_dims, *args[:4])
        return call(_LogNorm, *operands, args[4]), (0, None)


class _Gradient(Gradient):
    """Kept are messages; the options are log_params, need_x, need_bulk, need_p0."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = operators.log_norm_backward(*args)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, *needs = options = inputs[6:]
        Gradient.setup(ctx, _Gradient, inputs[:6], options, by_log=False, needs=needs)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        log_params, *needs = options = args[6:]

        def gradients(grad: Tensor, *operands: Any) -> Any:
            messages = call(_LogNorm, *operands, log_params)[1]
            return call(_Gradient, grad, *operands, messages, *options)

        return gradients_of_each(gradients, info.batch_size, in_dims, args, needs)


transform("tree_log_norm", _LogNorm)
transform("tree_log_norm_backward", _Gradient)
