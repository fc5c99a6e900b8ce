"""What differentiates the log-partition of a chain, in every schedule, and how its operators are mapped.

    log-partition  --gradient-->  posteriors  --along tangents-->  covariances

`LogNorm`, `Gradient`, `Along` and `Second` are the operators: each is what its name says, has a derivative up to the
second one, a rule for vmap, and is known to torch.compile. Where nothing traces or maps, `LogPartition` calls a schedule
directly. Kept for the backward pass are the operands and what the schedule keeps; gradients have the operands' own
shapes. Derivatives of gradients do not depend on the schedule.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import kernels
from ..kernels.message import Kept as RoomKept
from ..operands import Operands, arithmetic_dtype, differentiated, exceeds, is_plain
from ..rescues import report_chains
from ..schedules import choose
from ..schedules.checkpoints import Checkpoints
from ..schedules.packed import Packed, PackedChain
from . import chain_operators as operators
from . import tangents as tangent_operators
from .chain_operators import TREE
from .operator import apply, as_one, call, of_each, transform, with_batch_first

__all__ = ["TREE", "along", "forward", "gradient", "log_norm", "log_norm_in_pieces", "packed_log_norm", "short_log_norm"]

# which of x, bulk and p0 need a gradient
Needs = tuple[bool, ...]


class Kept(NamedTuple):
    """The log-partition [*B] in float64, and what the operators keep: see `chain_operators`."""

    log_norm: Tensor
    messages: Tensor
    following: Tensor
    redone: Tensor


def log_norm(
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    lengths: Tensor | None,
    log_params: bool,
    *,
    segments: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The log-partition [*B], found in float64, as a tensor of `dtype`. Arguments have been checked.

    `segments`: how many segments are walked side by side; 1 for the sequential schedule, `TREE` for that of pairs of
    matrices, None for what the device's model says, among all but the last.
    """
    if segments is None:
        segments = choose.of(x, bulk, p0, log_params, lengths is not None, "auto").segments
    operands, keep = Operands(x, bulk, p0, lengths, log_params), differentiated(x, bulk, p0)
    if not is_plain(operands):
        value: Tensor = apply(LogNorm, operators.log_norm, *operands, keep, segments)[0]
        return value.to(dtype, copy=True)
    if keep:
        return _differentiable(operands, _ByOperators(segments, dtype))
    return operators.log_norm_here(operands, False, segments)[0].to(dtype)


def short_log_norm(short: Any, x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool, keep: bool) -> Tensor:
    """The log-partition [*B] of a short chain on a CPU, in the dtype of the operands."""
    if keep:
        with_gradient: Tensor = LogPartition.apply(x, bulk, p0, None, log_params, _ByShort(short))
        return with_gradient
    value: Tensor
    value, _, redone = short.value(x, bulk, p0, False)
    report_chains(redone)
    return value


def log_norm_in_pieces(operands: Operands, every: int, keep: bool = True, progress: bool = False) -> Tensor:
    """The log-partition [*B] in float64, with a checkpoint after so many steps: it has one derivative.

    `keep`: the checkpoints, for a backward pass. `progress`: show a bar over the pieces of either pass.
    """
    x, bulk, p0, lengths, log_params = operands
    if torch.compiler.is_compiling():
        raise NotImplementedError("memory_budget: expected None inside torch.compile")
    if x.numel() == 0:  # nothing to cut
        return log_norm(x.to(p0.device), bulk.to(p0.device), p0, lengths, log_params)
    schedule = _ByCheckpoints(every, progress)
    return _differentiable(operands, schedule) if keep else schedule.forward(operands, False)[0]


def packed_log_norm(packed: Packed, log_params: bool) -> Tensor:
    """The log-partition [n] in float64 of sequences that lie one behind the other."""
    operands = Operands(packed.x, packed.bulk, packed.p0, None, log_params)
    if not PackedChain.takes(packed):
        return packed.by_sequence([log_norm(*piece, log_params) for piece in packed])
    if differentiated(*operands[:3]):
        return _differentiable(operands, _ByRows(packed))
    return PackedChain(packed, log_params).forward(False).log_norm.view(-1)


def forward(x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, keep: bool) -> Kept:
    """The log-partition, and what its gradient needs."""
    return Kept(*apply(LogNorm, operators.log_norm, x, bulk, p0, lengths, log_params, keep, 1))


def gradient(
    grad: Tensor,
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    lengths: Tensor | None,
    kept: Kept,
    log_params: bool,
    by_log: bool,
    needs: Needs,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `sum(grad * log_norm)`; an empty tensor for one that is not needed.

    `by_log`: with respect to the logarithms of bulk and p0, though these be linear.
    """
    arguments = grad, x, bulk, p0, lengths, *kept, log_params, by_log, *needs, 1
    gradients: tuple[Tensor, Tensor, Tensor] = apply(Gradient, operators.log_norm_backward, *arguments)
    return gradients


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
    derivative: Tensor = apply(Along, tangent_operators.log_norm_along, *arguments)
    return derivative


class Schedule(Protocol):
    """What `LogPartition` asks of a schedule."""

    def forward(self, operands: Operands, keep: bool = True) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The log-partition [*B] in memory of its own, and what the gradient needs."""

    def gradients(self, operands: Operands, kept: tuple[Tensor, ...], grad: Tensor, needs: Needs) -> tuple[Any, ...]:
        """The gradients of `sum(grad * log_norm)`, None for one that is not needed."""


def _differentiable(operands: Operands, schedule: Schedule) -> Tensor:
    value: Tensor = LogPartition.apply(*operands, schedule)
    return value


class LogPartition(torch.autograd.Function):
    """x, bulk, p0, lengths, log_params, schedule -> log-partition, where nothing traces or maps."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *operands, ctx.log_params, ctx.schedule = args
        value: Tensor
        value, kept = ctx.schedule.forward(Operands(*operands, ctx.log_params))
        ctx.save_for_backward(*operands, *kept)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, bulk, p0, lengths, *kept = ctx.saved_tensors
        operands = Operands(x, bulk, p0, lengths, ctx.log_params)
        return *ctx.schedule.gradients(operands, kept, grad, ctx.needs_input_grad[:3]), None, None, None


class _ByOperators(NamedTuple):
    """The schedules that the operators know: sequential, chunked and tree."""

    segments: int
    dtype: torch.dtype

    def forward(self, operands: Operands, keep: bool = True) -> tuple[Tensor, tuple[Tensor, ...]]:
        kept = operators.log_norm_here(operands, keep, self.segments)
        return kept[0].to(self.dtype, copy=True), kept

    def gradients(self, operands: Operands, kept: tuple[Tensor, ...], grad: Tensor, needs: Needs) -> tuple[Any, ...]:
        *tensors, log_params = operands
        return if_needed(call(Gradient, grad, *tensors, *kept, log_params, False, *needs, self.segments), needs)


class _ByShort(NamedTuple):
    """The sequential schedule of a short chain on a CPU, by what is known of chains like it."""

    short: Any

    def forward(self, operands: Operands, keep: bool = True) -> tuple[Tensor, tuple[Tensor, ...]]:
        value, kept, redone = self.short.value(*operands[:3], keep)
        report_chains(redone)
        return value, (kept,)

    def gradients(self, operands: Operands, kept: tuple[Tensor, ...], grad: Tensor, needs: Needs) -> tuple[Any, ...]:
        x, bulk, p0, _, log_params = operands
        if not torch.is_grad_enabled() and is_plain((grad,)) and self.short.fits(x, bulk, p0):
            gradients: tuple[Any, ...] = self.short.gradients(x, bulk, p0, kept[0], grad, needs)
            return gradients
        norm, messages, redone = self.short.parts(kept[0], x)
        parts = norm, messages, messages.new_empty(0), redone
        return if_needed(call(Gradient, grad, x, bulk, p0, None, *parts, log_params, False, *needs, 1), needs)


class _ByCheckpoints(NamedTuple):
    """A chain in pieces, of which the messages between them are kept."""

    every: int
    progress: bool

    def forward(self, operands: Operands, keep: bool = True) -> tuple[Tensor, tuple[Tensor, ...]]:
        with kernels.arithmetic_on(operands.p0):
            value, checkpoints = Checkpoints(operands, self.every, self.progress).forward(keep)
        return value.clone(), (value, checkpoints)

    def gradients(self, operands: Operands, kept: tuple[Tensor, ...], grad: Tensor, needs: Needs) -> tuple[Any, ...]:
        def compute(grad: Tensor, *tensors: Tensor) -> tuple[Any, ...]:
            with kernels.arithmetic_on(grad):
                schedule = Checkpoints(operands, self.every, self.progress)
                return schedule.backward(grad, *kept, needs)

        gradients: tuple[Any, ...] = _Once.apply(compute, grad, *operands[:3])
        return gradients


class _Once(torch.autograd.Function):
    """compute, grad, x, bulk, p0 -> gradients, which have no derivative."""

    @staticmethod
    def forward(ctx: Any, compute: Any, *tensors: Tensor) -> Any:
        return compute(*tensors)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("memory_budget: expected one derivative, got a second; pass None for two")


class _ByRows(NamedTuple):
    """Packed sequences, walked where they lie; derivatives of gradients, and wide weights, by padded batches."""

    packed: Packed

    def forward(self, operands: Operands, keep: bool = True) -> tuple[Tensor, tuple[Tensor, ...]]:
        kept = PackedChain(self.packed, operands.log_params).forward(keep)
        return kept.log_norm.flatten().clone(), kept[:3]

    def gradients(self, operands: Operands, kept: tuple[Tensor, ...], grad: Tensor, needs: Needs) -> tuple[Any, ...]:
        x, bulk, p0, _, log_params = operands
        packed = self.packed.of(x, bulk, p0)
        if torch.is_grad_enabled() or exceeds(grad, arithmetic_dtype(x, bulk, p0)):
            return _through_padding(packed, log_params, grad, needs)
        grad_x, grad_bulk, start = PackedChain(packed, log_params).backward(RoomKept(*kept), grad, needs)
        grad_x = None if grad_x is None else grad_x.to(x.dtype)
        grad_bulk = None if grad_bulk is None else grad_bulk.to(bulk.dtype)
        start = start.view(len(packed.lengths), -1)
        grad_p0 = start if p0.dim() > 1 else start.sum(0)
        return if_needed((grad_x, grad_bulk, grad_p0.to(p0.dtype)), needs)


def _through_padding(packed: Packed, log_params: bool, grad: Tensor, needs: Needs) -> tuple[Any, ...]:
    create = torch.is_grad_enabled()
    with torch.enable_grad():
        operands = [
            tensor if create else tensor.detach().requires_grad_(need)
            for tensor, need in zip((packed.x, packed.bulk, packed.p0), needs, strict=True)
        ]
        padded = packed.of(*operands)
        value = padded.by_sequence([log_norm(*piece, log_params) for piece in padded])
        wanted = [operand for operand, need in zip(operands, needs, strict=True) if need]
        gradients = iter(torch.autograd.grad(value, wanted, grad, create_graph=create))
    return tuple(next(gradients) if need else None for need in needs)


class LogNorm(torch.autograd.Function):
    """x, bulk, p0, lengths, log_params, keep, segments -> Kept."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        kept: tuple[Tensor, ...] = operators.log_norm(*args)
        return kept

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
        gradients = call(Gradient, grad, *ctx.saved_tensors, ctx.log_params, False, *needs, ctx.segments)
        return (*if_needed(gradients, needs), *(None,) * 4)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
        derivative = call(Along, *ctx.saved_tensors[:4], *tangents[:3], ctx.log_params, False)
        return derivative, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        operands = with_batch_first(info.batch_size, in_dims, *args[:4])
        # a mapped tensor does not say that a gradient is wanted of it
        keep = args[5] or torch.is_grad_enabled()
        return call(LogNorm, *operands, args[4], keep, args[6]), (0, None, None, None)


class Gradient(torch.autograd.Function):
    """grad, x, bulk, p0, lengths, *Kept, log_params, by_log, need_x, need_bulk, need_p0, segments -> gradients."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        gradients: tuple[Tensor, Tensor, Tensor] = operators.log_norm_backward(*args)
        return gradients

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.log_params, ctx.by_log, *ctx.needs, _ = ctx.options = inputs[9:]
        ctx.save_for_backward(*inputs[:5])
        ctx.save_for_forward(*inputs[:9])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        tangents = if_needed(tangents, ctx.needs)
        if all(tangent is None for tangent in tangents):
            return (None,) * 15
        derivatives = call(Second, *ctx.saved_tensors, *tangents, ctx.log_params, ctx.by_log)
        return (*if_needed(derivatives, ctx.needs_input_grad[:4]), *(None,) * 11)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        """Linear in `grad`; in the operands, their covariances, which are symmetric."""
        grad, x, bulk, p0, lengths, *kept = ctx.saved_tensors
        along_grad, along_x, along_bulk, along_p0 = tangents[:4]
        wide = ctx.by_log and not ctx.log_params  # tangents are linear, but the gradients are not
        if wide:
            along_bulk, along_p0 = _quotient(along_bulk, bulk), _quotient(along_p0, p0)
        options = ctx.log_params, ctx.by_log
        second = call(Second, grad, x, bulk, p0, lengths, along_x, along_bulk, along_p0, *options)
        out = [second[1], second[2] * bulk, second[3] * p0] if wide else list(second[1:])
        if along_grad is not None:
            first = call(Gradient, along_grad, x, bulk, p0, lengths, *kept, *ctx.options)
            out = [a + b if need else a for a, b, need in zip(out, first, ctx.needs, strict=True)]
        return tuple(a if need else a.new_zeros(0) for a, need in zip(out, ctx.needs, strict=True))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Each example has gradients of its own, also of an operand that all share: so the messages are made again."""
        log_params, _, *needs, segments = options = args[9:]
        grad, *operands = of_each(info.batch_size, "grad x bulk p0 lengths", in_dims, args)
        kept = call(LogNorm, *operands, log_params, True, segments)
        gradients = call(Gradient, grad, *operands, *kept, *options)
        return as_one(info.batch_size, gradients, in_dims[1:4], args[1:4], needs), (0, 0, 0)


class Along(torch.autograd.Function):
    """x, bulk, p0, lengths, along_x, along_bulk, along_p0, log_params, by_log -> the log-partition's derivative."""

    @staticmethod
    def forward(*args: Any) -> Tensor:
        derivative: Tensor = tangent_operators.log_norm_along(*args)
        return derivative

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
            second = call(Second, grad, x, bulk, p0, lengths, *tangents, ctx.log_params, ctx.by_log)
        if any(needs[4:7]):
            kept = call(LogNorm, x, bulk, p0, lengths, ctx.log_params, True, 1)
            first = call(Gradient, grad, x, bulk, p0, lengths, *kept, ctx.log_params, ctx.by_log, *needs[4:7], 1)
        return (*if_needed(second[1:], needs[:3]), None, *if_needed(first, needs[4:7]), None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        operands = of_each(info.batch_size, "x bulk p0 lengths x bulk p0", in_dims, args)
        return call(Along, *operands, *args[7:]), 0


class Second(torch.autograd.Function):
    """The gradients, with respect to grad, x, bulk and p0, of the products of `Gradient` with tangents.

    grad, x, bulk, p0, lengths, along_x, along_bulk, along_p0, log_params, by_log -> gradients.
    """

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        gradients: tuple[Tensor, ...] = tangent_operators.log_norm_second(*args)
        return gradients

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor | None, ...]:
        raise RuntimeError("logchain: expected at most two derivatives, got a third")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        operands = of_each(info.batch_size, "grad x bulk p0 lengths x bulk p0", in_dims, args)
        derivative, *gradients = call(Second, *operands, *args[8:])
        own = as_one(info.batch_size, gradients, in_dims[1:4], args[1:4], [True] * 3)
        return (derivative, *own), (0, 0, 0, 0)


def if_needed(gradients: Any, needs: Any) -> tuple[Any, ...]:
    """The gradients that are needed, None for the others."""
    return tuple(value if need else None for value, need in zip(gradients, needs, strict=True))


def _quotient(tangent: Tensor | None, value: Tensor) -> Tensor | None:
    return None if tangent is None else torch.where(value == 0, 0.0, tangent / torch.where(value == 0, 1.0, value))


transform("log_norm", LogNorm)
transform("log_norm_backward", Gradient)
transform("log_norm_along", Along)
transform("log_norm_second", Second)
