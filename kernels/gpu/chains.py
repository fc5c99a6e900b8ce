"""The operands of a batch of chains as the kernels read them, with bounds of matrices and levels of x.

`x` (v, g, m, c) of any float type and strides; `bulk` (v - 1 or 1, g, c, c) linear or logarithms, any strides, one
matrix for each of `g` sets of `m` sequences and each step, or for all steps; `start` (g, m, c), contiguous float64
logarithms; `ends` (g, m), contiguous int64, the steps of each sequence, at least 1, or None where all have v.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .scaled import exponent_of, is_low, level_of
from .tiles import at


class Operands(NamedTuple):
    """A batch of chains, see above; `dtype` is that of the arithmetic and of the messages."""

    x: Tensor
    bulk: Tensor
    start: Tensor
    ends: Tensor | None
    log_params: bool
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """v, g, m and c."""
        v, g, m, c = self.x.shape
        return v, g, m, c

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of x, and those of bulk, 0 from step to step where one matrix serves all."""
        return *self.x.stride(), 0 if len(self.bulk) == 1 else self.bulk.stride(0), *self.bulk.stride()[1:]

    @property
    def precision(self) -> str:
        """The precision of `tl.dot`, see `launch.precision`; sums of few terms are no faster on tensor cores."""
        precision = launch.precision(self.x.new_empty(0, dtype=self.dtype))
        return "ieee" if precision == "tf32x3" and self.shape[3] <= 32 else precision

    @property
    def double(self) -> bool:
        """Whether the arithmetic is float64."""
        return self.dtype == torch.float64


class Room(NamedTuple):
    """What a launch needs before it begins.

    `bound` (s, g), int32: 2 k + low of each matrix, see `scaled`. `level` (v, g, m), int32: the exponents of two of the
    largest exp x of each sequence and step. `doubt` (g, m), bool: false. `counters`: zeros.
    """

    bound: Tensor
    level: Tensor
    doubt: Tensor
    counters: Tensor


@triton.jit(do_not_specialize=["matrices", "g", "rows", "m", "cleared"])
def _prepare_kernel(
    bulk_ptr, x_ptr, bound_ptr, level_ptr, room_ptr, matrices, g, rows, m, cleared,
    stride_bv, stride_bg, stride_bk, stride_bj, stride_xv, stride_xg, stride_xm, stride_xc,
    C: tl.constexpr, ROWS: tl.constexpr, LOG_PARAMS: tl.constexpr, DTYPE: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
):  # fmt: skip
    """One program finds the bound of one matrix, or the levels of BLOCK_K rows of x, and writes its share of zeros."""
    program = tl.program_id(0).to(tl.int64)
    if program < matrices:
        bulk_ptr += program // g * stride_bv + program % g * stride_bg
        _bound(bulk_ptr, bound_ptr + program, stride_bk, stride_bj, C, ROWS, LOG_PARAMS, DTYPE, BLOCK_K, BLOCK_J)
    else:
        row = (program - matrices) * BLOCK_K + tl.arange(0, BLOCK_K)
        x_row = x_ptr + row // m // g * stride_xv + row // m % g * stride_xg + row % m * stride_xm
        top = tl.full((BLOCK_K, BLOCK_J), float("-inf"), DTYPE)
        for first in tl.range(0, C, BLOCK_J):
            columns = first + tl.arange(0, BLOCK_J)
            mask = (row < rows)[:, None] & (columns < C)[None, :]
            x = tl.load(x_row[:, None] + (columns.to(tl.int64) * stride_xc)[None, :], mask=mask, other=float("-inf"))
            top = tl.maximum(top, x.to(DTYPE))
        tl.store(level_ptr + row, level_of(tl.max(top, 1)), mask=row < rows)
    for first in tl.range(tl.program_id(0) * 256, cleared, tl.num_programs(0) * 256):
        words = first + tl.arange(0, 256)
        tl.store(room_ptr + words, tl.zeros((256,), tl.int32), mask=words < cleared)


@triton.jit
def _bound(
    matrix_ptr, bound_ptr, stride_k, stride_j,
    C: tl.constexpr, ROWS: tl.constexpr, LOG_PARAMS: tl.constexpr, DTYPE: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
):  # fmt: skip
    """2 k + low of a matrix, see `scaled`, is stored."""
    nothing: tl.constexpr = float("-inf") if LOG_PARAMS else 0.0
    across: tl.constexpr = (C + BLOCK_J - 1) // BLOCK_J
    top = tl.full((BLOCK_K, BLOCK_J), nothing, DTYPE)
    least = tl.full((BLOCK_K, BLOCK_J), float("inf"), DTYPE)
    for tile in tl.range(0, across * ((ROWS + BLOCK_K - 1) // BLOCK_K)):
        rows = tile // across * BLOCK_K + tl.arange(0, BLOCK_K)
        columns = tile % across * BLOCK_J + tl.arange(0, BLOCK_J)
        mask = (rows < ROWS)[:, None] & (columns < C)[None, :]
        p = tl.load(at(matrix_ptr, rows, columns, stride_k, stride_j), mask=mask, other=nothing).to(DTYPE)
        top = tl.maximum(top, p)
        least = tl.minimum(least, tl.where(p > nothing, p, float("inf")))
    highest, lowest = tl.max(top), tl.min(least)
    if LOG_PARAMS:
        k = level_of(highest)
    else:
        k = exponent_of(highest)
    tl.store(bound_ptr, 2 * k + is_low(lowest, k, LOG_PARAMS).to(tl.int32))


def found_in(chain: Operands, found: Tensor) -> tuple[Tensor, Tensor]:
    """`bound` and `level`, see `Room`, which lie in memory one behind the other."""
    v, g, m, _ = chain.shape
    bound, level = launch.parts(found, len(chain.bulk) * g, v * g * m)
    return bound.view(-1, g), level.view(v, g, m)


def room(chain: Operands, counters: int, *, bulk: Tensor | None = None, found: Tensor | None = None) -> Room:
    """The bounds of all matrices, the levels of x, no doubt, and so many int32 counters of 0; not for empty chains.

    `bulk` (any, g, rows, c): matrices, or rows of them, whose bounds are found instead; there may be none. `found`:
    memory for bounds, and levels behind them, that outlives the rest.
    """
    v, g, m, c = chain.shape
    assert chain.start.is_contiguous() and (chain.ends is None or chain.ends.is_contiguous())
    bulk = chain.bulk if bulk is None else bulk
    matrices, rows, marks = len(bulk) * g, v * g * m, -(-g * m // 4)
    sizes = [launch.whole(matrices, rows), launch.whole(marks, counters)]
    memory = torch.empty(sum(sizes[found is not None :]), dtype=torch.int32, device=chain.x.device)
    found, zeros = memory.split(sizes) if found is None else (found, memory)
    bound, level = launch.parts(found, matrices, rows)
    doubt, counted = launch.parts(zeros, marks, counters)
    block_j = min(256, triton.next_power_of_2(c))
    block_k = max(1, 2048 // block_j)
    launch.run(
        _prepare_kernel, (matrices + triton.cdiv(rows, block_k),), bulk, chain.x, bound, level,
        zeros, matrices, g, rows, m, len(zeros), *bulk.stride(), *chain.x.stride(),
        C=c, ROWS=bulk.shape[2], LOG_PARAMS=chain.log_params, DTYPE=launch.arithmetic(chain.dtype),
        BLOCK_K=block_k, BLOCK_J=block_j, num_warps=4,
    )  # fmt: skip
    doubtful = doubt.view(torch.bool)[: g * m].view(g, m)
    return Room(bound.view(-1, g), level.view(v, g, m), doubtful, counted)
