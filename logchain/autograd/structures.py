"""The log-partition and the posteriors of chains of structures, differentiable twice and once.

Dense matrices are passed on to `log_partition`. On a CPU products of factors, bands and arcs have kernels; any other
structure is scanned in log space. Second derivatives are those of torch's autograd through that scan.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..arguments import check_choice, has_values
from ..kernels.numbers import log_weights
from ..kernels.structured import Gradients, Walk
from ..operands import Operands, is_blocks
from ..rescues import report_chains
from ..schedules.choose import check_strategy
from ..tensors import differentiated
from ..transitions import LOG
from ..transitions.dense import Dense
from .log_partition import LogPartition, dense_log_norm, dense_posteriors
from .logarithms import gradients as gradients_in_logarithms
from .operator import apply
from .scan import total

Needs = tuple[bool, bool, bool]


def log_norm(operands: Operands) -> Tensor:
    """The log-partition [*B] in float64."""
    operands = operands.cheapest()
    if operands.is_dense:
        return dense_log_norm(operands)
    if operands.x.numel() == 0:  # no values, but a graph
        zeros = [tensor.reshape(-1)[:0].sum().double() for tensor in operands.tensors]
        return torch.stack(zeros).sum().expand(operands.x.shape[:-2])
    if is_blocks(operands.transition.pattern):
        return _of_blocks(operands)
    if not differentiated(*operands.tensors):
        return forward(operands, False).log_norm
    value: Tensor = apply(LogPartition, _Structure(operands.skeleton()), *operands.tensors)
    return value


def _of_blocks(operands: Operands) -> Tensor:
    """The log-partition [*B] of blocks that do not mix: each is a separate chain of dense matrices."""
    x, transition, p0, ends, log_params, _ = operands
    (blocks,) = transition.parameters
    count, size = blocks.shape[-3:-1]
    sequences = x.unflatten(-1, (count, size)).movedim(-2, -3)  # [*B, blocks, v, size]
    lengths = None if ends is None else ends[..., None].expand(*ends.shape, count)
    matrices, starts = Dense(blocks.movedim(-3, -4)), p0.unflatten(-1, (count, size))
    values = dense_log_norm(Operands(sequences, matrices, starts, lengths, log_params))
    unknown = values.isnan().any(-1)
    # the gradient of the branch that is not selected is 0, not NaN
    return torch.where(unknown, values.sum(-1), LOG.sum(values.masked_fill(unknown[..., None], 0.0), -1))


def posteriors(operands: Operands, needs: Needs) -> tuple[Tensor, Gradients]:
    """The log-partition [*B] in float64, and the expected counts of states, parameters and first states.

    They are gradients with respect to x and to logarithms of parameters and p0, of the dtype of the arithmetic, and
    differentiable once.
    """
    cheapest = operands.cheapest()
    if not needs[1]:
        operands = cheapest
    if operands.is_dense:
        wide = operands.of(*(tensor.to(operands.dtype) for tensor in operands.tensors))
        value, (x, bulk, p0) = dense_posteriors(wide, needs)
        return value, Gradients(x, (bulk,), p0)
    direct = cheapest is operands and operands.x.numel() > 0 and not is_blocks(operands.transition.pattern)
    again = differentiated(*operands.tensors)
    if direct and not again:
        walk = forward(operands, True)
        return walk.log_norm, backward(operands, walk, torch.ones_like(walk.log_norm), needs, by_log=True)
    with torch.enable_grad():
        logs = _logarithms(operands)
        value = log_norm(logs)
        x, p0, *parameters = torch.autograd.grad(value.sum(), logs.tensors, create_graph=again, materialize_grads=True)
    return value if again else value.detach(), Gradients(x, tuple(parameters), p0)


def forward(operands: Operands, keep: bool) -> Walk:
    """The log-partitions, and if `keep` what `backward` reads."""
    if not has_values(operands.x):
        value = operands.x.new_empty(operands.x.shape[:-2], dtype=torch.float64)
        return Walk(value, (), torch.empty_like(value, dtype=torch.bool))
    module = kernels.structured_kernels(operands.x, operands.transition.pattern)
    with kernels.arithmetic_on(operands.x), torch.no_grad():
        walk: Walk | None = None if module is None else module.forward(operands.chain(), keep)
        if walk is None:
            value = total(operands.steps()).contiguous()
            walk = Walk(value, (), torch.zeros_like(value, dtype=torch.bool))
        elif len(chosen := _chosen(walk.flagged)):
            walk.log_norm.view(-1)[chosen] = total(operands.selected(chosen).steps())
    report_chains(walk.flagged)
    return walk


def _chosen(mask: Tensor) -> Tensor:
    """The sequences in a mask [*B], as indices of the flattened batch."""
    return mask.flatten().nonzero()[:, 0]


def backward(operands: Operands, walk: Walk, weight: Tensor, needs: Needs, *, by_log: bool = False) -> Gradients:
    """The gradients of `sum(weight * log_norm)`; see `kernels.structured.Gradients`."""
    if not has_values(operands.x):
        x, p0, *parameters = (one.new_empty(one.shape, dtype=operands.dtype) for one in operands.tensors)
        return Gradients(x, tuple(parameters), p0)
    module = kernels.structured_kernels(operands.x, operands.transition.pattern)
    with kernels.arithmetic_on(operands.x):
        gradients: Gradients | None = None
        if module is not None and walk.kept:
            gradients = module.backward(operands.chain(by_log=by_log), walk, weight, needs)
        if gradients is None:
            return gradients_in_logarithms(operands, weight, by_log=by_log)
        if gradients.parameters is not None:
            gradients = gradients._replace(parameters=operands.transition.from_pattern(gradients.parameters))
        chosen = _chosen(walk.flagged & (weight != 0))
        if len(chosen):
            part = operands.selected(chosen)
            more = gradients_in_logarithms(part, weight.reshape(-1)[chosen], by_log=by_log)
            _add(operands, gradients, more, chosen)
    return gradients


def _add(operands: Operands, gradients: Gradients, more: Gradients, chosen: Tensor) -> None:
    """Add the gradients of the chosen sequences to those of all."""
    totals, parts = ((one.x, one.p0, *(one.parameters or ())) for one in (gradients, more))
    for into, part in zip(totals, parts, strict=False):
        if into is not None and part is not None:
            index = operands.batch_index(into, chosen)
            _ = into.index_put_(index, part, accumulate=True) if index else into.add_(part.view(into.shape))


class _Structure(NamedTuple):
    """The schedule of structures, for the tensors of `Operands`."""

    skeleton: Operands

    def forward(self, *tensors: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        walk = forward(self.skeleton.of(*tensors), True)
        return walk.log_norm.clone(), (walk.log_norm, walk.flagged, *walk.kept)  # the caller may change the value

    def gradients(
        self, tensors: Sequence[Tensor], saved: Sequence[Tensor], grad: Tensor, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        log_norm, flagged, *kept = saved
        wanted = needs[0], any(needs[2:]), needs[1]
        x, parameters, p0 = backward(self.skeleton.of(*tensors), Walk(log_norm, tuple(kept), flagged), grad, wanted)
        gradients = x, p0, *(parameters or (None,) * (len(tensors) - 2))
        return tuple(
            one.to(tensor.dtype) if need and one is not None else None
            for one, tensor, need in zip(gradients, tensors, needs, strict=True)
        )

    def log_norm(self, *tensors: Tensor) -> Tensor:
        return total(self.skeleton.of(*tensors).steps())


def _logarithms(operands: Operands) -> Operands:
    """Operands of the chain's dtype whose parameters are logarithms, differentiable functions of the originals."""
    x, p0, *parameters = (tensor.to(operands.dtype) for tensor in operands.tensors)
    if not operands.log_params:
        p0, *parameters = (log_weights(one, False, operands.dtype) for one in (p0, *parameters))
    leaves = [one if one.requires_grad else one.detach().requires_grad_() for one in (x, p0, *parameters)]
    return operands.of(*leaves)._replace(log_params=True)


def check_structured_options(strategy: object, memory_budget: object, progress: object) -> None:
    """Raise for options of `product` that structures do not have."""
    check_choice("strategy", check_strategy(strategy), ("auto", "sequential"))
    if memory_budget is not None:
        raise ValueError(f"memory_budget: expected None where bulk is a structure, got {memory_budget!r}")
    if progress is not False:
        raise ValueError(f"progress: expected False where bulk is a structure, got {progress!r}")
