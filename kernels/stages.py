"""Messages through the factors of a product of matrices, stage by stage, in any semiring.

A stage maps rows along one axis of a message's grid by matrices, see `Stage`: with a block axis, those of block i are
mapped by matrix i. As operands of a matrix product, a message (*lead, m, c) is (*lead, blocks or 1, rows, in), and a
parameter (*lead or ones, blocks or 1, in, out).
"""

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from .structured import Factors, Stage

Binary = Callable[[Tensor, Tensor], Tensor]


def through(
    message: Tensor, parameters: Sequence[Tensor], pattern: Factors, matmul: Binary, plus: Binary, times: Binary
) -> Tensor:
    """A message (*lead, m, c) times the product of the factors, each (*lead or ones, *own), plus the diagonal."""
    after = message
    for stage, parameter in zip(pattern.stages, parameters, strict=False):
        after = mapped(after, parameter, stage, matmul)
    return plus(after, times(message, parameters[-1][..., None, :])) if pattern.diagonal else after


def mapped(message: Tensor, parameter: Tensor, stage: Stage, matmul: Binary) -> Tensor:
    """A message (*lead, m, c) behind one stage."""
    return from_rows(matmul(to_rows(message, stage), matrices(parameter, stage)), stage, message.shape[-2])


def matrices(parameter: Tensor, stage: Stage) -> Tensor:
    """A parameter (*lead, *own) as matrices (*lead, blocks or 1, in, out)."""
    oriented = parameter.mT if stage.transposed else parameter
    return oriented.unsqueeze(-3) if stage.block is None else oriented


def _order(stage: Stage) -> list[int]:
    """The axes of (m, *grid) as rows have them: the block's, m, the others, the contracted one."""
    mapped_axes = [axis for axis in (stage.block, stage.contracted) if axis is not None]
    others = [1 + axis for axis in range(len(stage.axes)) if axis not in mapped_axes]
    return [*(1 + axis for axis in mapped_axes[:-1]), 0, *others, 1 + stage.contracted]


def to_rows(message: Tensor, stage: Stage) -> Tensor:
    """A message (*lead, m, c) in front of a stage as rows (*lead, blocks or 1, rows, in)."""
    *lead, m, _ = message.shape
    grid = message.reshape(*lead, m, *stage.axes)
    grid = grid.permute(*range(len(lead)), *(len(lead) + axis for axis in _order(stage)))
    blocks, size = 1 if stage.block is None else stage.axes[stage.block], stage.axes[stage.contracted]
    return grid.reshape(*lead, blocks, m * math.prod(stage.axes) // (blocks * size), size)


def from_rows(rows: Tensor, stage: Stage, m: int) -> Tensor:
    """Rows (*lead, blocks or 1, rows, out) behind a stage as a message (*lead, m, c)."""
    order, sizes = _order(stage), [m, *stage.axes]
    sizes[1 + stage.contracted] = rows.shape[-1]
    *lead, _, _, _ = rows.shape
    grid = rows.reshape(*lead, *(sizes[axis] for axis in order))
    leaving = [0, *(1 + axis for axis in stage.order)]  # axes of (m, *grid) as they leave
    grid = grid.permute(*range(len(lead)), *(len(lead) + order.index(axis) for axis in leaving))
    return grid.flatten(len(lead) + 1)
