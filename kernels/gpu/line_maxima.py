"""The maxima of the rows of matrices and of the columns of others, by one kernel that reads each entry once.

What a product of matrices of logarithms subtracts from its operands, where a program has not all of their terms, see
`log_matmul`. Arguments of the kernel are those of that product.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .log_tile import STRIDES, VARYING, left_operand, right_operand, sizes
from .pairs import ZERO
from .tiles import load

# rows or columns whose maxima one program finds, and terms of theirs at a time
_MAXIMA = {"BLOCK": 32, "BLOCK_K": 64, "num_warps": 4}


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=STRIDES)
def maxima_kernel(
    a_ptr, b_ptr, top_ptr, p, m, n, k,
    stride_ag, stride_ap, stride_am, stride_ak, stride_bg, stride_bp, stride_bk, stride_bn,
    LAYOUT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program finds the maxima of BLOCK rows of `a`, or of BLOCK columns of `b`, which follow those of all rows."""
    DTYPE: tl.constexpr = top_ptr.dtype.element_ty
    blocks_m, blocks = tl.cdiv(m, BLOCK), tl.cdiv(m, BLOCK) + tl.cdiv(n, BLOCK)
    batches = (tl.num_programs(0) // blocks).to(tl.int64)
    batch, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    z, y = batch // p, batch % p
    m, n, k = sizes(m, n, k, LAYOUT)
    if block < blocks_m:
        left, stride_m, stride_left = left_operand(a_ptr, z, y, stride_ag, stride_ap, stride_am, stride_ak, LAYOUT)
        rows = block * BLOCK + tl.arange(0, BLOCK)
        row = tl.max(maxima(left, rows, m, k, stride_m, stride_left, BLOCK_K, False, DTYPE), 1)
        tl.store(top_ptr + batch * m + rows, row, mask=rows < m)
    else:
        right, stride_right, stride_n = right_operand(b_ptr, z, y, stride_bg, stride_bp, stride_bk, stride_bn, LAYOUT)
        columns = (block - blocks_m) * BLOCK + tl.arange(0, BLOCK)
        column = tl.max(maxima(right, columns, n, k, stride_n, stride_right, BLOCK_K, True, DTYPE), 0)
        tl.store(top_ptr + batches * m + batch * n + columns, column, mask=columns < n)


@triton.jit
def maxima(ptr, own, m, k, stride_m, stride_k, BLOCK_K: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr):
    """The largest of each BLOCK_K entries of some rows (m, k), or of columns (k, m)."""
    if COLUMNS:
        top = tl.full((BLOCK_K, own.shape[0]), ZERO, DTYPE)
    else:
        top = tl.full((own.shape[0], BLOCK_K), ZERO, DTYPE)
    for first in tl.range(0, k, BLOCK_K):
        inner = first + tl.arange(0, BLOCK_K)
        if COLUMNS:
            top = tl.maximum(top, load(ptr, inner, own, k, m, stride_k, stride_m, DTYPE, ZERO))
        else:
            top = tl.maximum(top, load(ptr, own, inner, m, k, stride_m, stride_k, DTYPE, ZERO))
    return top


def maxima_of(matrices: Tensor) -> Tensor:
    """The largest entries of the rows of square matrices (g, p, c, c), and of their columns: (g, p, 2, c)."""
    dtype = torch.promote_types(matrices.dtype, torch.float32)
    found = torch.empty((2, *matrices.shape[:3]), dtype=dtype, device=matrices.device)
    if found.numel():
        with torch.cuda.device_of(matrices):
            write_maxima(matrices, matrices, found, launch.layout(matrices, matrices))
    return found.movedim(0, 2)


def write_maxima(a: Tensor, b: Tensor, found: Tensor, layout: str) -> None:
    """Write the maxima of the rows of all `a`, then of the columns of all `b`."""
    (g, p, m, k), n = a.shape, b.shape[-1]
    blocks_of_lines = triton.cdiv(m, _MAXIMA["BLOCK"]) + triton.cdiv(n, _MAXIMA["BLOCK"])
    launch.run(
        maxima_kernel, (g * p * blocks_of_lines,), a, b, found, p, m, n, k, *launch.pitches(a), *launch.pitches(b),
        LAYOUT=layout, **_MAXIMA,
    )  # fmt: skip
