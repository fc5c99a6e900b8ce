"""What the operators of a chain compute along tangents: the derivatives of its log-partition and of its gradient.

Both are sums over paths in log space, whichever schedule found what they are derivatives of.
"""

from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..kernels.chain import Chain
from ..kernels.plain import messages as log_messages
from ..kernels.plain.messages import Gradients, Tangents
from ..layout import Layout
from ..operands import chain_of, marked
from .operator import operator


def _along(
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    lengths: Tensor | None,
    along_x: Tensor | None,
    along_bulk: Tensor | None,
    along_p0: Tensor | None,
    log_params: bool,
    by_log: bool,
) -> Tensor:
    if x.numel() == 0:
        return x.new_zeros(x.shape[:-2], dtype=torch.float64)
    layout, chain = chain_of(x, bulk, p0, lengths, log_params)
    tangents = _tangents(layout, chain, along_x, along_bulk, along_p0, log_params or by_log)
    found = log_messages.tangent(chain, kernels.log_matmul_kernels(x), tangents)
    return layout.batched(marked(chain, found[..., None])[..., 0]).contiguous()


def _along_shapes(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[:-2], dtype=torch.float64)


def _second(
    grad: Tensor,
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    lengths: Tensor | None,
    along_x: Tensor | None,
    along_bulk: Tensor | None,
    along_p0: Tensor | None,
    log_params: bool,
    by_log: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if x.numel() == 0:
        return torch.zeros_like(grad), torch.zeros_like(x), torch.zeros_like(bulk), torch.zeros_like(p0)
    layout, chain = chain_of(x, bulk, p0, lengths, log_params)
    tangents = _tangents(layout, chain, along_x, along_bulk, along_p0, log_params or by_log)
    weight = layout.sequences(grad).double()
    along, first, derived = log_messages.second(chain, kernels.log_matmul_kernels(x), weight, tangents)
    if not log_params and not by_log:  # the first derivative is that of the logarithm over the weight itself
        for found, counts, tangent in zip(derived[1:], first[1:], tangents[1:], strict=True):
            if tangent is not None:
                found -= torch.where(counts == 0, 0.0, counts * tangent)
    out = torch.empty_like(grad, memory_format=torch.contiguous_format).copy_(layout.batched(along))
    return out, *gradients_of(layout, chain, derived, x, bulk, p0)


def gradients_of(
    layout: Layout, chain: Chain, found: Gradients, x: Tensor, bulk: Tensor, p0: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in the operands' own shapes, from those of logarithms, which are divided in place."""
    if not chain.log_params:
        linear = chain.bulk.reshape(found.bulk.shape).double(), _own(chain, chain.p0)
        for value, gradient in zip(linear, found[1:], strict=True):
            # 0 also for a NaN that nothing has used, behind the ends
            nothing = (gradient == 0) | (value == 0)
            gradient.div_(value).masked_fill_(nothing, 0.0)
    out = tuple(torch.zeros_like(value, memory_format=torch.contiguous_format) for value in (x, bulk, p0))
    layout.steps_first(out[0])[: chain.v] = found.x.view(chain.v, *chain.lead, chain.c)
    matrices = layout.matrices(out[1])[: chain.v - 1]
    matrices.copy_(found.bulk.view(matrices.shape))
    out[2].copy_(layout.states(found.p0.view(*chain.lead, chain.c)).sum_to_size(p0.shape))
    return out[0], out[1], out[2]


def _second_shapes(grad: Tensor, x: Tensor, bulk: Tensor, p0: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(operand.new_empty(operand.shape) for operand in (grad, x, bulk, p0))


def _tangents(
    layout: Layout, chain: Chain, x: Tensor | None, bulk: Tensor | None, p0: Tensor | None, by_log: bool
) -> Tangents:
    """Tangents of the logarithms; exactly 0 where a linear parameter is."""
    shape = (len(chain.bulk), chain.g, chain.c, chain.c)
    if x is not None:
        x = layout.steps_first(x)[: chain.v].reshape(chain.v, chain.g, chain.m, chain.c).double()
    if bulk is not None:
        bulk = layout.matrices(bulk)[: chain.v - 1].reshape(shape).double()
    if p0 is not None:
        p0 = _own(chain, layout.weights(p0))
    if not by_log:
        if bulk is not None:
            linear = chain.bulk.reshape(shape).double()
            bulk = (bulk / linear).masked_fill_(linear == 0, 0.0)
        if p0 is not None:
            linear = _own(chain, chain.p0)
            p0 = (p0 / linear).masked_fill_(linear == 0, 0.0)
    return Tangents(x, bulk, p0)


def _own(chain: Chain, p0: Tensor) -> Tensor:
    """(*lead or ones, c) as (g, m, c) in float64."""
    return p0.double().expand(*chain.lead, chain.c).reshape(chain.g, chain.m, chain.c)


_OPERANDS = "Tensor x, Tensor bulk, Tensor p0, Tensor? lengths"
_ALONG = "Tensor? along_x, Tensor? along_bulk, Tensor? along_p0"

log_norm_along = operator(
    f"log_norm_along({_OPERANDS}, {_ALONG}, bool log_params, bool by_log) -> Tensor", _along, _along_shapes
)
log_norm_second = operator(
    f"log_norm_second(Tensor grad, {_OPERANDS}, {_ALONG}, bool log_params, bool by_log)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _second,
    _second_shapes,
)
