"""The gradients of the log-semiring matrix product, which is computed again from the operands.

    grad_a(i, k) = sum_j weight_ij exp(a_ik + b_kj - c_ij)          grad_b = the same of the transposed product

Operands as in `log_matmul`: a (g, p, m, k) and b (g, p, k, n), any strides; arithmetic and gradients' sums float32, or
float64 if an operand is.

Numerics. The maxima of rows of `a` and of columns of `b` are subtracted first, and `c = log(exp(a) exp(b))` is computed
from the differences: offsets of 1e4 would otherwise leave no digits of a share. The share of term k in entry (i, j) is

    exp(a_ik) exp(b_kj) / exp(c_ij)

and weighted sums of shares are one product of tiles. Entries so far below their maxima that exponentials underflow, or
that `weight / exp(c)` may overflow, are left out of it: tiles with one are flagged, and another launch adds its shares
term by term, one j after another. A weight of 0 and a result of -inf give exactly 0.

Cost: the forward product and one product for each gradient. The shifted operands and `c` lie in a workspace of bounded
size, a block of matrices after the other. A long sum over j is cut into parts, which are added in a fixed order: two
runs agree to the last bit.

Tiles: those of `log_matmul` up to 64 x 64, from a model, not measured yet. Reference: `logchain.reference.matmul`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch, log_matmul
from .line_maxima import maxima
from .log_matmul_tiles import Tiles
from .pairs import ZERO
from .tiles import at, exp, finite, load, multiple, operand

# entries of each buffer of the workspace, or one matrix if that is larger
_HELD = 2**24

# programs that keep a device busy, and the least terms of a part of a sum
_PROGRAMS, _SHORTEST = 264, 1024

# rows to which shares are added term by term at a time
_PIECE = tl.constexpr(16)

# the exponentials of terms have not underflowed where c is above this, see `TRUSTED`
_DEEP = tl.constexpr(-55.0)

# weight / exp(c) is multiplied by this, so that the halves of small ones are normal numbers; the product does not
# overflow where it is below _LARGE
_SCALE, _LARGE = tl.constexpr(2.0**24), tl.constexpr(1e31)


@triton.jit(do_not_specialize=["p", "lines", "terms", "stride_g", "stride_p"])
def shifted_kernel(
    matrix_ptr, out_ptr, p, lines, terms, stride_g, stride_p, stride_line, stride_term,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program writes BLOCK rows of a matrix, or columns, less their maxima, to one that is contiguous by rows.

    A finite entry stays finite, however far it lies below.
    """
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    least: tl.constexpr = -1.7976931348623157e308 if DTYPE == tl.float64 else -3.4028234663852886e38
    blocks = tl.cdiv(lines, BLOCK)
    batch, own = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    matrix_ptr += batch // p * stride_g + batch % p * stride_p
    out_ptr += batch * lines * terms
    tops = maxima(matrix_ptr, own, lines, terms, stride_line, stride_term, BLOCK_K, COLUMNS, DTYPE)
    shift = finite(tl.max(tops, 0 if COLUMNS else 1))
    for first in tl.range(0, terms, BLOCK_K):
        inner = first + tl.arange(0, BLOCK_K)
        if COLUMNS:
            value = load(matrix_ptr, inner, own, terms, lines, stride_term, stride_line, DTYPE, ZERO)
            lower = tl.maximum(value - shift[None, :], least, propagate_nan=tl.PropagateNan.ALL)
            mask = (inner < terms)[:, None] & (own < lines)[None, :]
            tl.store(at(out_ptr, inner, own, lines, 1), tl.where(value == ZERO, ZERO, lower), mask=mask)
        else:
            value = load(matrix_ptr, own, inner, lines, terms, stride_line, stride_term, DTYPE, ZERO)
            lower = tl.maximum(value - shift[:, None], least, propagate_nan=tl.PropagateNan.ALL)
            mask = (own < lines)[:, None] & (inner < terms)[None, :]
            tl.store(at(out_ptr, own, inner, terms, 1), tl.where(value == ZERO, ZERO, lower), mask=mask)


@triton.jit(
    do_not_specialize=[
        "p", "m", "n", "k", "span", "parts", "stride_wg", "stride_wp", "stride_ag", "stride_ap", "stride_bg",
        "stride_bp",
    ]
)  # fmt: skip
def gradient_kernel(
    weight_ptr, c_ptr, a_ptr, b_ptr, out_ptr, flag_ptr, p, m, n, k, span, parts,
    stride_wg, stride_wp, stride_wm, stride_wn, stride_ag, stride_ap, stride_bg, stride_bp,
    DEEP: tl.constexpr, TRANSPOSED: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program computes one tile of `grad_a`, for the terms j of one part, and flags it if shares are left out.

    In another launch, of DEEP programs, those whose tile is flagged add what was left out. TRANSPOSED: each matrix `a`,
    `b` and `c` is contiguous by columns, otherwise by rows. Gradients of parts (parts, g, p, m, k) are contiguous.
    """
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    m, n, k = multiple(m, WIDTH), multiple(n, WIDTH), multiple(k, WIDTH)
    blocks_k = tl.cdiv(k, BLOCK_K)
    tiles = tl.cdiv(m, BLOCK_M) * blocks_k
    tile = tl.program_id(0) % tiles
    part, batch = tl.program_id(0) // tiles % parts, (tl.program_id(0) // tiles // parts).to(tl.int64)
    batches = (tl.num_programs(0) // tiles // parts).to(tl.int64)
    z, y = batch // p, batch % p
    weight_ptr += z * stride_wg + y * stride_wp
    c_ptr += batch * m * n
    a_ptr += multiple(z * stride_ag + y * stride_ap, WIDTH)
    b_ptr += multiple(z * stride_bg + y * stride_bp, WIDTH)
    out_ptr += (part * batches + batch) * m * k
    begin, end = part * span, tl.minimum(part * span + span, n)
    rows = tile // blocks_k * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tile % blocks_k * BLOCK_K + tl.arange(0, BLOCK_K)
    if DEEP:
        if tl.load(flag_ptr + tl.program_id(0)) != 0:
            for piece in range(0, BLOCK_M // _PIECE):
                _add_deep(
                    weight_ptr, c_ptr, a_ptr, b_ptr, out_ptr, tile // blocks_k * BLOCK_M + piece * _PIECE, inner,
                    begin, end, m, n, k, stride_wm, stride_wn, TRANSPOSED,
                )  # fmt: skip
    else:
        sums = tl.zeros((BLOCK_M, BLOCK_K), DTYPE)
        deep = tl.zeros((BLOCK_M,), tl.int32)
        for start in range(begin, end, BLOCK_N):
            columns = start + tl.arange(0, BLOCK_N)
            weight = load(weight_ptr, rows, columns, m, end, stride_wm, stride_wn, DTYPE, 0.0)
            c = _load(c_ptr, rows, columns, m, n, end, TRANSPOSED, DTYPE)
            b = _load(b_ptr, inner, columns, k, n, end, TRANSPOSED, DTYPE)
            quotient, pairwise = _quotient(weight, c)
            deep = tl.maximum(deep, tl.max(pairwise.to(tl.int32), 1))
            left, right = operand(quotient, PRECISION), operand(tl.trans(exp(b)), PRECISION)
            sums = tl.dot(left, right, sums, input_precision=PRECISION, out_dtype=DTYPE)
        a = _load(a_ptr, rows, inner, m, k, k, TRANSPOSED, DTYPE)
        mask = (rows < m)[:, None] & (inner < k)[None, :]
        sums = tl.where(a == ZERO, 0.0, sums * exp(a) * (1 / _SCALE))
        tl.store(at(out_ptr, rows, inner, k, 1), sums, mask=mask)
        tl.store(flag_ptr + tl.program_id(0), tl.max(deep))


@triton.jit
def _load(ptr, rows, columns, m, n, end, TRANSPOSED: tl.constexpr, DTYPE: tl.constexpr):
    """Entries of a matrix (m, n) whose rows, or columns, are contiguous; -inf outside of it, and from column `end`."""
    if TRANSPOSED:
        return load(ptr, rows, columns, m, end, 1, m, DTYPE, ZERO)
    else:
        return load(ptr, rows, columns, m, end, n, 1, DTYPE, ZERO)


@triton.jit
def _add_deep(
    weight_ptr, c_ptr, a_ptr, b_ptr, out_ptr, first_row, inner, begin, end, m, n, k, stride_wm, stride_wn,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Add to a piece of a stored tile the shares that were left out, those of one j at a time."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    rows = first_row + tl.arange(0, _PIECE)
    mask = (rows < m)[:, None] & (inner < k)[None, :]
    # in float64, which large weights that cancel do not overflow
    sums = load(out_ptr, rows, inner, m, k, k, 1, DTYPE, 0.0).to(tl.float64)
    a = _load(a_ptr, rows, inner, m, k, k, TRANSPOSED, DTYPE)
    for column in range(begin, end):
        j = tl.full((1,), column, tl.int64)
        weight = load(weight_ptr, rows, j, m, end, stride_wm, stride_wn, DTYPE, 0.0)
        c = _load(c_ptr, rows, j, m, n, end, TRANSPOSED, DTYPE)
        b = tl.trans(_load(b_ptr, inner, j, k, n, end, TRANSPOSED, DTYPE))
        _, pairwise = _quotient(weight, c)
        sums += tl.where(pairwise, weight * exp(a + b - tl.where(pairwise, c, 0.0)), 0.0).to(tl.float64)
    tl.store(at(out_ptr, rows, inner, k, 1), sums.to(DTYPE), mask=mask)


@triton.jit
def _quotient(weight, c):
    """`_SCALE weight / exp(c)`, or 0 where shares are to be added term by term, and whether they are."""
    used = (weight != 0.0) & (c != float("-inf"))
    quotient = weight * _SCALE * exp(-c)
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
            shifted_a, shifted_b = _shifted(a[block], dtype, columns=False), _shifted(b[block], dtype, columns=True)
            c = log_matmul.forward(shifted_a, shifted_b)
            wanted = []
            if grad_a is not None:
                wanted.append((_one(weight[block], c, shifted_a, shifted_b, transposed=False), grad_a[block]))
            if grad_b is not None:
                of_b = _one(weight[block].mT, c.mT, shifted_b.mT, shifted_a.mT, transposed=True)
                wanted.append((of_b.mT, grad_b[block]))
            for values, gradient in wanted:
                gradient.copy_(values)


def _shifted(matrix: Tensor, dtype: torch.dtype, *, columns: bool) -> Tensor:
    """The matrices less the maxima of rows or columns, contiguous; axes that are expanded stay expanded."""
    held = matrix
    for batch in (0, 1):
        if held.stride(batch) == 0:
            held = held.narrow(batch, 0, 1)
    out = torch.empty(held.shape, dtype=dtype, device=held.device)
    g, p, *axes = held.shape
    strides = launch.pitches(held)
    lines, terms = axes[::-1] if columns else axes
    line, term = strides[:1:-1] if columns else strides[2:]
    with torch.cuda.device_of(out):
        launch.run(
            shifted_kernel, (g * p * triton.cdiv(lines, 32),), held, out, p, lines, terms, *strides[:2], line, term,
            COLUMNS=columns, BLOCK=32, BLOCK_K=64, num_warps=4,
        )  # fmt: skip
    return out.expand(matrix.shape)


def _one(weight: Tensor, c: Tensor, a: Tensor, b: Tensor, *, transposed: bool) -> Tensor:
    """The gradient of `a` (g, p, m, k); that of `b` is the one of the transposed product."""
    g, p, m, k = a.shape
    n = b.shape[-1]
    tile = tiles(m, k, c.dtype, launch.chip(c))
    count = g * p * triton.cdiv(m, tile.block_m) * triton.cdiv(k, tile.block_k)
    parts = max(1, min(_PROGRAMS // count, n // _SHORTEST))
    span = triton.cdiv(triton.cdiv(n, parts), tile.block_n) * tile.block_n
    parts = triton.cdiv(n, span)
    sums = torch.empty(parts, g, p, m, k, dtype=c.dtype, device=c.device)
    flags = torch.empty(parts * count, dtype=torch.int32, device=c.device)
    with torch.cuda.device_of(c):
        for deep in (False, True):
            launch.run(
                gradient_kernel, (parts * count,), weight, c, a, b, sums, flags, p, m, n, k, span, parts,
                *weight.stride(), *a.stride()[:2], *b.stride()[:2], DEEP=deep, TRANSPOSED=transposed,
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
