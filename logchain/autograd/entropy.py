"""The entropy of a chain's paths, and the divergence between those of two chains, as operators of torch.

With t the logarithms of all weights of a path, x included, and s those of the other chain:

    H = log Z - E[t]                      dH = -Cov(t, dt)
    KL = E[t - s] - log Z + log Z'        dKL = Cov(t - s, dt) + (E' - E)[ds]

E and Cov are those of the chain's posterior over paths, E' that of the other one. `kernels.plain.entropy` computes the
values, and `Second` the covariances. Each operator can be differentiated once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.plain import entropy as formula
from ..operands import Operands, chain_of
from ..rescues import report_chains
from .chain import posteriors
from .chain_functions import Second as Covariances
from .operator import Saving, apply, call, if_needed, operator, transform, with_batch_first
from .paths import finite_log

Weights = tuple[Tensor, Tensor, Tensor]


def entropy(x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool) -> Tensor:
    """The entropy of the paths of each sequence [*B] in float64; 0 where none is possible."""
    entropies: Tensor = apply(_Entropy, _entropy, x, bulk, p0, lengths, log_params)
    return entropies


def divergence(p: Weights, q: Weights, lengths: Tensor | None, log_params: bool) -> Tensor:
    """The divergence of the paths of p from those of q [*B] in float64; 0 where none is possible under p."""
    divergences: Tensor = apply(_Divergence, _divergence, *p, *q, lengths, log_params)
    return divergences


class _Entropy(Saving):
    """x, bulk, p0, lengths, log_params -> entropy."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bulk, p0, lengths = ctx.saved_tensors
        tangents = _log_weights(x, bulk, p0, *ctx.options)
        gradients = call(Covariances, -grad, x, bulk, p0, lengths, *tangents, *ctx.options, True)[1:]
        return (*if_needed(gradients, ctx.needs_input_grad[:3]), None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        x, bulk, p0, lengths, log_params = args
        operands = with_batch_first(info.batch_size, in_dims, x, bulk, p0, lengths)
        return call(_Entropy, *operands, log_params), 0


class _Divergence(torch.autograd.Function):
    """x, bulk, p0, other_x, other_bulk, other_p0, lengths, log_params -> divergence from the other chain's paths."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *operands, ctx.log_params = inputs
        ctx.save_for_backward(*operands, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *operands, lengths, divergence = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad = torch.where(divergence.isinf(), 0.0, grad)
        p, q = _alike(tuple(operands[:3]), tuple(operands[3:]))
        nothing = None, None, None
        of_p = nothing
        if any(needs[:3]):
            logs = zip(*(_log_weights(*one, ctx.log_params) for one in (p, q)), strict=True)
            ratios = [log - other for log, other in logs]
            of_p = call(Covariances, grad, *p, lengths, *ratios, ctx.log_params, True)[1:]
        of_q = _gradients_of_q(grad, p, q, lengths, ctx.log_params) if any(needs[3:6]) else nothing
        gradients = (
            None if one is None else one.sum_to_size(operand.shape)
            for one, operand in zip((*of_p, *of_q), operands, strict=True)
        )
        return (*if_needed(gradients, needs[:6]), None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        *p, other_x, other_bulk, other_p0, lengths, log_params = args
        *p, lengths = with_batch_first(info.batch_size, (*in_dims[:3], in_dims[6]), p[0], p[1], p[2], lengths)
        q = with_batch_first(info.batch_size, (*in_dims[3:6], None), other_x, other_bulk, other_p0, None)
        return call(_Divergence, *p, *q[:3], lengths, log_params), 0


def _gradients_of_q(grad: Tensor, p: Weights, q: Weights, lengths: Tensor | None, log_params: bool) -> Any:
    """The posteriors under q less those under p, divided by the weights of q where these are not logarithms."""
    under_p, under_q = (posteriors(Operands(*one, lengths, log_params), (True, True, True), grad)[1] for one in (p, q))
    counts = [one - other for one, other in zip(under_q, under_p, strict=True)]
    if log_params:
        return counts
    # 0 also where the weight is NaN behind a sequence's end
    weighted = (
        torch.where((weight == 0) | (count == 0), 0.0, count / weight)
        for count, weight in zip(counts[1:], q[1:], strict=True)
    )
    return counts[0], *weighted


def _log_weights(x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool) -> Weights:
    """The logarithms of all weights in float64, with 0 for -inf and for NaN."""
    return finite_log(x, True), finite_log(bulk, log_params), finite_log(p0, log_params)


def _alike(p: Weights, q: Weights) -> tuple[Weights, Weights]:
    """Both chains with matrices and initial weights expanded to the same shapes."""
    shape = torch.broadcast_shapes(p[1].shape[:-2], q[1].shape[:-2])
    starts = torch.broadcast_tensors(p[2], q[2])
    bulks = [bulk.expand(*shape, *bulk.shape[-2:]) for _, bulk, _ in (p, q)]
    return (p[0], bulks[0], starts[0]), (q[0], bulks[1], starts[1])


def _values(chains: Sequence[Weights], lengths: Tensor | None, log_params: bool) -> Tensor:
    x = chains[0][0]
    if x.numel() == 0:
        return _shapes(x).zero_()
    layouts, in_order = zip(*(chain_of(*one, lengths, log_params) for one in chains), strict=True)
    values, redone = formula.values(in_order)
    report_chains(redone)
    result: Tensor = layouts[0].batched(values).contiguous()
    return result


def _shapes(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[:-2], dtype=torch.float64)


_P, _Q = "Tensor x, Tensor bulk, Tensor p0", "Tensor other_x, Tensor other_bulk, Tensor other_p0"
_entropy = operator(
    f"entropy({_P}, Tensor? lengths, bool log_params) -> Tensor", lambda *args: _values([args[:3]], *args[3:]), _shapes
)
_divergence = operator(
    f"divergence({_P}, {_Q}, Tensor? lengths, bool log_params) -> Tensor",
    lambda *args: _values(_alike(args[:3], args[3:6]), *args[6:]),
    _shapes,
)
transform("entropy", _Entropy)
transform("divergence", _Divergence)
