"""The log-partition of a chain, differentiable in every schedule.

Two Functions of torch compute it. `LogNorm`, with the derivative `Gradient`, takes any schedule but those of
`LogPartition`, also inside torch.compile and torch.func, where its operator `logchain::log_norm` is called instead.
`LogPartition` takes a schedule as an argument: that of a short chain on a CPU, of a chain within a memory budget, or of
packed sequences. In either the gradients are posterior marginals, computed by a backward pass from the operands and
what the schedule keeps, which are the forward messages or some of them.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import kernels
from ..arguments import has_values
from ..chain import Chain
from ..internals import is_transformed
from ..kernels.message import Kept
from ..operands import Operands, differentiated, is_plain
from ..rescues import report_chains
from ..schedules import choose
from ..schedules.checkpoints import Checkpoints
from ..schedules.packed import PackedChain
from . import chain_operators as operators
from .chain_functions import Gradient, LogNorm
from .chain_operators import Gradients, Saved
from .operator import IMPLEMENTATIONS, Final, apply, call, if_needed

# which of x, bulk and p0 need a gradient
Needs = tuple[bool, ...]


def log_norm(
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    lengths: Tensor | None,
    log_params: bool,
    *,
    schedule: choose.Schedule | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The log-partition [*B], computed in float64, as a tensor of `dtype`. Arguments have been checked.

    `schedule` None is the one that `choose` finds.
    """
    schedule = schedule or choose.of(x, bulk, p0, lengths is not None)
    # while torch.compile traces, tensors of torch.func say that they need no gradient
    keep = differentiated(x, bulk, p0) or (torch.compiler.is_compiling() and is_transformed())
    arguments = x, bulk, p0, lengths, log_params, keep, *schedule
    value: Tensor
    if keep or not is_plain(arguments):
        value = apply(LogNorm, operators.log_norm, *arguments)[0]
        return value.to(dtype, copy=True)  # the Function may have saved the value, which the caller may change
    value = IMPLEMENTATIONS["log_norm"](*arguments)[0]
    return value.to(dtype)


def posteriors(operands: Operands, needs: Needs, weight: Tensor | None = None) -> tuple[Tensor, Gradients]:
    """The log-partition [*B] in float64, and the gradients of its sum with respect to x, log bulk and log p0.

    These are state posteriors, expected transitions and initial posteriors, times a `weight` [*B] if there is one, and
    each in the shape of its operand; an empty tensor for one that is not needed.
    """
    *tensors, log_params = operands
    schedule = choose.of(operands.x, operands.bulk, operands.p0, operands.lengths is not None)
    saved = Saved(*apply(LogNorm, operators.log_norm, *operands, True, *schedule))
    weight = torch.ones_like(saved.log_norm) if weight is None else weight
    by_log = True
    options = log_params, by_log, *needs, *schedule
    return saved.log_norm, apply(Gradient, operators.log_norm_backward, weight, *tensors, *saved, *options)


def short_log_norm(short: Any, x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool, keep: bool) -> Tensor:
    """The log-partition [*B] of a short chain on a CPU, in the dtype of the operands; see `short_of`."""
    value: Tensor
    if keep:
        value = call(LogPartition, x, bulk, p0, None, log_params, _ByShort(short))
        return value
    value, _, redone = short.value(x, bulk, p0, False)
    report_chains(redone)
    return value


def log_norm_in_pieces(operands: Operands, every: int, keep: bool = True, progress: bool = False) -> Tensor:
    """The log-partition [*B] in float64, with a checkpoint after every so many steps; it can be differentiated once.

    `keep`: the checkpoints, for a backward pass. `progress`: show a bar over the pieces of either pass.
    """
    x, bulk, p0, lengths, log_params = operands
    if torch.compiler.is_compiling():
        raise NotImplementedError("memory_budget: expected None inside torch.compile")
    if x.numel() == 0 or not has_values(p0):  # nothing to cut
        return log_norm(x.to(p0.device), bulk.to(p0.device), p0, lengths, log_params)
    schedule = _ByCheckpoints(every, progress)
    value: Tensor = call(LogPartition, *operands, schedule) if keep else schedule.forward(operands, False)[0]
    return value


def packed_log_norm(packed: Chain) -> Tensor:
    """The log-partition [n] in float64 of packed sequences with dense matrices."""
    x, p0, bulk = packed.operands.tensors
    if not packed.in_place():
        return packed.by_sequence(packed.map(_of_batch))
    if differentiated(x, bulk, p0):
        value: Tensor = call(LogPartition, x, bulk, p0, None, packed.operands.log_params, _ByRows(packed))
        return value
    return PackedChain(packed).forward(False).log_norm.view(-1)


def _of_batch(operands: Any) -> Tensor:
    return log_norm(*operands.dense)


class Schedule(Protocol):
    """What `LogPartition` asks of a schedule."""

    def forward(self, operands: Operands) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The log-partition [*B] in memory of its own, and what `gradients` needs besides the operands."""

    def gradients(self, operands: Operands, saved: tuple[Tensor, ...], grad: Tensor, needs: Needs) -> tuple[Any, ...]:
        """The gradients of `sum(grad * log_norm)` with respect to x, bulk and p0; None for one that is not needed."""


class LogPartition(torch.autograd.Function):
    """x, bulk, p0, lengths, log_params, schedule -> log-partition."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x, bulk, p0, lengths, ctx.log_params, ctx.schedule = args
        ctx.choice = kernels.on_cpu()
        value: Tensor
        value, saved = ctx.schedule.forward(Operands(x, bulk, p0, lengths, ctx.log_params))
        ctx.save_for_backward(x, bulk, p0, lengths, *saved)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        kernels.check_forward_choice(ctx.choice, grad)
        x, bulk, p0, lengths, *saved = ctx.saved_tensors
        operands = Operands(x, bulk, p0, lengths, ctx.log_params)
        return *ctx.schedule.gradients(operands, saved, grad, ctx.needs_input_grad[:3]), None, None, None


class _ByShort(NamedTuple):
    """The sequential schedule of a short chain on a CPU, in one call of the C library whose arguments are cached."""

    short: Any

    def forward(self, operands: Operands) -> tuple[Tensor, tuple[Tensor, ...]]:
        value, saved, redone = self.short.value(*operands[:3], True)
        report_chains(redone)
        return value, (saved,)

    def gradients(self, operands: Operands, saved: tuple[Tensor, ...], grad: Tensor, needs: Needs) -> tuple[Any, ...]:
        x, bulk, p0, _, log_params = operands
        if not torch.is_grad_enabled() and is_plain((grad,)) and self.short.fits(x, bulk, p0):
            gradients: tuple[Any, ...] = self.short.gradients(x, bulk, p0, saved[0], grad, needs)
            return gradients
        norm, messages, redone = self.short.parts(saved[0], x)
        parts = Saved(norm, messages, messages.new_empty(0), redone)
        options = log_params, False, *needs, *choose.SEQUENTIAL
        return if_needed(call(Gradient, grad, x, bulk, p0, None, *parts, *options), needs)


class _ByCheckpoints(NamedTuple):
    """The sequential schedule in pieces of `every` steps, which keeps the messages between pieces alone."""

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

        gradients: tuple[Any, ...] = call(Once, compute, grad, *operands[:3])
        return gradients


class Once(Final):
    """compute, grad, x, bulk, p0 -> gradients, which cannot be differentiated again."""

    refusal = "memory_budget: expected one derivative, got a second; pass None for two"

    @staticmethod
    def forward(compute: Any, *tensors: Tensor) -> Any:
        return compute(*tensors)


class _ByRows(NamedTuple):
    """The sequential schedule of packed sequences, read where they lie.

    Where gradients are to be differentiated again they are computed from padded batches.
    """

    packed: Chain

    def forward(self, operands: Operands) -> tuple[Tensor, tuple[Tensor, ...]]:
        residuals = PackedChain(self.packed).forward(True)
        return residuals.log_norm.flatten().clone(), residuals[:3]

    def gradients(self, operands: Operands, saved: tuple[Tensor, ...], grad: Tensor, needs: Needs) -> tuple[Any, ...]:
        x, bulk, p0, _, _ = operands
        packed = self.packed.of_tensors(x, p0, bulk)
        if torch.is_grad_enabled():
            return _through_batches(packed, grad, needs)
        log_norm, messages, redone = saved
        residuals = Kept(log_norm, messages, redone)
        grad_x, grad_bulk, start = PackedChain(packed).backward(residuals, grad, needs)
        grad_x = None if grad_x is None else grad_x.to(x.dtype)
        grad_bulk = None if grad_bulk is None else grad_bulk.to(bulk.dtype)
        start = start.view(len(packed.lengths), -1)
        grad_p0 = start if p0.dim() > 1 else start.sum(0)
        return if_needed((grad_x, grad_bulk, grad_p0.to(p0.dtype)), needs)


def _through_batches(packed: Chain, grad: Tensor, needs: Needs) -> tuple[Any, ...]:
    """The gradients of packed operands with a graph of their own, None for one that is not needed."""
    x, p0, bulk = packed.operands.tensors
    with torch.enable_grad():
        value = packed.by_sequence(packed.map(_of_batch))
        wanted = [operand for operand, need in zip((x, bulk, p0), needs, strict=True) if need]
        gradients = iter(torch.autograd.grad(value, wanted, grad, create_graph=True))
    return tuple(next(gradients) if need else None for need in needs)
