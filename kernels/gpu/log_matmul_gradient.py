"""The gradients of the log-semiring matrix product, which is computed again from the operands.

    grad_a(i, k) = sum_j weight_ij exp(a_ik + b_kj - c_ij)          grad_b = the same of the transposed product

Operands as in `log_matmul`: a (g, p, m, k) and b (g, p, k, n), any strides; arithmetic and gradients' sums float32, or
float64 if an operand is.

Numerics. The maxima of rows of `a` and of columns of `b` are subtracted first, and `c = log(exp(a) exp(b))` is computed
from the differences: offsets of 1e4 would otherwise leave no digits of a share. The share of term k in entry (i, j) is

    exp(a_ik) exp(b_kj) / exp(c_ij)

and weighted sums of shares are one product of tiles. Entries so far below their maxima that exponentials underflow, or
that `weight / exp(c)` may overflow, are left out of it: the programs that find one add its shares term by term, one j
after another. A weight of 0 and a result of -inf give exactly 0.

Cost: the forward product and one product for each gradient. The shifted operands and `c` lie in a workspace of bounded
size, a block of matrices after the other. A long sum over j is cut into parts, which are added in a fixed order: two
runs agree to the last bit.

Tiles: those of `log_matmul` up to 64 x 64, from a model, not measured yet. Reference: `logchain.reference.matmul`.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch, log_matmul
from .log_matmul_tiles import Tiles
from .tiles import any_of, at, exp, load, multiple, operand

# entries of each buffer of the workspace, or one matrix if that is larger
_HELD = 2**24

# programs that keep a device busy, and the least terms of a part of a sum
_PROGRAMS, _SHORTEST = 264, 1024

# rows to which shares are added term by term at a time
_PIECE = tl.constexpr(16)

# the exponentials of terms have not underflowed where c is above this, see `TRUSTED`
_DEEP = tl.constexpr(-55.0)

# weight / exp(c) does not overflow in a product where it is below this
_LARGE = tl.constexpr(1e30)


@triton.jit
def gradient_kernel(
    weight_ptr, c_ptr, a_ptr, b_ptr, out_ptr,
    p, m, n, k, span, parts,
    stride_wg, stride_wp, stride_wm, stride_wn,
    stride_cg, stride_cp, stride_cm, stride_cn,
    stride_ag, stride_ap, stride_am, stride_ak,
    stride_bg, stride_bp, stride_bk, stride_bn,
    stride_og, stride_op, stride_om, stride_ok, stride_part,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program computes one tile of `grad_a`, for the terms j of one part."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    m, n, k = multiple(m, WIDTH), multiple(n, WIDTH), multiple(k, WIDTH)
    blocks_k = tl.cdiv(k, BLOCK_K)
    tiles = tl.cdiv(m, BLOCK_M) * blocks_k
    tile = tl.program_id(0) % tiles
    part, batch = tl.program_id(0) // tiles % parts, tl.program_id(0) // tiles // parts
    z, y = (batch // p).to(tl.int64), (batch % p).to(tl.int64)
    weight_ptr += z * stride_wg + y * stride_wp
    c_ptr += z * stride_cg + y * stride_cp
    a_ptr += z * stride_ag + y * stride_ap
    b_ptr += z * stride_bg + y * stride_bp
    out_ptr += z * stride_og + y * stride_op + part.to(tl.int64) * stride_part
    begin, end = part * span, tl.minimum(part * span + span, n)

    rows = tile // blocks_k * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tile % blocks_k * BLOCK_K + tl.arange(0, BLOCK_K)
    sums = tl.zeros((BLOCK_M, BLOCK_K), DTYPE)
    deep = tl.zeros((BLOCK_M,), tl.int32)
    for start in range(begin, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        weight = load(weight_ptr, rows, columns, m, end, stride_wm, stride_wn, DTYPE, 0.0)
        c = load(c_ptr, rows, columns, m, end, stride_cm, stride_cn, DTYPE, float("-inf"))
        b = load(b_ptr, inner, columns, k, end, stride_bk, stride_bn, DTYPE, float("-inf"))
        quotient, pairwise = _quotient(weight, c)
        deep = tl.maximum(deep, tl.max(pairwise.to(tl.int32), 1))
        left, right = operand(quotient, PRECISION), operand(tl.trans(exp(b)), PRECISION)
        sums = tl.dot(left, right, sums, input_precision=PRECISION, out_dtype=DTYPE)
    a = load(a_ptr, rows, inner, m, k, stride_am, stride_ak, DTYPE, float("-inf"))
    mask = (rows < m)[:, None] & (inner < k)[None, :]
    sums = tl.where(a == float("-inf"), 0.0, sums * exp(a))
    tl.store(at(out_ptr, rows, inner, stride_om, stride_ok), sums, mask=mask)
    if any_of(deep > 0):
        tl.debug_barrier()  # the tile was stored by other threads of this program
        for piece in range(0, BLOCK_M // _PIECE):
            _add_deep(
                weight_ptr, c_ptr, a_ptr, b_ptr, out_ptr, tile // blocks_k * BLOCK_M + piece * _PIECE, inner,
                begin, end, m, k, stride_wm, stride_wn, stride_cm, stride_cn, stride_am, stride_ak,
                stride_bk, stride_bn, stride_om, stride_ok,
            )  # fmt: skip


@triton.jit
def _add_deep(
    weight_ptr, c_ptr, a_ptr, b_ptr, out_ptr, first_row, inner, begin, end, m, k,
    stride_wm, stride_wn, stride_cm, stride_cn, stride_am, stride_ak, stride_bk, stride_bn, stride_om, stride_ok,
):  # fmt: skip
    """Add to a piece of a stored tile the shares that were left out, those of one j at a time."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    rows = first_row + tl.arange(0, _PIECE)
    mask = (rows < m)[:, None] & (inner < k)[None, :]
    sums = load(out_ptr, rows, inner, m, k, stride_om, stride_ok, DTYPE, 0.0)
    a = load(a_ptr, rows, inner, m, k, stride_am, stride_ak, DTYPE, float("-inf"))
    for column in range(begin, end):
        j = tl.full((1,), column, tl.int64)
        weight = load(weight_ptr, rows, j, m, end, stride_wm, stride_wn, DTYPE, 0.0)
        c = load(c_ptr, rows, j, m, end, stride_cm, stride_cn, DTYPE, 0.0)
        b = tl.trans(load(b_ptr, inner, j, k, end, stride_bk, stride_bn, DTYPE, float("-inf")))
        _, pairwise = _quotient(weight, c)
        sums += tl.where(pairwise, weight * exp(a + b - tl.where(pairwise, c, 0.0)), 0.0)
    tl.store(at(out_ptr, rows, inner, stride_om, stride_ok), sums, mask=mask)


@triton.jit
def _quotient(weight, c):
    """`weight / exp(c)`, or 0 where shares are to be added term by term, and whether they are."""
    used = (weight != 0.0) & (c != float("-inf"))
    quotient = weight * exp(-c)
    pairwise = used & ((c < _DEEP) | (tl.abs(quotient) > _LARGE))
    return tl.where(used & ~pairwise, quotient, 0.0), pairwise


def backward(
    weight: Tensor, a: Tensor, b: Tensor, *, grad_a: Tensor | None = None, grad_b: Tensor | None = None
) -> None:
    """Write the gradients of `sum(weight * log_matmul(a, b))` to those of `grad_a` and `grad_b` that are given.

    `weight` (g, p, m, n) may be expanded; either gradient may be written over it.
    """
    g, p, m, k = a.shape
    n = b.shape[-1]
    dtype = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    assert b.shape == (g, p, k, n) and weight.shape == (g, p, m, n)
    if 0 in (g, p, m, n, k):
        for gradient in (grad_a, grad_b):
            if gradient is not None:
                gradient.zero_()
        return
    size = max(m * n, m * k, k * n)
    sets = max(1, min(g, _HELD // (size * p)))
    products = max(1, min(p, _HELD // (size * sets)))
    for z in range(0, g, sets):
        for y in range(0, p, products):
            block = (slice(z, z + sets), slice(y, y + products))
            shifted_a, shifted_b = _shifted(a[block], -1, dtype), _shifted(b[block], -2, dtype)
            c = log_matmul.forward(shifted_a, shifted_b)
            wanted = []
            if grad_a is not None:
                wanted.append((_one(weight[block], c, shifted_a, shifted_b), grad_a[block]))
            if grad_b is not None:
                wanted.append((_one(weight[block].mT, c.mT, shifted_b.mT, shifted_a.mT).mT, grad_b[block]))
            for values, gradient in wanted:
                gradient.copy_(values)


def _shifted(matrix: Tensor, axis: int, dtype: torch.dtype) -> Tensor:
    """The matrices less their maxima over k; axes that are expanded stay expanded."""
    held = matrix
    for batch in (0, 1):
        if held.stride(batch) == 0:
            held = held.narrow(batch, 0, 1)
    shift = held.amax(axis, keepdim=True)
    return (held.to(dtype) - shift.masked_fill(shift == -math.inf, 0.0)).expand(matrix.shape)


def _one(weight: Tensor, c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The gradient of `a` (g, p, m, k); that of `b` is the one of the transposed product."""
    g, p, m, k = a.shape
    n = b.shape[-1]
    tile = tiles(m, k, c.dtype, launch.chip(c))
    count = g * p * triton.cdiv(m, tile.block_m) * triton.cdiv(k, tile.block_k)
    parts = max(1, min(_PROGRAMS // count, n // _SHORTEST))
    span = triton.cdiv(triton.cdiv(n, parts), tile.block_n) * tile.block_n
    parts = triton.cdiv(n, span)
    sums = torch.empty(parts, g, p, m, k, dtype=c.dtype, device=c.device)
    gradient_kernel[(parts * count,)](
        weight, c, a, b, sums, p, m, n, k, span, parts,
        *weight.stride(), *c.stride(), *a.stride(), *b.stride(), *sums.stride()[1:], sums.stride(0),
        WIDTH=launch.common_width(m, n, k), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        PRECISION=launch.precision(c), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return sums[0] if parts == 1 else sums.sum(0)


def tiles(m: int, k: int, dtype: torch.dtype, chip: str) -> Tiles:
    """The tiles for gradients (m, k), not much larger than needed."""
    if dtype == torch.float64:
        return DOUBLE
    return SMALL if max(m, k) <= 32 else MEDIUM[chip]


DOUBLE = Tiles(32, 16, 32, 4, 2)
SMALL = Tiles(32, 32, 32, 4, 2)
MEDIUM = {
    "sm_80": Tiles(64, 16, 64, 4, 2),
    "sm_90": Tiles(64, 16, 64, 4, 3),
    "gfx942": Tiles(64, 32, 64, 4, 2),
}
