"""The products of each L consecutive matrices of a stack, computed in parallel, each matrix read once.

    (M_1 D_1 ... M_L D_L)   (M_{L+1} D_{L+1} ... M_{2 L} D_{2 L})   ...          D_i = diag(exp x_i), or all 1

The products are a stack of logarithms. Numerics, cost and tiles are those of `forward_chain`.
"""

import torch
from torch import Tensor

from .chain_tiles import Widths, tiles
from .forward_chain import launch


def segment_product(
    bulk: Tensor,
    x: Tensor | None,
    *,
    log_params: bool,
    dtype: torch.dtype,
    rescued: Tensor,
    out: Tensor | None = None,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`log(M_1 D_1 M_2 D_2 ... M_L D_L)` with `D_i = diag(exp x_i)`, or all 1.

    Each row of the product is the forward message of a sequence that starts in one state. One program computes all rows
    up to c = 16, or 32 where 4 divides c and the strides; else blocks of 16 rows read a matrix, which is cached then.

    `bulk` (L, g1, g2, c, c), any strides, so that `stack.unflatten(...)` need not be copied; `x` (L, g1, g2, c).
    `dtype` is that of the arithmetic, as in `forward`.
    Returns the product (g1, g2, c, c) less its largest entry, and that entry (g1, g2) in float64, in `out` and
    `offset`, contiguous, if these are given. An impossible product is -inf with offset 0.
    """
    length, outer, inner, c, _ = bulk.shape
    if out is None:
        out = torch.empty(outer, inner, c, c, dtype=dtype, device=bulk.device)
    if offset is None:
        offset = torch.empty(outer, inner, dtype=torch.float64, device=bulk.device)
    assert length > 0 and out.is_contiguous() and offset.is_contiguous() and out.dtype == dtype
    x = None if x is None else x[..., None, :].expand(-1, -1, -1, c, -1)
    widths = Widths.of(bulk, x)
    choice = tiles(c, c, dtype, min(widths))
    joint = choice.whole and choice.block_s >= c
    messages = torch.empty(2, outer * inner, c, c, dtype=dtype, device=bulk.device)
    row_offset = offset if joint else torch.empty(outer, inner, c, dtype=torch.float64, device=bulk.device)
    launch(
        x, bulk, None, None, messages, out, row_offset, None, None, rescued, length + 1, c, choice, widths,
        dtype, log_params=log_params, keep=False, segment=True,
    )  # fmt: skip
    if not joint:
        dead = out.amax(-1) == -torch.inf
        torch.amax(row_offset.masked_fill_(dead, -torch.inf), -1, out=offset)
        offset.masked_fill_(offset == -torch.inf, 0.0)
        out += (row_offset - offset[..., None]).masked_fill_(dead, 0.0).to(dtype)[..., None]
    return out, offset


def segment_products(
    matrices: Tensor, x: Tensor | None, length: int, *, log_params: bool, dtype: torch.dtype, rescued: Tensor
) -> tuple[Tensor, Tensor]:
    """The products of each `length` of s matrices, and of a remainder: (n, g, c, c) and their offsets (n, g), float64.

    `matrices` (s, g, c, c); `x` (s, g, c), or None. `dtype` is that of the arithmetic and of the products.
    """
    count, g, c, _ = matrices.shape
    whole, remainder = divmod(count, length)
    out = torch.empty(whole + (remainder > 0), g, c, c, dtype=dtype, device=matrices.device)
    offset = torch.empty(out.shape[:2], dtype=torch.float64, device=matrices.device)
    for first, segments, steps in ((0, whole, length), (whole, 1, remainder)):
        if segments and steps:
            part = slice(first * length, first * length + segments * steps)
            segment_product(
                matrices[part].unflatten(0, (segments, steps)).transpose(0, 1),
                None if x is None else x[part].unflatten(0, (segments, steps)).transpose(0, 1),
                log_params=log_params, dtype=dtype, rescued=rescued,
                out=out[first : first + segments], offset=offset[first : first + segments],
            )  # fmt: skip
    return out, offset
