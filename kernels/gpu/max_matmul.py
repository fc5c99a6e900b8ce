"""The max-plus matrix product `c_ij = max_k (a_ik + b_kj)` and which k it is: the best where `log_matmul` sums all.

Operands as in `log_matmul`: (g, p, m, k) and (g, p, k, n), any strides, float32, float64, bfloat16 or float16. The
arithmetic is float32, or float64 if an operand is; a value is one rounded sum. The smallest k wins a tie; where no term
is finite the value is -inf and k is 0. A NaN wins over everything, the first one.

Cost: m n k additions and comparisons, no tensor cores. Tiles: both numbers of an output in registers and few enough of
them for several programs to a multiprocessor, from a model, not measured yet. Reference: `max` over k of the sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch

_ZERO = tl.constexpr(float("-inf"))


@triton.jit
def forward_kernel(
    a_ptr, b_ptr, out_ptr, argmax_ptr,
    p, m, n, k,
    stride_ag, stride_ap, stride_am, stride_ak,
    stride_bg, stride_bp, stride_bk, stride_bn,
    stride_og, stride_op, stride_om, stride_on,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of one product; `argmax` is contiguous."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    blocks_n = tl.cdiv(n, BLOCK_N)
    tiles = tl.cdiv(m, BLOCK_M) * blocks_n
    batch, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    z, y = (batch // p).to(tl.int64), (batch % p).to(tl.int64)
    rows = (tile // blocks_n * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = (tile % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    a_ptr += z * stride_ag + y * stride_ap + rows * stride_am
    b_ptr += z * stride_bg + y * stride_bp + columns * stride_bn
    best = tl.full((BLOCK_M, BLOCK_N), _ZERO, DTYPE)
    argmax = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for inner in tl.range(0, k, loop_unroll_factor=4):
        a = tl.load(a_ptr, mask=rows < m, other=_ZERO).to(DTYPE)
        b = tl.load(b_ptr, mask=columns < n, other=_ZERO).to(DTYPE)
        term = a[:, None] + b[None, :]
        better = (term > best) | ((term != term) & (best == best))
        best = tl.where(better, term, best)
        argmax = tl.where(better, inner, argmax)
        a_ptr += stride_ak
        b_ptr += stride_bk
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    out_ptr += z * stride_og + y * stride_op
    tl.store(out_ptr + rows[:, None] * stride_om + columns[None, :] * stride_on, best, mask=mask)
    argmax_ptr += batch.to(tl.int64) * m * n
    tl.store(argmax_ptr + rows[:, None] * n + columns[None, :], argmax, mask=mask)


# (BLOCK_M, BLOCK_N, warps) by the larger axis of the result
SMALL, LARGE = (16, 16, 1), (32, 32, 4)


def tiles(m: int, n: int) -> tuple[int, int, int]:
    """The tiles for results (m, n)."""
    return SMALL if max(m, n) <= 32 else LARGE


def forward(a: Tensor, b: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`max_k (a_ik + b_kj)` (g, p, m, n), written to `out` if that is given, and the k (g, p, m, n), int32.

    `out` must not overlap an operand.
    """
    g, p, m, k = a.shape
    n = b.shape[-1]
    dtype = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    if out is None:
        out = a.new_empty((g, p, m, n), dtype=dtype)
    assert b.shape == (g, p, k, n) and out.shape == (g, p, m, n) and out.dtype == dtype
    argmax = torch.empty((g, p, m, n), dtype=torch.int32, device=out.device)
    if out.numel():
        block_m, block_n, warps = tiles(m, n)
        programs = g * p * triton.cdiv(m, block_m) * triton.cdiv(n, block_n)
        with torch.cuda.device_of(out):
            forward_kernel[(programs,)](
                a, b, out, argmax, p, m, n, k, *launch.pitches(a), *launch.pitches(b), *launch.pitches(out),
                BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps,
            )  # fmt: skip
    return out, argmax
