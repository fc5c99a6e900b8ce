"""The log-partition of a chain by `matrix_product` of its matrices, each with the potentials of the step it leads into.

Derivatives of all orders that products of matrices have are torch's, by composition.
"""

import math

import torch
from torch import Tensor

from ..kernels.numbers import relative_logs
from .matmul import log_matmul
from .paths import sum_of_logs
from .products import log_products


def log_norm_by_tree(x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool) -> Tensor:
    """The log-partition [*B] in float64 of a chain of two variables or more. Arguments have been checked."""
    *batch, v, c = x.shape
    x, bulk, p0 = x.double(), bulk.double(), p0.double()
    if lengths is not None:  # the identity past a sequence's end
        padding = torch.arange(1, v, device=x.device) >= lengths[..., None]
        identity = torch.eye(c, dtype=x.dtype, device=x.device)
        bulk = torch.where(padding[..., None, None], identity.log() if log_params else identity, bulk)
        x = torch.cat([x[..., :1, :], x[..., 1:, :].masked_fill(padding[..., None], 0.0)], -2)
    x, top_x = relative_logs(x, -1, log=True)
    bulk, top_bulk = relative_logs(bulk, (-2, -1), log=log_params)
    p0, top_p0 = relative_logs(p0, -1, log=log_params)
    matrices = _plus(bulk, x[..., 1:, None, :]).expand(*batch, v - 1, c, c)
    start = _plus(p0, x[..., 0, :]).expand(*batch, c)[..., None, :]
    last = log_matmul(log_matmul(start, log_products(matrices, False)), start.new_zeros(*batch, c, 1))
    tops = top_x[..., 0], top_bulk[..., 0, 0].expand(*batch, v - 1), top_p0.expand(*batch, 1)
    return sum_of_logs(torch.cat([*tops, last[..., 0]], -1), exact=True)


def _plus(a: Tensor, b: Tensor) -> Tensor:
    """The sum, -inf where an infinite weight meets one of 0."""
    total = a + b
    return torch.where(total.isnan() & ~a.isnan() & ~b.isnan(), -math.inf, total)
