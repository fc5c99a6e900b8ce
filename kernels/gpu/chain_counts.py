"""The gradient of a chain's matrices, from linear messages: expected numbers of transitions.

    out_i(k, j) = sum_m weight_m a_{i-1,m}(k) r_{i,m}(j) / 2^k_i        for matrices, exactly 0 where P_i is
    out_i(k, j) = P_i(k, j) times that                                  for their logarithms: the expected counts

`messages` and `r` (v, g, m, c) are those of `chain_backward`, or of others in the same encoding, whatever c is; 2^k_i
is a matrix's bound, see `chains`. With one matrix for all steps, the gradient is summed over them.

Numerics: a product over sequences, on tensor cores. Weights are divided by a power of two, the largest one's, which is
multiplied into the sum in two factors: nothing overflows or underflows that the result does not.

Cost: s g m c^2 multiply-adds (v - 1 times that for one matrix); each tile of a matrix reads a part of messages, `bulk`
is read and `out` written once. Few sequences are added term by term, bound by the memory traffic of `bulk` and `out`.
Long sums for few matrices are cut into pieces, added in order: no atomics, the same bits every time.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .chains import Operands, room
from .scaled import exponent_of, halves, linear, multiply, power_of_two
from .tiles import at, load, multiples

# most terms that are added without a matrix product
FEW = 8

# a piece of a sum has at least so many terms
_SHORTEST = 256


class Tile(NamedTuple):
    """The tile that one program computes, its warps and its pipeline stages."""

    rows: int
    columns: int
    terms: int
    warps: int
    stages: int


def tiles(c: int, double: bool) -> Tile:
    """The tile of a matrix product over sequences, of matrices with `c` states."""
    if c <= 16:
        return Tile(16, 16, 16, 2, 2)
    if c <= 32:
        return Tile(32, 32, 16, 2, 2)
    return Tile(64, 64, 16, 8, 5) if double else Tile(64, 64, 32, 4, 5)


def few_tiles(c: int) -> Tile:
    """The tile of a sum of few terms: rows of consecutive matrices, all columns up to 256."""
    columns = min(256, triton.next_power_of_2(c))
    return Tile(1024 // columns, columns, 1, 4, 1)


@triton.jit(do_not_specialize=["g", "m", "length", "blocks", "span", "batches"])
def _product_kernel(
    message_ptr, r_ptr, weight_ptr, bulk_ptr, bound_ptr, out_ptr, g, m, length, blocks, span, batches,
    stride_bs, stride_bg, stride_bk, stride_bj, stride_op, stride_os, stride_og, stride_ok, stride_oj,
    KIND: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    WIDTH_BULK: tl.constexpr, WIDTH_OUT: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One program computes one tile (BLOCK_K, BLOCK_J) of one matrix's gradient, over one piece of the sum."""
    DTYPE: tl.constexpr = message_ptr.dtype.element_ty
    stride_bs, stride_bg, stride_bk = multiples(stride_bs, stride_bg, stride_bk, WIDTH_BULK)
    stride_os, stride_og, stride_ok = multiples(stride_os, stride_og, stride_ok, WIDTH_OUT)
    tiles_j: tl.constexpr = (C + BLOCK_J - 1) // BLOCK_J
    tiles_all: tl.constexpr = (C + BLOCK_K - 1) // BLOCK_K * tiles_j
    tile, batch = tl.program_id(0) % tiles_all, tl.program_id(0) // tiles_all
    piece, batch = batch // batches, batch % batches
    step, z = (batch // g).to(tl.int64), (batch % g).to(tl.int64)
    k = tile // tiles_j * BLOCK_K + tl.arange(0, BLOCK_K)
    j = tile % tiles_j * BLOCK_J + tl.arange(0, BLOCK_J)
    weight_ptr += z * length
    exponent = _exponent(weight_ptr, m, DTYPE)

    pitch = g.to(tl.int64) * m * C
    message_ptr += step * pitch + z * m * C
    r_ptr += (step + 1) * pitch + z * m * C
    across = tl.cdiv(length, BLOCK_M)
    total = tl.zeros((BLOCK_K, BLOCK_J), DTYPE)
    for block in tl.range(piece * span, tl.minimum(piece * span + span, blocks)):
        term = block * BLOCK_M + tl.arange(0, BLOCK_M)
        row = term.to(tl.int64) * C
        if ROWS == "apart":
            row = term.to(tl.int64) * pitch
        if ROWS == "nested":
            term = block % across * BLOCK_M + tl.arange(0, BLOCK_M)
            row = block // across * pitch + term.to(tl.int64) * C
        weight = tl.load(weight_ptr + term, mask=term < length, other=0.0).to(DTYPE)
        live = weight != 0.0
        a = tl.load(message_ptr + row[None, :] + k[:, None], mask=(k < C)[:, None] & live[None, :], other=0.0)
        r = tl.load(r_ptr + row[:, None] + j[None, :], mask=live[:, None] & (j < C)[None, :], other=0.0)
        high, low = halves(r * (weight * power_of_two(-exponent, DTYPE))[:, None], PRECISION)
        total += multiply(a, high, low, PRECISION)

    bulk_ptr += step * stride_bs + z * stride_bg
    p = load(bulk_ptr, k, j, C, C, stride_bk, stride_bj, DTYPE, float("-inf") if KIND == "log" else 0.0)
    gradient = _gradient(total, p, tl.load(bound_ptr + batch) >> 1, exponent, KIND)
    out_ptr += piece.to(tl.int64) * stride_op + step * stride_os + z * stride_og
    tl.store(at(out_ptr, k, j, stride_ok, stride_oj), gradient, mask=(k < C)[:, None] & (j < C)[None, :])


@triton.jit(do_not_specialize=["g", "m", "length", "batches"])
def _few_kernel(
    message_ptr, r_ptr, weight_ptr, bulk_ptr, bound_ptr, out_ptr, g, m, length, batches,
    stride_bs, stride_bg, stride_bk, stride_bj, stride_os, stride_og, stride_ok, stride_oj,
    KIND: tl.constexpr, C: tl.constexpr, WIDTH_BULK: tl.constexpr, WIDTH_OUT: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """One program adds up BLOCK_K rows of consecutive matrices' gradients, BLOCK_J columns, term by term."""
    DTYPE: tl.constexpr = message_ptr.dtype.element_ty
    stride_bs, stride_bg, stride_bk = multiples(stride_bs, stride_bg, stride_bk, WIDTH_BULK)
    stride_os, stride_og, stride_ok = multiples(stride_os, stride_og, stride_ok, WIDTH_OUT)
    tiles_j: tl.constexpr = (C + BLOCK_J - 1) // BLOCK_J
    line = (tl.program_id(0) // tiles_j).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    batch, k = (line // C).to(tl.int32), line % C
    j = tl.program_id(0) % tiles_j * BLOCK_J + tl.arange(0, BLOCK_J)
    there = batch < batches
    inside = there[:, None] & (j < C)[None, :]
    step, z = (batch // g).to(tl.int64), (batch % g).to(tl.int64)
    weight_ptr += z * m

    p = tl.load(
        (bulk_ptr + step * stride_bs + z * stride_bg + k * stride_bk)[:, None] + j.to(tl.int64)[None, :] * stride_bj,
        mask=inside,
        other=float("-inf") if KIND == "log" else 0.0,
    ).to(DTYPE)
    bound = tl.load(bound_ptr + batch, mask=there, other=0) >> 1
    exponent = tl.full((BLOCK_K,), -10000, tl.int32)
    for member in tl.range(0, m):
        weight = tl.load(weight_ptr + member, mask=there, other=0.0).to(DTYPE)
        exponent = tl.maximum(exponent, exponent_of(weight))
    total = tl.zeros((BLOCK_K, BLOCK_J), DTYPE)
    pitch = g.to(tl.int64) * m
    for term in tl.range(0, length):
        weight = tl.load(weight_ptr + term % m, mask=there, other=0.0).to(DTYPE)
        live = weight != 0.0
        row = ((step + term // m) * pitch + z * m + term % m) * C
        a = tl.load(message_ptr + row + k, mask=live, other=0.0)
        mask = live[:, None] & (j < C)[None, :]
        r = tl.load(r_ptr + (row + pitch * C)[:, None] + j[None, :], mask=mask, other=0.0)
        total += a[:, None] * (r * (weight * power_of_two(-exponent, DTYPE))[:, None])
    gradient = _gradient(total, p, bound[:, None], exponent[:, None], KIND)
    out = (out_ptr + step * stride_os + z * stride_og + k * stride_ok)[:, None] + j.to(tl.int64)[None, :] * stride_oj
    tl.store(out, gradient, mask=inside)


@triton.jit
def _exponent(weight_ptr, m, DTYPE: tl.constexpr):
    """The exponent of two of the largest of m weights."""
    most = tl.full((256,), -10000, tl.int32)
    for first in tl.range(0, m, 256):
        member = first + tl.arange(0, 256)
        most = tl.maximum(most, exponent_of(tl.load(weight_ptr + member, mask=member < m, other=0.0).to(DTYPE)))
    return tl.max(most)


@triton.jit
def _gradient(total, p, bound, exponent, KIND: tl.constexpr):
    """The gradient of entries p of matrices whose bound is 2^bound, from sums of products divided by 2^exponent."""
    if KIND == "linear":
        exponent -= bound
    else:
        total *= linear(p, bound, KIND == "log")
    half = exponent // 2
    gradient = (total * power_of_two(half, total.dtype)) * power_of_two(exponent - half, total.dtype)
    return tl.where(p == (float("-inf") if KIND == "log" else 0.0), 0.0, gradient)


def gradient(
    chain: Operands,
    messages: Tensor,
    r: Tensor,
    weight: Tensor,
    left_out: Tensor,
    out: Tensor,
    *,
    by_log: bool = False,
    bound: Tensor | None = None,
) -> None:
    """Write the gradient of `sum(weight * log_norm)` with respect to `bulk`.

    Args:
        chain: the operands that the messages were computed from.
        messages: linear forward messages (v, g, m, c), contiguous.
        r: a result of `chain_backward.backward` (v, g, m, c), contiguous; the first step's is not read.
        weight: (g, m) of any float type and strides; a sequence of weight 0 is left out, whatever its messages hold.
        left_out: (g, m), bool, sequences whose messages are not linear or not exact.
        out: (s, g, c, c) of any strides, in the dtype of the messages.
        by_log: the gradient of logarithms of `bulk` is wanted, as where it holds logarithms.
        bound: that of `chains.room`, if it is at hand.
    """
    v, g, m, c = chain.shape
    if v == 1 or out.numel() == 0 or m == 0:
        out.zero_()
        return
    steps = v - 1 if len(chain.bulk) < v - 1 else 1  # that are summed
    batches = len(chain.bulk) * g
    bound = room(chain._replace(x=chain.x[:1]), 0).bound if bound is None else bound
    few = m * steps <= FEW
    # terms of consecutive rows, or of rows at equal distances, are those of one step
    rows = "together" if steps == 1 or g == 1 else "apart" if m == 1 else "nested"
    repeated = 1 if few or rows == "nested" else steps
    weight = torch.where(left_out[:, None], 0.0, weight[:, None].expand(g, repeated, m)).contiguous()
    options = {
        "KIND": "log" if chain.log_params else "counts" if by_log else "linear", "C": c,
        "WIDTH_BULK": launch.widths(chain.bulk)[0], "WIDTH_OUT": launch.widths(out)[0],
    }  # fmt: skip
    if few:
        tile = few_tiles(c)
        grid = (triton.cdiv(batches * c, tile.rows) * triton.cdiv(c, tile.columns),)
        launch.run(
            _few_kernel, grid, messages, r, weight, chain.bulk, bound, out, g, m, m * steps, batches,
            *chain.bulk.stride(), *out.stride(), **options,
            BLOCK_K=tile.rows, BLOCK_J=tile.columns, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return
    tile = tiles(c, chain.double)
    length = m * repeated
    blocks = triton.cdiv(length, tile.terms) * (steps // repeated)
    programs = batches * triton.cdiv(c, tile.rows) * triton.cdiv(c, tile.columns)
    pieces = max(1, min(2 * launch.processors(messages) // programs, blocks * tile.terms // _SHORTEST))
    span = triton.cdiv(blocks, pieces)
    pieces = triton.cdiv(blocks, span)
    sums = out[None] if pieces == 1 else out.new_empty(pieces, *out.shape)
    launch.run(
        _product_kernel, (pieces * programs,), messages, r, weight, chain.bulk, bound, sums,
        g, m, length, blocks, span, batches, *chain.bulk.stride(), *sums.stride(), **options,
        PRECISION=chain.precision, ROWS=rows,
        BLOCK_K=tile.rows, BLOCK_J=tile.columns, BLOCK_M=tile.terms, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if pieces > 1:
        torch.sum(sums, 0, out=out)
