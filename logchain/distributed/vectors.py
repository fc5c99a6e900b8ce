"""Vectors through the ranks in turn: all but the last walk ahead, and the last one backwards from the end.

    forward     rank i: a_i from a_{i-1}          the last: b from the end         Z = a b
    backward    rank i: b_{i-1} from b_i          the last: from a

Two ranks meet in the middle: each walks its half once, they exchange two messages, and each walks back over what it
kept, half of the work of one process each. More ranks walk blocks of the batch one behind the other, as a pipeline: in
turn t rank i walks block t - i. With lengths, which may end on any rank, all of them walk ahead.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from ..kernels.message import Message
from .exchange import Exchange
from .messages import log_norm_of, row_of, size_of
from .shards import Shards
from .stretch import Gradients, Stretch


class Vectors:
    """The passes of one rank over its part of every block; `turns`: the last rank walks from the end."""

    def __init__(self, exchange: Exchange, shards: Shards, blocks: list[Stretch], turns: bool) -> None:
        self._exchange, self._blocks, self._filled, self._place = exchange, blocks, shards.filled, shards.place
        self._turns = turns and len(shards.filled) > 1
        self._ahead = len(shards.filled) - self._turns  # how many ranks walk ahead
        self._size = max(size_of(block.grid) for block in blocks)
        self._entering: list[Message | None] = [None] * len(blocks)
        self._following: list[Tensor | None] = [None] * len(blocks)

    def forward(self) -> list[Tensor]:
        """The log-partitions (g, m) of each block."""
        count, place, arrived = len(self._blocks), self._place, None
        ahead: list[Message | None] = [None] * count
        behind: list[Message | None] = [None] * count
        for turn in range(count + self._ahead - 1):
            received = self._exchange.gather((self._size,), partial(self._walk, turn, arrived))
            if place is not None and 0 < place < self._ahead:
                arrived = received[self._filled[place - 1]]
            done = turn - self._ahead + 1
            if done >= 0:
                ahead[done] = self._blocks[done].message(received[self._filled[self._ahead - 1]])
            if self._turns and turn < count:
                behind[turn] = self._blocks[turn].message(received[self._filled[-1]])
        norms = []
        for index, (left, right) in enumerate(zip(ahead, behind, strict=True)):
            assert left is not None
            if right is None:
                norms.append(left.scale.sum(0))
                continue
            norms.append(log_norm_of(left.values, right.values, [left.scale, right.scale]))
            self._entering[index], self._following[index] = left, right.values
        return norms

    def _walk(self, turn: int, arrived: Tensor | None) -> Tensor | None:
        """What a rank sends after a turn."""
        place, count = self._place, len(self._blocks)
        if place is None:
            return None
        if place >= self._ahead:
            return row_of(self._size, *self._blocks[turn].turned()) if turn < count else None
        index = turn - place
        if not 0 <= index < count:
            return None
        entering = None if place == 0 or arrived is None else self._blocks[index].message(arrived)
        return row_of(self._size, *self._blocks[index].ahead(entering))

    def backward(self, norms: list[Tensor], weights: list[Tensor], into: list[Gradients]) -> Callable[[], object]:
        """Write the gradients of this rank's part of each block, all but what the result does, which needs no rank."""
        turns, arrived = len(self._blocks) + self._ahead - 1, None

        def walk(turn: int, arrived: Tensor | None) -> Tensor | None:
            return self._walk_back(turn, arrived, norms, weights, into)

        for turn in range(turns - 1 if self._ahead > 1 else 0):
            received = self._exchange.gather((self._size,), partial(walk, turn, arrived))
            if self._place is not None and self._place + 1 < self._ahead:
                arrived = received[self._filled[self._place + 1]]
        rest = range(turns) if self._ahead == 1 else [turns - 1]
        return lambda: [walk(turn, arrived) for turn in rest]

    def _walk_back(
        self, turn: int, arrived: Tensor | None, norms: list[Tensor], weights: list[Tensor], into: list[Gradients]
    ) -> Tensor | None:
        """What a rank sends after a turn; the last rank walks back in the first turn."""
        place = self._place
        if place is None:
            return None
        if place >= self._ahead:
            for index, entering in enumerate(self._entering if turn == 0 else []):
                assert entering is not None
                self._blocks[index].back_turned(norms[index], weights[index], entering, into[index])
            return None
        index = turn - (self._ahead - 1 - place)
        if not 0 <= index < len(self._blocks):
            return None
        following = self._following[index]
        if place < self._ahead - 1 and arrived is not None:
            following = self._blocks[index].message(arrived).values
        return row_of(self._size, self._blocks[index].back(norms[index], weights[index], following, into[index]))
