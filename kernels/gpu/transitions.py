"""The gradient of a chain's transition matrices, from its messages: expected numbers of transitions.

    out_i(k, j) = sum_m weight_m exp(alpha_{i-1,m}(k) + r_{i,m}(j))         for linear matrices, exactly 0 where P_i is
    out_i(k, j) = sum_m weight_m exp(alpha_{i-1,m}(k) + log P_i(k, j) + r_{i,m}(j))          for logarithms of matrices

`alpha` (v, g, m, c) are the forward messages and `r` (v, g, m, c) a result of `backward_chain`, natural logarithms in
float32 or float64: `exp(alpha) P exp(r)` are the posteriors of transitions, which sum to 1 over (k, j), and `r` is -inf
after a sequence's end. `bulk` (s, g, c, c) are the matrices, of any float type, and `out` (s, g, c, c) their gradient;
with s = 1 the steps share one matrix, and its gradient is summed over them. A sequence of weight 0 is left out,
whatever its messages hold.

Numerics: the sum over the sequences is a matrix product of exponentials. Its operands are `exp(alpha_m(k) - top_m)`
and `weight_m exp(r_m(j) + top_m - shift_j)`, where `top_m` is the message's largest entry and `shift_j` the largest
`r_m(j) + top_m`: nothing can overflow, and the error of a term is below `2**-115 exp(shift_j) P(k, j)` times its
weight. Where that is more than `2**-28`, which takes a likely path that runs 60 nats below a message's maximum, or 600
in float64, the tile is computed again term by term in the same program. Few sequences are always added term by term.

Cost: s g m c**2 multiply-adds (v - 1 times that for s = 1), and m c exponentials for each tile of a row or column of
tiles; reads messages twice, `bulk` once, and writes `out` once. Few sequences: s g m c**2 exponentials, bound by the
memory traffic of `bulk` and `out` up to 7 of them. Long sums for few matrices are split over programs and their parts
added in a fixed order: no atomics, the same bits every time.

Tiles: a model of registers and of the tensor cores' share in a step, compiled for each chip, not measured yet.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import common_width, precision, widths
from .tiles import any_of, at, exp, finite, load, multiple, multiples, operand

# most terms that are added without a matrix product
FEW = 8

# a sum is split over programs until there are _PROGRAMS of them, but not into parts of less than _SHORTEST terms
_PROGRAMS = 256
_SHORTEST = 256


class Tile(NamedTuple):
    """The tile that one program computes, its warps and its pipeline stages."""

    rows: int
    columns: int
    terms: int
    warps: int
    stages: int


# by the largest number of states: small tiles compute less outside of a matrix, large ones read less twice
_PRODUCT = {16: Tile(16, 16, 16, 2, 3), 32: Tile(32, 32, 16, 2, 3)}
_LARGE = Tile(64, 64, 16, 4, 3)
_DOUBLE = {16: Tile(16, 16, 16, 2, 2)}
_LARGE_DOUBLE = Tile(32, 32, 16, 8, 2)


def tiles(c: int, double: bool) -> Tile:
    """The tile of a matrix product of messages with `c` states."""
    table, large = (_DOUBLE, _LARGE_DOUBLE) if double else (_PRODUCT, _LARGE)
    return next((tile for limit, tile in table.items() if c <= limit), large)


def few_tiles(c: int) -> Tile:
    """The tile of a sum of few terms: rows of consecutive matrices, all columns up to 256."""
    columns = min(256, triton.next_power_of_2(c))
    return Tile(1024 // columns, columns, 1, 4, 2)


@triton.jit
def _row(first, term, g, m, SUMMED: tl.constexpr):
    """The row of `messages` (steps g m, c) of a term: a member of one step, or of all steps if SUMMED."""
    if SUMMED:
        return first + (term // m).to(tl.int64) * g * m + term % m
    else:
        return first + term


@triton.jit
def _product(
    messages_ptr, r_ptr, weight_ptr, top_ptr, bulk_ptr, out_ptr,
    g, m, c, length, span, batches,
    stride_bs, stride_bg, stride_bk, stride_bj,
    stride_op, stride_os, stride_og, stride_ok, stride_oj,
    SUMMED: tl.constexpr, LOG_PARAMS: tl.constexpr, LIMIT: tl.constexpr, PRECISION: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_BULK: tl.constexpr, WIDTH_OUT: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One program computes one tile (BLOCK_K, BLOCK_J) of one matrix's gradient, over one part of the sum."""
    dtype = messages_ptr.dtype.element_ty
    ZERO: tl.constexpr = float("-inf") if LOG_PARAMS else 0.0
    c = multiple(c, WIDTH)
    stride_bs, stride_bg, stride_bk = multiples(stride_bs, stride_bg, stride_bk, WIDTH_BULK)
    stride_os, stride_og, stride_ok = multiples(stride_os, stride_og, stride_ok, WIDTH_OUT)
    tiles_k, tiles_j = tl.cdiv(c, BLOCK_K), tl.cdiv(c, BLOCK_J)
    program = tl.program_id(0)
    tile, batch = program % (tiles_k * tiles_j), program // (tiles_k * tiles_j)
    part, batch = batch // batches, batch % batches
    step, group = (batch // g).to(tl.int64), (batch % g).to(tl.int64)
    first_k, first_j = tile // tiles_j * BLOCK_K, tile % tiles_j * BLOCK_J
    begin = part * span
    end = tl.minimum(begin + span, length)

    k = first_k + tl.arange(0, BLOCK_K)
    j = first_j + tl.arange(0, BLOCK_J)
    first = (step * g + group) * m
    weight_ptr += group * m
    bulk_ptr += step * stride_bs + group * stride_bg
    out_ptr += part.to(tl.int64) * multiple(stride_op, WIDTH_OUT) + step * stride_os + group * stride_og

    highest = tl.full((BLOCK_M, BLOCK_J), float("-inf"), dtype)
    for start in range(begin, end, BLOCK_M):
        term = start + tl.arange(0, BLOCK_M)
        row = _row(first, term, g, m, SUMMED)
        live = tl.load(weight_ptr + term % m, mask=term < end, other=0.0) != 0.0
        top = finite(tl.load(top_ptr + row, mask=live, other=0.0))
        r = tl.load(r_ptr + row[:, None] * c + j[None, :], mask=live[:, None] & (j < c)[None, :], other=float("-inf"))
        highest = tl.maximum(highest, r + top[:, None])
    shift = finite(tl.max(highest, 0))

    total = tl.zeros((BLOCK_K, BLOCK_J), dtype)
    for start in range(begin, end, BLOCK_M):
        term = start + tl.arange(0, BLOCK_M)
        row = _row(first, term, g, m, SUMMED)
        weight = tl.load(weight_ptr + term % m, mask=term < end, other=0.0)
        live = weight != 0.0
        top = finite(tl.load(top_ptr + row, mask=live, other=0.0))
        # (BLOCK_K, BLOCK_M) and (BLOCK_M, BLOCK_J)
        mask = (k < c)[:, None] & live[None, :]
        alpha = tl.load(messages_ptr + row[None, :] * c + k[:, None], mask=mask, other=float("-inf"))
        mask = live[:, None] & (j < c)[None, :]
        r = tl.load(r_ptr + row[:, None] * c + j[None, :], mask=mask, other=float("-inf"))
        left = operand(exp(alpha - top[None, :]), PRECISION)
        right = operand(exp(r + top[:, None] - shift[None, :]) * weight[:, None], PRECISION)
        total = tl.dot(left, right, total, input_precision=PRECISION, out_dtype=dtype)

    p = load(bulk_ptr, k, j, c, c, stride_bk, stride_bj, dtype, ZERO)
    if LOG_PARAMS:
        size = shift[None, :] + p
        deep = size > LIMIT
        gradient = total * exp(size)
    else:
        # in two factors: exp(shift) could overflow where the product does not
        half = exp(shift * 0.5)[None, :]
        deep = p * exp(shift - LIMIT)[None, :] > 1.0
        gradient = total * half * half
    gradient = tl.where((total == 0.0) | (p == ZERO), 0.0, gradient)
    inside = (k < c)[:, None] & (j < c)[None, :]
    tl.store(at(out_ptr, k, j, stride_ok, stride_oj), gradient, mask=inside)

    if any_of(deep):
        # the gradient is written again by other threads
        tl.debug_barrier()
        SUB_K: tl.constexpr = min(BLOCK_K, 32)
        SUB_J: tl.constexpr = min(BLOCK_J, 32)
        ACROSS: tl.constexpr = BLOCK_J // SUB_J
        for sub in range(0, BLOCK_K // SUB_K * ACROSS):
            _redo(
                messages_ptr, r_ptr, weight_ptr, bulk_ptr, out_ptr, g, m, c, first, begin, end,
                first_k + sub // ACROSS * SUB_K + tl.arange(0, SUB_K),
                first_j + sub % ACROSS * SUB_J + tl.arange(0, SUB_J),
                stride_bk, stride_bj, stride_ok, stride_oj, SUMMED, LOG_PARAMS,
            )  # fmt: skip


@triton.jit
def _redo(
    messages_ptr, r_ptr, weight_ptr, bulk_ptr, out_ptr, g, m, c, first, begin, end, k, j,
    stride_bk, stride_bj, stride_ok, stride_oj, SUMMED: tl.constexpr, LOG_PARAMS: tl.constexpr,
):  # fmt: skip
    """Rows k and columns j of one matrix's gradient, term by term."""
    dtype = messages_ptr.dtype.element_ty
    ZERO: tl.constexpr = float("-inf") if LOG_PARAMS else 0.0
    p = load(bulk_ptr, k, j, c, c, stride_bk, stride_bj, dtype, ZERO)
    # the product of tiles has written zeros already
    if any_of(p != ZERO):
        total = tl.zeros((k.shape[0], j.shape[0]), dtype)
        for term in range(begin, end):
            weight = tl.load(weight_ptr + term % m)
            if weight != 0.0:
                row = _row(first, term, g, m, SUMMED)
                alpha = tl.load(messages_ptr + row * c + k, mask=k < c, other=float("-inf"))
                r = tl.load(r_ptr + row * c + j, mask=j < c, other=float("-inf"))
                total += weight * _share(alpha[:, None], r[None, :], p, LOG_PARAMS)
        inside = (k < c)[:, None] & (j < c)[None, :]
        tl.store(at(out_ptr, k, j, stride_ok, stride_oj), tl.where(p == ZERO, 0.0, total), mask=inside)


@triton.jit
def _share(alpha, r, p, LOG_PARAMS: tl.constexpr):
    """`exp(alpha + r)`, times the matrix if that is a logarithm; 0 without a path, even where the matrix is NaN."""
    joint = alpha + r
    if LOG_PARAMS:
        return tl.where(joint == float("-inf"), 0.0, exp(joint + p))
    else:
        # in two factors: devices flush an exponential below 2^-126, which matters beside a large entry of the matrix
        half = exp(0.5 * joint)
        return half * half


@triton.jit
def _few(
    messages_ptr, r_ptr, weight_ptr, bulk_ptr, out_ptr,
    g, m, c, length, batches,
    stride_bs, stride_bg, stride_bk, stride_bj,
    stride_os, stride_og, stride_ok, stride_oj,
    SUMMED: tl.constexpr, LOG_PARAMS: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_BULK: tl.constexpr, WIDTH_OUT: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """One program adds up BLOCK_K rows of consecutive matrices' gradients, BLOCK_J columns, term by term."""
    dtype = messages_ptr.dtype.element_ty
    ZERO: tl.constexpr = float("-inf") if LOG_PARAMS else 0.0
    c = multiple(c, WIDTH)
    stride_bs, stride_bg, stride_bk = multiples(stride_bs, stride_bg, stride_bk, WIDTH_BULK)
    stride_os, stride_og, stride_ok = multiples(stride_os, stride_og, stride_ok, WIDTH_OUT)
    tiles_j = tl.cdiv(c, BLOCK_J)
    program = tl.program_id(0)
    before = (program // tiles_j).to(tl.int64) * BLOCK_K
    k = (before % c).to(tl.int32) + tl.arange(0, BLOCK_K)
    batch = (before // c).to(tl.int32) + k // c
    k = k % c
    j = program % tiles_j * BLOCK_J + tl.arange(0, BLOCK_J)
    inside = (batch < batches)[:, None] & (j < c)[None, :]
    step, group = (batch // g).to(tl.int64), (batch % g).to(tl.int64)
    first = (step * g + group) * m

    bulk_at = bulk_ptr + (step * stride_bs + group * stride_bg + k.to(tl.int64) * stride_bk)[:, None]
    p = tl.load(bulk_at + j.to(tl.int64)[None, :] * stride_bj, mask=inside, other=ZERO).to(dtype)
    total = tl.zeros((BLOCK_K, BLOCK_J), dtype)
    for term in range(0, length):
        row = _row(first, term, g, m, SUMMED)
        weight = tl.load(weight_ptr + group * m + term % m, mask=batch < batches, other=0.0)
        live = weight != 0.0
        alpha = tl.load(messages_ptr + row * c + k, mask=live, other=float("-inf"))
        mask = live[:, None] & (j < c)[None, :]
        r = tl.load(r_ptr + row[:, None] * c + j[None, :], mask=mask, other=float("-inf"))
        total += weight[:, None] * _share(alpha[:, None], r, p, LOG_PARAMS)
    out_at = out_ptr + (step * stride_os + group * stride_og + k.to(tl.int64) * stride_ok)[:, None]
    tl.store(out_at + j.to(tl.int64)[None, :] * stride_oj, tl.where(p == ZERO, 0.0, total), mask=inside)


def gradient(messages: Tensor, r: Tensor, weight: Tensor, bulk: Tensor, out: Tensor, *, log_params: bool) -> None:
    """Write the gradient of `sum(weight * log_norm)` with respect to `bulk`.

    Args:
        messages: forward messages (v, g, m, c), contiguous.
        r: the result of `backward_chain.backward` (v, g, m, c), contiguous; the first step's is not read.
        weight: (g, m).
        bulk: (s, g, c, c) with s = v - 1, or 1 for all steps; any strides.
        out: (s, g, c, c) of any strides, in the dtype of the messages.
        log_params: whether `bulk` holds logarithms.
    """
    v, g, m, c = messages.shape
    s, dtype = len(bulk), messages.dtype
    assert messages.is_contiguous() and r.is_contiguous() and r.shape == messages.shape and r.dtype == dtype
    assert bulk.shape == out.shape == (s, g, c, c) and s in (1, v - 1) and weight.shape == (g, m) and out.dtype == dtype
    if v == 1 or out.numel() == 0 or m == 0:
        out.zero_()
        return
    summed = s < v - 1
    weight = weight.to(dtype).contiguous()
    if summed and g == 1:
        # the members of all steps, one after another, are those of one step
        weight, m, summed = weight.repeat(1, v - 1), m * (v - 1), False
    length, batches = m * (v - 1) if summed else m, s * g
    options = {"SUMMED": summed, "LOG_PARAMS": log_params, "WIDTH": common_width(c)}
    options |= {"WIDTH_BULK": widths(bulk)[0], "WIDTH_OUT": widths(out)[0]}
    if length <= FEW:
        tile = few_tiles(c)
        grid = (triton.cdiv(batches * c, tile.rows) * triton.cdiv(c, tile.columns),)
        _few[grid](
            messages, r[1:], weight, bulk, out, g, m, c, length, batches, *bulk.stride(), *out.stride(), **options,
            BLOCK_K=tile.rows, BLOCK_J=tile.columns, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return
    double = dtype == torch.float64
    tile = tiles(c, double)
    count = batches * triton.cdiv(c, tile.rows) * triton.cdiv(c, tile.columns)
    parts = max(1, min(_PROGRAMS // count, length // _SHORTEST))
    span = triton.cdiv(triton.cdiv(length, parts), tile.terms) * tile.terms
    parts = triton.cdiv(length, span)
    sums = out[None] if parts == 1 else torch.empty(parts, *out.shape, dtype=dtype, device=out.device)
    _product[(parts * count,)](
        messages, r[1:], weight, messages[:-1].amax(-1), bulk, sums,
        g, m, c, length, span, batches, *bulk.stride(), *sums.stride(), **options,
        LIMIT=600.0 if double else 60.0, PRECISION=precision(messages),
        BLOCK_K=tile.rows, BLOCK_J=tile.columns, BLOCK_M=tile.terms, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if parts > 1:
        torch.sum(sums, 0, out=out)
