"""How the operators of a chain are each other's derivatives, and how they are mapped.

    log-partition  --gradient-->  posteriors  --along tangents-->  covariances

Kept for the backward pass are the operands and one tensor of forward messages. The gradients are written in the
operands' own shapes. Covariances are exact too, and are not differentiated again.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _chain_operators as operators
from ._batching import batch_axes, mapped_first, shape_of_one, with_batch_first
from ._operators import apply, is_plain, transform
from ._operators import call as _call


class Kept(NamedTuple):
    """The log-partition [*B] in float64, and what `kernels.sum_product` keeps: messages, scales, what was redone."""

    log_norm: Tensor
    messages: Tensor
    scales: Tensor
    redone: Tensor


def log_norm(
    x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, segments: int = 1
) -> Tensor:
    """The log-partition [*B] in float64. Arguments have been checked.

    `segments`: into how many the chain is cut (`kernels.chunked`); 1 for the sequential schedule. It changes the time
    that a call and its gradient take, and the memory of either.
    """
    keep = torch.is_grad_enabled() and any(operand.requires_grad for operand in (x, bulk, p0))
    return Kept(*apply(_LogNorm, operators.log_norm, x, bulk, p0, lengths, log_params, keep, segments)).log_norm


def log_norm_within(
    x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, workspace: Any
) -> Tensor:
    """The same, with what the gradient needs in a workspace; as without one where a call is traced or mapped."""
    arguments = x, bulk, p0, lengths, log_params
    if not (is_plain(arguments) and torch.is_grad_enabled() and any(t.requires_grad for t in arguments[:3])):
        return log_norm(*arguments)
    found: Tensor = _call(_Within, *arguments, workspace)
    return found


def forward(x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, keep: bool) -> Kept:
    """The log-partition, and what its gradient needs."""
    return Kept(*apply(_LogNorm, operators.log_norm, x, bulk, p0, lengths, log_params, keep, 1))


def gradient(
    grad: Tensor,
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    lengths: Tensor | None,
    kept: Kept,
    log_params: bool,
    by_log: bool,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `sum(grad * log_norm)`; an empty tensor for one that is not needed.

    `by_log`: with respect to the logarithms of bulk and p0, though these be linear.
    """
    arguments = grad, x, bulk, p0, lengths, *kept, log_params, by_log, *needs, 1
    found: tuple[Tensor, Tensor, Tensor] = apply(_Gradient, operators.log_norm_backward, *arguments)
    return found


def along(
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    lengths: Tensor | None,
    tangents: tuple[Tensor | None, Tensor | None, Tensor | None],
    log_params: bool,
    by_log: bool,
) -> Tensor:
    """The derivative of the log-partition along tangents of the operands [*B], in float64: a path's expected tangent.

    `by_log`: the tangents are those of the logarithms of bulk and p0, though these be linear.
    """
    arguments = x, bulk, p0, lengths, *tangents, log_params, by_log
    found: Tensor = apply(_Along, operators.log_norm_along, *arguments)
    return found


class _LogNorm(torch.autograd.Function):
    """x, bulk, p0, lengths, log_params, keep, segments -> Kept."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = operators.log_norm(*args)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *operands, ctx.log_params, _, ctx.segments = inputs
        ctx.save_for_backward(*operands, *output)
        ctx.save_for_forward(*operands)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 7
        needs = ctx.needs_input_grad[:3]
        found = _call(_Gradient, grad, *ctx.saved_tensors, ctx.log_params, False, *needs, ctx.segments)
        return (*_if_needed(found, needs), *(None,) * 4)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
        found = _call(_Along, *ctx.saved_tensors[:4], *tangents[:3], ctx.log_params, False)
        return found, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        operands = with_batch_first(info.batch_size, in_dims, *args[:4])
        # a mapped tensor does not say that a gradient is wanted of it
        keep = args[5] or torch.is_grad_enabled()
        return _call(_LogNorm, *operands, args[4], keep, args[6]), (0, None, None, None)


class _Within(torch.autograd.Function):
    """x, bulk, p0, lengths, log_params, workspace -> the log-partition."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *operands, ctx.log_params, _ = args
        kept = operators.log_norm_within(*args)
        ctx.save_for_backward(*operands, *kept)
        return kept[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[:3]
        found = _call(_Gradient, grad, *ctx.saved_tensors, ctx.log_params, False, *needs, 1)
        return (*_if_needed(found, needs), *(None,) * 3)


class _Gradient(torch.autograd.Function):
    """grad, x, bulk, p0, lengths, *Kept, log_params, by_log, need_x, need_bulk, need_p0, segments -> gradients."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = operators.log_norm_backward(*args)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        tensors, (ctx.log_params, ctx.by_log, *ctx.needs, ctx.segments) = inputs[:9], inputs[9:]
        ctx.save_for_backward(*tensors[:5])
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *along: Tensor | None) -> tuple[Tensor | None, ...]:
        tangents = _if_needed(along, ctx.needs)
        if all(tangent is None for tangent in tangents):
            return (None,) * 15
        found = _call(_Second, *ctx.saved_tensors, *tangents, ctx.log_params, ctx.by_log)
        return (*_if_needed(found, ctx.needs_input_grad[:4]), *(None,) * 11)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        """Linear in `grad`; in the operands, their covariances, which are symmetric."""
        grad, x, bulk, p0, lengths, *kept = ctx.saved_tensors
        along_grad, along_x, along_bulk, along_p0 = tangents[:4]
        wide = ctx.by_log and not ctx.log_params  # tangents are linear, but the gradients are not
        if wide:
            along_bulk, along_p0 = _quotient(along_bulk, bulk), _quotient(along_p0, p0)
        found = _call(_Second, grad, x, bulk, p0, lengths, along_x, along_bulk, along_p0, ctx.log_params, ctx.by_log)
        out = [found[1], found[2] * bulk, found[3] * p0] if wide else list(found[1:])
        if along_grad is not None:
            arguments = along_grad, x, bulk, p0, lengths, *kept, ctx.log_params, ctx.by_log, *ctx.needs, ctx.segments
            more = _call(_Gradient, *arguments)
            out = [a + b if need else a for a, b, need in zip(out, more, ctx.needs, strict=True)]
        return tuple(a if need else a.new_zeros(0) for a, need in zip(out, ctx.needs, strict=True))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Each example has gradients of its own, also of an operand that all share: so the messages are made again."""
        grad, *operands = _each(info.batch_size, in_dims, args[:5])
        log_params, by_log, *needs, segments = args[9:]
        kept = _call(_LogNorm, *operands, log_params, True, segments)
        found = _call(_Gradient, grad, *operands, *kept, log_params, by_log, *needs, segments)
        own = _as_one(info.batch_size, found, in_dims[1:4], args[1:4], needs)
        return own, (0, 0, 0)


class _Along(torch.autograd.Function):
    """x, bulk, p0, lengths, along_x, along_bulk, along_p0, log_params, by_log -> the log-partition's derivative."""

    @staticmethod
    def forward(*args: Any) -> Tensor:
        found: Tensor = operators.log_norm_along(*args)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.log_params, ctx.by_log = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bulk, p0, lengths, *tangents = ctx.saved_tensors
        needs = ctx.needs_input_grad
        first: tuple[Tensor | None, ...] = (None,) * 3
        second: tuple[Tensor | None, ...] = (None,) * 4
        if any(needs[:3]):
            second = _call(_Second, grad, x, bulk, p0, lengths, *tangents, ctx.log_params, ctx.by_log)
        if any(needs[4:7]):
            kept = _call(_LogNorm, x, bulk, p0, lengths, ctx.log_params, True, 1)
            first = _call(_Gradient, grad, x, bulk, p0, lengths, *kept, ctx.log_params, ctx.by_log, *needs[4:7], 1)
        return (*_if_needed(second[1:], needs[:3]), None, *_if_needed(first, needs[4:7]), None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        size, axes = info.batch_size, batch_axes(args[0], in_dims[0])
        operands = _each(size, (None, *in_dims), (None, *args[:4]))[1:]
        tangents = [
            mapped_first(size, axes, own, tangent, dim, expand=True)
            for own, tangent, dim in zip((2, 3, 1), args[4:7], in_dims[4:7], strict=True)
        ]
        return _call(_Along, *operands, *tangents, *args[7:]), 0


class _Second(torch.autograd.Function):
    """The gradients, with respect to grad, x, bulk and p0, of the products of `_Gradient` with tangents.

    grad, x, bulk, p0, lengths, along_x, along_bulk, along_p0, log_params, by_log -> gradients.
    """

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = operators.log_norm_second(*args)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor | None, ...]:
        raise RuntimeError("logchain: expected at most two derivatives, got a third")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        size, axes = info.batch_size, batch_axes(args[1], in_dims[1])
        operands = _each(size, in_dims, args[:5])
        tangents = [
            mapped_first(size, axes, own, tangent, dim, expand=True)
            for own, tangent, dim in zip((2, 3, 1), args[5:8], in_dims[5:8], strict=True)
        ]
        along, *found = _call(_Second, *operands, *tangents, *args[8:])
        own = _as_one(size, found, in_dims[1:4], args[1:4], [True] * 3)
        return (along, *own), (0, 0, 0, 0)


def _each(size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> list[Any]:
    """grad, x, bulk, p0 and lengths, each expanded to operands of its own for every example."""
    axes = batch_axes(args[1], in_dims[1])
    return [
        mapped_first(size, axes, own, operand, dim, expand=True)
        for own, operand, dim in zip((0, 2, 3, 1, 0), args, in_dims, strict=False)
    ]


def _as_one(size: int, found: Any, in_dims: tuple[Any, ...], operands: tuple[Any, ...], needs: Any) -> Any:
    """Gradients of `_each` operand in the shape that one example of it has."""
    return tuple(
        gradient.reshape(size, *shape_of_one(operand, dim)) if need else gradient.expand(size, 0)
        for gradient, operand, dim, need in zip(found, operands, in_dims, needs, strict=True)
    )


def _if_needed(found: Any, needs: Any) -> tuple[Any, ...]:
    return tuple(value if need else None for value, need in zip(found, needs, strict=True))


def _quotient(tangent: Tensor | None, value: Tensor) -> Tensor | None:
    return None if tangent is None else torch.where(value == 0, 0.0, tangent / torch.where(value == 0, 1.0, value))


transform("log_norm", _LogNorm)
transform("log_norm_backward", _Gradient)
transform("log_norm_along", _Along)
transform("log_norm_second", _Second)
