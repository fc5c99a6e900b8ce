"""How the operators of a chain are each other's derivatives, and how they are mapped.

    log-partition  --gradient-->  posteriors  --along tangents-->  covariances

Kept for the backward pass are the operands and one tensor of forward messages. The gradients are written in the
operands' own shapes. Covariances are exact too, and are not differentiated again.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..operands import differentiated, is_plain
from ..rescues import report_chains
from ..schedules import choose
from . import chain_operators as operators
from . import tangents as tangent_operators
from .operator import apply, as_one, call, of_each, transform, with_batch_first


class Kept(NamedTuple):
    """The log-partition [*B] in float64, and what `kernels.plain` keeps: messages, scales, what was redone."""

    log_norm: Tensor
    messages: Tensor
    scales: Tensor
    redone: Tensor


def log_norm(
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    lengths: Tensor | None,
    log_params: bool,
    *,
    segments: int | None = None,
    workspace: Any = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The log-partition [*B], found in float64. Arguments have been checked.

    `segments`: into how many the chain is cut (`kernels.chunked`); 1 for the sequential schedule, None for as many as
    the device's model says. It changes the time that a call and its gradient take, and the memory of either.
    `workspace`: where messages are kept; with 1 segment.
    """
    if segments is None:
        segments = choose.of(x, bulk, p0, log_params, lengths is not None, "auto").segments
    arguments, keep = (x, bulk, p0, lengths, log_params), differentiated(x, bulk, p0)
    if not is_plain(arguments):
        found: Tensor = apply(_LogNorm, operators.log_norm, *arguments, keep, segments)[0].to(dtype, copy=True)
    elif keep:
        found = call(LogPartition, *arguments, segments, workspace, dtype, None)
    else:
        found = operators.log_norm_here(*arguments, False, segments)[0].to(dtype)
    return found


def short_log_norm(short: Any, x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool, keep: bool) -> Tensor:
    """The log-partition [*B] of a short chain, in the dtype of the operands."""
    if keep:
        with_gradient: Tensor = call(LogPartition, x, bulk, p0, None, log_params, 1, None, None, short)
        return with_gradient
    found: Tensor
    found, _, redone = short.value(x, bulk, p0, False)
    report_chains(redone)
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
    found: Tensor = apply(Along, tangent_operators.log_norm_along, *arguments)
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
        found = call(_Gradient, grad, *ctx.saved_tensors, ctx.log_params, False, *needs, ctx.segments)
        return (*if_needed(found, needs), *(None,) * 4)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
        found = call(Along, *ctx.saved_tensors[:4], *tangents[:3], ctx.log_params, False)
        return found, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        operands = with_batch_first(info.batch_size, in_dims, *args[:4])
        # a mapped tensor does not say that a gradient is wanted of it
        keep = args[5] or torch.is_grad_enabled()
        return call(_LogNorm, *operands, args[4], keep, args[6]), (0, None, None, None)


class LogPartition(torch.autograd.Function):
    """The log-partition alone, where nothing traces.

    x, bulk, p0, lengths, log_params, segments, workspace, dtype, the `Short` of these or None -> log-partition.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x, bulk, p0, lengths, ctx.log_params, ctx.segments, workspace, dtype, ctx.short = args
        if ctx.short is not None:
            found: Tensor
            found, kept, redone = ctx.short.value(x, bulk, p0, True)
            report_chains(redone)
            ctx.save_for_backward(x, bulk, p0, kept)
            return found
        kept = operators.log_norm_here(x, bulk, p0, lengths, ctx.log_params, True, ctx.segments, workspace)
        ctx.save_for_backward(x, bulk, p0, lengths, *kept)
        return kept[0].to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs, short = ctx.needs_input_grad[:3], ctx.short
        if short is None:
            saved = ctx.saved_tensors
        else:
            x, bulk, p0, kept = ctx.saved_tensors
            if not torch.is_grad_enabled() and is_plain((grad,)) and short.fits(x, bulk, p0):
                return (*short.gradients(x, bulk, p0, kept, grad, needs), *(None,) * 6)
            saved = x, bulk, p0, None, *short.parts(kept, x)
        found = call(_Gradient, grad, *saved, ctx.log_params, False, *needs, ctx.segments)
        return (*if_needed(found, needs), *(None,) * 6)


class Gradient(torch.autograd.Function):
    """grad, x, bulk, p0, lengths, *kept, *options -> gradients, whose derivatives are the same in every schedule.

    `forward` and `vmap` are a schedule's own, and its `setup_context` is `setup`.
    """

    @staticmethod
    def setup(ctx: Any, schedule: Any, tensors: Any, options: Any, *, by_log: bool, needs: Any) -> None:
        ctx.schedule, ctx.options, ctx.by_log, ctx.needs = schedule, options, by_log, needs
        ctx.log_params, ctx.others = options[0], (None,) * (len(tensors) + len(options) - 4)
        ctx.save_for_backward(*tensors[:5])
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *along: Tensor | None) -> tuple[Tensor | None, ...]:
        tangents = if_needed(along, ctx.needs)
        if all(tangent is None for tangent in tangents):
            return (None, None, None, None, *ctx.others)
        found = call(_Second, *ctx.saved_tensors, *tangents, ctx.log_params, ctx.by_log)
        return (*if_needed(found, ctx.needs_input_grad[:4]), *ctx.others)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        """Linear in `grad`; in the operands, their covariances, which are symmetric."""
        grad, x, bulk, p0, lengths, *kept = ctx.saved_tensors
        along_grad, along_x, along_bulk, along_p0 = tangents[:4]
        wide = ctx.by_log and not ctx.log_params  # tangents are linear, but the gradients are not
        if wide:
            along_bulk, along_p0 = _quotient(along_bulk, bulk), _quotient(along_p0, p0)
        found = call(_Second, grad, x, bulk, p0, lengths, along_x, along_bulk, along_p0, ctx.log_params, ctx.by_log)
        out = [found[1], found[2] * bulk, found[3] * p0] if wide else list(found[1:])
        if along_grad is not None:
            more = call(ctx.schedule, along_grad, x, bulk, p0, lengths, *kept, *ctx.options)
            out = [a + b if need else a for a, b, need in zip(out, more, ctx.needs, strict=True)]
        return tuple(a if need else a.new_zeros(0) for a, need in zip(out, ctx.needs, strict=True))


class _Gradient(Gradient):
    """Kept is `Kept`; the options are log_params, by_log, need_x, need_bulk, need_p0, segments."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = operators.log_norm_backward(*args)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, by_log, *needs, _ = options = inputs[9:]
        Gradient.setup(ctx, _Gradient, inputs[:9], options, by_log=by_log, needs=needs)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        log_params, _, *needs, segments = options = args[9:]

        def gradients(grad: Tensor, *operands: Any) -> Any:
            kept = call(_LogNorm, *operands, log_params, True, segments)
            return call(_Gradient, grad, *operands, *kept, *options)

        return gradients_of_each(gradients, info.batch_size, in_dims, args, needs)


class Along(torch.autograd.Function):
    """x, bulk, p0, lengths, along_x, along_bulk, along_p0, log_params, by_log -> the log-partition's derivative."""

    @staticmethod
    def forward(*args: Any) -> Tensor:
        found: Tensor = tangent_operators.log_norm_along(*args)
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
            second = call(_Second, grad, x, bulk, p0, lengths, *tangents, ctx.log_params, ctx.by_log)
        if any(needs[4:7]):
            kept = call(_LogNorm, x, bulk, p0, lengths, ctx.log_params, True, 1)
            first = call(_Gradient, grad, x, bulk, p0, lengths, *kept, ctx.log_params, ctx.by_log, *needs[4:7], 1)
        return (*if_needed(second[1:], needs[:3]), None, *if_needed(first, needs[4:7]), None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        operands = of_each(info.batch_size, "x bulk p0 lengths x bulk p0", in_dims, args)
        return call(Along, *operands, *args[7:]), 0


class _Second(torch.autograd.Function):
    """The gradients, with respect to grad, x, bulk and p0, of the products of `_Gradient` with tangents.

    grad, x, bulk, p0, lengths, along_x, along_bulk, along_p0, log_params, by_log -> gradients.
    """

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = tangent_operators.log_norm_second(*args)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor | None, ...]:
        raise RuntimeError("logchain: expected at most two derivatives, got a third")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        operands = of_each(info.batch_size, "grad x bulk p0 lengths x bulk p0", in_dims, args)
        along, *found = call(_Second, *operands, *args[8:])
        own = as_one(info.batch_size, found, in_dims[1:4], args[1:4], [True] * 3)
        return (along, *own), (0, 0, 0, 0)


def gradients_of_each(
    gradients: Callable[..., Any], size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...], needs: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Each example has gradients of its own, also of an operand that all share: so the messages are made again."""
    found = gradients(*of_each(size, "grad x bulk p0 lengths", in_dims, args))
    return as_one(size, found, in_dims[1:4], args[1:4], needs), (0, 0, 0)


def if_needed(found: Any, needs: Any) -> tuple[Any, ...]:
    """The gradients that are needed, None for the others."""
    return tuple(value if need else None for value, need in zip(found, needs, strict=True))


def _quotient(tangent: Tensor | None, value: Tensor) -> Tensor | None:
    return None if tangent is None else torch.where(value == 0, 0.0, tangent / torch.where(value == 0, 1.0, value))


transform("log_norm", _LogNorm)
transform("log_norm_backward", _Gradient)
transform("log_norm_along", Along)
transform("log_norm_second", _Second)
