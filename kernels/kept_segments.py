"""What the backward pass of a chain cut into segments needs, in the two tensors that a chain keeps in any case.

    messages (length + 3, count g m, 1, c)    of the segments' steps; the weights f; what enters; the head's messages
    scales (length + 4, count g m, 1, 1)      of the segments' steps; the head's sum; its scales; the segments' sums

The segments' chain writes its rows in place, and the last row of `scales`, for it is asked for three steps more than it
has. Where the whole chain was left to the sequential schedule, this is that one's memory.
"""

from typing import NamedTuple

from torch import Tensor

from .chain import Chain
from .cut import Cut

# rows of `messages` and of `scales` beyond those of the segments' steps
MORE = 3


def shapes(count: int, length: int, g: int, m: int, c: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Those of `messages` and `scales`."""
    return (length + MORE, count * g * m, 1, c), (length + MORE + 1, count * g * m, 1, 1)


class Kept(NamedTuple):
    """What lies behind the segments' steps in messages and scales, as views."""

    final: Tensor  # (count, g, m, c), of the head and of all segments but the last
    entering: Tensor  # (count, g, m, c)
    head_messages: Tensor  # (rest + 1, g, m, c)
    head_total: Tensor  # (g, m, 1)
    head_scales: Tensor  # (rest + 1, g, m, 1)

    @classmethod
    def of(cls, cut: Cut, messages: Tensor, scales: Tensor) -> "Kept":
        """Those of a chain that is cut so."""
        g, m, c, steps = cut.chain.g, cut.chain.m, cut.chain.c, cut.rest + 1
        final, entering, head = messages[-MORE:].view(MORE, cut.count, g, m, c)
        total, head_scales = scales[-MORE:-1].view(MORE - 1, cut.count, g, m, 1)
        return cls(final, entering, head[:steps], total[0], head_scales[:steps])


def as_kept(chain: Chain, count: int, length: int, messages: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """What the sequential schedule has written for `(length + MORE) * count` steps, in the shapes of segments."""
    messages[chain.v :] = 0.0  # whose results are compared, finds the same twice
    scales[chain.v : -1] = 0.0
    first, second = shapes(count, length, chain.g, chain.m, chain.c)
    padded = chain.new(*second).zero_()
    padded.view(-1)[: scales.numel()] = scales.view(-1)
    return messages.view(first), padded


def as_sequential(chain: Chain, count: int, messages: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse."""
    room, g, m = len(messages) * count, chain.g, chain.m
    return messages.view(room, g, m, chain.c), scales.view(-1)[: (room + 1) * g * m].view(room + 1, g, m, 1)
