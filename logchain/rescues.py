"""Counts of sequences and outputs that underflowed in the fast arithmetic and were computed again exactly."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor


@dataclass
class Rescues:
    """How many `sequences`, `outputs` and `boundaries` were computed again.

    Sequences are computed again in log space. Outputs are entries of the results of `matmul` and of products in a tree.
    Boundaries between segments of a chain are those where the message of a warm-up failed its verification.
    """

    sequences: int = 0
    outputs: int = 0
    boundaries: int = 0


_open: ContextVar[Rescues | None] = ContextVar("_open", default=None)


@contextmanager
def rescues() -> Iterator[Rescues]:
    """Returns a context that counts the sequences and outputs that are computed again exactly in its block.

    All results have the same accuracy; the counts explain the time. Outer blocks include the counts of nested ones.

    >>> import torch, logchain
    >>> with logchain.rescues() as seen:
    ...     out = logchain.matmul(torch.tensor([[0.0, -200.0]]), torch.tensor([[-200.0], [0.0]]))
    >>> out, seen
    (tensor([[-199.3069]]), Rescues(sequences=0, outputs=1, boundaries=0))
    """
    seen = Rescues()
    token = _open.set(seen)
    try:
        yield seen
    finally:
        _open.reset(token)
        for name, count in vars(seen).items():
            _add(name, count)


def report_chains(recomputed: int | Tensor) -> None:
    """Count sequences, passed as a number or a bool mask."""
    _add("sequences", recomputed)


def report_outputs(recomputed: int | Tensor) -> None:
    """Count outputs of matrix products."""
    _add("outputs", recomputed)


def report_boundaries(refused: Tensor) -> None:
    """Count boundaries between segments in a bool mask."""
    _add("boundaries", refused)


def _add(name: str, count: int | Tensor) -> None:
    """Add to a count of the innermost open block; a tensor is read only if there is one."""
    seen = _open.get()
    if seen is not None:
        setattr(seen, name, getattr(seen, name) + int(count.sum() if isinstance(count, Tensor) else count))
