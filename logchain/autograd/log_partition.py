"""The log-partition as an autograd Function of any schedule, and the schedules of chains of dense matrices.

`LogPartition`, with its derivatives `Posteriors` and `Covariances`, takes tensors and a `Schedule`, which computes
their log-partition and its gradients: that of short chains, of checkpoints, of packed sequences, or of `structures`.
The operators of `dense_operators` compute all other dense chains, also inside torch.compile and torch.func. In both
the gradients are posterior marginals, computed by a backward pass from the operands and all or some of the forward
messages.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import kernels
from ..arguments import has_values
from ..internals import is_mapped, is_transformed
from ..operands import Operands
from ..rescues import report_chains
from ..schedules import choose
from ..schedules.checkpoints import Checkpoints
from ..tensors import differentiated, is_plain
from ..transitions.dense import Dense
from . import dense_operators as operators
from .dense_operators import Saved
from .operator import Final, apply, if_needed
from .scan import Steps, second_derivatives, total

# which tensors need a gradient, and the gradients
Needs = tuple[bool, ...]
Gradients = tuple[Tensor | None, ...]


def dense_log_norm(
    operands: Operands, schedule: choose.Schedule | None = None, dtype: torch.dtype = torch.float64
) -> Tensor:
    """The log-partition [*B] of dense matrices, computed in float64, as a tensor of `dtype`.

    `schedule`: by default that of `choose`.
    """
    keep = differentiated(*operands.tensors)
    if operands.packed:
        value: Tensor
        if keep:
            value = apply(LogPartition, _Packed(operands.skeleton()), *operands.tensors)
        else:
            value = _forward_in_place(operands, False).log_norm
        return value.to(dtype)
    x, bulk, p0, lengths, log_params = dense = operands.dense
    schedule = schedule or choose.of(x, bulk, p0, lengths is not None)
    # tensors of torch.func may report that they need no gradient
    keep = keep or (torch.is_grad_enabled() and is_transformed())
    value = operators.log_norm(*dense, keep, *schedule)[0]
    return value.to(dtype, copy=keep)  # autograd may have saved the value, which the caller may change


def dense_posteriors(
    operands: Operands, needs: Needs, weight: Tensor | None = None
) -> tuple[Tensor, operators.Gradients]:
    """The log-partition [*B] in float64, and the gradients of its sum with respect to x, log bulk and log p0.

    These are state posteriors, expected transitions and initial posteriors, times a `weight` [*B] if there is one, and
    each in the shape of its operand; an empty tensor for one that is not needed.
    """
    if operands.packed:
        saved = _forward_in_place(operands, True)
        weight = torch.ones_like(saved.log_norm) if weight is None else weight
        with kernels.arithmetic_on(operands.x):
            return saved.log_norm, operators.backward(operands, saved, weight, needs, by_log=True)
    x, bulk, p0, lengths, log_params = dense = operands.dense
    by_log, schedule = True, choose.of(x, bulk, p0, lengths is not None)
    saved = Saved(*operators.log_norm(*dense, True, *schedule))
    weight = torch.ones_like(saved.log_norm) if weight is None else weight
    gradients = operators.log_norm_backward(weight, *dense[:4], *saved, log_params, by_log, *needs, *schedule)
    return saved.log_norm, gradients


def _forward_in_place(operands: Operands, keep: bool) -> Saved:
    with kernels.arithmetic_on(operands.x):
        return operators.forward(operands, keep)


def short_log_norm(short: Any, x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool, keep: bool) -> Tensor:
    """The log-partition [*B] of a short chain on a CPU, in the dtype of the operands; see `short_of`."""
    value: Tensor
    if keep:
        value = apply(LogPartition, _Short(short, log_params), x, bulk, p0)
        return value
    value, recomputed = short.value(x, bulk, p0)
    report_chains(recomputed)
    return value


def log_norm_in_pieces(operands: Operands, every: int, keep: bool = True, progress: bool = False) -> Tensor:
    """The log-partition [*B] in float64, with a checkpoint after each `every` steps; it can be differentiated once.

    `keep`: whether to save the checkpoints for a backward pass. `progress`: show a bar over the pieces of either pass.
    """
    tensors, p0 = operands.tensors, operands.p0
    if torch.compiler.is_compiling():
        raise NotImplementedError("memory_budget: expected None inside torch.compile")
    if operands.x.numel() == 0 or not has_values(p0):
        return dense_log_norm(operands.of(*(tensor.to(p0.device) for tensor in tensors)))
    schedule = _Checkpoints(operands.skeleton(), every, progress)
    value: Tensor = apply(LogPartition, schedule, *tensors) if keep else schedule.forward(*tensors, keep=False)[0]
    return value


class Schedule(Protocol):
    """How a log-partition and its gradients are computed from some tensors."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The log-partition [*B] in separate memory, and what `gradients` needs besides the tensors."""

    def gradients(self, tensors: Sequence[Tensor], saved: Sequence[Tensor], grad: Tensor, needs: Needs) -> Gradients:
        """The gradients of `sum(grad * log_norm)` with respect to the tensors that need one."""

    def log_norm(self, *tensors: Tensor) -> Tensor:
        """The log-partition, which torch's autograd differentiates twice."""


class LogPartition(torch.autograd.Function):
    """schedule, *tensors -> log-partition."""

    @staticmethod
    def forward(ctx: Any, schedule: Schedule, *tensors: Tensor) -> Tensor:
        ctx.schedule, ctx.choice = schedule, kernels.on_cpu()
        value, saved = schedule.forward(*tensors)
        ctx.save_for_backward(*tensors, *saved)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kernels.check_forward_choice(ctx.choice, grad)
        schedule, needs, saved = ctx.schedule, ctx.needs_input_grad[1:], ctx.saved_tensors
        tensors, residuals = saved[: len(needs)], saved[len(needs) :]
        if not is_plain((grad,)) and is_mapped():  # a batch of gradients
            return None, *_by_scan(schedule, tensors, grad, needs)
        if torch.is_grad_enabled():
            return None, *apply(Posteriors, schedule, needs, grad, *saved)
        return None, *schedule.gradients(tensors, residuals, grad, needs)


def _by_scan(schedule: Schedule, tensors: Sequence[Tensor], grad: Tensor, needs: Needs) -> Gradients:
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        tensors = tensors if again else [tensor.detach().requires_grad_() for tensor in tensors]
        used = [tensor for tensor, need in zip(tensors, needs, strict=True) if need]
        gradients = iter(torch.autograd.grad(schedule.log_norm(*tensors), used, grad, create_graph=again))
    return tuple(next(gradients) if need else None for need in needs)


class Posteriors(torch.autograd.Function):
    """schedule, needs, grad, *tensors, *saved -> the gradients of tensors, None for one that is not needed."""

    @staticmethod
    def forward(ctx: Any, schedule: Schedule, needs: Needs, grad: Tensor, *args: Tensor) -> Gradients:
        tensors, saved = args[: len(needs)], args[len(needs) :]
        ctx.schedule, ctx.residuals = schedule, len(saved)
        ctx.save_for_backward(grad, *tensors)
        ctx.set_materialize_grads(False)
        return schedule.gradients(tensors, saved, grad, needs)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        second = apply(Covariances, ctx.schedule, *ctx.saved_tensors, *tangents)
        return None, None, *second, *(None,) * ctx.residuals


class Covariances(Final):
    """schedule, grad, *tensors, *tangents -> the gradients of `sum(posteriors * tangents)` by grad and the tensors."""

    @staticmethod
    def forward(schedule: Schedule, grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
        count = len(args) // 2
        return second_derivatives(schedule.log_norm, args[:count], grad, args[count:])


class _Short(NamedTuple):
    """The sequential schedule of a short chain on a CPU, in one call of the C library whose arguments are cached."""

    short: Any
    log_params: bool

    def forward(self, *operands: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        residuals = self.short.joint_residuals()
        value, recomputed = self.short.value(*operands, residuals)
        report_chains(recomputed)
        return value, (residuals,)

    def gradients(self, operands: Sequence[Tensor], saved: Sequence[Tensor], grad: Tensor, needs: Needs) -> Gradients:
        return tuple(self.short.gradients(*operands, saved[0].contiguous(), grad, needs))

    def log_norm(self, x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
        return total(Steps(x, Dense(bulk), p0, None, self.log_params))


class _Checkpoints(NamedTuple):
    """The sequential schedule in pieces of `every` steps, which saves only the messages between pieces."""

    skeleton: Operands
    every: int
    progress: bool

    def forward(self, *operands: Tensor, keep: bool = True) -> tuple[Tensor, tuple[Tensor, ...]]:
        with kernels.arithmetic_on(operands[1]):
            value, checkpoints = self._pieces(operands).forward(keep)
        return value.clone(), (value, checkpoints)

    def gradients(self, operands: Sequence[Tensor], saved: Sequence[Tensor], grad: Tensor, needs: Needs) -> Gradients:
        with kernels.arithmetic_on(grad):
            return self._pieces(operands).backward(grad, saved[0], saved[1], needs)

    def log_norm(self, *operands: Tensor) -> Tensor:
        raise RuntimeError("memory_budget: expected one derivative, got a second; pass None for two")

    def _pieces(self, operands: Sequence[Tensor]) -> Checkpoints:
        return Checkpoints(self.skeleton.of(*operands), self.every, self.progress)


class _Packed(NamedTuple):
    """The sequential schedule of packed sequences that kernels read in place, for x, p0 and bulk."""

    skeleton: Operands

    def forward(self, *tensors: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        saved = _forward_in_place(self.skeleton.of(*tensors), True)
        return saved.log_norm.clone(), saved

    def gradients(self, tensors: Sequence[Tensor], saved: Sequence[Tensor], grad: Tensor, needs: Needs) -> Gradients:
        (x, p0, bulk), operands = needs, self.skeleton.of(*tensors)
        with kernels.arithmetic_on(grad):
            by_x, by_bulk, by_p0 = operators.backward(operands, Saved(*saved), grad, (x, bulk, p0))
        return if_needed((by_x, by_p0, by_bulk), needs)

    def log_norm(self, *tensors: Tensor) -> Tensor:
        packed = self.skeleton.packed.of_tensors(*tensors)
        value: Tensor = packed.by_sequence(packed.map(lambda operands: total(operands.steps())))
        return value
