"""One step of a vector chain: what the forward and the backward recursion do alike.

    u(j) = log sum_k exp(message(k)) P(k, j)

for a block of BLOCK_S sequences that share `P` (c, c), linear or logarithms. The backward recursion passes `P`
transposed, that is its strides exchanged. Messages are float32 (float64 for float64) logarithms with a maximum of
0, so their exponentials need no shift; `P` is scaled as in `chain_matrix`. Sums are float32, their
logarithms float64: what is added to them may cancel, and only what is stored is rounded.

A sum below TRUSTED although a term is there is redone by the pairwise maximum, in the same kernel. Whether a term is
there at all is asked by a product of zeros and ones, and only where some sum is small.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chain_matrix import level_of, load_matrix, log_entry, log_level, log_wide, lowered, scaled
from .launch import common_width, precision
from .tiles import TRUSTED, any_of, exp, far, finite, log, operand


class Tiles(NamedTuple):
    """A block of sequences, of terms and of outputs; `whole`: the matrix is one tile.

    `dot`: the sums are `tl.dot`, otherwise one sequence is summed term by term, and its columns' maxima are found on
    the way.
    """

    dot: bool
    whole: bool
    block_s: int
    block_k: int
    block_c: int
    warps: int
    stages: int

    @property
    def registers(self) -> int:
        """All that a thread may have: left alone, ptxas spills some for more programs on a processor."""
        return min(255, 2048 // self.warps)


def tiles(c: int, m: int, dtype: torch.dtype, width: int, *, transposed: bool = False) -> Tiles:
    """How a step is cut for `m` sequences to a set of matrices, whose elements are loaded `width` at once.

    A model of registers and shared memory, checked by compiling, not measured yet. Two sequences already read their
    matrix half as often with a dot, though it has room for sixteen. A whole row of outputs is one tile, so that its
    maximum costs nothing; where sixteen such rows do not fit into registers, one does, and then the sequences of a set
    find their matrix in the cache at best.
    """
    wide = dtype == torch.float64
    block_c = max(16, triton.next_power_of_2(c))
    if m == 1 or c > (32 if wide else 256 if width == 4 else 128):
        if c <= 64:
            return Tiles(False, True, 1, block_c, block_c, 2 if block_c <= 32 else 4, 2)
        block_k = min(32, max(1, (2048 if wide else 4096) // block_c))
        return Tiles(False, False, 1, block_k, block_c, 4 if block_c <= 256 else 16 if block_c > 2048 else 8, 3)
    if c <= 64:
        many = 16 < c <= 32 and width == 4 and not wide
        return Tiles(True, True, 32 if many else 16, block_c, block_c, 4 if c <= 16 or many else 8, 2)
    return Tiles(True, False, 16, 16, block_c, 8, 3 if width == 4 else 2 if transposed else 1)


class Widths(NamedTuple):
    """How many elements can be loaded at once: from rows of messages, of matrices, and of `x` and its gradient."""

    c: int
    bulk: int
    x: int

    @classmethod
    def of(cls, bulk: Tensor, *rows: Tensor | None) -> "Widths":
        """For matrices (..., c, c) and rows (..., c) with strides of their own."""
        c = bulk.shape[-1]
        strides = bulk.stride()[:-2] + tuple(stride for stride in bulk.stride()[-2:] if stride != 1)
        others = [stride for row in rows if row is not None for stride in row.stride()[:-1]]
        return cls(common_width(c), common_width(c, *strides), common_width(c, *others))


def constants(choice: Tiles, bulk: Tensor, dtype: torch.dtype, widths: Widths) -> dict[str, Any]:
    """The compile-time arguments that the launchers of both directions share, and warps and stages."""
    c = bulk.shape[-1]
    # one matrix for all steps stays in registers where there are enough
    held = choice.whole and (c <= 32 or not torch.version.hip)
    exact = torch.get_float32_matmul_precision() == "highest"
    # in 32 terms nothing is gained by tensor cores, whose sums are truncated
    ieee = not choice.dot or (c <= 32 and exact)
    return {
        "HOMOGENEOUS": held and bulk.shape[0] == 1,
        "DTYPE": arithmetic(dtype),
        "DOT": choice.dot,
        "WHOLE": choice.whole,
        "BLOCK_S": choice.block_s,
        "BLOCK_K": choice.block_k,
        "BLOCK_C": choice.block_c,
        "PRECISION": "ieee" if ieee else precision(bulk.new_empty((), dtype=dtype)),
        "WIDTH_C": widths.c,
        "WIDTH": widths.bulk,
        "WIDTH_K": 1 if bulk.stride(-2) == 1 else widths.bulk,
        "WIDTH_J": 1 if bulk.stride(-1) == 1 else widths.bulk,
        "WIDTH_X": widths.x,
        "num_warps": choice.warps,
        "num_stages": choice.stages,
        **({} if torch.version.hip else {"maxnreg": choice.registers}),
    }


@triton.jit
def _multiply(weights, matrix, sums, DOT: tl.constexpr, PRECISION: tl.constexpr):
    if DOT:
        left, right = operand(weights, PRECISION), operand(matrix, PRECISION)
        return tl.dot(left, right, sums, input_precision=PRECISION, out_dtype=sums.dtype)
    else:
        return sums + tl.sum(tl.trans(weights) * matrix, 0)[None, :]


@triton.jit
def load_message(message_ptr, members, states, inside, c):
    """The entries `states` of the messages in rows `members`, -inf outside."""
    mask = inside[:, None] & (states < c)[None, :]
    return tl.load((message_ptr + members * c)[:, None] + states[None, :], mask=mask, other=float("-inf"))


@triton.jit
def step(
    message_ptr,
    new_ptr,
    members,
    inside,
    matrix,
    top,
    matrix_ptr,
    stride_k,
    stride_j,
    wanted,
    c,
    rescued_ptr,
    LOG_PARAMS: tl.constexpr,
    DTYPE: tl.constexpr,
    DOT: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The logarithms `u` (BLOCK_S, BLOCK_C) in float64; those that are not `wanted` may be anything.

    From the messages at `message_ptr` (BLOCK_S, c) in memory, in rows `members`. Kept in registers, they would be held,
    and computed, once for each layout that they are used in. Where the new messages will go (`new_ptr`) is room for
    notes until then. `top` (BLOCK_C) holds the columns' maxima, unless they are found on the way;
    WHOLE: `matrix` is all of `P`, scaled.
    """
    columns = tl.arange(0, BLOCK_C)
    sums = tl.zeros((BLOCK_S, BLOCK_C), DTYPE)
    if WHOLE:
        sums = _multiply(exp(load_message(message_ptr, members, columns, inside, c)), matrix, sums, DOT, PRECISION)
    elif DOT:
        level = level_of(top, LOG_PARAMS)
        for start in tl.range(0, c, BLOCK_K):
            rows = start + tl.arange(0, BLOCK_K)
            weights = exp(load_message(message_ptr, members, rows, inside, c))
            p = load_matrix(matrix_ptr, stride_k, stride_j, rows, columns, c, LOG_PARAMS, DTYPE)
            sums = _multiply(weights, scaled(p, level, LOG_PARAMS), sums, DOT, PRECISION)
    else:
        top = tl.full((BLOCK_C,), float("-inf") if LOG_PARAMS else 0.0, DTYPE)
        for start in tl.range(0, c, BLOCK_K):
            rows = start + tl.arange(0, BLOCK_K)
            weights = exp(load_message(message_ptr, members, rows, inside, c))
            p = load_matrix(matrix_ptr, stride_k, stride_j, rows, columns, c, LOG_PARAMS, DTYPE)
            new_top = tl.maximum(top, tl.max(p, 0))
            sums = lowered(sums, top, new_top, LOG_PARAMS)
            top = new_top
            sums = _multiply(weights, scaled(p, level_of(top, LOG_PARAMS), LOG_PARAMS), sums, DOT, PRECISION)
    small = (sums < TRUSTED) & wanted & (top > (float("-inf") if LOG_PARAMS else 0.0))[None, :]
    if any_of(small):
        # all sums are put aside, so that little is in registers meanwhile
        notes = (new_ptr + members * c)[:, None] + columns[None, :]
        mask = inside[:, None] & (columns < c)[None, :]
        tl.store(notes, tl.where(small, -1.0, sums), mask=mask)
        tl.debug_barrier()
        _redo(
            message_ptr, new_ptr, members, inside, matrix_ptr, stride_k, stride_j, c, rescued_ptr,
            LOG_PARAMS, DTYPE, DOT, BLOCK_S, min(BLOCK_C, 32), min(BLOCK_C, 64),
        )  # fmt: skip
        tl.debug_barrier()
        sums = tl.load(notes, mask=mask, other=0.0)
        tl.debug_barrier()
    # what was redone is a logarithm already
    u = log_wide(tl.where(small, 1.0, sums)) + log_level(level_of(top, LOG_PARAMS), LOG_PARAMS)[None, :]
    return tl.where(small, sums.to(tl.float64), u)


@triton.jit
def _redo(
    message_ptr,
    new_ptr,
    members,
    inside,
    matrix_ptr,
    stride_k,
    stride_j,
    c,
    rescued_ptr,
    LOG_PARAMS: tl.constexpr,
    DTYPE: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Replace each -1 at `new_ptr` by its `u`, in tiles small enough to keep in registers beside all else."""
    for first in tl.range(0, c, BLOCK_C):
        columns = first + tl.arange(0, BLOCK_C)
        notes = (new_ptr + members * c)[:, None] + columns[None, :]
        small = tl.load(notes, mask=inside[:, None] & (columns < c)[None, :], other=0.0) == -1.0
        if any_of(small):
            some = small & _reached(
                message_ptr, members, inside, matrix_ptr, stride_k, stride_j, columns, c,
                LOG_PARAMS, DTYPE, DOT, BLOCK_S, BLOCK_K, BLOCK_C,
            )  # fmt: skip
            u = tl.full((BLOCK_S, BLOCK_C), float("-inf"), DTYPE)
            if any_of(some):
                redone = _pairwise(
                    message_ptr, members, inside, matrix_ptr, stride_k, stride_j, columns, c,
                    LOG_PARAMS, DTYPE, BLOCK_S, BLOCK_C,
                )  # fmt: skip
                u = tl.where(some, redone, u)
                if rescued_ptr is not None:
                    tl.atomic_add(rescued_ptr, tl.sum(some.to(tl.int32)).to(tl.int64))
            tl.store(notes, u, mask=small)


@triton.jit
def _reached(
    message_ptr,
    members,
    inside,
    matrix_ptr,
    stride_k,
    stride_j,
    columns,
    c,
    LOG_PARAMS: tl.constexpr,
    DTYPE: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Where a sum has a term at all."""
    count = tl.zeros((BLOCK_S, BLOCK_C), tl.float32)
    for start in tl.range(0, c, BLOCK_K):
        rows = start + tl.arange(0, BLOCK_K)
        message = load_message(message_ptr, members, rows, inside, c)
        p = load_matrix(matrix_ptr, stride_k, stride_j, rows, columns, c, LOG_PARAMS, DTYPE)
        some = (message > float("-inf")).to(tl.float16)
        open_ = (p > (float("-inf") if LOG_PARAMS else 0.0)).to(tl.float16)
        if DOT:
            count = tl.dot(some, open_, count)
        else:
            count += tl.max(tl.trans(some).to(tl.float32) * open_.to(tl.float32), 0)[None, :]
    return count > 0


@triton.jit
def _pairwise(
    message_ptr,
    members,
    inside,
    matrix_ptr,
    stride_k,
    stride_j,
    columns,
    c,
    LOG_PARAMS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The same logarithms by maximum and sum over pairs, one term of every output at a time."""
    top = tl.full((BLOCK_S, BLOCK_C), float("-inf"), DTYPE)
    for k in range(0, c):
        pairs = _pairs(message_ptr, members, inside, matrix_ptr, k, stride_k, stride_j, columns, c, LOG_PARAMS, DTYPE)
        top = tl.maximum(top, pairs)
    shift = finite(top)
    sums = tl.zeros((BLOCK_S, BLOCK_C), DTYPE)
    for k in range(0, c):
        pairs = _pairs(message_ptr, members, inside, matrix_ptr, k, stride_k, stride_j, columns, c, LOG_PARAMS, DTYPE)
        sums += exp(pairs - shift)
    return top + log(sums)


@triton.jit
def _pairs(
    message_ptr,
    members,
    inside,
    matrix_ptr,
    k,
    stride_k,
    stride_j,
    columns,
    c,
    LOG_PARAMS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    message = tl.load(message_ptr + members * c + k, mask=inside, other=float("-inf"))
    row = matrix_ptr + far(k, stride_k) + columns.to(tl.int64) * stride_j
    p = tl.load(row, mask=columns < c, other=float("-inf") if LOG_PARAMS else 0.0).to(DTYPE)
    return message[:, None] + log_entry(p, LOG_PARAMS)[None, :]


@triton.jit
def normalised(total, DTYPE: tl.constexpr):
    """Float64 logarithms (BLOCK_S, BLOCK_C) as a message with maximum 0, and what was taken out; -inf stays."""
    taken = tl.max(total, 1)
    return (total - finite(taken)[:, None]).to(DTYPE), taken


@triton.jit
def _column_tops_kernel(
    bulk_ptr, top_ptr, sets, inner, c, stride_bv, stride_bg, stride_bh, stride_bk, stride_bj,
    LOG_PARAMS: tl.constexpr, DTYPE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program for a block of columns of one matrix."""
    blocks = tl.cdiv(c, BLOCK_C)
    index = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    step, z = index // sets, index % sets
    matrix_ptr = bulk_ptr + step * stride_bv + z // inner * stride_bg + z % inner * stride_bh
    top = tl.full((BLOCK_K, BLOCK_C), float("-inf") if LOG_PARAMS else 0.0, DTYPE)
    for start in tl.range(0, c, BLOCK_K):
        rows = start + tl.arange(0, BLOCK_K)
        top = tl.maximum(top, load_matrix(matrix_ptr, stride_bk, stride_bj, rows, columns, c, LOG_PARAMS, DTYPE))
    tl.store(top_ptr + index * c + columns, tl.max(top, 0), mask=columns < c)


def column_tops(bulk: Tensor, dtype: torch.dtype, *, log_params: bool) -> Tensor:
    """The maxima over `k` of `bulk` (s, g, h, c, c), as (s, g * h, c)."""
    steps, outer, inner, c, _ = bulk.shape
    tops = bulk.new_empty((steps, outer * inner, c), dtype=dtype)
    block_c = min(64, triton.next_power_of_2(c))
    if tops.numel():
        grid = (steps * outer * inner * triton.cdiv(c, block_c),)
        _column_tops_kernel[grid](
            bulk, tops, outer * inner, inner, c, *bulk.stride(),
            LOG_PARAMS=log_params, DTYPE=arithmetic(dtype), BLOCK_K=32, BLOCK_C=block_c, num_warps=4,
        )  # fmt: skip
    return tops


def arithmetic(dtype: torch.dtype) -> tl.dtype:
    """Triton's name for the dtype of the arithmetic."""
    return tl.float64 if dtype == torch.float64 else tl.float32
