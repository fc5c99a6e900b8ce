"""What products of factors have in common: a message passes through one factor after the other."""

import math

from torch import Tensor

from ..kernels.structured import Factors, Stage
from .arithmetic import Arithmetic
from .transition import Transition


class Product(Transition):
    """A product of factors, of which each maps one axis of a grid of states; `pattern` says how."""

    pattern: Factors

    def apply(self, message: Tensor, arithmetic: Arithmetic) -> Tensor:
        """`message @ P`, see `Transition.apply`."""
        after = message
        for stage, parameter in zip(self.pattern.stages, self.parameters, strict=False):
            after = _through(after, stage, parameter, arithmetic)
        if self.pattern.diagonal:
            after = arithmetic.plus(after, arithmetic.times(message, self.parameters[-1][..., None, :]))
        return after

    @property
    def multiply_adds(self) -> int:
        """The multiply-adds of one step of one sequence."""
        count = self.states if self.pattern.diagonal else 0
        for stage, parameter in zip(self.pattern.stages, self.parameters, strict=False):
            rows = math.prod(stage.axes) // stage.axes[stage.contracted]
            count += rows * math.prod(parameter.shape[-2:])
        return count


def _through(message: Tensor, stage: Stage, parameter: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Messages `[*lead, rows, states]` behind a stage, of a parameter `[*lead or ones, (blocks,) in, out]`."""
    *lead, rows, _ = message.shape
    axes = len(stage.axes)
    matrices = parameter.mT if stage.transposed else parameter
    if stage.block is None:
        matrices = matrices.unsqueeze(-3)
    grid = message.reshape(*lead, rows, *stage.axes)
    block, contracted = stage.block, stage.contracted
    others = [axis for axis in range(axes) if axis not in (block, contracted)]
    first = len(lead)
    blocks = [first + 1 + block] if block is not None else []
    order = [*range(first), *blocks, first, *(first + 1 + axis for axis in others), first + 1 + contracted]
    grid = grid.permute(order)
    sizes = grid.shape[first:-1]  # (blocks), rows, others
    count = stage.axes[block] if block is not None else 1
    passed = arithmetic.matmul(grid.reshape(*lead, count, -1, stage.axes[contracted]), matrices)
    passed = passed.reshape(*lead, *sizes, passed.shape[-1])
    back = [order.index(axis) for axis in range(len(order))]
    grid = passed.permute(back)
    return grid.permute(*range(first + 1), *(first + 1 + axis for axis in stage.order)).flatten(first + 1)
