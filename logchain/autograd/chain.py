"""The log-partition of a chain, differentiable in every schedule.

Where something traces or maps, the operators of `autograd.chain_functions` compute. Otherwise one Function,
`LogPartition`, has the schedule as an argument, and keeps the operands and what the schedule keeps.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import kernels
from ..kernels.message import Kept
from ..operands import Operands, differentiated, is_plain
from ..rescues import report_chains
from ..schedules import choose
from ..schedules.checkpoints import Checkpoints
from ..schedules.packed import Packed, PackedChain
from . import chain_operators as operators
from .chain_functions import Gradient, LogNorm, if_needed
from .chain_operators import TREE, Gradients, Saved
from .operator import apply, call

__all__ = [
    "TREE",
    "forward",
    "gradient",
    "log_norm",
    "log_norm_in_pieces",
    "packed_log_norm",
    "short_log_norm",
]

# which of x, bulk and p0 need a gradient
Needs = tuple[bool, ...]


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
    return operators.log_norm_here(operands, False, segments).log_norm.to(dtype)


def short_log_norm(short: Any, x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool, keep: bool) -> Tensor:
    """The log-partition [*B] of a short chain on a CPU, in the dtype of the operands."""
    if keep:
        with_gradient: Tensor = call(LogPartition, x, bulk, p0, None, log_params, _ByShort(short))
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
    if not packed.in_place:
        return packed.by_sequence([log_norm(*piece, log_params) for piece in packed])
    if differentiated(*operands[:3]):
        return _differentiable(operands, _ByRows(packed))
    return PackedChain(packed, log_params).forward(False).log_norm.view(-1)


def forward(x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, keep: bool) -> Saved:
    """The log-partition, and what its gradient needs."""
    return Saved(*apply(LogNorm, operators.log_norm, x, bulk, p0, lengths, log_params, keep, 1))


def gradient(
    grad: Tensor,
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    lengths: Tensor | None,
    saved: Saved,
    log_params: bool,
    by_log: bool,
    needs: Needs,
) -> Gradients:
    """The gradients of `sum(grad * log_norm)`; an empty tensor for one that is not needed.

    `by_log`: with respect to the logarithms of bulk and p0, though these be linear.
    """
    arguments = grad, x, bulk, p0, lengths, *saved, log_params, by_log, *needs, 1
    gradients: Gradients = apply(Gradient, operators.log_norm_backward, *arguments)
    return gradients


class Schedule(Protocol):
    """What `LogPartition` asks of a schedule."""

    def forward(self, operands: Operands, keep: bool = True) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The log-partition [*B] in memory of its own, and what the gradient needs."""

    def gradients(self, operands: Operands, saved: tuple[Tensor, ...], grad: Tensor, needs: Needs) -> tuple[Any, ...]:
        """The gradients of `sum(grad * log_norm)`, None for one that is not needed."""


def _differentiable(operands: Operands, schedule: Schedule) -> Tensor:
    value: Tensor = call(LogPartition, *operands, schedule)
    return value


class LogPartition(torch.autograd.Function):
    """x, bulk, p0, lengths, log_params, schedule -> log-partition, where nothing traces or maps."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x, bulk, p0, lengths, ctx.log_params, ctx.schedule = args
        value: Tensor
        value, saved = ctx.schedule.forward(Operands(x, bulk, p0, lengths, ctx.log_params))
        ctx.save_for_backward(x, bulk, p0, lengths, *saved)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, bulk, p0, lengths, *saved = ctx.saved_tensors
        operands = Operands(x, bulk, p0, lengths, ctx.log_params)
        return *ctx.schedule.gradients(operands, saved, grad, ctx.needs_input_grad[:3]), None, None, None


class _ByOperators(NamedTuple):
    """The schedules that the operators know: sequential, chunked and tree."""

    segments: int
    dtype: torch.dtype

    def forward(self, operands: Operands, keep: bool = True) -> tuple[Tensor, tuple[Tensor, ...]]:
        saved = operators.log_norm_here(operands, keep, self.segments)
        return saved.log_norm.to(self.dtype, copy=True), saved

    def gradients(self, operands: Operands, saved: tuple[Tensor, ...], grad: Tensor, needs: Needs) -> tuple[Any, ...]:
        *tensors, log_params = operands
        return if_needed(call(Gradient, grad, *tensors, *saved, log_params, False, *needs, self.segments), needs)


class _ByShort(NamedTuple):
    """The sequential schedule of a short chain on a CPU, by what is known of chains like it."""

    short: Any

    def forward(self, operands: Operands, keep: bool = True) -> tuple[Tensor, tuple[Tensor, ...]]:
        value, saved, redone = self.short.value(*operands[:3], keep)
        report_chains(redone)
        return value, (saved,)

    def gradients(self, operands: Operands, saved: tuple[Tensor, ...], grad: Tensor, needs: Needs) -> tuple[Any, ...]:
        x, bulk, p0, _, log_params = operands
        if not torch.is_grad_enabled() and is_plain((grad,)) and self.short.fits(x, bulk, p0):
            gradients: tuple[Any, ...] = self.short.gradients(x, bulk, p0, saved[0], grad, needs)
            return gradients
        norm, messages, redone = self.short.parts(saved[0], x)
        parts = Saved(norm, messages, messages.new_empty(0), redone)
        return if_needed(call(Gradient, grad, x, bulk, p0, None, *parts, log_params, False, *needs, 1), needs)


class _ByCheckpoints(NamedTuple):
    """A chain in pieces, of which the messages between them are kept."""

    every: int
    progress: bool

    def forward(self, operands: Operands, keep: bool = True) -> tuple[Tensor, tuple[Tensor, ...]]:
        with kernels.arithmetic_on(operands.p0):
            value, checkpoints = Checkpoints(operands, self.every, self.progress).forward(keep)
        return value.clone(), (value, checkpoints)

    def gradients(self, operands: Operands, saved: tuple[Tensor, ...], grad: Tensor, needs: Needs) -> tuple[Any, ...]:
        log_norm, checkpoints = saved

        def compute(grad: Tensor, *tensors: Tensor) -> tuple[Any, ...]:
            with kernels.arithmetic_on(grad):
                schedule = Checkpoints(operands, self.every, self.progress)
                return schedule.backward(grad, log_norm, checkpoints, needs)

        gradients: tuple[Any, ...] = call(_Once, compute, grad, *operands[:3])
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
    """Packed sequences, walked where they lie; derivatives of gradients by padded batches."""

    packed: Packed

    def forward(self, operands: Operands, keep: bool = True) -> tuple[Tensor, tuple[Tensor, ...]]:
        residuals = PackedChain(self.packed, operands.log_params).forward(keep)
        return residuals.log_norm.flatten().clone(), residuals[:3]

    def gradients(self, operands: Operands, saved: tuple[Tensor, ...], grad: Tensor, needs: Needs) -> tuple[Any, ...]:
        x, bulk, p0, _, log_params = operands
        packed = self.packed.of(x, bulk, p0)
        if torch.is_grad_enabled():
            return _through_padding(packed, log_params, grad, needs)
        log_norm, messages, redone = saved
        residuals = Kept(log_norm, messages, redone)
        grad_x, grad_bulk, start = PackedChain(packed, log_params).backward(residuals, grad, needs)
        grad_x = None if grad_x is None else grad_x.to(x.dtype)
        grad_bulk = None if grad_bulk is None else grad_bulk.to(bulk.dtype)
        start = start.view(len(packed.lengths), -1)
        grad_p0 = start if p0.dim() > 1 else start.sum(0)
        return if_needed((grad_x, grad_bulk, grad_p0.to(p0.dtype)), needs)


def _through_padding(packed: Packed, log_params: bool, grad: Tensor, needs: Needs) -> tuple[Any, ...]:
    """The gradients of packed operands, None for one that is not needed, as functions that can be differentiated."""
    with torch.enable_grad():
        value = packed.by_sequence([log_norm(*piece, log_params) for piece in packed])
        wanted = [operand for operand, need in zip((packed.x, packed.bulk, packed.p0), needs, strict=True) if need]
        gradients = iter(torch.autograd.grad(value, wanted, grad, create_graph=True))
    return tuple(next(gradients) if need else None for need in needs)
