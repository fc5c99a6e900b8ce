"""The log-semiring matrix product `c = log(exp(a) exp(b))` in one kernel, into new memory or over an operand.

    s = exp(a - row maximum) exp(b - column maximum)        c = log s + row maximum + column maximum

Operands are (g, p, m, k) and (g, p, k, n): two batch axes, any strides, float32, float64, bfloat16 or float16. The
arithmetic and the result are float32, or float64 if an operand is.

Numerics. A program finds the maxima of its rows and columns over all of k, then multiplies tiles of exponentials. Both
factors of a term are at most 1 and have an error below 2^-115, since 3xTF32 drops a small factor's second half where
that is denormal. So an s of at least `TRUSTED` is exact to rounding. Entries with a smaller s, unless row or column are
all -inf, are first stored as +inf, which no sum can be. Programs that stored one go on: a product of zeros and ones
finds those that are truly zero, and the others are recomputed by log-sum-exp, few at a time, so that no register is
spilled. Maxima are added with their rounding errors. A NaN makes its row or column NaN.

In place, only the program that writes rows of `a` reads them, from a copy if they are more than one tile.

Cost. One exponential for every entry of a tile and 2 m k n operations on tensor cores, three times that for 3xTF32;
operands are read twice, the second time from a cache. Up to c = 128 a batch of square products is bound by memory.

Tiles: `log_matmul_tiles`. Reference: `logchain.reference.matmul`.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .log_matmul_redo import MARK, ZERO, redo
from .log_matmul_tiles import tiles
from .tiles import TRUSTED, any_of, at, exact_sum, exp, finite, load, log, multiple, operand

_LOG_TRUSTED = tl.constexpr(math.log(TRUSTED.value))


@triton.jit
def forward_kernel(
    a_ptr, b_ptr, out_ptr, a_top_ptr, b_top_ptr, out_top_ptr, rescued_ptr,
    p, m, n, k,
    stride_ag, stride_ap, stride_am, stride_ak,
    stride_bg, stride_bp, stride_bk, stride_bn,
    stride_og, stride_op, stride_om, stride_on,
    stride_atg, stride_atp, stride_btg, stride_btp, stride_otg, stride_otp,
    WIDTH_M: tl.constexpr, WIDTH_N: tl.constexpr, WIDTH_K: tl.constexpr,
    WIDTH_AM: tl.constexpr, WIDTH_AK: tl.constexpr, WIDTH_BK: tl.constexpr, WIDTH_BN: tl.constexpr,
    WIDTH_OM: tl.constexpr, WIDTH_ON: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr,
    DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program computes one tile of one product."""
    m, n, k = multiple(m, WIDTH_M), multiple(n, WIDTH_N), multiple(k, WIDTH_K)
    stride_am, stride_ak = multiple(stride_am, WIDTH_AM), multiple(stride_ak, WIDTH_AK)
    stride_bk, stride_bn = multiple(stride_bk, WIDTH_BK), multiple(stride_bn, WIDTH_BN)
    stride_om, stride_on = multiple(stride_om, WIDTH_OM), multiple(stride_on, WIDTH_ON)
    blocks_n = tl.cdiv(n, BLOCK_N)
    tiles = tl.cdiv(m, BLOCK_M) * blocks_n
    batch, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    z, y = (batch // p).to(tl.int64), (batch % p).to(tl.int64)
    a_ptr += multiple(z * stride_ag + y * stride_ap, WIDTH_AM * WIDTH_AK)
    b_ptr += multiple(z * stride_bg + y * stride_bp, WIDTH_BK * WIDTH_BN)
    out_ptr += multiple(z * stride_og + y * stride_op, WIDTH_OM * WIDTH_ON)
    a_top, b_top = _top(a_top_ptr, z, y, stride_atg, stride_atp), _top(b_top_ptr, z, y, stride_btg, stride_btp)
    if out_top_ptr is not None:
        out_top_ptr += z * stride_otg + y * stride_otp

    first_row, first_column = tile // blocks_n * BLOCK_M, tile % blocks_n * BLOCK_N
    rows, columns = first_row + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
    value = _product(
        a_ptr, b_ptr, a_top, b_top, rows, columns, m, n, k, stride_am, stride_ak, stride_bk, stride_bn,
        BLOCK_K, UNROLL, PRECISION, out_ptr.dtype.element_ty,
    )  # fmt: skip
    _store(out_ptr, out_top_ptr, value, rows, columns, m, n, stride_om, stride_on)
    if any_of(value == MARK):
        redo(
            a_ptr, b_ptr, out_ptr, a_top, b_top, out_top_ptr, rescued_ptr, first_row, first_column, m, n, k,
            stride_am, stride_ak, stride_bk, stride_bn, stride_om, stride_on, BLOCK_M, BLOCK_N, BLOCK_K,
            DEPTH,
        )  # fmt: skip


@triton.jit
def in_place_kernel(
    a_ptr, b_ptr, scratch_ptr, a_top_ptr, b_top_ptr, out_top_ptr, rescued_ptr,
    batches, p, m, k,
    stride_ag, stride_ap, stride_am, stride_ak,
    stride_bg, stride_bp, stride_bk, stride_bn,
    stride_atg, stride_atp, stride_btg, stride_btp, stride_otg, stride_otp,
    WIDTH_M: tl.constexpr, WIDTH_K: tl.constexpr,
    WIDTH_AM: tl.constexpr, WIDTH_AK: tl.constexpr, WIDTH_BK: tl.constexpr, WIDTH_BN: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr,
    DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program writes blocks of rows of the product over those of `a`, one block after another; n is k.

    Rows that are read after some of their entries were written are copied to `scratch` (programs, BLOCK_M, k) before:
    always, but if one tile holds WHOLE rows, only where entries are recomputed.
    """
    m, k = multiple(m, WIDTH_M), multiple(k, WIDTH_K)
    stride_am, stride_ak = multiple(stride_am, WIDTH_AM), multiple(stride_ak, WIDTH_AK)
    stride_bk, stride_bn = multiple(stride_bk, WIDTH_BK), multiple(stride_bn, WIDTH_BN)
    scratch_ptr += tl.program_id(0).to(tl.int64) * BLOCK_M * k
    blocks = tl.cdiv(m, BLOCK_M)
    for block in tl.range(tl.program_id(0), batches * blocks, tl.num_programs(0), disable_licm=True):
        batch, first_row = block // blocks, block % blocks * BLOCK_M
        z, y = (batch // p).to(tl.int64), (batch % p).to(tl.int64)
        out = a_ptr + multiple(z * stride_ag + y * stride_ap, WIDTH_AM * WIDTH_AK)
        b = b_ptr + multiple(z * stride_bg + y * stride_bp, WIDTH_BK * WIDTH_BN)
        a_top, b_top = _top(a_top_ptr, z, y, stride_atg, stride_atp), _top(b_top_ptr, z, y, stride_btg, stride_btp)
        out_top = out_top_ptr
        if out_top_ptr is not None:
            out_top += z * stride_otg + y * stride_otp
        rows = first_row + tl.arange(0, BLOCK_M)
        saved = scratch_ptr - first_row.to(tl.int64) * k  # so that rows have the same numbers as in `a`
        if WHOLE:
            columns = tl.arange(0, BLOCK_N)
            value = _product(
                out, b, a_top, b_top, rows, columns, m, k, k, stride_am, stride_ak, stride_bk, stride_bn,
                BLOCK_K, UNROLL, PRECISION, a_ptr.dtype.element_ty,
            )  # fmt: skip
            marked = any_of(value == MARK)
            if marked:
                _copy(out, saved, rows, m, k, stride_am, stride_ak, BLOCK_K)
            tl.debug_barrier()  # other threads of this program may still read the rows
            _store(out, out_top, value, rows, columns, m, k, stride_am, stride_ak)
            if marked:
                redo(
                    saved, b, out, a_top, b_top, out_top, rescued_ptr, first_row, 0, m, k, k,
                    k, 1, stride_bk, stride_bn, stride_am, stride_ak, BLOCK_M, BLOCK_N, BLOCK_K,
                    DEPTH,
                )  # fmt: skip
        else:
            tl.debug_barrier()  # other threads of this program may still read the copy of the block before
            _copy(out, saved, rows, m, k, stride_am, stride_ak, BLOCK_K)
            tl.debug_barrier()
            for first_column in tl.range(0, k, BLOCK_N, disable_licm=True):
                columns = first_column + tl.arange(0, BLOCK_N)
                value = _product(
                    saved, b, a_top, b_top, rows, columns, m, k, k, k, 1, stride_bk, stride_bn,
                    BLOCK_K, UNROLL, PRECISION, a_ptr.dtype.element_ty,
                )  # fmt: skip
                _store(out, out_top, value, rows, columns, m, k, stride_am, stride_ak)
                if any_of(value == MARK):
                    redo(
                        saved, b, out, a_top, b_top, out_top, rescued_ptr, first_row, first_column, m, k, k,
                        k, 1, stride_bk, stride_bn, stride_am, stride_ak, BLOCK_M, BLOCK_N, BLOCK_K,
                        DEPTH,
                    )  # fmt: skip


@triton.jit
def _top(top_ptr, z, y, stride_g, stride_p):
    """The number subtracted from all entries of an operand, 0 in place of -inf."""
    if top_ptr is None:
        return 0.0
    else:
        return finite(tl.load(top_ptr + z * stride_g + y * stride_p))


@triton.jit
def _copy(a_ptr, saved_ptr, rows, m, k, stride_am, stride_ak, BLOCK_K: tl.constexpr):
    for start in range(0, k, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        mask = (rows < m)[:, None] & (inner < k)[None, :]
        a = tl.load(at(a_ptr, rows, inner, stride_am, stride_ak), mask=mask)
        tl.store(at(saved_ptr, rows, inner, k, 1), a, mask=mask)


@triton.jit
def _product(
    a_ptr, b_ptr, a_top, b_top, rows, columns, m, n, k, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_K: tl.constexpr, UNROLL: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A tile of the result, +inf (MARK) for entries to be recomputed."""
    a_max = tl.full((rows.shape[0], BLOCK_K), ZERO, DTYPE)
    b_max = tl.full((BLOCK_K, columns.shape[0]), ZERO, DTYPE)
    for start in tl.range(0, k, BLOCK_K, loop_unroll_factor=UNROLL):
        inner = start + tl.arange(0, BLOCK_K)
        a_max = tl.maximum(a_max, load(a_ptr, rows, inner, m, k, stride_am, stride_ak, DTYPE, ZERO))
        b_max = tl.maximum(b_max, load(b_ptr, inner, columns, k, n, stride_bk, stride_bn, DTYPE, ZERO))
    row, column = tl.max(a_max, 1), tl.max(b_max, 0)
    row_shift, column_shift = finite(row), finite(column)
    s = tl.zeros((rows.shape[0], columns.shape[0]), DTYPE)
    for start in range(0, k, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        a = load(a_ptr, rows, inner, m, k, stride_am, stride_ak, DTYPE, ZERO)
        b = load(b_ptr, inner, columns, k, n, stride_bk, stride_bn, DTYPE, ZERO)
        left = operand(exp(a - row_shift[:, None]), PRECISION)
        right = operand(exp(b - column_shift[None, :]), PRECISION)
        s = tl.dot(left, right, s, input_precision=PRECISION, out_dtype=DTYPE)
    logs = log(s)  # before the shifts are added up: its branches would have to hold them all
    shift, error = exact_sum((row_shift - a_top)[:, None], (column_shift - b_top)[None, :])
    value = shift + (logs + error)
    return tl.where((logs < _LOG_TRUSTED) & (row > ZERO)[:, None] & (column > ZERO)[None, :], MARK, value)


@triton.jit
def _store(out_ptr, out_top_ptr, value, rows, columns, m, n, stride_om, stride_on):
    if out_top_ptr is not None:
        tl.atomic_max(out_top_ptr, tl.max(tl.where(value < MARK, value, ZERO)), sem="relaxed")
    mask = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(at(out_ptr, rows, columns, stride_om, stride_on), value, mask=mask)


# programs in place on each multiprocessor, bounded because each has scratch for rows
_RESIDENT = 4


def forward(
    a: Tensor,
    b: Tensor,
    out: Tensor | None = None,
    *,
    a_top: Tensor | None = None,
    b_top: Tensor | None = None,
    out_top: Tensor | None = None,
    rescued: Tensor | None = None,
) -> Tensor:
    """`log(exp(a) exp(b))` (g, p, m, n) for (g, p, m, k) and (g, p, k, n), written to `out` if that is given.

    `out` may be the memory of `a` or of `b`, of which then a bounded number of rows is copied. With `a_top` and `b_top`
    (g, p), of the dtype of the result, the product is stored less both, a top of -inf counting as 0, and `out_top` (g,
    p), which the caller has filled with -inf, receives its largest entry. The number of recomputed entries is added to
    `rescued` (1), int64.
    """
    g, p, m, k = a.shape
    n = b.shape[-1]
    dtype = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    if out is None:
        out = a.new_empty((g, p, m, n), dtype=dtype)
    assert b.shape == (g, p, k, n) and out.shape == (g, p, m, n) and out.dtype == dtype
    assert (a_top is None) == (b_top is None) == (out_top is None)
    if not out.numel():
        return out
    over_a, over_b = launch.same_storage(out, a), launch.same_storage(out, b)
    assert not (over_a and over_b)
    if over_b or not over_a and out.stride(-2) == 1 != out.stride(-1):
        # computed as the transposed product, so that the result is over its left operand, or is contiguous by rows
        forward(b.mT, a.mT, out.mT, a_top=b_top, b_top=a_top, out_top=out_top, rescued=rescued)
        return out

    plain = not over_a and a.stride(-1) == b.stride(-1) == out.stride(-1) == 1
    tile = tiles(m, n, dtype, launch.chip(out), aligned=launch.aligned(a, b, out), plain=plain)
    tops = (a_top, b_top, out_top)
    top_pitches = [pitch for top in tops for pitch in ((0, 0) if top is None else launch.pitches(top))]
    options = {
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "UNROLL": tile.unroll,
        "DEPTH": tile.depth, "PRECISION": launch.precision(out), "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    rows = g * p * triton.cdiv(m, tile.block_m)
    with torch.cuda.device_of(out):
        if over_a:
            programs = min(rows, _RESIDENT * launch.processors(out))
            scratch = out.new_empty(programs * tile.block_m * k)
            in_place_kernel[(programs,)](
                a, b, scratch, *tops, rescued, g * p, p, m, k, *launch.pitches(a), *launch.pitches(b), *top_pitches,
                *map(launch.common_width, (m, k)), *launch.widths(a), *launch.widths(b), WHOLE=n <= tile.block_n,
                **options,
            )  # fmt: skip
        else:
            forward_kernel[(rows * triton.cdiv(n, tile.block_n),)](
                a, b, out, *tops, rescued, p, m, n, k,
                *launch.pitches(a), *launch.pitches(b), *launch.pitches(out), *top_pitches,
                *map(launch.common_width, (m, n, k)), *launch.widths(a), *launch.widths(b), *launch.widths(out),
                **options,
            )  # fmt: skip
    return out
