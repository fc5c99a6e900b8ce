"""A dense matrix, as the scan of any transition takes it."""

from torch import Tensor

from .semiring import LINEAR, Semiring
from .transition import Transition, look_up


class Dense(Transition):
    """The matrices `[*lead, c, c]` themselves; a step costs `c^2` multiply-adds."""

    own = (2,)

    def __init__(self, matrix: Tensor) -> None:
        super().__init__(matrix)
        self.states = matrix.shape[-1]

    def apply(self, message: Tensor, semiring: Semiring) -> Tensor:
        """`message @ P`, see `Transition.apply`."""
        return semiring.matmul(message, self.parameters[0])

    @property
    def mT(self) -> "Dense":
        """The transposed matrices."""
        return Dense(self.parameters[0].mT)

    def entries(self, source: Tensor, target: Tensor, semiring: Semiring = LINEAR) -> Tensor:
        """`P[source, target]`, see `Transition.entries`."""
        return look_up(self.parameters[0], source, target)
