"""The log-partition of a chain, differentiable in every schedule.

Where something traces or maps, the operators of `autograd.chain_functions` compute. Otherwise one Function,
`LogPartition`, has the schedule as an argument, and keeps the operands and what the schedule keeps.
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
from .chain_functions import Along, Gradient, LogNorm, if_needed
from .chain_operators import TREE
from .operator import apply, call

__all__ = [
    "TREE",
    "along",
    "forward",
    "gradient",
    "log_norm",
    "log_norm_in_pieces",
    "packed_log_norm",
    "short_log_norm",
]

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
    value: Tensor = call(LogPartition, *operands, schedule)
    return value


class LogPartition(torch.autograd.Function):
    """x, bulk, p0, lengths, log_params, schedule -> log-partition, where nothing traces or maps."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x, bulk, p0, lengths, ctx.log_params, ctx.schedule = args
        value: Tensor
        value, kept = ctx.schedule.forward(Operands(x, bulk, p0, lengths, ctx.log_params))
        ctx.save_for_backward(x, bulk, p0, lengths, *kept)
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
        log_norm, checkpoints = kept

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
        log_norm, messages, redone = kept
        room_kept = RoomKept(log_norm, messages, redone)
        grad_x, grad_bulk, start = PackedChain(packed, log_params).backward(room_kept, grad, needs)
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
