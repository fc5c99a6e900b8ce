"""The log-semiring matrix product `c = log(exp(a) exp(b))`, batched, into new memory or over `a`; its gradient.

    s = exp(a - row maximum) exp(b - column maximum)        c = log s + row maximum + column maximum
    gradient of a = exp(a - top_i) sum_j q_ij exp(b_kj - top_j)        q_ij = weight_ij exp(top_i + top_j - c_ij)

Operands are (g, p, m, k) and (g, p, k, n) with any strides, 0 for broadcasting, and any float type. A program computes
one tile of one product. It scans k twice, for maxima and for sums, so that no other launch comes first. Factors of
possible entries are raised to FLOOR, so an s of exactly 0 means -inf. This adds at most 2 k FLOOR to a sum: an s of at
least k TRUSTED is exact to rounding. Smaller ones are recomputed in the same program, pair by pair, and so are terms of
the gradient with a large q. The gradient's maxima are those of a tile's block of k. It reads c less shifts of rows and
columns, so that differences keep their digits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .scaled import exp, finite, multiply, precision

# what factors of `a` are multiplied by, so that a product of two is a normal number; FLOOR; TRUSTED
_FLOAT32, _FLOAT64 = tl.constexpr((2.0**100, 2.0**-113, 2.0**-86)), tl.constexpr((2.0**900, 2.0**-961, 2.0**-904))
# terms of a gradient with log(q / weight) above STEEP or q above LARGE are added pair by pair; SCALE keeps digits of q
NO_PATH, STEEP = tl.constexpr(float("-inf")), tl.constexpr(55.0)
LARGE, SCALE = tl.constexpr(2.0**80), tl.constexpr(2.0**24)
# most rows, columns and terms of a tile, half in float64
_PRODUCT, _GRADIENT = (64, 128, 32), (64, 64, 16)
_VARYING = ["tiles", "p", "stride_rg", "stride_rp", "stride_rm", "stride_sg", "stride_sp", "stride_sn"]

Into = Tensor | None
Shifts = tuple[Tensor, Tensor]


@triton.jit
def _places(rows, columns, m, n, strides):
    """Where entries of a matrix are, and which exist."""
    places = rows.to(tl.int64)[:, None] * strides[2] + columns.to(tl.int64)[None, :] * strides[3]
    return places, (rows < m)[:, None] & (columns < n)[None, :]


@triton.jit
def _load(ptr, rows, columns, m, n, strides, FILL: tl.constexpr, DTYPE: tl.constexpr):
    places, inside = _places(rows, columns, m, n, strides)
    return tl.load(ptr + places, mask=inside, other=FILL).to(DTYPE)


@triton.jit
def _line(ptr, rows, m, stride_m, FILL: tl.constexpr, DTYPE: tl.constexpr):
    return tl.load(ptr + rows.to(tl.int64) * stride_m, mask=rows < m, other=FILL).to(DTYPE)


@triton.jit
def _factor(x, shift, TIMES: tl.constexpr, FLOOR: tl.constexpr):
    """`TIMES exp(x - shift)`, at least `TIMES FLOOR`; 0 for -inf."""
    raised = tl.maximum(TIMES * exp(x - shift), TIMES * FLOOR, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(x == NO_PATH, 0.0, raised)


@triton.jit
def _less(x, shift):
    """`x - shift`, which stays finite for a finite x."""
    LEAST: tl.constexpr = -1.7976931348623157e308 if x.dtype == tl.float64 else -3.4028234663852886e38
    return tl.where(x == NO_PATH, x, tl.maximum(x - shift, LEAST, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _quotient(weight, c, left, right):
    """`SCALE q` or 0 where terms are added pair by pair, and where they are."""
    steep = tl.where((weight == 0.0) | (c == NO_PATH), NO_PATH, (left - c) + right)
    q = weight * exp(tl.where(steep > STEEP, STEEP, steep))
    pairwise = (steep > STEEP) | (tl.abs(q) > LARGE)
    return tl.where(pairwise, 0.0, q * SCALE), pairwise


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["row_ptr", "column_ptr"])
def product_kernel(
    a_ptr, b_ptr, out_ptr, row_ptr, column_ptr, top_ptr, count_ptr, tiles, p, m, n, k, a_strides, b_strides,
    out_strides, stride_rg, stride_rp, stride_rm, stride_sg, stride_sp, stride_sn, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program computes one tile of one product, whose rows may be those of `a`."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    LIMITS: tl.constexpr = _FLOAT64 if DTYPE == tl.float64 else _FLOAT32
    across = tl.cdiv(n, BLOCK_N)
    batch, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    z, y = batch // p, batch % p
    a_ptr, b_ptr = a_ptr + z * a_strides[0] + y * a_strides[1], b_ptr + z * b_strides[0] + y * b_strides[1]
    i, j = tile // across * BLOCK_M + tl.arange(0, BLOCK_M), tile % across * BLOCK_N + tl.arange(0, BLOCK_N)
    # maxima of whole tiles: Triton 3.6 cannot compile a loop of reductions whose result is used twice
    rows, columns = tl.full((BLOCK_M, BLOCK_K), NO_PATH, DTYPE), tl.full((BLOCK_K, BLOCK_N), NO_PATH, DTYPE)
    for first in tl.range(0, k, BLOCK_K):
        inner = first + tl.arange(0, BLOCK_K)
        rows = tl.maximum(rows, _load(a_ptr, i, inner, m, k, a_strides, NO_PATH, DTYPE))
        columns = tl.maximum(columns, _load(b_ptr, inner, j, k, n, b_strides, NO_PATH, DTYPE))
    row, column, s = finite(tl.max(rows, 1)), finite(tl.max(columns, 0)), tl.zeros((BLOCK_M, BLOCK_N), DTYPE)
    for first in tl.range(0, k, BLOCK_K):
        inner = first + tl.arange(0, BLOCK_K)
        a = _load(a_ptr, i, inner, m, k, a_strides, NO_PATH, DTYPE)
        b = _load(b_ptr, inner, j, k, n, b_strides, NO_PATH, DTYPE)
        a, b = _factor(a, row[:, None], LIMITS[0], LIMITS[1]), _factor(b, column[None, :], 1.0, LIMITS[1])
        s = multiply(a, b, s, PRECISION)
    row_shift = finite(_line(row_ptr + z * stride_rg + y * stride_rp, i, m, stride_rm, 0, DTYPE))
    column_shift = finite(_line(column_ptr + z * stride_sg + y * stride_sp, j, n, stride_sn, 0, DTYPE))
    small, top = (s > 0.0) & (s < k * (LIMITS[0] * LIMITS[2])), tl.full((BLOCK_M, BLOCK_N), NO_PATH, DTYPE)
    s *= 1.0 / LIMITS[0]
    if tl.max(small.to(tl.int32)) > 0:
        sums = tl.zeros((BLOCK_M, BLOCK_N), DTYPE)
        for turn in tl.range(0, 2 * k):
            at = tl.cast(turn % k, tl.int64)
            left = _less(_line(a_ptr + at * a_strides[3], i, m, a_strides[2], NO_PATH, DTYPE), row_shift)
            right = _less(_line(b_ptr + at * b_strides[2], j, n, b_strides[3], NO_PATH, DTYPE), column_shift)
            if turn < k:
                top = tl.maximum(top, left[:, None] + right[None, :])
            else:
                sums += exp((left[:, None] + right[None, :]) - finite(top))
        s, top = tl.where(small, sums, s), tl.where(small, top, NO_PATH)
        if count_ptr is not None:
            tl.store(count_ptr + tl.program_id(0), tl.load(count_ptr + tl.program_id(0)) + tl.sum(small.to(tl.int32)))
    row, column = (row - row_shift)[:, None], (column - column_shift)[None, :]
    base = row + column
    part = base - row
    error = tl.where(tl.abs(base) < float("inf"), (row - (base - part)) + (column - part), 0.0)
    value = tl.where(top > NO_PATH, top + tl.log(s), base + (error + tl.log(s)))
    places, inside = _places(i, j, m, n, out_strides)
    if top_ptr is not None:
        tl.store(top_ptr + tl.program_id(0), tl.max(tl.where(inside, value, NO_PATH)))
    tl.debug_barrier()  # other threads of this program read these rows
    tl.store(out_ptr + z * out_strides[0] + y * out_strides[1] + places, value, mask=inside)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["row_ptr", "column_ptr"])
def gradient_kernel(
    weight_ptr, a_ptr, b_ptr, c_ptr, out_ptr, row_ptr, column_ptr, tiles, p, m, n, k, weight_strides, a_strides,
    b_strides, c_strides, out_strides, stride_rg, stride_rp, stride_rm, stride_sg, stride_sp, stride_sn,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program computes one tile (i, k) of the gradient of `a`; `b` is (g, p, n, k)."""
    DTYPE: tl.constexpr = c_ptr.dtype.element_ty
    across = tl.cdiv(k, BLOCK_K)
    batch, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    z, y = batch // p, batch % p
    a_ptr, b_ptr = a_ptr + z * a_strides[0] + y * a_strides[1], b_ptr + z * b_strides[0] + y * b_strides[1]
    weight_ptr += z * weight_strides[0] + y * weight_strides[1]
    c_ptr += z * c_strides[0] + y * c_strides[1]
    row_ptr, column_ptr = row_ptr + z * stride_rg + y * stride_rp, column_ptr + z * stride_sg + y * stride_sp
    i, inner = tile // across * BLOCK_M + tl.arange(0, BLOCK_M), tile % across * BLOCK_K + tl.arange(0, BLOCK_K)
    a = _load(a_ptr, i, inner, m, k, a_strides, NO_PATH, DTYPE)
    a_top, row_shift = tl.max(a, 1), finite(_line(row_ptr, i, m, stride_rm, 0.0, DTYPE))
    left, sums, missing = _less(a_top, row_shift), tl.zeros((BLOCK_M, BLOCK_K), DTYPE), tl.zeros((), tl.int32)
    for first in tl.range(0, n, BLOCK_N):
        j = first + tl.arange(0, BLOCK_N)
        weight = _load(weight_ptr, i, j, m, n, weight_strides, 0.0, DTYPE)
        c = _load(c_ptr, i, j, m, n, c_strides, NO_PATH, DTYPE)
        b = _load(b_ptr, j, inner, n, k, b_strides, NO_PATH, DTYPE)
        b_top = tl.max(b, 1)
        right = _less(b_top, finite(_line(column_ptr, j, n, stride_sn, 0.0, DTYPE)))
        q, pairwise = _quotient(weight, c, left[:, None], right[None, :])
        missing = tl.maximum(missing, tl.max(pairwise.to(tl.int32)))
        sums = multiply(q, exp(b - finite(b_top)[:, None]), sums, PRECISION)
    gradient, pairs = exp(a - finite(a_top)[:, None]) * sums, tl.zeros((BLOCK_M, BLOCK_K), DTYPE)
    if missing > 0:
        for j in tl.range(0, n):
            at = tl.cast(j, tl.int64)
            weight = _line(weight_ptr + at * weight_strides[3], i, m, weight_strides[2], 0.0, DTYPE)
            c = _line(c_ptr + at * c_strides[3], i, m, c_strides[2], NO_PATH, DTYPE)
            b = _line(b_ptr + at * b_strides[2], inner, k, b_strides[3], NO_PATH, DTYPE)
            right = _less(b, finite(_line(column_ptr + at * stride_sn, inner, k, 0, 0.0, DTYPE)))
            _, pairwise = _quotient(weight, c, left, tl.max(right, 0))
            share = exp((_less(a, row_shift[:, None]) + right[None, :]) - tl.where(pairwise, c, 0.0)[:, None])
            pairs += tl.where(pairwise[:, None], (weight * (1.0 / SCALE))[:, None] * share, 0.0)
    gradient = tl.where(a == NO_PATH, 0.0, gradient * (1.0 / SCALE) + pairs * SCALE)
    places, inside = _places(i, inner, m, k, out_strides)
    tl.store(out_ptr + z * out_strides[0] + y * out_strides[1] + places, gradient, mask=inside)


def tiles(m: int, n: int, k: int, dtype: torch.dtype, most=_PRODUCT) -> tuple[int, list[int], dict[str, int]]:
    """The number of tiles of (m, n) sums of k terms; rows, columns and terms of a tile; options of a launch."""
    half = 2 if dtype == torch.float64 else 1
    block = [max(16, min(triton.next_power_of_2(i), limit // half)) for i, limit in zip((m, n, k), most, strict=True)]
    warps = max(1, 8 * half * block[0] * block[1] // (most[0] * most[1]))
    options = {"num_warps": warps, "num_stages": 2 if most is _PRODUCT and k > 64 else 1}
    return triton.cdiv(m, block[0]) * triton.cdiv(n, block[1]), block, options


def forward(a: Tensor, b: Tensor, shifts: Shifts, out: Into = None, tops: Into = None, counts: Into = None) -> Tensor:
    """`log(exp(a) exp(b))` (g, p, m, n) less shifts of rows (g, p, m) and columns (g, p, n), where -inf counts as 0.

    `out` may be `a` if a tile has all columns. Programs write maxima to `tops`, and add recomputed entries to `counts`.
    """
    (g, p, m, k), n = a.shape, b.shape[-1]
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    out = torch.empty(g, p, m, n, dtype=dtype, device=a.device) if out is None else out
    count, block, options = tiles(m, n, k, dtype)
    product_kernel[(g * p * count,)](
        a, b, out, *shifts, tops, counts, count, p, m, n, k, a.stride(), b.stride(), out.stride(),
        *shifts[0].stride(), *shifts[1].stride(), precision(dtype, a.device), *block, **options,
    )  # fmt: skip
    return out


def backward(grad: Tensor, weight: Tensor, a: Tensor, b: Tensor, c: Tensor, shifts: Shifts) -> None:
    """Write the gradient of `sum(weight * product)` with respect to `a`; `c` is the product less `shifts`."""
    (g, p, m, k), n = a.shape, b.shape[-1]
    count, block, options = tiles(m, k, n, c.dtype, _GRADIENT)
    gradient_kernel[(g * p * count,)](
        weight, a, b, c, grad, *shifts, count, p, m, n, k, weight.stride(), a.stride(), b.mT.stride(), c.stride(),
        grad.stride(), *shifts[0].stride(), *shifts[1].stride(), precision(c.dtype, a.device), *block, **options,
    )  # fmt: skip
