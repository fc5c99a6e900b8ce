"""Rows of states through factors by torch's matrix products, from memory into memory.

With sets g and m rows in each, a row that enters a factor without blocks holds (before, entering, after) entries. Rows
that enter the first factor with blocks are (g, m, blocks, entering), and those that leave the last one are
(g, blocks, m, leaving). Between two of these they are (g, entering, blocks, m), which is what leaves a product of
transposed matrices: nothing is permuted in memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..structured import Factor


def multiply(
    factors: Sequence[Factor],
    rows: Tensor,
    matrices: Sequence[Tensor],
    middles: Sequence[Tensor],
    out: Tensor | None,
    sets: int,
) -> None:
    """Write rows (rows, size) times matrices (sets or 1, (blocks,) in, out), after each factor but the last to middles.

    `out`: memory for what leaves the last one, or None, if only the middles are wanted.
    """
    for place, (factor, matrix) in enumerate(zip(factors, matrices, strict=True)):
        last = place + 1 == len(factors)
        into = out if last else middles[place]
        if into is None:
            return
        into = into.view(-1)[: len(rows) * factor.size]
        if factor.blocks and len(rows) == len(matrix):  # the rows of a set are one: blocks of all sets are alike
            front = in_blocks(factor, rows, sets, place > 0).flatten(0, 1)
            torch.bmm(front, matrix.flatten(0, 1), out=into.view(-1, 1, factor.leaving))
        elif factor.blocks:
            front, matrix = in_blocks(factor, rows, sets, place > 0), matrix.expand(sets, -1, -1, -1)
            left, right = (front, matrix) if last else (matrix.mT, front.mT)
            for a, b, result in zip(left, right, into.view(*left.shape[:3], right.shape[-1]), strict=True):
                torch.bmm(a, b, out=result)
        elif factor.after > 1:
            front, result = _grid(factor, rows, len(matrix)), _grid(factor.reverse, into, len(matrix))
            for a, b, part in zip(matrix.mT, front, result, strict=True):
                torch.bmm(a.expand(len(b), -1, -1), b, out=part)
        elif len(matrix) == 1:
            torch.mm(rows.view(-1, factor.entering), matrix[0], out=into.view(-1, factor.leaving))
        else:
            front = rows.view(len(matrix), -1, factor.entering)
            torch.bmm(front, matrix, out=into.view(len(matrix), -1, factor.leaving))
        rows = into.view(len(rows), -1)


def in_blocks(factor: Factor, rows: Tensor, sets: int, between: bool) -> Tensor:
    """Rows that enter a factor, which another one leaves if `between`, as (sets, blocks, rows of a set, in)."""
    if between:
        return rows.view(sets, factor.entering, factor.blocks, -1).permute(0, 2, 3, 1)
    return rows.view(sets, -1, factor.blocks, factor.entering).transpose(1, 2)


def operand(factor: Factor, rows: Tensor, sets: int, steps: int, between: bool) -> Tensor:
    """Rows of some steps that enter a factor as (sets, blocks, rows of a set, in), or without blocks (rows, size)."""
    if not factor.blocks:
        return rows.reshape(-1, factor.others * factor.entering)
    grid = in_blocks(factor, rows.reshape(-1), sets * steps, between)
    grid = grid.view(sets, steps, *grid.shape[1:]).transpose(1, 2).flatten(2, 3)
    return grid.contiguous() if grid.shape[2] == 1 else grid  # torch multiplies strange strides one by one


def _grid(factor: Factor, rows: Tensor, sets: int) -> Tensor:
    return rows.view(sets, -1, factor.entering, factor.after)


def add_counts(factor: Factor, rows: Tensor, following: Tensor, counts: Tensor) -> None:
    """Add products of rows that enter a factor and rows that leave it to counts (sets, *own).

    Both are (sets, blocks, rows of a set, size), or without blocks (rows, size).
    """
    if factor.transposed:
        rows, following, factor = following, rows, factor.reverse
    sets = len(counts)
    if factor.blocks:
        for place, (front, back) in enumerate(zip(rows, following, strict=True)):
            counts[place % sets].baddbmm_(front.mT, back)
    elif factor.after > 1:
        grids = _grid(factor, rows, sets), _grid(factor.reverse, following, sets)
        for front, back, total in zip(*grids, counts, strict=True):
            if factor.after >= max(factor.entering, factor.leaving):  # sums of small matrices are slow, one by one
                total.add_(torch.bmm(front, back.mT).sum(0))
            else:
                total.addbmm_(front, back.mT)
    elif sets == 1:
        counts[0].addmm_(rows.reshape(-1, factor.entering).mT, following.reshape(-1, factor.leaving))
    else:
        counts.baddbmm_(rows.reshape(sets, -1, factor.entering).mT, following.reshape(sets, -1, factor.leaving))
