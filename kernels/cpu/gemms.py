"""The factors of a product as matrix products by torch, from rows in memory into rows in memory, for many steps.

A row of the grid in front of a stage holds (before, in, after) entries, or with a block axis (blocks, in). The latter
makes sums of rows by blocks, (groups, blocks, together, out) of `together` rows each; they become rows again in the
order of axes that the next stage asks for, either (blocks, out) or turned, (out, blocks).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..stages import leaving_grid
from ..structured import Stage
from .passes import Passes


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
        """The entries of a row behind the stage."""
        return (self.blocks or self.before * self.after) * self.leaving


def links(stages: Sequence[Stage], parameters: Sequence[Tensor]) -> tuple[Link, ...] | None:
    """The links of stages, between messages in the order of their states; None if rows would have to be permuted."""
    made = []
    if stages[0].block not in (None, 0):
        return None
    for place, (stage, parameter) in enumerate(zip(stages, parameters, strict=False)):
        following = stages[place + 1].block if place + 1 < len(stages) else None
        count = len(stage.axes)
        leaving = leaving_grid(stage, parameter)[stage.order.index(stage.contracted)]
        before = math.prod(stage.axes[: stage.contracted])
        entering, after = stage.axes[stage.contracted], math.prod(stage.axes[stage.contracted + 1 :])
        if stage.block is None:
            if following == 1 or stage.order != tuple(range(count)):
                return None
            made.append(Link(0, before, entering, leaving, after, False))
        else:
            if count != 2:
                return None
            turned = (stage.order[0] == stage.block) == (following == 1)
            made.append(Link(stage.axes[stage.block], 1, entering, leaving, 1, turned))
    return tuple(made)


class Sums(NamedTuple):
    """Rows by blocks as the passes read them, see `Pass`."""

    blocks: int
    together: int


class Gemms:
    """Links with the memory that they need for at most so many rows.

    Attributes:
        out: the sums behind the last link.
    """

    def __init__(self, made: tuple[Link, ...], rows: int, like: Tensor) -> None:
        self._links = made
        last = made[-1]
        inner = [link.size for link in made[:-1] if link.blocks]
        self._scratch = like.new_empty(rows * max([*inner, last.size if last.turned else 0]))
        self.out = like.new_empty(rows * last.size)
        self._turns = [self._turn(link, rows) if link.turned else None for link in made]

    def _turn(self, link: Link, rows: int) -> Passes:
        turn = Passes(self.out.dtype, rows, link.size, rows)
        turn.point(sums=self._scratch)
        turn.set(blocks=link.blocks)
        return turn

    def between(self, rows: Tensor, matrices: Sequence[Tensor], middles: Sequence[Tensor]) -> None:
        """Write the rows behind each link but the last."""
        for place, middle in enumerate(middles):
            self._pass(place, rows, matrices[place], middle)
            rows = middle

    def run(self, rows: Tensor, matrices: Sequence[Tensor], middles: Sequence[Tensor]) -> Sums:
        """Write the rows behind each link, the last as sums into `out`."""
        self.between(rows, matrices, middles)
        last, entering, count = self._links[-1], (middles[-1] if middles else rows), rows.shape[0]
        out = self.out[: count * last.size]
        if last.blocks and not last.turned:
            _multiply(last, entering, matrices[-1], out)
            return Sums(last.blocks, count // matrices[-1].shape[0])
        self._pass(len(self._links) - 1, entering, matrices[-1], out.view(count, last.size))
        return Sums(1, count)

    def _pass(self, place: int, rows: Tensor, matrices: Tensor, into: Tensor) -> None:
        link, turn = self._links[place], self._turns[place]
        if not link.blocks:
            _multiply(link, rows, matrices, into)
            return
        sets, count = matrices.shape[0], rows.shape[0]
        sums = self._scratch[: count * link.size]
        _multiply(link, rows, matrices, sums)
        if turn is not None:
            turn.point(state=into)
            turn.set(together=count // sets)
            turn.run("turn_rows", count)
        else:
            grid = sums.view(sets, link.blocks, -1, link.leaving).transpose(1, 2)
            into.view(grid.shape).copy_(grid)


def _multiply(link: Link, rows: Tensor, matrices: Tensor, into: Tensor) -> None:
    """Write the products of rows with matrices (sets, (blocks,) in, out), each set with as many rows."""
    sets, count = matrices.shape[0], rows.shape[0]
    if link.blocks:
        blocks = link.blocks
        if count == sets:  # the rows of a set are one: blocks of all sets are alike
            grid, out = rows.view(-1, 1, link.entering), into.view(-1, 1, link.leaving)
            torch.bmm(grid, matrices.flatten(0, 1), out=out)
            return
        if sets == 1:
            grid, out = rows.view(-1, blocks, link.entering), into.view(blocks, -1, link.leaving)
            torch.bmm(grid.transpose(0, 1), matrices[0], out=out)
            return
        grid, out = rows.view(sets, -1, blocks, link.entering), into.view(sets, blocks, -1, link.leaving)
        for place in range(sets):
            torch.bmm(grid[place].transpose(0, 1), matrices[place], out=out[place])
    elif link.after > 1:
        grid, out = rows.view(sets, -1, link.entering, link.after), into.view(sets, -1, link.leaving, link.after)
        for place in range(sets):
            torch.bmm(matrices[place].mT.expand(grid.shape[1], -1, -1), grid[place], out=out[place])
    elif sets == 1:
        torch.mm(rows.view(-1, link.entering), matrices[0], out=into.view(-1, link.leaving))
    else:
        torch.bmm(rows.view(sets, -1, link.entering), matrices, out=into.view(sets, -1, link.leaving))


def add_counts(link: Link, transposed: bool, rows: Tensor, behind: Tensor, counts: Tensor) -> None:
    """Add the sums over steps and rows of products of what enters and leaves a link to counts (sets, *own).

    Rows are (steps, rows, entries) each. If there is more than one step, sets have one row each, or all share counts.
    """
    sets = counts.shape[0]
    if transposed:
        rows, behind, link = behind, rows, link._replace(entering=link.leaving, leaving=link.entering)
    if sets > 1 and rows.shape[0] > 1:
        rows, behind = rows.transpose(0, 1), behind.transpose(0, 1)
    blocks, after = (link.blocks,) if link.blocks else (), (link.after,) if link.after > 1 else ()
    left = _grouped(rows, sets, (*blocks, link.entering, *after))
    right = _grouped(behind, sets, (*blocks, link.leaving, *after))
    if not blocks and not after and sets > 1:
        counts.baddbmm_(left.mT, right)
        return
    for place in range(sets):
        front, back, sums = left[place], right[place], counts[place]
        if blocks:
            sums.baddbmm_(front.permute(1, 2, 0), back.transpose(0, 1))
        elif after:
            sums.addbmm_(front, back.mT)
        else:
            sums.addmm_(front.mT, back)


def _grouped(rows: Tensor, sets: int, sizes: tuple[int, ...]) -> Tensor:
    """Rows, (steps, rows, entries) or (sets, steps, entries), as a view (sets, rows of a set, *sizes)."""
    if sets > 1 and rows.shape[0] == sets:
        return rows.view(*rows.shape[:2], *sizes)
    return rows.view(sets, -1, *sizes)
