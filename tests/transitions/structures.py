"""Structures of each kind, and their matrices by the formulas of their docstrings, entry by entry."""

import itertools
from collections.abc import Callable

import numpy as np
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
    "user's": lambda rand, *lead: Shift(rand(*lead, C)),
}


def entry(structure: Transition, i: int, j: int) -> float:
    """P[i, j] of a structure without leading axes, by its formula."""
    parameters = [parameter.detach().double().numpy() for parameter in structure.parameters]
    match structure:
        case transitions.Banded():
            return sum(parameters[0][k, j] for k, offset in enumerate(structure.offsets) if j - i == offset)
        case transitions.Sparse():
            arcs = zip(*structure.indices.tolist(), parameters[0], strict=True)
            return sum(value for source, target, value in arcs if (source, target) == (i, j))
        case transitions.LowRank():
            stays = parameters[2][i] if len(parameters) > 2 and i == j else 0.0
            return parameters[0][i] @ parameters[1][j] + stays
        case transitions.BlockDiagonal():
            size = parameters[0].shape[-1]
            return parameters[0][i // size, i % size, j % size] if i // size == j // size else 0.0
        case transitions.Kronecker():
            sizes = [matrix.shape[0] for matrix in parameters]
            tuples = list(itertools.product(*map(range, sizes)))
            pairs = zip(parameters, tuples[i], tuples[j], strict=True)
            return float(np.prod([matrix[a, b] for matrix, a, b in pairs]))
        case transitions.Monarch():
            left, right = parameters
            (a, b), (middle, last) = divmod(i, left.shape[1]), divmod(j, right.shape[2])
            return left[a, b, middle] * right[middle, a, last]
        case Shift():
            return parameters[0][i] if j == (i + 1) % C else 0.0
    raise AssertionError(structure)
