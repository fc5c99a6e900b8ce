"""The chain as a composition of differentiable log-semiring products: what a second derivative is taken through."""

import math

import torch
from torch import Tensor

from ._layout import Layout
from ._log_matmul import log_matmul


def differentiable_log_norm(x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool) -> Tensor:
    """The log-partition [*B] in float64, with a graph of v nodes that holds a message and a matrix each."""
    layout = Layout.of(x, bulk)
    x, bulk, p0 = layout.steps_first(x), layout.matrices(bulk), layout.weights(p0)
    v, *lead, c = x.shape
    g = math.prod(bulk.shape[1:-2])
    ends = None if lengths is None else layout.sequences(lengths)[..., None]  # (g, m, 1)
    start = p0.double() if log_params else _log(p0.double())
    message = (start + x[0].double()).reshape(g, -1, c)  # (g, m, c)
    scale = torch.zeros_like(message[..., 0]).detach()
    for step in range(1, v):
        top = message.detach().amax(-1, keepdim=True)
        top.masked_fill_(top == -math.inf, 0.0)
        scale = scale + top[..., 0]
        message = message - top
        matrix = bulk[min(step, len(bulk)) - 1].reshape(g, c, c).double()
        potential = x[step].double().reshape(message.shape)
        if ends is not None:  # NaN behind the end must not come near
            matrix = torch.where((ends > step).any(1, keepdim=True), matrix, 1.0)
            potential = torch.where(ends > step, potential, 0.0)
        after = log_matmul(message, matrix if log_params else _log(matrix)) + potential
        message = after if ends is None else torch.where(ends > step, after, message)
    total = log_matmul(message, message.new_zeros(g, c, 1))[..., 0]
    return layout.batched(total + scale)


def _log(p: Tensor) -> Tensor:
    """log p with a gradient of 0 at 0."""
    zero = p == 0
    return p.masked_fill(zero, 1.0).log().masked_fill(zero, -math.inf)
