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
    Boundaries lie between segments of a chain, where the message that a warm-up had guessed was refused.
    """

    sequences: int = 0
    outputs: int = 0
    boundaries: int = 0

    def add(self, other: "Rescues") -> None:
        """Add the counts of another block."""
        self.sequences += other.sequences
        self.outputs += other.outputs
        self.boundaries += other.boundaries


_open: ContextVar[Rescues | None] = ContextVar("_open", default=None)


@contextmanager
def rescues() -> Iterator[Rescues]:
    """A context that counts the sequences and outputs that are computed again exactly in a `with` block.

    All results keep the same accuracy; the counts explain the time. What nested blocks count, outer ones count too.

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
        report(seen)


def report(counts: Rescues) -> None:
    """Add counts to those of the innermost open block, if there is one."""
    counter = _open.get()
    if counter is not None:
        counter.add(counts)


def report_chains(recomputed: int | Tensor) -> None:
    """Count sequences, given as a number or a bool mask; read only if a block is open."""
    if _open.get() is not None:
        report(Rescues(sequences=int(recomputed.sum() if isinstance(recomputed, Tensor) else recomputed)))


def report_outputs(recomputed: int | Tensor) -> None:
    """Count outputs of matrix products; the number is read only if a block is open."""
    if _open.get() is not None:
        report(Rescues(outputs=int(recomputed)))


def report_boundaries(refused: Tensor) -> None:
    """Count boundaries between segments in a bool mask; read only if a block is open."""
    if _open.get() is not None:
        report(Rescues(boundaries=int(refused.sum())))
