"""The operators `log_norm_along` and `log_norm_second`: derivatives of a log-partition, and of its gradient.

    log_norm_along     sum(gradient * tangents)
    log_norm_second    the gradients of sum(grad * log_norm_along) with respect to grad, x, bulk and p0

Both carry messages with their tangents in log space, step by step, whichever schedule computed the log-partition.
`by_log`: tangents and gradients are those of the logarithms of bulk and p0.
"""

from collections.abc import Sequence
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


def _along(*args: Any) -> Tensor:
    x, bulk, p0, lengths, *tangents, log_params, by_log = args
    if x.numel() == 0:
        return _along_shapes(x).zero_()
    layout, chain = chain_of(x, bulk, p0, lengths, log_params)
    along = _tangents(layout, chain, tangents, log_params or by_log)
    derivative = log_messages.tangent(chain, kernels.log_matmul_kernels(x), along)
    return layout.batched(marked(chain, derivative[..., None])[..., 0]).contiguous()


def _along_shapes(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[:-2], dtype=torch.float64)


def _second(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    x, bulk, p0, lengths, *tangents, log_params, by_log = args
    if x.numel() == 0:
        return tuple(shape.zero_() for shape in _second_shapes(grad, x, bulk, p0))
    layout, chain = chain_of(x, bulk, p0, lengths, log_params)
    along = _tangents(layout, chain, tangents, log_params or by_log)
    weight = layout.sequences(grad).double()
    derivative, first, second = log_messages.second(chain, kernels.log_matmul_kernels(x), weight, along)
    if not log_params and not by_log:  # the derivative of `counts / weight` has that of the denominator too
        for gradient, counts, tangent in zip(second[1:], first[1:], along[1:], strict=True):
            if tangent is not None:
                gradient -= torch.where(counts == 0, 0.0, counts * tangent)
    by_grad = torch.empty_like(grad, memory_format=torch.contiguous_format).copy_(layout.batched(derivative))
    return by_grad, *gradients_of(layout, chain, second, x, bulk, p0)


def gradients_of(
    layout: Layout, chain: Chain, by_log: Gradients, x: Tensor, bulk: Tensor, p0: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the operands in their own shapes, from those of their logarithms, which are overwritten."""
    if not chain.log_params:
        linear = chain.bulk.reshape(by_log.bulk.shape).double(), _by_sequence(chain, chain.p0)
        for value, gradient in zip(linear, by_log[1:], strict=True):
            # 0 also where the weight is NaN behind a sequence's end
            nothing = (gradient == 0) | (value == 0)
            gradient.div_(value).masked_fill_(nothing, 0.0)
    grad_x, grad_bulk, grad_p0 = (
        torch.zeros_like(operand, memory_format=torch.contiguous_format) for operand in (x, bulk, p0)
    )
    layout.steps_first(grad_x)[: chain.v] = by_log.x.view(chain.v, *chain.lead, chain.c)
    matrices = layout.matrices(grad_bulk)[: chain.v - 1]
    matrices.copy_(by_log.bulk.view(matrices.shape))
    grad_p0.copy_(layout.states(by_log.p0.view(*chain.lead, chain.c)).sum_to_size(p0.shape))
    return grad_x, grad_bulk, grad_p0


def _second_shapes(grad: Tensor, x: Tensor, bulk: Tensor, p0: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(operand.new_empty(operand.shape) for operand in (grad, x, bulk, p0))


def _tangents(layout: Layout, chain: Chain, along: Sequence[Tensor | None], by_log: bool) -> Tangents:
    """The tangents of the logarithms, from those of the operands; exactly 0 at weight 0. `by_log`: as they are."""
    x, bulk, p0 = along
    shape = (len(chain.bulk), chain.g, chain.c, chain.c)
    if x is not None:
        x = layout.steps_first(x)[: chain.v].reshape(chain.v, chain.g, chain.m, chain.c).double()
    if bulk is not None:
        bulk = layout.matrices(bulk)[: chain.v - 1].reshape(shape).double()
    if p0 is not None:
        p0 = _by_sequence(chain, layout.weights(p0))
    if not by_log:
        bulk = quotient(bulk, chain.bulk.reshape(shape).double())
        p0 = quotient(p0, _by_sequence(chain, chain.p0))
    return Tangents(x, bulk, p0)


def quotient(tangent: Tensor | None, weight: Tensor) -> Tensor | None:
    """The tangent of the logarithm of a weight, from that of the weight; 0 at weight 0."""
    zero = weight == 0
    return None if tangent is None else torch.where(zero, 0.0, tangent / torch.where(zero, 1.0, weight))


def _by_sequence(chain: Chain, p0: Tensor) -> Tensor:
    """Initial weights (*lead or ones, c) as (g, m, c) in float64."""
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
