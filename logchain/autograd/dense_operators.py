"""The operators of the log-partition of dense matrices, with its first and second derivatives.

    log_norm             log Z
    log_norm_backward    weight * d log Z                              posterior marginals
    log_norm_second      d log Z along tangents, and its gradients     expectations and covariances

The arguments `segments` and `warm_up` are a `schedules.choose.Schedule`. For the backward pass `log_norm` saves the
operands and the messages of its schedule; gradients have the shapes of their operands. Second derivatives are torch's,
through `scan`, for all schedules.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..kernels.chain import Layout, arithmetic_dtype
from ..kernels.message import Residuals
from ..operands import Operands, check_chain
from ..rescues import report_chains
from ..schedules import choose
from ..schedules import segments as by_segments
from ..schedules.choose import SEQUENTIAL, Schedule
from ..tensors import empty_gradients, is_plain
from ..transitions.dense import Dense
from .operator import Final, Saving, if_needed, mapped_axes, mapped_first, operator
from .scan import Steps, second_derivatives, total

# the gradients of x, bulk and p0 in their own shapes, each empty where it is not needed
Gradients = tuple[Tensor, ...]


class Saved(NamedTuple):
    """The log-partition [*B] in float64, and what the gradient reads in addition to the operands.

    Of one scan: forward `messages` (v, g, m, c), which sequences were `recomputed` exactly (g, m), and as `extra`
    nothing or the `bound` of `kernels.message.Residuals`, (s, g), or (1, s, g) if the messages are `halved`. Of several
    segments: see `schedules.segments`.
    """

    log_norm: Tensor
    messages: Tensor
    extra: Tensor
    recomputed: Tensor


def _forward(*args: Any) -> Saved:
    x, bulk, p0, lengths, log_params, keep, segments, warm_up = args
    if x.numel() == 0:
        return _output_shapes(*args)
    short = short_of(x, bulk, p0, log_params) if lengths is None and segments == 1 else None
    if short is not None:
        log_norm, messages, recomputed = residuals = short.residuals(x, keep)
        report_chains(short.value(x, bulk, p0, residuals, check=False)[1])
        return Saved(log_norm, messages, messages.new_empty(0), recomputed)
    return forward(Operands(x, Dense(bulk), p0, lengths, log_params), keep, Schedule(segments, warm_up))


def forward(operands: Operands, keep: bool, schedule: Schedule = SEQUENTIAL) -> Saved:
    """The log-partition of operands with dense matrices, and if `keep` what the gradient needs."""
    x, (segments, warm_up) = operands.x, schedule
    chain = operands.dense_chain()
    if _is_cut(x, segments):
        saved = Saved(*by_segments.forward(chain, segments, warm_up, keep=keep))
    else:
        memory = kernels.messages_of(chain, chain.v) if keep else None
        options = {"halved": True} if keep and kernels.halves(x, chain.g, chain.m, chain.dtype) else {}
        scanned, _ = kernels.forward(chain, None, keep=memory, **options)
        report_chains(scanned.recomputed)
        bound = scanned.bound
        extra = scanned.messages.new_empty(0) if bound is None else bound[None] if scanned.halved else bound
        saved = Saved(scanned.log_norm, scanned.messages, extra, scanned.recomputed)
    in_order = chain.layout.batched(saved.log_norm).clone(memory_format=torch.contiguous_format)
    return saved._replace(log_norm=in_order)


def short_of(x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool) -> Any:
    """The `kernels.cpu.template.Short` of operands that one thread of a CPU scans in one call of C; None for others.

    Operands are checked, once for all of the same shapes, strides, dtypes and `log_params`.
    """
    try:
        if not (type(log_params) is bool and is_plain((x, bulk, p0)) and bulk.is_cpu and p0.is_cpu and kernels.in_c(x)):
            return None
        return kernels.load("cpu.template").short_of(x, bulk, p0, log_params, _is_one_scan)
    except (AttributeError, RuntimeError):  # an operand that is no dense tensor
        check_chain(x, bulk, p0)
        raise


def _is_one_scan(x: Tensor, bulk: Tensor, p0: Tensor) -> bool:
    check_chain(x, bulk, p0)
    return not choose.Size.of(x, bulk, p0, False).idle and choose.of(x, bulk, p0, False) == SEQUENTIAL


def _is_cut(x: Tensor, segments: int) -> bool:
    return min(segments, x.shape[-2] - 1) > 1


def _output_shapes(
    x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, keep: bool, segments: int, _: int
) -> Saved:
    """Uninitialized memory for the outputs of `log_norm`; messages are empty unless `keep`."""
    g, m = Layout.of(x, bulk).grid
    v, c = x.shape[-2:]
    dtype = arithmetic_dtype(x, bulk, p0)
    log_norm = x.new_empty(x.shape[:-2], dtype=torch.float64)
    if _is_cut(x, segments):
        inside, between, marks = by_segments.saved_shapes(x, v, g, m, c, segments, keep)
        extra = x.new_empty(between, dtype=torch.float64 if kernels.on_gpu(x) else torch.int64)
        return Saved(log_norm, x.new_empty(inside, dtype=dtype), extra, x.new_empty(marks, dtype=torch.bool))
    messages = x.new_empty((v, g, m, c) if keep else (0,), dtype=dtype)
    extra = messages.new_empty(0)
    if kernels.in_triton(x):
        bound = (1 if v == 1 else bulk.shape[-3], g)
        extra = x.new_empty((1, *bound) if keep and kernels.halves(x, g, m, dtype) else bound, dtype=torch.int32)
    return Saved(log_norm, messages, extra, x.new_empty((g, m), dtype=torch.bool))


def _backward(grad: Tensor, *args: Any) -> Gradients:
    x, bulk, p0, lengths, log_norm, messages, extra, recomputed, log_params, by_log, *needs, segments, _ = args
    if x.numel() == 0:
        return tuple(gradient.zero_() for gradient in empty_gradients((x, bulk, p0), needs))
    short = short_of(x, bulk, p0, log_params) if lengths is None and segments == 1 else None
    if short is None:
        saved = Saved(log_norm, messages, extra, recomputed)
        operands = Operands(x, Dense(bulk), p0, lengths, log_params)
        return backward(operands, saved, grad, needs, by_log=by_log, segments=segments)
    gradients = short.gradients(x, bulk, p0, (log_norm, messages, recomputed), grad, needs, by_log=by_log)
    return tuple(x.new_empty(0) if gradient is None else gradient for gradient in gradients)


def backward(
    operands: Operands, saved: Saved, grad: Tensor, needs: Sequence[bool], *, by_log: bool = False, segments: int = 1
) -> Gradients:
    """The gradients of `sum(grad * log_norm)`; `saved` and `segments` are those of `forward`."""
    x, bulk, p0, *_ = operands.dense
    grad_x, grad_bulk, grad_p0 = empty_gradients((x, bulk, p0), needs)
    chain = operands.dense_chain(by_log=by_log)
    layout = chain.layout
    wide = grad_bulk if bulk.dtype == chain.dtype else torch.empty_like(grad_bulk, dtype=chain.dtype)
    into_x = layout.steps_first(grad_x) if needs[0] else None
    into_bulk = layout.matrices(wide)[: len(chain.bulk)] if needs[1] else None
    if operands.packed or chain.v == 1:
        wide.zero_()  # no transition leads into a first row
    saved = saved._replace(log_norm=layout.grouped(saved.log_norm))
    weight = layout.grouped(grad)
    if _is_cut(x, segments):
        start = by_segments.backward(chain, segments, saved, weight, into_x, into_bulk)
    else:
        halved = saved.extra.dim() == 3
        bound = saved.extra[0] if halved else saved.extra if saved.extra.dim() == 2 else None
        residuals = Residuals(saved.log_norm, saved.messages, saved.recomputed, bound=bound, halved=halved)
        start = kernels.backward(chain, residuals, weight, None, into_x, into_bulk)
    if wide is not grad_bulk:
        grad_bulk.copy_(wide)
    if needs[2]:
        grad_p0.copy_(layout.states(start).sum_to_size(p0.shape))
    return grad_x, grad_bulk, grad_p0


def _second(
    weight: Tensor, x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    *tangents, log_params, by_log = options
    if x.numel() == 0:
        return tuple(torch.zeros_like(operand) for operand in (weight, x, bulk, p0))
    weights = (bulk.double(), p0.double()) if by_log and not log_params else None
    operands = (x, bulk, p0) if weights is None else (x, *(weight.log() for weight in weights))

    def log_norm(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
        return total(Steps(x, Dense(bulk), p0, lengths, log_params or by_log))

    by_weight, *gradients = second_derivatives(log_norm, operands, weight, tangents)
    if weights is not None:
        gradients[1:] = [
            (gradient / divisor).masked_fill((gradient == 0) | (divisor == 0), 0.0)
            for gradient, divisor in zip(gradients[1:], weights, strict=True)
        ]
    if lengths is not None:  # on a GPU, lengths are not checked before
        by_weight = by_weight.masked_fill((lengths < 1) | (lengths > x.shape[-2]), torch.nan)
    results = zip((by_weight, *gradients), (weight, x, bulk, p0), strict=True)
    return tuple(gradient.to(operand.dtype).contiguous() for gradient, operand in results)


def _quotient(tangent: Tensor | None, weight: Tensor) -> Tensor | None:
    """The tangent of the logarithm of a weight, from that of the weight; 0 at weight 0."""
    zero = weight == 0
    return None if tangent is None else torch.where(zero, 0.0, tangent / torch.where(zero, 1.0, weight))


class _LogNorm(torch.autograd.Function):
    """x, bulk, p0, lengths, log_params, keep, segments, warm_up -> `Saved`."""

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
        gradients = log_norm_backward(grad, *ctx.saved_tensors, ctx.log_params, False, *needs, *ctx.schedule)
        return (*if_needed(gradients, needs), *(None,) * 5)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
        operands = ctx.saved_tensors[:4]
        weight = operands[0].new_ones(operands[0].shape[:-2], dtype=torch.float64)
        derivative = log_norm_second(weight, *operands, *tangents[:3], ctx.log_params, False)[0]
        return derivative, None, None, None


class _Gradient(torch.autograd.Function):
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
        derivatives = log_norm_second(*ctx.saved_tensors, *tangents, ctx.log_params, ctx.by_log)
        return (*if_needed(derivatives, ctx.needs_input_grad[:4]), *(None,) * 12)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        """The gradients are linear in `grad`; their Jacobian in the operands, covariances, is symmetric."""
        grad, x, bulk, p0, lengths, *saved = ctx.saved_tensors
        along_grad, along_x, along_bulk, along_p0 = tangents[:4]
        wide = ctx.by_log and not ctx.log_params  # tangents of weights, but gradients of their logarithms
        if wide:
            along_bulk, along_p0 = _quotient(along_bulk, bulk), _quotient(along_p0, p0)
        options = ctx.log_params, ctx.by_log
        second = log_norm_second(grad, x, bulk, p0, lengths, along_x, along_bulk, along_p0, *options)
        derivatives = [second[1], second[2] * bulk, second[3] * p0] if wide else list(second[1:])
        if along_grad is not None:
            first = log_norm_backward(along_grad, x, bulk, p0, lengths, *saved, *ctx.options)
            derivatives = [a + b if need else a for a, b, need in zip(derivatives, first, ctx.needs, strict=True)]
        return tuple(a if need else a.new_zeros(0) for a, need in zip(derivatives, ctx.needs, strict=True))


class _Second(Saving):
    """weight, x, bulk, p0, lengths, along_x, along_bulk, along_p0, log_params, by_log -> derivative, *gradients.

    The derivative [*B] is that of the log-partition along the tangents, and does not depend on the weight. `gradients`
    are those of `sum(weight * derivative)` with respect to x, bulk and p0, and cannot be differentiated.
    """

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        Saving.setup_context(ctx, inputs, output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *of_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if any(gradient is not None for gradient in of_gradients):
            raise RuntimeError(Final.refusal)
        _, *operands = ctx.saved_tensors[:5]
        tangents, needs = ctx.saved_tensors[5:], ctx.needs_input_grad
        first: tuple[Tensor | None, ...] = (None,) * 3
        second: tuple[Tensor | None, ...] = (None,) * 4
        if grad is not None and any(needs[1:4]):
            second = log_norm_second(grad, *operands, *tangents, *ctx.options)
        if grad is not None and any(needs[5:8]):
            saved = log_norm(*operands, ctx.options[0], True, *SEQUENTIAL)
            first = log_norm_backward(grad, *operands, *saved, *ctx.options, *needs[5:8], *SEQUENTIAL)
        return (None, *if_needed(second[1:], needs[1:4]), None, *if_needed(first, needs[5:8]), None, None)


def _vmap_of_gradient(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], Any]:
    """An operand that is not mapped has a gradient for each example too: the forward messages are computed again."""
    log_params, *_, segments, warm_up = options = args[9:]
    grad, *operands = mapped_first(info.batch_size, in_dims, args[:5])
    saved = log_norm(*operands, log_params, True, segments, warm_up)
    gradients = log_norm_backward(grad, *operands, *saved, *options)
    return gradients, mapped_axes(gradients)


_OPERANDS = "Tensor x, Tensor bulk, Tensor p0, Tensor? lengths"
_SAVED = "Tensor log_norm, Tensor messages, Tensor extra, Tensor recomputed"
_TANGENTS = "Tensor? along_x, Tensor? along_bulk, Tensor? along_p0"

log_norm = operator(
    f"log_norm({_OPERANDS}, bool log_params, bool keep, int segments, int warm_up) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _output_shapes,
    _LogNorm,
    batched=1,
)
log_norm_backward = operator(
    f"log_norm_backward(Tensor grad, {_OPERANDS}, {_SAVED}, bool log_params, bool by_log,"
    " bool need_x, bool need_bulk, bool need_p0, int segments, int warm_up) -> (Tensor, Tensor, Tensor)",
    _backward,
    lambda *args: empty_gradients(args[1:4], args[11:14]),
    _Gradient,
    vmap=_vmap_of_gradient,
)
log_norm_second = operator(
    f"log_norm_second(Tensor weight, {_OPERANDS}, {_TANGENTS}, bool log_params, bool by_log)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _second,
    lambda *args: empty_gradients(args[:4]),
    _Second,
    gradients=True,
)
