"""Stretches that forget how they began: every rank begins some steps early, and all walk at once.

A rank walks its last steps from a uniform message, and sends what comes out of it to the next: that is what enters
there. After its whole stretch it holds the message that really leaves, and verifies by Hilbert's metric that the two
are the same up to rounding, as `schedules.overlapped` does between segments. Backward messages begin early likewise,
from the first steps of the next rank. Where a boundary fails, the ranks walk in turn, as in `vectors`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels.message import Message
from ..kernels.numbers import exact_sum
from ..rescues import report_boundaries
from ..schedules.overlapped import through, unlike
from .exchange import Exchange
from .messages import row_of, size_of
from .products import Products
from .shards import Shards
from .stretch import Gradients, Stretch
from .vectors import Vectors


class Overlapped:
    """The passes of one rank over its part of all sequences."""

    def __init__(self, exchange: Exchange, shards: Shards, block: Stretch, in_turn: Vectors | Products) -> None:
        self._exchange, self._block, self._filled, self._place = exchange, block, shards.filled, shards.place
        self._in_turn, self._shards, self._steps, self._size = in_turn, shards, 0, size_of(block.grid)

    def forward(self) -> list[Tensor]:
        """The log-partitions (g, m)."""
        wanted = self._exchange.gather((), self._to_forget)
        steps = wanted[self._filled]
        if len(self._filled) == 1 or not steps.all():
            return self._in_turn.forward()
        self._steps = int(steps.max())
        begun = self._exchange.gather((self._size,), self._early)
        entering = None if not self._place else self._block.message(begun[self._filled[self._place - 1]])
        left = self._exchange.gather((self._size,), lambda: self._whole(entering, begun))
        parts = [self._block.message(left[rank]) for rank in self._filled]
        log_norm = torch.stack(exact_sum(torch.cat([part.scale for part in parts]))).sum(0)
        refused = torch.stack([part.values[..., 0] for part in parts[:-1]]) > 0
        if refused.any() or not (log_norm < torch.inf).all():  # what is not finite is that of one walk
            report_boundaries(refused)
            self._steps = 0
            return self._in_turn.forward()
        return [log_norm]

    def backward(self, norms: list[Tensor], weights: list[Tensor], into: list[Gradients]) -> Callable[[], object]:
        """Write the gradients of this rank's part, all but what the result does, which needs no other rank."""
        if self._steps == 0:
            return self._in_turn.backward(norms, weights, into)
        place, last = self._place, len(self._filled) - 1
        begun = self._exchange.gather((self._size,), self._early_back)
        following = None
        if place is not None and place < last:
            following = self._block.message(begun[self._filled[place + 1]]).values

        def walk() -> Tensor | None:
            if place is None:
                return None
            ahead = self._block.back(norms[0], weights[0], following, into[0])
            if place == 0:
                return None
            assumed = self._block.message(begun[self._filled[place]]).values
            refused = unlike(self._block.chain, ahead, assumed)
            refused &= (weights[0] != 0) & (norms[0] > -torch.inf)
            return refused if self._block.reached is None else refused & self._block.reached

        refused = self._exchange.gather(self._block.grid[:2], walk) > 0
        if not refused.any():
            return lambda: None
        report_boundaries(refused[self._filled])
        return Vectors(self._exchange, self._shards, [self._block], turns=False).backward(norms, weights, into)

    def _to_forget(self) -> Tensor:
        """The number of steps to begin early, 0 if this rank's part does not forget in time."""
        return torch.tensor(0.0 if self._place is None else self._block.early(through, unlike), device="cpu")

    def _early(self) -> Tensor | None:
        if self._place is None or self._place == len(self._filled) - 1:
            return None
        return row_of(self._size, self._block.last_ahead(min(self._steps, self._block.chain.v)))

    def _early_back(self) -> Tensor | None:
        if not self._place:
            return None
        return row_of(self._size, self._block.first_back(min(self._steps, self._block.chain.v)))

    def _whole(self, entering: Message | None, begun: Tensor) -> Tensor | None:
        """The scale of this rank's part, and in the place of the first state whether what leaves it is refused."""
        if self._place is None:
            return None
        leaving = self._block.ahead(entering)
        refused = torch.zeros_like(leaving.values)
        if self._place < len(self._filled) - 1:
            assumed = self._block.message(begun[self._filled[self._place]])
            refused[..., 0] = unlike(self._block.chain, leaving.values, assumed.values) & self._block.continues
        return row_of(self._size, refused, leaving.scale)
