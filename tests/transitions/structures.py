"""Structures of each kind, of 12 states."""

import random
from collections.abc import Callable

import torch

from logchain.transitions import Semiring, Transition
from tests.kernels import structures

C = 12


def numbers(seed: int, dtype: torch.dtype = torch.float64) -> Callable[..., torch.Tensor]:
    """A function that draws weights of a shape, some of them zero."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        weights = torch.rand(*shape, generator=generator, dtype=torch.float64)
        return weights.masked_fill(torch.rand(*shape, generator=generator) < 0.1, 0.0).to(dtype)

    return rand


class Shift(Transition):
    """A user's structure: P(i, i + by mod c) = weight_i."""

    axes = (1,)

    def __init__(self, weight: torch.Tensor, by: int = 1):
        super().__init__(weight)
        self.states, self.by = weight.shape[-1], by

    def apply(self, message: torch.Tensor, semiring: Semiring) -> torch.Tensor:
        (weight,) = self.parameters
        return semiring.times(message, weight[..., None, :]).roll(self.by, -1)


KINDS = {
    "banded": structures.bands(C, 0, 1, 2, -3),
    # in any order
    "sparse": structures.arcs(C, random.Random(1).sample([(i, j) for i in range(C) for j in range(C)], 60)),
    "low_rank": structures.low_rank(C, 3, False),
    "diagonal": structures.low_rank(C, 3),
    "blocks": structures.block_diagonal(3, 4),
    "kronecker": structures.kronecker(3, 2, 2),
    "monarch": structures.monarch(3, 4, 4),
    "narrow": structures.monarch(3, 4, 2),
    "duration": structures.durations(4, 3),
    "user's": structures.Kind(C, [(C,)], Shift),
}
MAKE = {name: kind.random for name, kind in KINDS.items()}
# those that have best paths
WITH_PATHS = [name for name, make in MAKE.items() if not make(numbers(3)).sums]
