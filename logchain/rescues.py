"""How often the fast arithmetic had to be redone exactly."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Rescues:
    """`sequences`: chains redone in log space. `outputs`: entries redone by the pairwise maximum.

    Outputs are those of `matmul` and of products in a tree, and on a GPU also those of each step of a chain.
    """

    sequences: int = 0
    outputs: int = 0

    def add(self, other: "Rescues") -> None:
        """Add other counts to these."""
        self.sequences += other.sequences
        self.outputs += other.outputs


_open: ContextVar[Rescues | None] = ContextVar("_open", default=None)


@contextmanager
def rescues() -> Iterator[Rescues]:
    """A context that counts, for a `with` block, the sequences and outputs that were recomputed exactly.

    The answers are the same to the accuracy contract; the counts explain the time. Nested blocks count for the outer
    ones too.

    >>> import torch, logchain
    >>> with logchain.rescues() as seen:
    ...     out = logchain.matmul(torch.tensor([[0.0, -200.0]]), torch.tensor([[-200.0], [0.0]]))
    >>> out, seen
    (tensor([[-199.3069]]), Rescues(sequences=0, outputs=1))
    """
    seen = Rescues()
    token = _open.set(seen)
    try:
        yield seen
    finally:
        _open.reset(token)
        report(seen)


def report(counts: Rescues) -> None:
    """Add to the innermost open count, if there is one."""
    counter = _open.get()
    if counter is not None:
        counter.add(counts)


def report_chains(redone: int | Tensor) -> None:
    """Count sequences: a number, those marked, or the sums of a GPU; looked at only where somebody counts."""
    if _open.get() is not None:
        sums = isinstance(redone, Tensor) and redone.dtype != torch.bool
        count = int(redone.sum() if isinstance(redone, Tensor) else redone)
        report(Rescues(outputs=count) if sums else Rescues(sequences=count))


def report_outputs(rescued: int | Tensor) -> None:
    """Count outputs of `matmul`; looked at only where somebody counts."""
    if _open.get() is not None:
        report(Rescues(outputs=int(rescued)))
