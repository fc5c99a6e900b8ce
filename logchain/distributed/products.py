"""Vectors on the outer ranks, and products of matrices on those between them, all at once.

    a, M_1, ..., M_k, b        a: the first rank's forward message; M_i: the product of a rank between, c x c;
                               b: the backward message that the last rank walked from the end

They are exchanged, and each rank computes what enters it and what follows it. The ranks between walk their part again
from there, for gradients. With lengths, which may end on any rank, the last one multiplies as well.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels.message import Message
from .exchange import Exchange
from .messages import log_norm_of, row_of, times
from .shards import Shards
from .stretch import Gradients, Stretch


class Products:
    """The passes of one rank over its part of all sequences; `turns`: the last rank walks from the end."""

    def __init__(self, exchange: Exchange, shards: Shards, block: Stretch, turns: bool, differentiated: bool) -> None:
        self._exchange, self._block, self._filled, self._place = exchange, block, shards.filled, shards.place
        self._turns, self._differentiated = turns and len(shards.filled) > 1, differentiated
        g, m, c = block.grid
        self._size = g * m * max(c * c + 1, c + 2)
        self._entering: list[Message] = []
        self._following: list[Tensor] = []

    def forward(self) -> list[Tensor]:
        """The log-partitions (g, m)."""
        block, last = self._block, len(self._filled) - 1
        received = self._exchange.gather((self._size,), self._walk)
        rows = [received[rank] for rank in self._filled]
        left = block.message(rows[0])
        right = block.message(rows[-1]) if self._turns else None
        matrices = [self._matrix(row) for row in rows[1 : last + (not self._turns)]]
        scales = [left.scale, *(scale[None] for _, scale in matrices), *([] if right is None else [right.scale])]
        self._entering = [left]
        for matrix, _ in matrices:
            values, total = times(self._entering[-1].values, matrix)
            scales.append(total[None])
            self._entering.append(Message(values, torch.zeros_like(left.scale)))
        behind = torch.zeros_like(left.values) if right is None else right.values
        log_norm = log_norm_of(self._entering[-1].values, behind, scales)
        following = [behind]
        for matrix, _ in reversed(matrices):
            following.append(times(following[-1], matrix.mT)[0])
        self._following = following[::-1]
        if self._differentiated and self._between:
            assert self._place is not None
            block.enter(self._entering[self._place - 1])
        return [log_norm]

    def backward(self, norms: list[Tensor], weights: list[Tensor], into: list[Gradients]) -> Callable[[], object]:
        """What writes the gradients of this rank's part when it is called."""

        def write() -> None:
            place = self._place
            if self._turns and place == len(self._filled) - 1:
                self._block.back_turned(norms[0], weights[0], self._entering[-1], into[0])
            elif place is not None:
                self._block.back(norms[0], weights[0], self._following[place], into[0])

        return write

    @property
    def _between(self) -> bool:
        """Whether this rank multiplies its matrices."""
        place, last = self._place, len(self._filled) - 1
        return place is not None and place > 0 and not (self._turns and place == last)

    def _walk(self) -> Tensor | None:
        if self._place is None:
            return None
        if self._between:
            return row_of(self._size, *self._block.product())
        return row_of(self._size, *(self._block.ahead(None) if self._place == 0 else self._block.turned()))

    def _matrix(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """The logarithms of a product (g, m, c, c), and its scale (g, m)."""
        g, m, c = self._block.grid
        both = row.to(self._block.chain.x.device)
        return both[: g * m * c * c].view(g, m, c, c), both[g * m * c * c :][: g * m].view(g, m)
