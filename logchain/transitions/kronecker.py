"""Kronecker products: states that are tuples, whose parts move independently."""

import math

import torch
from torch import Tensor

from ..kernels.structured import Factor, Factors
from .products import Product
from .semiring import LINEAR, Semiring
from .transition import check_parameter, look_up


class Kronecker(Product):
    r"""The Kronecker product of square matrices, as `torch.kron`: parts of a state move independently.

    `P[(i, j, ...), (i', j', ...)] = first[i, i'] second[j, j'] ...`, where the last part of a state varies fastest. The
    chains of a factorial hidden Markov model are of this kind.

    Args:
        matrices: two or more, each of weights `[*B or ones, v-1 or 1, c_k, c_k]`, or `[c_k, c_k]`; logarithms with
            `log_params`.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together.

    Cost of a step: `c (c_1 + c_2 + ...)` multiply-adds for `c = c_1 c_2 ...`, a product of matrices for each factor.

    Source: Z. Ghahramani and M. I. Jordan, "Factorial hidden Markov models", Machine Learning 29 (1997).

    >>> Kronecker(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.eye(2)).to_dense()
    tensor([[0.9000, 0.0000, 0.1000, 0.0000],
            [0.0000, 0.9000, 0.0000, 0.1000],
            [0.2000, 0.0000, 0.8000, 0.0000],
            [0.0000, 0.2000, 0.0000, 0.8000]])
    """

    def __init__(self, *matrices: Tensor) -> None:
        if len(matrices) < 2:
            raise ValueError(f"matrices: expected two or more, got {len(matrices)}")
        for matrix in matrices:
            check_parameter("matrices", matrix, 2, like=matrices[0])
            if matrix.shape[-2] != matrix.shape[-1]:
                raise ValueError(f"matrices: expected square ones [..., c, c], got {list(matrix.shape)}")
        super().__init__(*matrices)
        sizes = tuple(matrix.shape[-1] for matrix in matrices)
        self.states, self.axes = math.prod(sizes), (2,) * len(sizes)
        factors = (
            Factor(size, size, math.prod(sizes[:place]), math.prod(sizes[place + 1 :]))
            for place, size in enumerate(sizes)
        )
        self.pattern = Factors(tuple(factors))

    @property
    def mT(self) -> "Kronecker":
        """The transposed matrices: the product of transposed factors."""
        return Kronecker(*(matrix.mT for matrix in self.parameters))

    def entries(self, source: Tensor, target: Tensor, semiring: Semiring = LINEAR) -> Tensor:
        """`P[source, target]`, one entry of each matrix, multiplied; see `Transition.entries`."""
        entries = torch.tensor(semiring.one, dtype=self.dtype, device=self.device)
        for matrix in reversed(self.parameters):
            size = matrix.shape[-1]
            entries = semiring.times(entries, look_up(matrix, source % size, target % size))
            source, target = source // size, target // size
        return entries
