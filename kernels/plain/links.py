"""The factors of a product as torch's matrix products, from rows in memory into rows in memory.

With sets g and m rows in each, a row that enters a factor without blocks holds its grid as (before, in, after) entries.
Rows that enter the first factor with blocks are (g, m, blocks, in), and those that leave the last one are
(g, blocks, m, out). Between two of these they are (g, in, blocks, m), which is what leaves a product of transposed
matrices: nothing is permuted in memory.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..structured import Factors

Matrices = Sequence[Tensor]


class Link(NamedTuple):
    """The sizes of one factor; `blocks` is 0 if it has no block axis, `others` the size of all other axes."""

    blocks: int
    others: int
    entering: int
    leaving: int
    after: int

    @property
    def size(self) -> int:
        """The entries of a row after the factor."""
        return self.others * self.leaving

    @property
    def transposed(self) -> "Link":
        """The link of the transposed matrices."""
        return self._replace(entering=self.leaving, leaving=self.entering)


def links(pattern: Factors, parameters: Sequence[Tensor]) -> tuple[Link, ...] | None:
    """The links of factors (..., in, out); None where rows would have to be permuted."""
    result, stages = [], pattern.stages
    for place, (stage, parameter) in enumerate(zip(stages, parameters, strict=False)):
        axes, at, order = stage.axes, stage.contracted, tuple(range(len(stage.axes)))
        if stage.block is not None:  # there are two axes
            order = (1, 0) if place + 1 < len(stages) else (0, 1)
        mixed = pattern.diagonal if stage.block == 0 and at == 1 else stage.block is not None
        if mixed or stage.block != stages[0].block or stage.order != order:
            return None
        leaving, blocks = parameter.shape[-2 if stage.transposed else -1], 0 if stage.block is None else axes[0]
        result.append(Link(blocks, math.prod(axes) // axes[at], axes[at], leaving, math.prod(axes[at + 1 :])))
    return tuple(result)


def multiply(
    chain_links: Sequence[Link], rows: Tensor, matrices: Matrices, middles: Matrices, out: Tensor | None, sets: int
) -> None:
    """Write rows (rows, size) times matrices (sets or 1, (blocks,) in, out), after each factor but the last to middles.

    `out`: memory for what leaves the last one, or None, if only the middles are wanted.
    """
    for place, (link, matrix) in enumerate(zip(chain_links, matrices, strict=True)):
        last = place + 1 == len(chain_links)
        into = out if last else middles[place]
        if into is None:
            return
        into = into.view(-1)[: len(rows) * link.size]
        if link.blocks and len(rows) == len(matrix):  # the rows of a set are one: blocks of all sets are alike
            front = in_blocks(link, rows, sets, place > 0).flatten(0, 1)
            torch.bmm(front, matrix.flatten(0, 1), out=into.view(-1, 1, link.leaving))
        elif link.blocks:
            front, matrix = in_blocks(link, rows, sets, place > 0), matrix.expand(sets, -1, -1, -1)
            left, right = (front, matrix) if last else (matrix.mT, front.mT)
            for a, b, result in zip(left, right, into.view(*left.shape[:3], right.shape[-1]), strict=True):
                torch.bmm(a, b, out=result)
        elif link.after > 1:
            front, result = _grid(link, rows, len(matrix)), _grid(link.transposed, into, len(matrix))
            for a, b, part in zip(matrix.mT, front, result, strict=True):
                torch.bmm(a.expand(len(b), -1, -1), b, out=part)
        elif len(matrix) == 1:
            torch.mm(rows.view(-1, link.entering), matrix[0], out=into.view(-1, link.leaving))
        else:
            front = rows.view(len(matrix), -1, link.entering)
            torch.bmm(front, matrix, out=into.view(len(matrix), -1, link.leaving))
        rows = into.view(len(rows), -1)


def in_blocks(link: Link, rows: Tensor, sets: int, between: bool) -> Tensor:
    """Rows that enter a factor, which another one leaves if `between`, as (sets, blocks, rows of a set, in)."""
    if between:
        return rows.view(sets, link.entering, link.blocks, -1).permute(0, 2, 3, 1)
    return rows.view(sets, -1, link.blocks, link.entering).transpose(1, 2)


def operand(link: Link, rows: Tensor, sets: int, steps: int, between: bool) -> Tensor:
    """Rows of some steps that enter a factor as (sets, blocks, rows of a set, in), or without blocks (rows, size)."""
    if not link.blocks:
        return rows.reshape(-1, link.others * link.entering)
    grid = in_blocks(link, rows.reshape(-1), sets * steps, between)
    grid = grid.view(sets, steps, *grid.shape[1:]).transpose(1, 2).flatten(2, 3)
    return grid.contiguous() if grid.shape[2] == 1 else grid  # torch multiplies strange strides one by one


def _grid(link: Link, rows: Tensor, sets: int) -> Tensor:
    return rows.view(sets, -1, link.entering, link.after)


def add_counts(link: Link, transposed: bool, rows: Tensor, following: Tensor, counts: Tensor) -> None:
    """Add products of rows that enter a factor and rows that leave it to counts (sets, *own).

    Both are (sets, blocks, rows of a set, size), or without blocks (rows, size).
    """
    if transposed:
        rows, following, link = following, rows, link.transposed
    sets = len(counts)
    if link.blocks:
        for place, (front, back) in enumerate(zip(rows, following, strict=True)):
            counts[place % sets].baddbmm_(front.mT, back)
    elif link.after > 1:
        grids = _grid(link, rows, sets), _grid(link.transposed, following, sets)
        for front, back, total in zip(*grids, counts, strict=True):
            if link.after >= max(link.entering, link.leaving):  # sums of small matrices are slow, one by one
                total.add_(torch.bmm(front, back.mT).sum(0))
            else:
                total.addbmm_(front, back.mT)
    elif sets == 1:
        counts[0].addmm_(rows.reshape(-1, link.entering).mT, following.reshape(-1, link.leaving))
    else:
        counts.baddbmm_(rows.reshape(sets, -1, link.entering).mT, following.reshape(sets, -1, link.leaving))
