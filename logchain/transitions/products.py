"""Products of factors, through which a message passes one after the other."""

from torch import Tensor

from ..kernels.structured import Factors
from .semiring import Semiring
from .transition import Transition


class Product(Transition):
    """A product of factors, of which each maps an axis of rows of states; `pattern` says how."""

    pattern: Factors

    def apply(self, message: Tensor, semiring: Semiring) -> Tensor:
        """`message @ P`, see `Transition.apply`."""
        after = message
        for place, (factor, parameter) in enumerate(zip(self.pattern.factors, self.parameters, strict=False)):
            matrix = parameter.mT if factor.transposed else parameter
            if factor.blocks:
                rows = after.unflatten(-1, (factor.blocks, factor.entering)).transpose(-2, -3)
                rows = semiring.matmul(rows, matrix)  # [*lead, blocks, m, leaving]
                last = place + 1 == len(self.pattern.factors)
                after = rows.movedim(-3, -2 if last else -1).flatten(-2)
            else:
                grid = after.unflatten(-1, (factor.before, factor.entering, factor.after)).mT
                rows = semiring.matmul(grid.flatten(-4, -2), matrix)  # [*lead, m before after, leaving]
                after = rows.unflatten(-2, grid.shape[-4:-1]).mT.flatten(-3)
        if self.pattern.diagonal:
            after = semiring.plus(after, semiring.times(message, self.parameters[-1][..., None, :]))
        return after

    @property
    def multiply_adds(self) -> int:
        """The multiply-adds of one step of one sequence."""
        products = sum(factor.vectors * factor.entering * factor.leaving for factor in self.pattern.factors)
        return products + (self.states if self.pattern.diagonal else 0)
