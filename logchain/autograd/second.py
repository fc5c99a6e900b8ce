"""The operators `log_norm_along` and `log_norm_second`: derivatives of a log-partition, and of its gradient.

    log_norm_along     sum(gradient of log Z * tangents)
    log_norm_second    the gradients of sum(weight * log_norm_along) with respect to weight, x, bulk and p0

torch's autograd finds them through `scan`, whichever schedule computed the log-partition. `by_log`: tangents and
gradients are those of the logarithms of bulk and p0.
"""

from typing import Any

import torch
from torch import Tensor

from ..transitions.dense import Dense
from .operator import operator
from .scan import Steps, second_derivatives, total


def _second(
    weight: Tensor, x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    *tangents, log_params, by_log = options
    if x.numel() == 0:
        return tuple(torch.zeros_like(operand) for operand in (weight, x, bulk, p0))
    weights = (bulk.double(), p0.double()) if by_log and not log_params else None
    operands = (x, bulk, p0) if weights is None else (x, *(one.log() for one in weights))

    def log_norm(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
        return total(Steps(x, Dense(bulk), p0, lengths, log_params or by_log))

    by_weight, *gradients = second_derivatives(log_norm, operands, weight, tangents)
    if weights is not None:
        gradients[1:] = [
            (gradient / one).masked_fill((gradient == 0) | (one == 0), 0.0)
            for gradient, one in zip(gradients[1:], weights, strict=True)
        ]
    if lengths is not None:  # on a GPU, lengths are not checked before
        by_weight = by_weight.masked_fill((lengths < 1) | (lengths > x.shape[-2]), torch.nan)
    results = zip((by_weight, *gradients), (weight, x, bulk, p0), strict=True)
    return tuple(gradient.to(operand.dtype).contiguous() for gradient, operand in results)


def _along(x: Tensor, *args: Any) -> Tensor:
    return _second(x.new_ones(x.shape[:-2], dtype=torch.float64), x, *args)[0]


def quotient(tangent: Tensor | None, weight: Tensor) -> Tensor | None:
    """The tangent of the logarithm of a weight, from that of the weight; 0 at weight 0."""
    zero = weight == 0
    return None if tangent is None else torch.where(zero, 0.0, tangent / torch.where(zero, 1.0, weight))


def _shapes(weight: Tensor, x: Tensor, bulk: Tensor, p0: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(operand.new_empty(operand.shape) for operand in (weight, x, bulk, p0))


_ARGUMENTS = (
    "Tensor x, Tensor bulk, Tensor p0, Tensor? lengths, Tensor? along_x, Tensor? along_bulk, Tensor? along_p0,"
    " bool log_params, bool by_log"
)
log_norm_along = operator(
    f"log_norm_along({_ARGUMENTS}) -> Tensor",
    _along,
    lambda x, *_: x.new_empty(x.shape[:-2], dtype=torch.float64),
)
log_norm_second = operator(
    f"log_norm_second(Tensor weight, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _second,
    _shapes,
)
