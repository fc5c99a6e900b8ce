"""Transition matrices that are more than their entries: accepted in place of `bulk` by all functions of a chain."""

from .banded import Banded
from .block_diagonal import BlockDiagonal
from .duration import Duration
from .kronecker import Kronecker
from .low_rank import LowRank
from .monarch import Monarch
from .semiring import LINEAR, LOG, MAX, Semiring
from .sparse import Sparse
from .transition import Transition

__all__ = [
    "LINEAR",
    "LOG",
    "MAX",
    "Semiring",
    "Banded",
    "BlockDiagonal",
    "Duration",
    "Kronecker",
    "LowRank",
    "Monarch",
    "Sparse",
    "Transition",
]
