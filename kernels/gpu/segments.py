"""The products of each so many consecutive matrices of a stack, side by side, a program reading every matrix once.

    (M_1 D_1 ... M_L D_L)   (M_{L+1} D_{L+1} ... M_{2 L} D_{2 L})   ...          D_i = diag(exp x_i), or all 1

The products are a stack themselves. Numerics, cost and tiles are those of `forward_chain.segment_product`.
"""

import torch
from torch import Tensor

from . import forward_chain


def segment_products(
    matrices: Tensor,
    x: Tensor | None,
    length: int,
    *,
    log_params: bool,
    rescued: Tensor,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The products of each `length` matrices (s, g, c, c) and of the rest, and what was taken out of them (., g).

    `x` (s, g, c), or None. The offsets are float64; the products have `dtype`, by default that of the arithmetic.
    """
    count, g, c, _ = matrices.shape
    whole, rest = divmod(count, length)
    dtype = dtype or forward_chain.arithmetic_dtype(matrices if x is None else x, matrices)
    out = torch.empty(whole + (rest > 0), g, c, c, dtype=dtype, device=matrices.device)
    offset = torch.empty(out.shape[:2], dtype=torch.float64, device=matrices.device)
    for first, segments, steps in ((0, whole, length), (whole, 1, rest)):
        if segments and steps:
            part = slice(first * length, first * length + segments * steps)
            forward_chain.segment_product(
                matrices[part].unflatten(0, (segments, steps)).transpose(0, 1),
                None if x is None else x[part].unflatten(0, (segments, steps)).transpose(0, 1),
                log_params=log_params,
                dtype=dtype,
                out=out[first : first + segments],
                offset=offset[first : first + segments],
                rescued=rescued,
            )
    return out, offset
