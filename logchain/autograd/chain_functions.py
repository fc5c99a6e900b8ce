"""The log-partition and its derivatives as Functions of torch, each with its own derivative and its rule for vmap.

    LogNorm    log Z
    Gradient   weight * d log Z                    posterior marginals
    Along      d log Z along tangents              their expectation
    Second     d(sum of Gradient * tangents)       covariances

`LogNorm` and `Gradient` can be differentiated twice and once. For the backward pass they keep the operands and what
the schedule keeps; gradients have the shapes of their operands. `Along` and `Second` do not depend on the schedule.
"""

from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..schedules.choose import SEQUENTIAL
from . import chain_operators  # noqa: F401  registers the operators
from .operator import Final, Saving, as_one, call, if_needed, of_each, transform, with_batch_first
from .second import quotient


class LogNorm(torch.autograd.Function):
    """x, bulk, p0, lengths, log_params, keep, segments, warm_up -> `chain_operators.Saved`."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *operands, ctx.log_params, _, segments, warm_up = inputs
        ctx.schedule = segments, warm_up
        ctx.choice = kernels.on_cpu()
        ctx.save_for_backward(*operands, *output)
        ctx.save_for_forward(*operands)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 8
        kernels.check_forward_choice(ctx.choice, grad)
        needs = ctx.needs_input_grad[:3]
        gradients = call(Gradient, grad, *ctx.saved_tensors, ctx.log_params, False, *needs, *ctx.schedule)
        return (*if_needed(gradients, needs), *(None,) * 5)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
        derivative = call(Along, *ctx.saved_tensors[:4], *tangents[:3], ctx.log_params, False)
        return derivative, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        operands = with_batch_first(info.batch_size, in_dims, *args[:4])
        # whether a gradient is wanted cannot be seen: a mapped tensor says that it needs none
        keep = args[5] or torch.is_grad_enabled()
        return call(LogNorm, *operands, args[4], keep, *args[6:]), (0, None, None, None)


class Gradient(torch.autograd.Function):
    """grad, x, bulk, p0, lengths, *Saved, log_params, by_log, *needs of x, bulk, p0, segments, warm_up -> gradients."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.log_params, ctx.by_log, *ctx.needs, _, _ = ctx.options = inputs[9:]
        ctx.save_for_backward(*inputs[:5])
        ctx.save_for_forward(*inputs[:9])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        tangents = if_needed(tangents, ctx.needs)
        if all(tangent is None for tangent in tangents):
            return (None,) * 16
        derivatives = call(Second, *ctx.saved_tensors, *tangents, ctx.log_params, ctx.by_log)
        return (*if_needed(derivatives, ctx.needs_input_grad[:4]), *(None,) * 12)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        """The gradients are linear in `grad`; their Jacobian in the operands, covariances, is symmetric."""
        grad, x, bulk, p0, lengths, *saved = ctx.saved_tensors
        along_grad, along_x, along_bulk, along_p0 = tangents[:4]
        wide = ctx.by_log and not ctx.log_params  # tangents of weights, but gradients of their logarithms
        if wide:
            along_bulk, along_p0 = quotient(along_bulk, bulk), quotient(along_p0, p0)
        options = ctx.log_params, ctx.by_log
        second = call(Second, grad, x, bulk, p0, lengths, along_x, along_bulk, along_p0, *options)
        derivatives = [second[1], second[2] * bulk, second[3] * p0] if wide else list(second[1:])
        if along_grad is not None:
            first = call(Gradient, along_grad, x, bulk, p0, lengths, *saved, *ctx.options)
            derivatives = [a + b if need else a for a, b, need in zip(derivatives, first, ctx.needs, strict=True)]
        return tuple(a if need else a.new_zeros(0) for a, need in zip(derivatives, ctx.needs, strict=True))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """A shared operand has a gradient for each example too, so the forward messages are computed again."""
        log_params, _, *needs, segments, warm_up = options = args[9:]
        grad, *operands = of_each(info.batch_size, "grad x bulk p0 lengths", in_dims, args)
        saved = call(LogNorm, *operands, log_params, True, segments, warm_up)
        gradients = call(Gradient, grad, *operands, *saved, *options)
        return as_one(info.batch_size, gradients, in_dims[1:4], args[1:4], needs), (0, 0, 0)


class Along(Saving):
    """x, bulk, p0, lengths, along_x, along_bulk, along_p0, log_params, by_log -> the log-partition's derivative."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bulk, p0, lengths, *tangents = ctx.saved_tensors
        needs = ctx.needs_input_grad
        first: tuple[Tensor | None, ...] = (None,) * 3
        second: tuple[Tensor | None, ...] = (None,) * 4
        if any(needs[:3]):
            second = call(Second, grad, x, bulk, p0, lengths, *tangents, *ctx.options)
        if any(needs[4:7]):
            saved = call(LogNorm, x, bulk, p0, lengths, ctx.options[0], True, *SEQUENTIAL)
            first = call(Gradient, grad, x, bulk, p0, lengths, *saved, *ctx.options, *needs[4:7], *SEQUENTIAL)
        return (*if_needed(second[1:], needs[:3]), None, *if_needed(first, needs[4:7]), None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        operands = of_each(info.batch_size, "x bulk p0 lengths x bulk p0", in_dims, args)
        return call(Along, *operands, *args[7:]), 0


class Second(Final):
    """grad, x, bulk, p0, lengths, along_x, along_bulk, along_p0, log_params, by_log -> gradients.

    They are those of the sum of the outputs of `Gradient` times the tangents, with respect to grad, x, bulk and p0.
    """

    refusal = "logchain: expected at most two derivatives, got a third"

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        operands = of_each(info.batch_size, "grad x bulk p0 lengths x bulk p0", in_dims, args)
        derivative, *gradients = call(Second, *operands, *args[8:])
        gradients = as_one(info.batch_size, gradients, in_dims[1:4], args[1:4], [True] * 3)
        return (derivative, *gradients), (0, 0, 0, 0)


transform("log_norm", LogNorm)
transform("log_norm_backward", Gradient)
transform("log_norm_along", Along)
transform("log_norm_second", Second)
