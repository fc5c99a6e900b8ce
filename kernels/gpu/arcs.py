"""Chains whose transitions are arcs between a few pairs of states, as `kernels.plain.arcs` defines them, in Triton."""

from torch import Tensor

from ..structured import Gradients, Structured, Walk
from . import sparse
from .sparse_rows import arc_rows


def forward(chain: Structured, keep: bool) -> Walk:
    """The log-partitions, see `sparse`."""
    arcs = chain.pattern
    return sparse.forward(chain, arc_rows(arcs.target, arcs.source, chain.c, is_sorted=False), keep)


def backward(chain: Structured, walk: Walk, weight: Tensor, needs: tuple[bool, bool, bool]) -> Gradients:
    """The gradients of x, of the arcs' parameters and of p0, times `weight` [*B]; None for what is not needed."""
    arcs = chain.pattern
    return sparse.backward(chain, arc_rows(arcs.source, arcs.target, chain.c, is_sorted=True), walk, weight, needs)
