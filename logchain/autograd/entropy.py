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
from ..operands import Operands, chain_of
from ..rescues import report_chains
from ..schedules import choose
from .chain import forward, gradient
from .chain_functions import Second as Covariances
from .chain_functions import if_needed
from .chain_operators import log_norm_here
from .operator import apply, call, operator, transform, with_batch_first
from .paths import finite_log
from .tangents import log_norm_along

Weights = tuple[Tensor, Tensor, Tensor]


def entropy(x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool) -> Tensor:
    """The entropy of the paths of each sequence [*B] in float64; 0 where none is possible."""
    found: Tensor = apply(_Entropy, _entropy, x, bulk, p0, lengths, log_params)
    return found


def divergence(p: Weights, q: Weights, lengths: Tensor | None, log_params: bool) -> Tensor:
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
        found = call(Covariances, -grad, x, bulk, p0, lengths, *tangents, ctx.log_params, True)
        return (*if_needed(found[1:], ctx.needs_input_grad[:3]), None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        x, bulk, p0, lengths, log_params = args
        operands = with_batch_first(info.batch_size, in_dims, x, bulk, p0, lengths)
        return call(_Entropy, *operands, log_params), 0


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
            of_p = list(call(Covariances, grad, *p, lengths, *tangents, log_params, True)[1:])
        if any(needs[3:6]):
            wanted = True, True, True
            kept_p, kept_q = (forward(*one, lengths, log_params, True) for one in (p, q))
            under_q = gradient(grad, *q, lengths, kept_q, log_params, True, wanted)
            under_p = gradient(grad, *p, lengths, kept_p, log_params, True, wanted)
            of_q = [one - other for one, other in zip(under_q, under_p, strict=True)]
            for index, weight in enumerate(() if log_params else q[1:], 1):
                counts = under_q[index] - under_p[index]  # 0 beside a NaN that nothing has used, behind the ends
                of_q[index] = torch.where((weight == 0) | (counts == 0), 0.0, counts / weight)
        found = (
            one if one is None else one.sum_to_size(operand.shape)
            for one, operand in zip((*of_p, *of_q), operands, strict=True)
        )
        return (*if_needed(found, needs[:6]), None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        *p, other_x, other_bulk, other_p0, lengths, log_params = args
        *p, lengths = with_batch_first(info.batch_size, (*in_dims[:3], in_dims[6]), p[0], p[1], p[2], lengths)
        q = with_batch_first(info.batch_size, (*in_dims[3:6], None), other_x, other_bulk, other_p0, None)
        return call(_Divergence, *p, *q[:3], lengths, log_params), 0


def _log_weights(x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool) -> Weights:
    """The logarithms of all weights, finite, in float64."""
    return finite_log(x, True), finite_log(bulk, log_params), finite_log(p0, log_params)


def _alike(p: Weights, q: Weights, *, steps: bool = True) -> tuple[Weights, Weights]:
    """Both chains with the axes that the matrices and the initial weights of either have: views."""
    lead = torch.broadcast_shapes(p[1].shape[:-3], q[1].shape[:-3])
    each = max(p[1].shape[-3], q[1].shape[-3]) if min(p[1].shape[-3], q[1].shape[-3]) else 0
    starts = torch.broadcast_tensors(p[2], q[2])
    bulks = [bulk.expand(*lead, each if steps else bulk.shape[-3], *bulk.shape[-2:]) for _, bulk, _ in (p, q)]
    return (p[0], bulks[0], starts[0]), (q[0], bulks[1], starts[1])


def _forward_entropy(x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool) -> Tensor:
    p = x, bulk, p0
    if not kernels.in_c(x) or x.numel() == 0:
        return _entropy_in_torch(p, lengths, log_params)
    layout, chain = chain_of(*p, lengths, log_params)
    values, unknown = kernels.entropy_in_c()(chain, None)
    found, left = layout.batched(values).contiguous(), layout.batched(unknown)
    if unknown.any():
        report_chains(unknown)
        found[left] = _entropy_in_torch(*_chosen(left, p, lengths), log_params)
    return found


def _forward_divergence(*args: Any) -> Tensor:
    p, q, lengths, log_params = args[:3], args[3:6], args[6], args[7]
    if not kernels.in_c(p[0]) or p[0].numel() == 0:
        return _divergence_in_torch(p, q, lengths, log_params)
    p, q = _alike(p, q, steps=False)
    (layout, chain), (_, other) = (chain_of(*one, lengths, log_params) for one in (p, q))
    values, unknown = kernels.entropy_in_c()(chain, other)
    found, left = layout.batched(values).contiguous(), layout.batched(unknown)
    if unknown.any():
        report_chains(unknown)
        (p, ends), (q, _) = (_chosen(left, one, lengths) for one in (p, q))
        found[left] = _divergence_in_torch(p, q, ends, log_params)
    return found


def _chosen(mask: Tensor, p: Weights, lengths: Tensor | None) -> tuple[Weights, Tensor | None]:
    """The operands and lengths of the sequences of a mask [*B], along one axis; what all share they still share."""
    x, bulk, p0 = p
    batch = x.shape[:-2]
    bulk, p0 = (
        value.expand(*batch, *value.shape[lead:])[mask] if value.shape[:lead].numel() > 1 else value.flatten(0, lead)
        for value, lead in ((bulk, bulk.dim() - 3), (p0, p0.dim() - 1))
    )
    return (x[mask], bulk, p0), None if lengths is None else lengths.expand(batch)[mask]


def _entropy_in_torch(p: Weights, lengths: Tensor | None, log_params: bool) -> Tensor:
    norm = _log_norm(p, lengths, log_params)
    expected = _expected(p, lengths, _log_weights(*p, log_params), log_params)
    return torch.where(norm == -torch.inf, 0.0, norm - expected)


def _divergence_in_torch(p: Weights, q: Weights, lengths: Tensor | None, log_params: bool) -> Tensor:
    """The same; +inf where a path of p, of a probability above 2^-1000, has none under q."""
    p, q = _alike(p, q)
    zero = -torch.inf if log_params else 0.0
    forbidden = (q[0] == -torch.inf).double(), (q[1] == zero).double(), (q[2] == zero).double()
    ruled_out = _expected(p, lengths, forbidden, log_params) > 0
    weights = _log_weights(*p, log_params), _log_weights(*q, log_params)
    differences = tuple(one - other for one, other in zip(*weights, strict=True))
    norm, other_norm = (_log_norm(one, lengths, log_params) for one in (p, q))
    found = _expected(p, lengths, differences, log_params) - norm + torch.where(ruled_out, 0.0, other_norm)
    return torch.where(norm == -torch.inf, 0.0, torch.where(ruled_out, torch.inf, found))


def _log_norm(p: Weights, lengths: Tensor | None, log_params: bool) -> Tensor:
    x, bulk, p0 = (operand.double() for operand in p)
    segments = choose.of(x, bulk, p0, log_params, lengths is not None, "auto").segments
    return log_norm_here(Operands(x, bulk, p0, lengths, log_params), False, segments)[0]


def _expected(p: Weights, lengths: Tensor | None, tangents: tuple[Tensor, ...], log_params: bool) -> Tensor:
    found: Tensor = log_norm_along(*p, lengths, *tangents, log_params, True)
    return found


def _shapes(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[:-2], dtype=torch.float64)


_P, _Q = "Tensor x, Tensor bulk, Tensor p0", "Tensor other_x, Tensor other_bulk, Tensor other_p0"
_entropy = operator(f"entropy({_P}, Tensor? lengths, bool log_params) -> Tensor", _forward_entropy, _shapes)
_divergence = operator(
    f"divergence({_P}, {_Q}, Tensor? lengths, bool log_params) -> Tensor", _forward_divergence, _shapes
)
transform("entropy", _Entropy)
transform("divergence", _Divergence)
