"""Modules whose trained parameters are the factors of a structured transition matrix."""

from .arcs import Banded, Sparse
from .durations import Durations
from .products import BlockDiagonal, Kronecker, LowRank, Monarch
from .weights import TransitionWeights

__all__ = ["Banded", "BlockDiagonal", "Durations", "Kronecker", "LowRank", "Monarch", "Sparse", "TransitionWeights"]
