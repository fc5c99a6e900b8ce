"""The log-partition of chains of any transition, differentiable twice, and their posteriors, differentiable once.

The operators of `dense_operators` compute dense matrices, also inside torch.compile and torch.func. Short chains,
pieces with checkpoints, packed sequences and structures are an `Algorithm` of the Function `LogPartition`, whose
derivatives are `Posteriors` and `Covariances`. On a CPU products of factors, bands, arcs and durations have kernels;
any other structure is scanned in log space. Gradients are posterior marginals, by a backward pass from the operands and
all or some of the forward messages. Second derivatives are torch's, through the scan.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import kernels
from ..arguments import has_values
from ..internals import is_mapped, is_transformed
from ..kernels.numbers import log_weights
from ..kernels.structured import POSTERIORS, PRODUCT, Gradients
from ..operands import Operands
from ..rescues import report_chains
from ..schedules import choose
from ..schedules.checkpoints import Checkpoints
from ..tensors import differentiated, is_plain
from ..transitions import LOG
from ..transitions.dense import Dense
from . import dense_operators as operators
from .dense_operators import Saved
from .logarithms import gradients as gradients_in_logarithms
from .operator import Final, apply
from .scan import Steps, second_derivatives, total

# which tensors need a gradient, and their gradients
Needs = tuple[bool, ...]
Results = tuple[Tensor | None, ...]


def log_norm(operands: Operands, schedule: choose.Schedule | None = None) -> Tensor:
    """The log-partition [*B] in float64; `schedule` of dense matrices, by default that of `choose`."""
    differentiable = differentiated(*operands.tensors)
    operands = operands.cheapest(POSTERIORS if differentiable else PRODUCT)
    if operands.is_dense and not operands.packed:
        x, bulk, p0, lengths, _ = operands.dense
        # tensors of torch.func may report that they need no gradient
        keep = differentiable or (torch.is_grad_enabled() and is_transformed())
        value: Tensor = operators.log_norm(
            *operands.dense, keep, *(schedule or choose.of(x, bulk, p0, lengths is not None))
        )[0]
        return value.clone() if keep else value  # autograd may have saved the value, which the caller may change
    if operands.x.numel() == 0:  # no values, but a graph
        zeros = [tensor.reshape(-1)[:0].sum().double() for tensor in operands.tensors]
        return torch.stack(zeros).sum().expand(operands.x.shape[:-2])
    if operands.is_blocks:
        return _of_blocks(operands)
    if not differentiable:
        return forward(operands, False)[0]
    result: Tensor = apply(LogPartition, _Whole(operands.skeleton()), *operands.tensors)
    return result


def _of_blocks(operands: Operands) -> Tensor:
    """The log-partition [*B] of blocks that do not mix: each is a separate chain of dense matrices."""
    x, transition, p0, ends, log_params, _ = operands
    (blocks,) = transition.parameters
    count, size = blocks.shape[-3:-1]
    sequences = x.unflatten(-1, (count, size)).movedim(-2, -3)  # [*B, blocks, v, size]
    lengths = None if ends is None else ends[..., None].expand(*ends.shape, count)
    matrices, starts = Dense(blocks.movedim(-3, -4)), p0.unflatten(-1, (count, size))
    values = log_norm(Operands(sequences, matrices, starts, lengths, log_params))
    unknown = values.isnan().any(-1)
    # the gradient of the branch that is not selected is 0, not NaN
    return torch.where(unknown, values.sum(-1), LOG.sum(values.masked_fill(unknown[..., None], 0.0), -1))


def posteriors(operands: Operands, needs: Needs, weight: Tensor | None = None) -> tuple[Tensor, Gradients]:
    """The log-partition [*B] in float64, and the expected counts of states, first states and parameters.

    They are gradients, of its sum times a `weight` [*B] if there is one, with respect to x and to logarithms of p0 and
    parameters, of the dtype of the arithmetic, and differentiable once.
    """
    # matrices in place of a structure take gradients of parameters by autograd
    by_matrices = any(needs[2:]) and operands.takes_longer(POSTERIORS)
    operands = operands if by_matrices else operands.cheapest()
    operands = operands.of(*(tensor.to(operands.dtype) for tensor in operands.tensors))
    again = differentiated(*operands.tensors)
    if operands.is_dense and not operands.packed:
        x, bulk, p0, lengths, log_params = dense = operands.dense
        schedule = choose.of(x, bulk, p0, lengths is not None)
        saved = Saved(*operators.log_norm(*dense, True, *schedule))
        weight = torch.ones_like(saved.log_norm) if weight is None else weight
        by_operand = needs[0], needs[2], needs[1]
        states, counts, starts = operators.log_norm_backward(
            weight, *dense[:4], *saved, log_params, True, *by_operand, *schedule
        )
        return saved.log_norm, (states, starts, counts)
    if not (again or by_matrices or operands.x.numel() == 0 or operands.is_blocks):
        residuals = forward(operands, True)
        weight = torch.ones_like(residuals[0]) if weight is None else weight
        return residuals[0], backward(operands, residuals, weight, needs, by_log=True)
    with torch.enable_grad():
        logs = _logarithms(operands)
        value = log_norm(logs)
        weight = torch.ones_like(value) if weight is None else weight
        gradients = torch.autograd.grad(value, logs.tensors, weight, create_graph=again, materialize_grads=True)
    return value if again else value.detach(), gradients


def short_log_norm(short: Any, x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool, keep: bool) -> Tensor:
    """The log-partition [*B] of a short chain on a CPU, in the dtype of the operands; see `short_of`."""
    value: Tensor
    if keep:
        value = apply(LogPartition, _Short(short, log_params), x, bulk, p0)
        return value
    value, recomputed = short.value(x, bulk, p0)
    report_chains(recomputed)
    return value


def log_norm_in_pieces(operands: Operands, every: int, keep: bool, progress: bool) -> Tensor:
    """The log-partition [*B] in float64, with a checkpoint after each `every` steps; it can be differentiated once.

    `keep`: whether to save the checkpoints for a backward pass. `progress`: show a bar over the pieces of either pass.
    """
    tensors, p0 = operands.tensors, operands.p0
    if torch.compiler.is_compiling():
        raise NotImplementedError("memory_budget: expected None inside torch.compile; call product outside of it")
    if operands.x.numel() == 0 or not has_values(p0):
        return log_norm(operands.of(*(tensor.to(p0.device) for tensor in tensors)))
    pieces = Checkpoints(operands, every, progress)
    value: Tensor = apply(LogPartition, pieces, *tensors) if keep else pieces.forward(*tensors, keep=False)[0]
    return value


class Algorithm(Protocol):
    """How a log-partition and its gradients are computed from tensors."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The log-partition [*B] in new memory, and what `gradients` reads in addition to the tensors."""

    def gradients(self, tensors: Sequence[Tensor], saved: Sequence[Tensor], grad: Tensor, needs: Needs) -> Results:
        """The gradients of `sum(grad * log_norm)` with respect to the tensors that need one."""

    def log_norm(self, *tensors: Tensor) -> Tensor:
        """The log-partition, which torch's autograd differentiates twice."""


class LogPartition(torch.autograd.Function):
    """algorithm, *tensors -> log-partition."""

    @staticmethod
    def forward(ctx: Any, algorithm: Algorithm, *tensors: Tensor) -> Tensor:
        ctx.algorithm, ctx.choice = algorithm, kernels.on_cpu()
        value, saved = algorithm.forward(*tensors)
        ctx.save_for_backward(*tensors, *saved)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kernels.check_forward_choice(ctx.choice, grad)
        algorithm, needs, saved = ctx.algorithm, ctx.needs_input_grad[1:], ctx.saved_tensors
        tensors, residuals = saved[: len(needs)], saved[len(needs) :]
        if not is_plain((grad,)) and is_mapped():  # a batch of gradients
            return None, *_by_scan(algorithm, tensors, grad, needs)
        if torch.is_grad_enabled():
            return None, *apply(Posteriors, algorithm, needs, grad, *saved)
        return None, *algorithm.gradients(tensors, residuals, grad, needs)


def _by_scan(algorithm: Algorithm, tensors: Sequence[Tensor], grad: Tensor, needs: Needs) -> Results:
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        tensors = tensors if again else [tensor.detach().requires_grad_() for tensor in tensors]
        used = [tensor for tensor, need in zip(tensors, needs, strict=True) if need]
        gradients = iter(torch.autograd.grad(algorithm.log_norm(*tensors), used, grad, create_graph=again))
    return tuple(next(gradients) if need else None for need in needs)


class Posteriors(torch.autograd.Function):
    """algorithm, needs, grad, *tensors, *saved -> the gradients of tensors, None for one that is not needed."""

    @staticmethod
    def forward(ctx: Any, algorithm: Algorithm, needs: Needs, grad: Tensor, *args: Tensor) -> Results:
        tensors, saved = args[: len(needs)], args[len(needs) :]
        ctx.algorithm, ctx.residuals = algorithm, len(saved)
        ctx.save_for_backward(grad, *tensors)
        ctx.set_materialize_grads(False)
        return algorithm.gradients(tensors, saved, grad, needs)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        second = apply(Covariances, ctx.algorithm, *ctx.saved_tensors, *tangents)
        return None, None, *second, *(None,) * ctx.residuals


class Covariances(Final):
    """algorithm, grad, *tensors, *tangents -> the gradients of `sum(posteriors * tangents)` by grad and the tensors."""

    @staticmethod
    def forward(algorithm: Algorithm, grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
        count = len(args) // 2
        return second_derivatives(algorithm.log_norm, args[:count], grad, args[count:])


class _Short(NamedTuple):
    """The scan of a short chain on a CPU, in one call of the C library whose arguments are cached."""

    short: Any
    log_params: bool

    def forward(self, *operands: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        residuals = self.short.joint_residuals()
        value, recomputed = self.short.value(*operands, residuals)
        report_chains(recomputed)
        return value, (residuals,)

    def gradients(self, operands: Sequence[Tensor], saved: Sequence[Tensor], grad: Tensor, needs: Needs) -> Results:
        return tuple(self.short.gradients(*operands, saved[0].contiguous(), grad, needs))

    def log_norm(self, x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
        return total(Steps(x, Dense(bulk), p0, None, self.log_params))


class _Whole(NamedTuple):
    """The scan of structures, or of packed sequences that kernels read in place, for the tensors of `Operands`."""

    skeleton: Operands

    def forward(self, *tensors: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        saved = forward(self.skeleton.of(*tensors), True)
        return saved[0].clone(), saved  # the caller may change the value

    def gradients(self, tensors: Sequence[Tensor], saved: Sequence[Tensor], grad: Tensor, needs: Needs) -> Results:
        gradients = backward(self.skeleton.of(*tensors), saved, grad, needs)
        return tuple(
            gradient.to(tensor.dtype) if need and gradient is not None else None
            for gradient, tensor, need in zip_longest(gradients, tensors, needs)
        )

    def log_norm(self, *tensors: Tensor) -> Tensor:
        if not self.skeleton.packed:
            return total(self.skeleton.of(*tensors).steps())
        packed = self.skeleton.packed.of_tensors(*tensors)
        value: Tensor = packed.by_sequence(packed.map(lambda operands: total(operands.steps())))
        return value


def forward(operands: Operands, keep: bool) -> tuple[Tensor, ...]:
    """The log-partitions, and if `keep` what `backward` reads; see `kernels.structured.Saved`."""
    if not has_values(operands.x):
        value = operands.x.new_empty(operands.x.shape[:-2], dtype=torch.float64)
        return value, torch.empty_like(value, dtype=torch.bool)
    with kernels.arithmetic_on(operands.x), torch.no_grad():
        if operands.packed:
            return operators.forward(operands, keep)
        saved: tuple[Tensor, ...] | None = operands.in_c("forward", keep)
        if saved is None:
            value = total(operands.steps()).contiguous()
            saved = value, torch.zeros_like(value, dtype=torch.bool)
        elif len(chosen := saved[1].flatten().nonzero()[:, 0]):
            saved[0].view(-1)[chosen] = total(operands.selected(chosen).steps())
    report_chains(saved[1])
    return saved


def backward(
    operands: Operands, saved: Sequence[Tensor], weight: Tensor, needs: Needs, *, by_log: bool = False
) -> Gradients:
    """The gradients of `sum(weight * log_norm)`; those of parameters are missing if none is needed."""
    if not has_values(operands.x):
        return tuple(tensor.new_empty(tensor.shape, dtype=operands.dtype) for tensor in operands.tensors)
    with kernels.arithmetic_on(operands.x):
        if operands.packed:
            by_operand = needs[0], needs[2], needs[1]
            x, bulk, p0 = operators.backward(operands, Saved(*saved), weight, by_operand, by_log=by_log)
            return x, p0, bulk
        gradients: Gradients | None = None
        if len(saved) > 2:
            gradients = operands.in_c("backward", saved, weight, needs, by_log)
        if gradients is None:
            return gradients_in_logarithms(operands, weight, by_log=by_log)
        chosen = (saved[1] & (weight != 0)).flatten().nonzero()[:, 0]
        if len(chosen):
            part = operands.selected(chosen)
            recomputed = gradients_in_logarithms(part, weight.reshape(-1)[chosen], by_log=by_log)
            for into, term in zip(gradients, recomputed, strict=False):
                if into is not None:
                    index = operands.batch_index(into, chosen)
                    _ = into.index_put_(index, term, accumulate=True) if index else into.add_(term.view(into.shape))
    return gradients


def _logarithms(operands: Operands) -> Operands:
    """Operands of the chain's dtype whose parameters are logarithms, differentiable functions of the originals."""
    x, p0, *parameters = operands.tensors
    if not operands.log_params:
        p0, *parameters = (log_weights(weights, False, operands.dtype) for weights in (p0, *parameters))
    tensors = x, p0, *parameters
    leaves = [tensor if tensor.requires_grad else tensor.detach().requires_grad_() for tensor in tensors]
    return operands.of(*leaves)._replace(log_params=True)
