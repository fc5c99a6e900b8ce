"""The entropy of a chain's paths, and the divergence between those of two chains, as an operator of torch.

With t the logarithms of all weights of a path, x included, and s those of the other chain:

    H = log Z - E[t]                      dH = -Cov(t, dt)
    KL = E[t - s] - log Z + log Z'        dKL = Cov(t - s, dt) + (E' - E)[ds]

E and Cov are those of the chain's posterior over paths, E' that of the other one. `kernels.plain.entropy` computes the
values, and `log_norm_second` the covariances. They can be differentiated once.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.chain import Chain
from ..kernels.numbers import log_weights
from ..kernels.plain import entropy as formula
from ..operands import Operands, as_dense
from ..rescues import report_chains
from ..transitions.dense import Dense
from .dense_operators import log_norm_second
from .log_partition import log_norm, posteriors
from .operator import if_needed, operator


def entropy(operands: Operands) -> Tensor:
    """`log Z - E[log w(z)]` [*B] in float64, differentiable once; 0 where no path is possible.

    The mean log-weight of a path is the sum of all logarithms, each times the expected number of its uses. That holds
    where entries are products of parameters; other structures are converted to dense matrices.
    """
    if operands.transition.sums:
        operands = as_dense(operands)
    if operands.is_dense:
        return _entropy(*operands.dense[:3], None, None, None, *operands.dense[3:])
    if operands.x.numel() == 0:
        return log_norm(operands)
    x, p0, *parameters = operands.tensors
    batch, sequence = operands.x.shape[:-2], range(operands.x.dim() - 2)
    # subtracting the largest potential does not change posteriors, and makes log Z small
    top = x.detach().amax(-1, keepdim=True)
    x = x.double() - top.double().masked_fill(~top.isfinite(), 0.0)
    if operands.lengths is not None:
        inside = torch.arange(x.shape[-2], device=x.device) < operands.lengths[..., None]
        x = torch.where(inside[..., None], x, 0.0)
    logs = [log_weights(weights, operands.log_params, torch.float64) for weights in (p0, *parameters)]
    # expected counts are per sequence
    logs = [log.expand(*batch, *log.shape[len(batch) :]) for log in logs]
    expanded = operands.of(x, *logs)._replace(log_params=True)
    total, counts = posteriors(expanded, (True,) * (2 + len(parameters)))
    mean = torch.zeros_like(total)
    for used, log in zip(counts, (x, *logs), strict=True):
        terms = used * torch.where((used == 0) | (log == -math.inf), 0.0, log)
        mean = mean + terms.sum([axis for axis in range(terms.dim()) if axis not in sequence])
    return torch.where(total == -math.inf, 0.0, total - mean)


def divergence(p: Sequence[Tensor], q: Sequence[Tensor], lengths: Tensor | None, log_params: bool) -> Tensor:
    """The divergence of the paths of p from those of q [*B] in float64; 0 where none is possible under p."""
    return _entropy(*p, *q, lengths, log_params)


class _Entropy(torch.autograd.Function):
    """x, bulk, p0, other_x, other_bulk, other_p0, lengths, log_params -> entropy, or divergence from other paths."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *operands, ctx.log_params = inputs
        ctx.save_for_backward(*operands, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *operands, lengths, value = ctx.saved_tensors
        needs, options = ctx.needs_input_grad, (ctx.log_params, True)
        p, *q = chains = _chains(operands)
        logs = [_log_weights(*chain, ctx.log_params) for chain in chains]
        if q:
            grad = torch.where(value.isinf(), 0.0, grad)
            tangents = tuple(log_p - log_q for log_p, log_q in zip(*logs, strict=True))
        else:
            grad, tangents = -grad, logs[0]
        gradients: list[Tensor | None] = [None] * 6
        if any(needs[:3]):
            gradients[:3] = log_norm_second(grad, *p, lengths, *tangents, *options)[1:]
        if any(needs[3:6]):
            gradients[3:] = _gradients_of_q(grad, p, q[0], lengths, ctx.log_params)
        gradients = [
            None if gradient is None else gradient.sum_to_size(operand.shape)
            for gradient, operand in zip(gradients, operands, strict=True)
        ]
        return (*if_needed(gradients, needs[:6]), None, None)


def _gradients_of_q(
    grad: Tensor, p: Sequence[Tensor], q: Sequence[Tensor], lengths: Tensor | None, log_params: bool
) -> list[Tensor]:
    """The posteriors under q less those under p, divided by the weights of q where these are not logarithms."""
    chains = (Operands(x, Dense(bulk), p0, lengths, log_params) for x, bulk, p0 in (p, q))
    under_p, under_q = (posteriors(chain, (True, True, True), grad)[1] for chain in chains)
    x, p0, bulk = (of_q - of_p for of_q, of_p in zip(under_q, under_p, strict=True))
    if log_params:
        return [x, bulk, p0]
    pairs = zip((bulk, p0), q[1:], strict=True)
    # 0 also where the weight is NaN past a sequence's end
    return [x, *(torch.where((weight == 0) | (count == 0), 0.0, count / weight) for count, weight in pairs)]


def _log_weights(x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool) -> tuple[Tensor, ...]:
    """The logarithms of all weights in float64, with 0 for -inf and for NaN, which makes the log-partition NaN too."""
    logs = x.double(), *(log_weights(weights, log_params, torch.float64) for weights in (bulk, p0))
    finite = zip(logs, (x, bulk, p0), strict=True)
    return tuple(log.masked_fill((log == -torch.inf) | weights.isnan(), 0.0) for log, weights in finite)


def _chains(operands: Sequence[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """One chain, or two with matrices and initial weights expanded to the same shapes."""
    p, q = (operands[0], operands[1], operands[2]), operands[3:]
    if q[0] is None:
        return [p]
    matrices, starts = (torch.broadcast_tensors(*pair) for pair in zip(p[1:], q[1:], strict=True))
    return [(p[0], matrices[0], starts[0]), (q[0], matrices[1], starts[1])]


def _values(*args: Any) -> Tensor:
    *operands, lengths, log_params = args
    if operands[0].numel() == 0:
        return _shapes(*operands).zero_()
    chains = [Chain.of(*chain, lengths, log_params) for chain in _chains(operands)]
    values, recomputed = formula.values(chains)
    report_chains(recomputed)
    result: Tensor = chains[0].layout.batched(values).contiguous()
    return result


def _shapes(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[:-2], dtype=torch.float64)


_entropy: Callable[..., Tensor] = operator(
    "entropy(Tensor x, Tensor bulk, Tensor p0, Tensor? other_x, Tensor? other_bulk, Tensor? other_p0,"
    " Tensor? lengths, bool log_params) -> Tensor",
    _values,
    _shapes,
    _Entropy,
)
