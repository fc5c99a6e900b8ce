"""The factors of a product as torch's matrix products, from rows in memory into rows in memory, for many steps.

A row that enters a stage holds its grid as (before, in, after) entries, or with a block axis as (blocks, in). After a
stage it holds the grid that the next stage takes: (blocks, out) is turned, (out, blocks), where that has another block
axis.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..stages import leaving_grid
from ..structured import Stage


class Link(NamedTuple):
    """The sizes of one stage; `blocks` is 0 if it has no block axis. `turned`: rows are wanted as (out, blocks)."""

    blocks: int
    before: int
    entering: int
    leaving: int
    after: int
    turned: bool

    @property
    def size(self) -> int:
        """The entries of a row after the stage."""
        return (self.blocks or self.before * self.after) * self.leaving


def links(stages: Sequence[Stage], parameters: Sequence[Tensor]) -> tuple[Link, ...] | None:
    """The links of stages between messages in the order of their states; None if rows would have to be permuted."""
    result = []
    if stages[0].block not in (None, 0):
        return None
    for place, (stage, parameter) in enumerate(zip(stages, parameters, strict=False)):
        following = stages[place + 1].block if place + 1 < len(stages) else None
        leaving = leaving_grid(stage, parameter)[stage.order.index(stage.contracted)]
        before, after = math.prod(stage.axes[: stage.contracted]), math.prod(stage.axes[stage.contracted + 1 :])
        entering = stage.axes[stage.contracted]
        if stage.block is None:
            if following == 1 or stage.order != tuple(range(len(stage.axes))):
                return None
            result.append(Link(0, before, entering, leaving, after, False))
        else:
            if len(stage.axes) != 2:
                return None
            turned = (stage.order[0] == stage.block) == (following == 1)
            result.append(Link(stage.axes[stage.block], 1, entering, leaving, 1, turned))
    return tuple(result)


class Products:
    """Links, with scratch for at most so many rows."""

    def __init__(self, chain_links: tuple[Link, ...], rows: int, like: Tensor) -> None:
        self.links = chain_links
        self._scratch = like.new_empty(rows * max([link.size for link in chain_links if link.turned], default=0))

    def between(self, rows: Tensor, matrices: Sequence[Tensor], middles: Sequence[Tensor]) -> Tensor:
        """The rows (count, size) before the last link; `middles` are those after each but the last."""
        for link, matrix, middle in zip(self.links, matrices, middles, strict=False):
            self._pass(link, rows, matrix, middle)
            rows = middle
        return rows

    def run(
        self, rows: Tensor, matrices: Sequence[Tensor], middles: Sequence[Tensor], out: Tensor, by_blocks: bool = False
    ) -> int:
        """Write the rows after all links; `by_blocks`: as (blocks, count, out) where that is cheaper. The blocks."""
        link, matrix, rows = self.links[-1], matrices[-1], self.between(rows, matrices, middles)
        if by_blocks and link.blocks and not link.turned and len(matrix) == 1:
            _multiply_blocks(link, rows, matrix[0], out.view(link.blocks, -1, link.leaving))
            return link.blocks
        self._pass(link, rows, matrix, out)
        return 1

    def _pass(self, link: Link, rows: Tensor, matrices: Tensor, out: Tensor) -> None:
        """Write the products (count, size) of rows with matrices (sets, (blocks,) in, out), each set with as many."""
        sets, count = len(matrices), len(rows)
        if link.turned:
            scratch = self._scratch[: count * link.size]
            if sets == 1:  # one matrix is transposed faster than many
                _multiply_blocks(link, rows, matrices[0], scratch.view(link.blocks, count, link.leaving))
                out.view(-1, link.blocks).copy_(scratch.view(link.blocks, -1).mT)
            else:
                self._pass(link._replace(turned=False), rows, matrices, scratch.view(count, link.size))
                out.view(count, link.leaving, link.blocks).copy_(scratch.view(count, link.blocks, link.leaving).mT)
        elif link.blocks:
            if count == sets:  # the rows of a set are one: blocks of all sets are alike
                grid, into = rows.view(-1, 1, link.entering), out.view(-1, 1, link.leaving)
                torch.bmm(grid, matrices.flatten(0, 1), out=into)
                return
            grid, into = rows.view(sets, -1, rows.shape[1]), out.view(sets, -1, link.blocks, link.leaving)
            for part, matrix, result in zip(grid, matrices, into, strict=True):
                _multiply_blocks(link, part, matrix, result.transpose(0, 1))
        elif link.after > 1:
            grid, into = rows.view(sets, -1, link.entering, link.after), out.view(sets, -1, link.leaving, link.after)
            for part, matrix, result in zip(grid, matrices, into, strict=True):
                torch.bmm(matrix.mT.expand(len(part), -1, -1), part, out=result)
        elif sets == 1:
            torch.mm(rows.view(-1, link.entering), matrices[0], out=out.view(-1, link.leaving))
        else:
            torch.bmm(rows.view(sets, -1, link.entering), matrices, out=out.view(sets, -1, link.leaving))


def _multiply_blocks(link: Link, rows: Tensor, matrices: Tensor, out: Tensor) -> None:
    """Write the products (blocks, count, out) of rows (count, blocks in) with matrices (blocks, in, out)."""
    torch.bmm(rows.view(-1, link.blocks, link.entering).transpose(0, 1), matrices, out=out)


def add_counts(link: Link, transposed: bool, rows: Tensor, following: Tensor, counts: Tensor) -> None:
    """Add the products of rows before a link and rows after it, of each set, to counts (sets, *own)."""
    if transposed:
        rows, following, link = following, rows, link._replace(entering=link.leaving, leaving=link.entering)
    sets = len(counts)
    shape = (sets, -1, link.blocks) if link.blocks else (sets, -1)
    after = (link.after,) if link.after > 1 else ()
    left, right = rows.view(*shape, link.entering, *after), following.view(*shape, link.leaving, *after)
    if not (link.blocks or after) and sets > 1:
        counts.baddbmm_(left.mT, right)
        return
    for front, back, total in zip(left, right, counts, strict=True):
        if link.blocks:
            total.baddbmm_(front.permute(1, 2, 0), back.transpose(0, 1))
        elif not after:
            total.addmm_(front.mT, back)
        elif link.after >= max(link.entering, link.leaving):  # sums of small matrices are slow, one by one
            total.add_(torch.bmm(front, back.mT).sum(0))
        else:
            total.addbmm_(front, back.mT)
