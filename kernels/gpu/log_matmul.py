"""The log-semiring matrix product `c = log(exp(a) exp(b))`, into new memory or over an operand.

    s = exp(a - row maximum) exp(b - column maximum)        c = log s + row maximum + column maximum

Operands are (g, p, m, k) and (g, p, k, n): two batch axes, any strides, float32, float64, bfloat16 or float16. The
arithmetic and the result are float32, or float64 if an operand is.

Numerics. Maxima are found first, in the registers of a program that has all of k, by a walk over k, or by a kernel that
reads each entry once; or the caller has them, from the products that made the operands. Then tiles of exponentials are
multiplied. Both factors of a term are at most 1 and have an error below 2^-115, since 3xTF32 drops a small factor's
second half where that is denormal. So an s of at least `TRUSTED` is exact to rounding. An entry with a smaller s,
unless row or column are all -inf, is stored as +inf, which no sum can be, and its tile is flagged: `redo_kernel`
computes those again, see `pairs`, and has nothing to do elsewhere. Maxima are added with their rounding errors. A NaN
makes its row or column NaN.

In place, only the program that writes rows of `a` reads them, if one tile holds whole rows; it leaves them as they are
if an entry is to be computed again. Longer rows are copied, a bounded number at a time.

Cost. One exponential for every entry of a tile and 2 m k n operations on tensor cores, three times that for 3xTF32.
Up to c = 128 a batch of square products is bound by memory, and operands are read from it once.

Tiles: `log_matmul_tiles`. Reference: `logchain.reference.matmul`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tree import blocks
from . import launch
from .line_maxima import write_maxima
from .log_matmul_tiles import tiles
from .log_tile import (
    STRIDES,
    VARYING,
    add_product,
    copy_rows,
    left_operand,
    logarithms,
    right_operand,
    shift_of,
    sizes,
    store,
    sums_of,
    top_of,
    walked_maxima,
    width_of_stride,
)  # fmt: skip  # isort: skip
from .pairs import MARK, ZERO, raise_tops, redo
from .tiles import load, multiple

# how a program of `product_kernel` finds maxima: all of k is in registers, or it walks over k, or they are in memory
_REGISTERS, _WALK, _MEMORY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# rows that are redone in place at a time
_ROWS = tl.constexpr(16)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=STRIDES)
def product_kernel(
    a_ptr, b_ptr, out_ptr, room_ptr, maxima_ptr, a_top_ptr, b_top_ptr, out_top_ptr, out_column_ptr, p, m, n, k,
    stride_ag, stride_ap, stride_am, stride_ak, stride_bg, stride_bp, stride_bk, stride_bn,
    stride_og, stride_op, stride_om, stride_tg, stride_tp,
    MAXIMA: tl.constexpr, LAYOUT: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program computes one tile of one product, and flags it in the room if there is a mark in it.

    Without `out_ptr` the product is written over `a`, but for tiles with marks. Maxima that are in memory: of the rows
    of all `a`, then of the columns of all `b`.
    """
    DTYPE: tl.constexpr = room_ptr.dtype.element_ty
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_K: tl.constexpr = TILE.block_k
    blocks_n = tl.cdiv(n, BLOCK_N)
    tiles = tl.cdiv(m, BLOCK_M) * blocks_n
    batch, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    z, y = batch // p, batch % p
    m, n, k = sizes(m, n, k, LAYOUT)
    a_ptr, stride_am, stride_ak = left_operand(a_ptr, z, y, stride_ag, stride_ap, stride_am, stride_ak, LAYOUT)
    b_ptr, stride_bk, stride_bn = right_operand(b_ptr, z, y, stride_bg, stride_bp, stride_bk, stride_bn, LAYOUT)
    rows = tile // blocks_n * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if MAXIMA == _REGISTERS:
        inner = tl.arange(0, BLOCK_K)
        a = load(a_ptr, rows, inner, m, k, stride_am, stride_ak, DTYPE, ZERO)
        b = load(b_ptr, inner, columns, k, n, stride_bk, stride_bn, DTYPE, ZERO)
        row, column = tl.max(a, 1), tl.max(b, 0)
        sums = tl.zeros((BLOCK_M, BLOCK_N), DTYPE)
        sums = add_product(a, b, shift_of(row)[:, None], shift_of(column)[None, :], sums, PRECISION)
    else:
        batches = (tl.num_programs(0) // tiles).to(tl.int64)
        row_at = maxima_ptr + batch * m + rows
        column_at = maxima_ptr + batches * m + batch * n + columns
        if MAXIMA == _WALK:
            row, column = walked_maxima(
                a_ptr, b_ptr, rows, columns, m, n, k, stride_am, stride_ak, stride_bk, stride_bn, BLOCK_K, DTYPE
            )
            # through memory they come to the threads that use them
            tl.store(row_at, row, mask=rows < m)
            tl.store(column_at, column, mask=columns < n)
            tl.debug_barrier()
        row = tl.load(row_at, mask=rows < m, other=ZERO)
        column = tl.load(column_at, mask=columns < n, other=ZERO)
        sums = sums_of(
            a_ptr, b_ptr, row, column, rows, columns, m, n, k, stride_am, stride_ak, stride_bk, stride_bn,
            BLOCK_K, PRECISION,
        )  # fmt: skip
    value = logarithms(sums, row, column, top_of(a_top_ptr, batch), top_of(b_top_ptr, batch), PRECISION)
    # in place all of a tile with marks is computed again
    own = z * stride_tg + y * stride_tp
    marked = raise_tops(out_top_ptr, out_column_ptr, own, value, rows, columns, m, n, out_ptr is None) == MARK
    tl.store(room_ptr + tl.program_id(0), marked.to(DTYPE))
    if out_ptr is None:
        tl.debug_barrier()  # other threads of this program may still read the rows
        if not marked:
            store(a_ptr, value, rows, columns, m, n, stride_am)
    else:
        out_ptr += multiple(z * stride_og + y * stride_op, width_of_stride(LAYOUT, "out"))
        store(out_ptr, value, rows, columns, m, n, multiple(stride_om, width_of_stride(LAYOUT, "out")))


@triton.jit(do_not_specialize=VARYING + STRIDES)
def redo_kernel(
    a_ptr, b_ptr, out_ptr, room_ptr, a_top_ptr, b_top_ptr, out_top_ptr, out_column_ptr, rescued_ptr, count, p, m, n, k,
    stride_ag, stride_ap, stride_am, stride_ak, stride_bg, stride_bp, stride_bk, stride_bn,
    stride_og, stride_op, stride_om, stride_tg, stride_tp,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program redoes those of its share of the `count` tiles of `product_kernel` that are flagged.

    Without `out_ptr` the rows of `a`, which are as they were, are copied to the room, behind the flags, and multiplied
    again: (programs, ROWS, k).
    """
    blocks_n = tl.cdiv(n, BLOCK_N)
    tiles = tl.cdiv(m, BLOCK_M) * blocks_n
    for place in tl.range(tl.program_id(0), count, tl.num_programs(0), disable_licm=True):
        if tl.load(room_ptr + place) != 0.0:
            batch, tile = (place // tiles).to(tl.int64), place % tiles
            z, y = batch // p, batch % p
            a, b = a_ptr + z * stride_ag + y * stride_ap, b_ptr + z * stride_bg + y * stride_bp
            own = z * stride_tg + y * stride_tp
            a_top, b_top = top_of(a_top_ptr, batch), top_of(b_top_ptr, batch)
            first_row, first_column = tile // blocks_n * BLOCK_M, tile % blocks_n * BLOCK_N
            if out_ptr is None:
                for row in tl.range(first_row, tl.minimum(first_row + BLOCK_M, m), _ROWS, disable_licm=True):
                    # so that rows have the same numbers as in `a`
                    saved = room_ptr + count + (tl.program_id(0).to(tl.int64) * _ROWS - row) * k
                    _redo_rows(
                        a, b, saved, a_top, b_top, out_top_ptr, out_column_ptr, own, rescued_ptr, row, m, n, k,
                        stride_am, stride_ak, stride_bk, stride_bn, BLOCK_N, PRECISION,
                    )  # fmt: skip
            else:
                redo(
                    a, b, out_ptr + z * stride_og + y * stride_op, a_top, b_top, out_top_ptr, out_column_ptr, own,
                    rescued_ptr, first_row, first_column, m, n, k, stride_am, stride_ak, stride_bk, stride_bn,
                    stride_om, 1, BLOCK_M, BLOCK_N, _ROWS,
                )  # fmt: skip


@triton.jit
def _redo_rows(
    a_ptr, b_ptr, saved_ptr, a_top, b_top, out_top_ptr, out_column_ptr, own, rescued_ptr, first_row, m, n, k,
    stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr = 16,
):  # fmt: skip
    """Copy rows of `a`, and write the product over them."""
    DTYPE: tl.constexpr = saved_ptr.dtype.element_ty
    rows = first_row + tl.arange(0, ROWS)
    tl.debug_barrier()  # other threads of this program may still read the rows copied before
    copy_rows(a_ptr, saved_ptr, rows, m, k, stride_am, stride_ak, ROWS)
    tl.debug_barrier()
    for first_column in tl.range(0, n, ROWS, disable_licm=True):
        columns = first_column + tl.arange(0, ROWS)
        row, column = walked_maxima(saved_ptr, b_ptr, rows, columns, m, n, k, k, 1, stride_bk, stride_bn, ROWS, DTYPE)
        sums = sums_of(
            saved_ptr, b_ptr, row, column, rows, columns, m, n, k, k, 1, stride_bk, stride_bn, ROWS, PRECISION
        )
        value = logarithms(sums, row, column, a_top, b_top, PRECISION)
        store(a_ptr, value, rows, columns, m, n, stride_am)
    tl.debug_barrier()  # the tile was stored by other threads of this program
    redo(
        saved_ptr, b_ptr, a_ptr, a_top, b_top, out_top_ptr, out_column_ptr, own, rescued_ptr, first_row, 0, m, n, k,
        k, 1, stride_bk, stride_bn, stride_am, 1, ROWS, BLOCK_N, ROWS,
    )  # fmt: skip


# entries of rows, or of results, that are copied at a time
_HELD = 2**22

# programs that redo tiles on each multiprocessor, bounded because each may have room for rows
_RESIDENT = 4


def forward(
    a: Tensor,
    b: Tensor,
    out: Tensor | None = None,
    *,
    a_top: Tensor | None = None,
    b_top: Tensor | None = None,
    maxima: Tensor | None = None,
    out_top: Tensor | None = None,
    out_column: Tensor | None = None,
    rescued: Tensor | None = None,
) -> Tensor:
    """`log(exp(a) exp(b))` (g, p, m, n) for (g, p, m, k) and (g, p, k, n), written to `out` if that is given.

    `out` may be the memory of `a` or of `b`, of which then a bounded number of rows is copied. With `a_top` and `b_top`
    (g, p), of the dtype of the result, the product is stored less both, a top of -inf counting as 0, and `out_top` (g,
    p), which the caller has filled with -inf, receives its largest entry; or, with `out_column` (g, p, n), `out_top`
    (g, p, m) receives those of rows, and `out_column` those of columns. Of square operands, `maxima` (2, g, p, k),
    contiguous, may be those of the rows of `a` and of the columns of `b`. The number of recomputed entries is added to
    `rescued` (1), int64.
    """
    g, p, m, k = a.shape
    n = b.shape[-1]
    dtype = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    if out is None:
        out = a.new_empty((g, p, m, n), dtype=dtype)
    assert b.shape == (g, p, k, n) and out.shape == (g, p, m, n) and out.dtype == dtype
    assert (a_top is None) == (b_top is None) == (out_top is None)
    assert maxima is None or maxima.shape == (2, g, p, m) and m == n == k
    assert out_column is None or out_top is not None and out_column.stride()[:2] == out_top.stride()[:2]
    if not out.numel():
        return out
    over_a, over_b = launch.same_storage(out, a), launch.same_storage(out, b)
    assert not (over_a and over_b)
    if over_b or not over_a and out.stride(-2) == 1 != out.stride(-1):
        # computed as the transposed product, so that the result is over its left operand, or is contiguous by rows
        tops = (out_top, None) if out_column is None else (out_column, out_top)
        options = {"maxima": None if maxima is None else maxima.flip(0), "out_top": tops[0], "out_column": tops[1]}
        forward(b.mT, a.mT, out.mT, a_top=b_top, b_top=a_top, rescued=rescued, **options)
        return out

    given = (a_top, b_top, out_top, out_column)
    by_rows = launch.pitches(out)[-1] in (0, 1)
    tile = tiles(m, n, k, dtype, launch.chip(out), aligned=launch.layout(a, b, out) != "")
    with torch.cuda.device_of(out):
        if by_rows and (n <= tile.block_n or not over_a):
            _launch(a, b, None if over_a else out, given, rescued, maxima)
        else:
            _by_parts(a, b, out, given, rescued, maxima, copied=over_a)
    return out


Tops = Sequence[Tensor | None]


def _by_parts(
    a: Tensor, b: Tensor, out: Tensor, tops: Tops, rescued: Tensor | None, maxima: Tensor | None, *, copied: bool
) -> None:
    """Write the product part by part, for rows of `a` that are `copied` before, and results that are copied after."""
    g, p, m, k = a.shape
    rows = min(m, max(64, _HELD // max(k, out.shape[-1]) // 64 * 64))
    for block in blocks(max(1, _HELD // (rows * max(k, out.shape[-1]))), g, p):
        part_tops = [None if top is None else top[block] for top in tops]
        lines = None if tops[3] is None else part_tops[2]
        for row in range(0, m, rows):
            part = (*block, slice(row, row + rows))
            left = a[part].clone(memory_format=torch.contiguous_format) if copied else a[part]
            if lines is not None:
                part_tops[2] = lines[..., part[2]]
            by_rows = launch.pitches(out)[-1] == 1
            into = out[part] if by_rows else out.new_empty(out[part].shape)
            known = None if maxima is None else torch.cat([maxima[0][part].flatten(), maxima[1][block].flatten()])
            _launch(left, b[block], into, part_tops, rescued, known)
            if not by_rows:
                out[part] = into


def _launch(
    a: Tensor, b: Tensor, out: Tensor | None, tops: Tops, rescued: Tensor | None, known: Tensor | None = None
) -> None:
    """Write the product to `out`, contiguous by rows, or over `a`, of which a tile then holds whole rows."""
    (g, p, m, k), n = a.shape, b.shape[-1]
    target = a if out is None else out
    layout = launch.layout(a, b, target)
    tile = tiles(m, n, k, target.dtype, launch.chip(target), aligned=layout != "")
    across = triton.cdiv(n, tile.block_n)
    count = g * p * triton.cdiv(m, tile.block_m) * across
    programs = min(count, _RESIDENT * launch.processors(target))
    mode = _REGISTERS if k <= tile.block_k else _WALK if across == 1 and known is None else _MEMORY
    held = programs * _ROWS.value * k if out is None else 0
    if known is None:
        # behind the flags; rows are held there when maxima have been used
        room = target.new_empty(launch.whole(count, max(held, 0 if mode is _REGISTERS else g * p * (m + n))))
        found = room[launch.whole(count) :]
    else:
        room, found = target.new_empty(count + held), known
    strides = (*launch.pitches(a), *launch.pitches(b))
    if mode is _MEMORY and known is None:
        write_maxima(a, b, found, layout)
    *own_tops, out_top, out_column = tops
    strides += (*launch.pitches(target)[:3], *((0, 0) if out_top is None else launch.pitches(out_top)[:2]))
    given = (*(None if top is None else top.contiguous() for top in own_tops), out_top, out_column)
    precision = launch.precision(target)
    launch.run(
        product_kernel, (count,), a, b, out, room, found, *given, p, m, n, k, *strides,
        MAXIMA=mode.value, LAYOUT=layout, TILE=tile, PRECISION=precision,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    launch.run(
        redo_kernel, (programs,), a, b, out, room, *given, rescued, count, p, m, n, k, *strides,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, PRECISION=precision, num_warps=4, num_stages=1,
    )  # fmt: skip
