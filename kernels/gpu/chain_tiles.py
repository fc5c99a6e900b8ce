"""The tiles of a step of the forward and the backward recursion, and the arguments that both launchers share."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chain_matrix import load_matrix
from .launch import common_width, precision, run


class Tiles(NamedTuple):
    """The block sizes of sequences (s), terms (k) and results (c); `whole`: the transition matrix is one tile.

    `dot`: sums are by `tl.dot`; otherwise a program has one sequence and adds up products term by term, finding the
    maxima of columns on the way.
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
        """The most registers that a thread can have; ptxas by itself spills some to run more programs at once."""
        return min(255, 2048 // self.warps)


def tiles(c: int, m: int, dtype: torch.dtype, width: int, *, transposed: bool = False) -> Tiles:
    """The tiles for `m` sequences to a set of matrices, of whose elements `width` are loaded at once.

    From a model of registers and shared memory, checked by compiling, not measured yet. With `dot` sixteen sequences
    share the loads of a matrix, which is worth it from two on. All c results of a sequence are in one tile, so that
    their maximum needs no other program; where sixteen such rows do not fit into registers, a program has one sequence.
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
    """The number of elements that one load takes from rows of messages, of matrices, and of `x` and its gradient."""

    c: int
    bulk: int
    x: int

    @classmethod
    def of(cls, bulk: Tensor, *rows: Tensor | None) -> "Widths":
        """The widths for matrices (..., c, c) and for rows (..., c) of `x` and its gradient."""
        c = bulk.shape[-1]
        strides = bulk.stride()[:-2] + tuple(stride for stride in bulk.stride()[-2:] if stride != 1)
        others = [stride for row in rows if row is not None for stride in row.stride()[:-1]]
        return cls(common_width(c), common_width(c, *strides), common_width(c, *others))


def constants(choice: Tiles, bulk: Tensor, dtype: torch.dtype, widths: Widths) -> dict[str, Any]:
    """The compile-time arguments that the forward and the backward launcher share, with warps and stages."""
    c = bulk.shape[-1]
    # one matrix for all steps stays in registers if there are enough
    held = choice.whole and (c <= 32 or not torch.version.hip)
    exact = torch.get_float32_matmul_precision() == "highest"
    # sums of up to 32 terms are no faster on tensor cores, which truncate them
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
def _column_tops_kernel(
    bulk_ptr, top_ptr, sets, inner, c, stride_bv, stride_bg, stride_bh, stride_bk, stride_bj,
    LOG_PARAMS: tl.constexpr, DTYPE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program computes a block of columns of one matrix."""
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


def column_tops(bulk: Tensor, choice: Tiles, dtype: torch.dtype, *, log_params: bool) -> Tensor | None:
    """The maxima (s, g * h, c) of the columns of matrices `bulk` (s, g, h, c, c); None if a step finds them itself."""
    if choice.whole or not choice.dot:
        return None
    steps, outer, inner, c, _ = bulk.shape
    tops = bulk.new_empty((steps, outer * inner, c), dtype=dtype)
    block_c = min(64, triton.next_power_of_2(c))
    if tops.numel():
        grid = (steps * outer * inner * triton.cdiv(c, block_c),)
        run(
            _column_tops_kernel, grid, bulk, tops, outer * inner, inner, c, *bulk.stride(),
            LOG_PARAMS=log_params, DTYPE=arithmetic(dtype), BLOCK_K=32, BLOCK_C=block_c, num_warps=4,
        )  # fmt: skip
    return tops


def arithmetic(dtype: torch.dtype) -> tl.dtype:
    """Triton's name for the dtype of the arithmetic."""
    return tl.float64 if dtype == torch.float64 else tl.float32
