"""Rows of messages times a product of factors, and the sums over rows that are the gradients of its matrices.

Matrices are (in, out), or with blocks (blocks, in, out), and rows are (rows, size). Where the factors have blocks, rows
that enter one are (rows, blocks, in): what leaves a product of transposed matrices enters the next without a copy.
Rows of several sets have an axis of sets first, and so have the matrices.
"""

from collections.abc import Sequence

from torch import Tensor

from ..structured import Factor


def entering(factors: Sequence[Factor], rows: Tensor, matrices: Sequence[Tensor]) -> list[Tensor]:
    """What enters each of the factors, of rows (rows, size) that enter the first."""
    first = factors[0]
    result = [rows.unflatten(-1, (first.blocks, first.entering)) if first.blocks else rows]
    for factor, matrix in zip(factors[:-1], matrices, strict=False):
        if factor.blocks:
            result.append((matrix.mT @ result[-1].movedim(-3, -1)).transpose(-3, -1))
        else:
            result.append(_product(factor, result[-1], matrix))
    return result


def multiply(
    factors: Sequence[Factor], rows: Tensor, matrices: Sequence[Tensor], diagonal: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """Rows times the factors' product plus the diagonal, (rows of all sets, size), and what enters each factor."""
    parts, last, matrix = entering(factors, rows, matrices), factors[-1], matrices[-1]
    if last.blocks:
        sums = (parts[-1].transpose(-3, -2) @ matrix).transpose(-3, -2).flatten(-2).contiguous()
    else:
        sums = _product(last, parts[-1], matrix)
    sums = sums if diagonal is None else sums.addcmul(rows, diagonal)
    return sums.view(-1, sums.shape[-1]), parts


def _product(factor: Factor, rows: Tensor, matrix: Tensor) -> Tensor:
    """Rows times the matrix of a factor without blocks."""
    *sets, count, _ = rows.shape
    if factor.after == 1:
        return (rows.view(*sets, -1, factor.entering) @ matrix).view(*sets, count, -1)
    grid = rows.view(*sets, -1, factor.entering, factor.after)
    return (matrix.mT.unsqueeze(-3).expand(*grid.shape[:-2], -1, -1) @ grid).view(*sets, count, -1)


def counts(factor: Factor, rows: Tensor, following: Tensor) -> Tensor:
    """The sum over rows of products of what enters a factor and what enters its reverse, in the shape of its parameter.

    `following`: of rows of gradients, what enters the reverse of this factor.
    """
    result = _lines(factor, rows).mT @ _lines(factor.reverse, following)
    return result.mT if factor.transposed else result


def _lines(factor: Factor, rows: Tensor) -> Tensor:
    """Rows that enter a factor as lines (lines, in), or (blocks, rows, in), that its matrices map."""
    if factor.blocks:
        return rows.transpose(-3, -2)
    grid = rows.reshape(*rows.shape[:-2], -1, factor.entering, factor.after)
    return grid.mT.flatten(-3, -2)
