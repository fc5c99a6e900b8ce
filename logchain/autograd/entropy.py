"""Entropies of paths, and divergences between the paths of two chains, as operators of torch that have a gradient.

    H = log Z - E[t]        dH/dt = -(dE[t]/dt' along t)        t: the logarithms of all weights
    KL = E[t - s] - log Z + log Z'        dKL/dt = dE[t]/dt' along t - s        dKL/ds = E' - E

E[t] is what the log-partition changes by along t, and its derivative along a tangent is a covariance, which
`autograd.chain` finds. Both exist once: what a covariance depends on is not differentiated again.
"""

from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..layout import Layout
from ..operands import chain_of
from ..schedules import choose
from .chain import covariances, forward, gradient, if_needed
from .chain_operators import log_norm_here
from .operator import apply, call, operator, transform, with_batch_first
from .paths import finite_log
from .tangents import log_norm_along

Operands = tuple[Tensor, Tensor, Tensor]


def entropy(x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool) -> Tensor:
    """The entropy of the paths of each sequence [*B] in float64; 0 where none is possible."""
    found: Tensor = apply(_Entropy, _entropy, x, bulk, p0, lengths, log_params)
    return found


def divergence(p: Operands, q: Operands, lengths: Tensor | None, log_params: bool) -> Tensor:
    """The divergence of the paths of p from those of q [*B] in float64; 0 where none is possible under p."""
    found: Tensor = apply(_Divergence, _divergence, *p, *q, lengths, log_params)
    return found


class _Entropy(torch.autograd.Function):
    """x, bulk, p0, lengths, log_params -> entropy."""

    @staticmethod
    def forward(*args: Any) -> Tensor:
        found: Tensor = _entropy(*args)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *operands, ctx.log_params = inputs
        ctx.save_for_backward(*operands)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bulk, p0, lengths = ctx.saved_tensors
        tangents = _log_weights(x, bulk, p0, ctx.log_params)
        found = covariances(-grad, x, bulk, p0, lengths, tangents, ctx.log_params)
        return (*if_needed(found, ctx.needs_input_grad[:3]), None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        return call(_Entropy, *with_batch_first(info.batch_size, in_dims, *args[:4]), args[4]), 0


class _Divergence(torch.autograd.Function):
    """x, bulk, p0 of p, and of q, lengths, log_params -> divergence."""

    @staticmethod
    def forward(*args: Any) -> Tensor:
        found: Tensor = _divergence(*args)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *operands, ctx.log_params = inputs
        ctx.save_for_backward(*operands, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *operands, lengths, divergence = ctx.saved_tensors
        log_params, needs = ctx.log_params, ctx.needs_input_grad
        grad = torch.where(divergence.isinf(), 0.0, grad)
        p, q = _alike(tuple(operands[:3]), tuple(operands[3:]))
        of_p: list[Tensor | None] = [None] * 3
        of_q: list[Tensor | None] = [None] * 3
        if any(needs[:3]):
            weights = _log_weights(*p, log_params), _log_weights(*q, log_params)
            tangents = tuple(one - other for one, other in zip(*weights, strict=True))
            of_p = list(covariances(grad, *p, lengths, tangents, log_params))
        if any(needs[3:6]):
            wanted = True, True, True
            kept_p, kept_q = (forward(*one, lengths, log_params, True) for one in (p, q))
            under_q = gradient(grad, *q, lengths, kept_q, log_params, True, wanted)
            under_p = gradient(grad, *p, lengths, kept_p, log_params, True, wanted)
            of_q = [one - other for one, other in zip(under_q, under_p, strict=True)]
            for index, weight in enumerate(() if log_params else q[1:], 1):
                of_q[index] = torch.where(weight == 0, 0.0, of_q[index] / weight)
        found = (
            one if one is None else one.sum_to_size(operand.shape)
            for one, operand in zip((*of_p, *of_q), operands, strict=True)
        )
        return (*if_needed(found, needs[:6]), None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        *p, lengths = with_batch_first(info.batch_size, (*in_dims[:3], in_dims[6]), *args[:3], args[6])
        q = with_batch_first(info.batch_size, (*in_dims[3:6], None), *args[3:6], None)
        return call(_Divergence, *p, *q[:3], lengths, args[7]), 0


def _log_weights(x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool) -> Operands:
    """The logarithms of all weights, finite, in float64."""
    return finite_log(x, True), finite_log(bulk, log_params), finite_log(p0, log_params)


def _alike(p: Operands, q: Operands, *, steps: bool = True) -> tuple[Operands, Operands]:
    """Both chains with the axes that the matrices and the initial weights of either have: views."""
    lead = torch.broadcast_shapes(p[1].shape[:-3], q[1].shape[:-3])
    each = max(p[1].shape[-3], q[1].shape[-3]) if min(p[1].shape[-3], q[1].shape[-3]) else 0
    p0 = torch.broadcast_tensors(p[2], q[2])
    first, second = (
        (x, bulk.expand(*lead, each if steps else bulk.shape[-3], *bulk.shape[-2:]), start)
        for (x, bulk, _), start in zip((p, q), p0, strict=True)
    )
    return first, second


def _forward_entropy(x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool) -> Tensor:
    if not kernels.in_c(x) or x.numel() == 0:
        return _entropy_in_torch(x, bulk, p0, lengths, log_params)
    layout, chain = chain_of(x, bulk, p0, lengths, log_params)
    values, unknown = kernels.entropy_in_c()(chain, None)
    if not unknown.any():
        return layout.batched(values).clone(memory_format=torch.contiguous_format)
    ...


_OPERANDS = "Tensor x, Tensor bulk, Tensor p0, Tensor? lengths"
