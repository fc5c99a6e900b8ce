"""Products of factors, through which a message passes one after the other."""

import math

from torch import Tensor

from ..kernels.stages import through
from ..kernels.structured import Factors
from .semiring import Semiring
from .transition import Transition


class Product(Transition):
    """A product of factors, of which each maps one axis of a grid of states; `pattern` says how."""

    pattern: Factors

    def apply(self, message: Tensor, semiring: Semiring) -> Tensor:
        """`message @ P`, see `Transition.apply`."""
        return through(message, self.parameters, self.pattern, semiring.matmul, semiring.plus, semiring.times)

    @property
    def multiply_adds(self) -> int:
        """The multiply-adds of one step of one sequence."""
        count = self.states if self.pattern.diagonal else 0
        for stage, parameter in zip(self.pattern.stages, self.parameters, strict=False):
            rows = math.prod(stage.axes) // stage.axes[stage.contracted]
            count += rows * math.prod(parameter.shape[-2:])
        return count
