"""Structures of each kind."""

from collections.abc import Callable

import torch

from logchain import transitions
from logchain.transitions import Semiring, Transition

C = 12

Rand = Callable[..., torch.Tensor]


def numbers(seed: int, dtype: torch.dtype = torch.float64) -> Rand:
    """A function that draws weights of a shape, some of them zero."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        weights = torch.rand(*shape, generator=generator, dtype=torch.float64)
        return weights.masked_fill(torch.rand(*shape, generator=generator) < 0.1, 0.0).to(dtype)

    return rand


def _arcs(rand: Rand) -> torch.Tensor:
    arcs = torch.nonzero(rand(C, C) > 0.6).mT
    return arcs[:, torch.randperm(arcs.shape[1], generator=torch.Generator().manual_seed(1))]


class Shift(Transition):
    """A user's structure: P(i, i + by mod c) = weight_i."""

    own = (1,)

    def __init__(self, weight: torch.Tensor, by: int = 1):
        super().__init__(weight)
        self.states, self.by = weight.shape[-1], by

    def apply(self, message: torch.Tensor, semiring: Semiring) -> torch.Tensor:
        (weight,) = self.parameters
        return semiring.times(message, weight[..., None, :]).roll(self.by, -1)


MAKE: dict[str, Callable[..., Transition]] = {
    "banded": lambda rand, *lead: transitions.Banded(rand(*lead, 4, C), [0, 1, 2, -3]),
    "sparse": lambda rand, *lead: (lambda arcs: transitions.Sparse(arcs, rand(*lead, arcs.shape[1]), C))(_arcs(rand)),
    "low_rank": lambda rand, *lead: transitions.LowRank(rand(*lead, C, 3), rand(*lead, C, 3)),
    "diagonal": lambda rand, *lead: transitions.LowRank(rand(*lead, C, 3), rand(*lead, C, 3), rand(*lead, C)),
    "blocks": lambda rand, *lead: transitions.BlockDiagonal(rand(*lead, 3, 4, 4)),
    "kronecker": lambda rand, *lead: transitions.Kronecker(rand(*lead, 3, 3), rand(*lead, 2, 2), rand(*lead, 2, 2)),
    "monarch": lambda rand, *lead: transitions.Monarch(rand(*lead, 3, 4, 4), rand(*lead, 4, 3, 3)),
    "narrow": lambda rand, *lead: transitions.Monarch(rand(*lead, 3, 4, 2), rand(*lead, 2, 3, 6)),
    "duration": lambda rand, *lead: transitions.Duration(rand(*lead, 4, 4), rand(*lead, 4, 3)),
    "user's": lambda rand, *lead: Shift(rand(*lead, C)),
}
