"""A dense matrix, as the scan of any transition takes it."""

from functools import partial

import torch
from torch import Tensor

from .semiring import LINEAR, TERMS, Semiring
from .transition import Transition, look_up


class Dense(Transition):
    """The matrices `[*lead, c, c]` themselves; a step costs `c^2` multiply-adds."""

    axes = (2,)

    def __init__(self, matrix: Tensor) -> None:
        super().__init__(matrix)
        self.states = matrix.shape[-1]

    def _dense(self, semiring: Semiring) -> Tensor:
        return self.parameters[0]

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

    def best(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """The largest `message(k) + log P(k, j)` and its k, see `Transition.best`; some columns at a time."""
        columns = self.parameters[0].split(max(1, TERMS // max(1, message.numel())), -1)
        parts = [(message[..., None] + part[..., None, :, :]).max(-2) for part in columns]
        values, states = parts[0] if len(parts) == 1 else map(partial(torch.cat, dim=-1), zip(*parts, strict=True))
        return values, states
