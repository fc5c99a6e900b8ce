"""How the tree schedule of the log-partition is differentiated, and mapped.

Kept for the backward pass are the operands and a few messages; the leaves are made again. Second derivatives, and
derivatives along tangents, do not depend on the order in which matrices are multiplied: they are those of `_chain`.
"""

from typing import Any

import torch
from torch import Tensor

from . import _tree_operators as operators
from ._batching import with_batch_first
from ._chain import _Along, _as_one, _each, _if_needed, _Second
from ._operators import apply, transform


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
        found = _call(_Gradient, grad, *ctx.saved_tensors, ctx.log_params, *needs)
        return (*_if_needed(found, needs), None, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
        return _call(_Along, *ctx.saved_tensors[:4], *tangents[:3], ctx.log_params, False), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        operands = with_batch_first(info.batch_size, in_dims, *args[:4])
        return _call(_LogNorm, *operands, args[4]), (0, None)


class _Gradient(torch.autograd.Function):
    """grad, x, bulk, p0, lengths, messages, log_params, need_x, need_bulk, need_p0 -> gradients."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = operators.log_norm_backward(*args)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        tensors, (ctx.log_params, *ctx.needs) = inputs[:6], inputs[6:]
        ctx.save_for_backward(*tensors[:5])
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *along: Tensor | None) -> tuple[Tensor | None, ...]:
        tangents = _if_needed(along, ctx.needs)
        if all(tangent is None for tangent in tangents):
            return (None,) * 10
        found = _call(_Second, *ctx.saved_tensors, *tangents, ctx.log_params, False)
        return (*_if_needed(found, ctx.needs_input_grad[:4]), *(None,) * 6)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        """Linear in `grad`; in the operands, their covariances, which are symmetric."""
        *operands, messages = ctx.saved_tensors
        along_grad, *along = tangents[:4]
        out = _call(_Second, *operands, *along, ctx.log_params, False)[1:]
        if along_grad is not None:
            more = _call(_Gradient, along_grad, *operands[1:], messages, ctx.log_params, *ctx.needs)
            out = [a + b if need else a for a, b, need in zip(out, more, ctx.needs, strict=True)]
        return tuple(a if need else a.new_zeros(0) for a, need in zip(out, ctx.needs, strict=True))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Each example has gradients of its own, also of an operand that all share: so the messages are made again."""
        grad, *operands = _each(info.batch_size, in_dims, args[:5])
        log_params, *needs = args[6:]
        messages = _call(_LogNorm, *operands, log_params)[1]
        found = _call(_Gradient, grad, *operands, messages, log_params, *needs)
        return _as_one(info.batch_size, found, in_dims[1:4], args[1:4], needs), (0, 0, 0)


def _call(function: Any, *args: Any) -> Any:
    return function.apply(*args)


transform("tree_log_norm", _LogNorm)
transform("tree_log_norm_backward", _Gradient)
