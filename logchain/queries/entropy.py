"""The entropy of the posterior over the state paths of a batch of chains."""

import math

import torch
from torch import Tensor

from ..autograd.entropy import entropy as entropy_of_dense
from ..kernels.numbers import log_weights
from .operands import Operands, multiplied_out
from .product import log_norm, posteriors


def entropy(operands: Operands) -> Tensor:
    """`log Z - E[log w(z)]` [*B] in float64, differentiable once; 0 where no path is possible.

    The mean log-weight of a path is the sum of all logarithms, each times the expected number of its uses. That holds
    where entries are products of parameters; others are multiplied out.
    """
    if operands.transition.sums:
        operands = multiplied_out(operands)
    if operands.is_dense:
        return entropy_of_dense(*operands.dense)
    if operands.x.numel() == 0:
        return log_norm(operands)
    x, p0, *parameters = operands.tensors
    batch, sequence = operands.x.shape[:-2], range(operands.x.dim() - 2)
    # potentials relative to the largest leave posteriors as they are, and log Z small
    top = x.detach().amax(-1, keepdim=True)
    x = x.double() - top.double().masked_fill(~top.isfinite(), 0.0)
    if operands.lengths is not None:
        inside = torch.arange(x.shape[-2], device=x.device) < operands.lengths[..., None]
        x = torch.where(inside[..., None], x, 0.0)
    logs = [log_weights(one, operands.log_params, torch.float64) for one in (p0, *parameters)]
    # each sequence has counts of its own
    logs = [one.expand(*batch, *one.shape[len(batch) :]) for one in logs]
    own = operands.of(x, *logs)._replace(log_params=True)
    total, (states, counts, starts) = posteriors(own, (True, True, True))
    assert states is not None and counts is not None and starts is not None
    mean = torch.zeros_like(total)
    for used, log in zip((states, starts, *counts), (x, *logs), strict=True):
        terms = used * torch.where((used == 0) | (log == -math.inf), 0.0, log)
        mean = mean + terms.sum([axis for axis in range(terms.dim()) if axis not in sequence])
    return torch.where(total == -math.inf, 0.0, total - mean)
