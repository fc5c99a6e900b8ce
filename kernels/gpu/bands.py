"""Chains whose transitions stand in bands, as `kernels.plain.bands` defines them, on the Triton kernels."""

from torch import Tensor

from ..structured import Gradients, Structured, Walk
from . import sparse
from .sparse_rows import banded_rows


def forward(chain: Structured, keep: bool) -> Walk:
    """The log-partitions, see `sparse`."""
    return sparse.forward(chain, banded_rows(chain.pattern, chain.x.device), keep)


def backward(chain: Structured, walk: Walk, weight: Tensor, needs: tuple[bool, bool, bool]) -> Gradients:
    """The gradients of x, of the bands and of p0, times `weight` [*B]; None for what is not needed."""
    return sparse.backward(chain, banded_rows(chain.pattern, chain.x.device), walk, weight, needs)
