"""The sequences of a chain as rows, for walks that take all of them a step further at a time.

Messages of all steps lie one after the other, as rows (rows, c). If all sequences share their parameters, the longest
come first, and a step has rows only for those that have not ended; otherwise it has rows for all. What belongs to the
transition into a step has as many rows as the step before.
"""

import torch
from torch import Tensor

from ..sets import Sets
from ..stages import transposed
from ..structured import Structured, places
from .factors import Weights
from .gemms import Link, Sums, links
from .library import in_large_pages
from .passes import Passes


class Rows:
    """The sequences of a chain as rows, and the operands as the passes read them.

    Attributes:
        order: the sequence of each row (n), as an index of the flattened batch.
        ends: the number of steps of each row, or None.
        counts: how many rows a step has, for each step that some sequence has.
        starts: the first row of each step, and the one after the last.
        forth, back: the stages of the product, and of the transposed product.
    """

    def __init__(self, chain: Structured, forth: tuple[Link, ...], back: tuple[Link, ...]) -> None:
        self.chain, self.sets, self.forth, self.back = chain, Sets.of(chain), forth, back
        sets = self.sets
        self.n = sets.g * sets.m
        order = sets.grouped(torch.arange(self.n).view(chain.batch)).reshape(-1)
        self.ends: Tensor | None = None
        self.counts = [self.n] * chain.v
        in_sets = torch.arange(self.n)
        if chain.ends is not None:
            ends = chain.ends.reshape(-1)[order]
            if sets.g == 1:
                in_sets = torch.argsort(ends, descending=True, stable=True)
            self.ends = ends[in_sets].contiguous()
            alive = (self.ends > torch.arange(chain.v)[:, None]).sum(1).tolist()
            self.counts = [count if sets.g == 1 else self.n for count in alive if count]
        self.order = order[in_sets]
        self.starts = [0, *torch.tensor(self.counts).cumsum(0).tolist()]
        self.passes = Passes(chain.dtype, self.n, chain.c, self.n // sets.g)
        x = chain.x.to(chain.dtype).resolve_neg()
        x = x if x.stride(-1) == 1 or chain.c == 1 else x.contiguous()
        self.passes.point(x=x, x_at=self.places(x), ends=self.ends)
        self.passes.set(x_step=x.stride(-2), steps=chain.v)

    @classmethod
    def of(cls, chain: Structured) -> "Rows | None":
        """The rows of a chain; None if its stages would have to permute rows between products."""
        own = [torch.empty(one.shape[len(chain.batch) + 1 :], device="meta") for one in chain.parameters]
        forth = links(chain.pattern.stages, own)
        pattern, parameters = transposed(chain.pattern, own)
        back = links(pattern.stages, parameters)
        return None if forth is None or back is None else cls(chain, forth, back)

    def places(self, tensor: Tensor) -> Tensor:
        """The offsets of all rows in a tensor [*B, ...]."""
        return places(tensor, self.chain.batch)[self.order].contiguous()

    def new(self, *shape: int) -> Tensor:
        """Uninitialised memory of the dtype of the arithmetic."""
        return in_large_pages(torch.empty(shape, dtype=self.chain.dtype))

    def of_step(self, tensor: Tensor, step: int) -> Tensor:
        """The rows of a step in those of all steps."""
        return tensor[self.starts[step] : self.starts[step + 1]]

    def point_sums(self, sums: Sums, out: Tensor, before: Tensor, weights: Weights) -> None:
        """Let passes read sums, and what the diagonal adds to them."""
        diagonal = weights.diagonal
        self.passes.point(sums=out, before=before, diagonal=diagonal)
        apart = diagonal.stride(0) if diagonal is not None and diagonal.shape[0] > 1 else 0
        self.passes.set(blocks=sums.blocks, together=sums.together, diagonal_set=apart)
