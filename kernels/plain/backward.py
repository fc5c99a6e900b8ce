"""The gradients of a batch of chains' log-partition, by the backward recursion in float64 logarithms.

    b_{v-1} = 0               b_{i-1} = log(P_i exp(x_i + b_i))
    d log Z / d x_i = posterior_i = softmax(a_i + b_i)
    d log Z / d log P_i(j, k) = posterior_i(k) P_i(j, k) exp(a_{i-1}(j)) / sum over j

a_i are the forward messages that `forward` kept. Each posterior is normalized by its own sum, so that rounding errors
of messages do not add up along the chain, and a backward message matters only up to an additive constant.
"""

import math

import torch
from torch import Tensor

from ..chain import Chain
from ..message import Residuals
from ..numbers import shifted
from . import matmul as log_matmul
from .forward import forward, potentials, transitions


def backward(
    chain: Chain,
    residuals: Residuals,
    weight: Tensor,
    following: Tensor | None,
    grad_x: Tensor | None,
    grad_bulk: Tensor | None,
) -> Tensor:
    """The gradient of `sum(weight * log_norm)` with respect to p0, or the backward message of the step that entered.

    Args:
        chain: the operands that `forward` was called with.
        residuals: the result of `forward`. For a stretch, replace its `log_norm` by that of the whole chain: -inf there
            marks sequences without a possible path, which have gradient 0.
        weight: (g, m); sequences of weight 0 have gradient 0, whatever they hold.
        following: the backward message of each sequence's last step (g, m, c), float64 logarithms up to an additive
            constant; None for zeros, where the chain ends.
        grad_x: memory (v, *lead, c) into which the gradient of x is written; None where it is not wanted.
        grad_bulk: memory (s, *sets, c, c), each matrix contiguous, into which the gradient of `bulk` is written, or of
            its logarithms; None where it is not wanted.

    Returns:
        Where no message entered, the gradients of each sequence's p0 (*lead, c), in float64: one may exceed float32
        although their sum does not. Otherwise the backward message of the step that entered (g, m, c), float64
        logarithms up to an additive constant: the `following` of the stretch before.
    """
    if residuals.halved:  # by Triton kernels
        residuals, _ = forward(chain, keep=torch.empty_like(residuals.messages))
    g, c, entered = chain.g, chain.c, int(residuals.entered)
    weight = weight.double().masked_fill(residuals.log_norm == -math.inf, 0.0)[..., None]
    counts = torch.zeros(g, c, c, dtype=torch.float64, device=weight.device)
    message = last = counts.new_zeros(g, chain.m, c) if following is None else following
    posterior = torch.zeros_like(last)
    for step in reversed(range(chain.v)):
        alive_weight = weight if chain.ended is None else weight.masked_fill(chain.ended[step], 0.0)
        posterior = torch.softmax(residuals.logs(step + entered) + message, -1)
        posterior = (posterior * alive_weight).masked_fill(alive_weight == 0, 0.0)
        if grad_x is not None:
            grad_x[step] = posterior.view(grad_x.shape[1:])
        if step + entered == 0:
            break
        x, (matrix, _) = potentials(chain, step)[0], transitions(chain, step, entered)
        if grad_bulk is not None:
            index = step - 1 + entered
            before = residuals.logs(index).masked_fill(alive_weight == 0, -math.inf)
            step_counts = log_matmul.backward(posterior, before, matrix, False, True, torch.float64)[1]
            assert step_counts is not None
            if len(chain.bulk) == 1:
                counts += step_counts
            else:
                grad_bulk[index] = _gradient(chain, step_counts, chain.bulk[index])
        earlier = shifted(log_matmul.forward(x + message, matrix.mT, torch.float64)[0])[0]
        message = earlier if chain.ended is None else torch.where(chain.ended[step], last, earlier)
    if grad_bulk is not None and len(chain.bulk) == 1:
        grad_bulk[0] = _gradient(chain, counts, chain.bulk[0])
    if residuals.entered:
        return message.masked_fill(weight == 0, 0.0)
    return _gradient(chain, posterior.view(*chain.lead, c), chain.p0.expand(*chain.lead, c))


def _gradient(chain: Chain, counts: Tensor, weights: Tensor) -> Tensor:
    """The gradient of weights, or of their logarithms if the chain asks for that, from the latter `counts`.

    It has the shape of `weights`, and is exactly 0 at weight 0.
    """
    counts = counts.view(weights.shape)
    if chain.log_params or chain.by_log:
        return counts
    return (counts / weights.double()).masked_fill(counts == 0, 0.0)
