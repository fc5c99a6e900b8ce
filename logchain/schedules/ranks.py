"""The seconds that each way to cut a chain over ranks is predicted to take.

    vectors(K)     (K + R - 2) turns of a block of the batch, each with a collective; 2 ranks: one turn
    products       the slowest of the outer ranks' vectors and the inner ranks' products, then vectors again; gradients
    overlapped     one rank's part and the steps that it begins early

Walks and products are timed by the constants of `cost`. A collective passes what each rank sends around a ring.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from . import choose
from .cost import Constants
from .cost_counts import SEQUENTIAL, Size

Strategy = Literal["auto", "vectors", "products", "overlapped"]
STRATEGIES = get_args(Strategy)

# steps that a stretch begins early, as far as is known before it runs; shorter stretches are not overlapped
_EARLY, _SHORTEST = 40, 2000

# the time of a product's c rows together, against c walks of a row alone: 0.95 to 0.35 from 4 to 128 states
_ROWS = 0.8

# seconds of a call beside its walks and collectives, of either pass
_CALL = 1e-3

# seconds for a message from a rank to the next, and bytes a second
_LATENCY, _BANDWIDTH = 5e-4, 1e9

# bytes of the header with which ranks agree on sizes, of the status of a gather, and of what is summed beside gradients
_HEADER, _STATUS = 104, 16
_MARKS = 48


class Cut(NamedTuple):
    """A way to cut a chain: its name, the number of blocks of the batch, and its predicted seconds."""

    name: str
    blocks: int
    seconds: float


def cuts(size: Size, sizes: Sequence[int], costs: Constants) -> list[Cut]:
    """All cuts of chains of this size over ranks that hold so many variables, the fastest first.

    `size.v` does not matter; `sizes` are those of the ranks that hold variables.
    """
    model = _Model(size, list(sizes), costs)
    found = [model.vectors(blocks) for blocks in model.numbers_of_blocks()]
    if len(sizes) > 2:
        found.append(model.products())
    if len(sizes) > 1 and min(sizes) >= _SHORTEST:
        found.append(model.overlapped())
    return sorted(found, key=lambda cut: cut.seconds)


class _Model(NamedTuple):
    size: Size
    sizes: list[int]
    costs: Constants

    def numbers_of_blocks(self) -> list[int]:
        """The numbers of blocks of the batch that are tried: one, or as many as keep ranks of a pipeline busy."""
        ranks, sequences = len(self.sizes), max(1, self.size.sequences)
        if ranks <= 2 and not self.size.lengths:
            return [1]
        return sorted({1, min(sequences, 2 * ranks), min(sequences, 8 * ranks)})

    def vectors(self, blocks: int) -> Cut:
        """Vectors through the ranks in turn, block by block."""
        ranks = len(self.sizes)
        turns = ranks > 1 and not self.size.lengths
        ahead = self.sizes[: ranks - turns]
        each = self.size._replace(m=max(1, self.size.m // blocks))
        number, sent = blocks + len(ahead) - 1, self._message() // blocks
        seconds = max(number * self._walk(max(ahead), each), self._walk(self.sizes[-1]))
        back = max(number * self._back(max(ahead), each), self._back(self.sizes[-1]))
        gathers = number + (number - 1 if self.size.gradients and len(ahead) > 1 else 0)
        return self._cut("vectors", blocks, seconds + back, gathers, sent)

    def products(self) -> Cut:
        """Vectors on the outer ranks, products on those between."""
        outer = [self.sizes[0]] if self.size.lengths else [self.sizes[0], self.sizes[-1]]
        between = max(self.sizes[1:] if self.size.lengths else self.sizes[1:-1])
        seconds = max(*map(self._walk, outer), self._product(between))
        if self.size.gradients:
            seconds += self._walk(between) + self._back(max(self.sizes))
        sent = 8 * self.size.sequences * (self.size.c**2 + 1)
        return self._cut("products", 1, seconds, 1, sent)

    def overlapped(self) -> Cut:
        """Stretches that begin early; with gradients also from the other end."""
        longest = max(self.sizes)
        early = self._walk(_EARLY) * (1 + self.size.gradients)
        vain = choose.in_vain(self.size._replace(v=longest), self.costs)
        seconds = self._walk(longest) + self._back(longest) + early + vain
        return self._cut("overlapped", 1, seconds, 3 + 2 * self.size.gradients, self._message())

    def _cut(self, name: str, blocks: int, seconds: float, gathers: int, sent: int) -> Cut:
        """The cut with its collectives: the header, so many gathers, and the sum of shared gradients."""
        ranks, shared, sent = len(self.sizes), 0, sent + _STATUS
        if self.size.gradients:
            shared = _MARKS + 8 * ranks + 8 * self.size.c * (self.size.g * self.size.c * self.size.one_matrix + 1)
        seconds += _CALL * (1 + self.size.gradients)
        collectives = _exchange(_HEADER, ranks) + gathers * _exchange(sent, ranks)
        if self.size.gradients:
            collectives += _exchange(shared, ranks)
        return Cut(name, blocks, seconds + collectives)

    def _message(self) -> int:
        return 8 * self.size.sequences * (self.size.c + 2)

    def _walk(self, v: int, size: Size | None = None) -> float:
        return choose.seconds((size or self.size)._replace(v=v, gradients=False), SEQUENTIAL, self.costs)

    def _back(self, v: int, size: Size | None = None) -> float:
        both = (size or self.size)._replace(v=v, gradients=True)
        return (
            max(0.0, choose.seconds(both, SEQUENTIAL, self.costs) - self._walk(v, size)) if self.size.gradients else 0.0
        )

    def _product(self, v: int) -> float:
        return _ROWS * self.size.c * self._walk(v)


def _exchange(sent: int, ranks: int) -> float:
    """The time in which every rank sends so many bytes to all others."""
    return (ranks - 1) * (_LATENCY + sent / _BANDWIDTH)
