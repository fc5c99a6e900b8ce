"""The best paths of few long chains: segments side by side on a CPU, each begun some steps early, as in `overlapped`.

Once the best paths into all states go through one state, what was before is lost, and max-plus messages that began
apart are soon the same, bit for bit. Where the message that arrives at each boundary is the one that was assumed there,
all messages are those of the walk through the whole chain, and so is the path, ties included. A segment that a wrong
message entered is walked again.

On the way back each segment ends in the state that the best path of the next segment's first steps comes from, or,
where that was wrong, in the state that its whole path comes from.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..kernels.chain import Chain, segments_of
from ..rescues import report_boundaries
from .cut import Cut
from .overlapped import early


class Walks(NamedTuple):
    """Messages of the head, of all segments side by side, and of those that were walked `again`; see `path_messages`.

    `unknown` (g, m): whether a sequence holds NaN or +inf.
    """

    head: Any
    segments: Any
    again: dict[int, Any]
    unknown: Tensor


def paths(chain: Chain, steps: int, segments: int) -> tuple[Tensor, Tensor]:
    """The states (g, m, steps) of the best paths, and whether sequences are unknown, as of `kernels.plain.viterbi`."""
    cut = Cut(chain, max(1, segments_of(chain.v, segments)[0]))
    begun = early(cut, _through, _differ) if cut.count > 1 else 0
    if begun == 0:
        whole: tuple[Tensor, Tensor] = kernels.path_kernels(chain.x).paths(chain, steps)
        return whole
    walks = _forward(cut, begun)
    head, found = _backward(cut, walks, begun)
    states = torch.full((chain.g, chain.m, steps), -1, device="cpu")
    states[..., : cut.rest + 1] = head
    states[..., cut.rest + 1 : chain.v].unflatten(-1, (cut.count, cut.length)).copy_(found[..., 1:].movedim(0, 2))
    last = states[..., chain.v - 1, None] if chain.ends is None else states.gather(-1, chain.ends - 1)
    states[walks.unknown | (last[..., 0] < 0)] = -1
    return states, walks.unknown


def _forward(cut: Cut, steps: int) -> Walks:
    kept, reached = kernels.path_messages(), cut.reached()
    head = kept(cut.head(), None)
    begun = _through(cut, cut.length - steps, cut.length, head.leaving.new_zeros(cut.count, *head.leaving.shape))
    entering = torch.cat([head.leaving[None], begun[:-1]])
    segments = kept(cut.segments(), cut.by_set(entering))
    arrived, again = cut.by_segment(segments.leaving), {}
    unknown = head.unknown | cut.by_segment(segments.unknown).any(0)
    for s in range(1, cut.count):
        wrong = _differ(cut.chain, arrived[s - 1], entering[s]) & reached[s] & ~unknown
        if wrong.any():
            report_boundaries(wrong)
            again[s] = kept(cut.segment(s), arrived[s - 1])
            arrived[s] = again[s].leaving
    return Walks(head, segments, again, unknown)


def _backward(cut: Cut, walks: Walks, steps: int) -> tuple[Tensor, Tensor]:
    """The states of the head (g, m, rest + 1), and of each segment from the one before it on (count, g, m, length + 1).

    Each round of the loop settles at least one more segment, from the last to the first.
    """
    chain, reached = cut.chain, cut.reached()
    last = torch.full((cut.count + 1, chain.g, chain.m), -1, device="cpu")  # of the head and the segments; -1 for any
    first = cut.by_segment(walks.segments.paths(cut.by_set(last[1:]), steps + 1))[..., 0]
    while True:
        last[:-1] = torch.where(reached, first, -1)
        found = cut.by_segment(walks.segments.paths(cut.by_set(last[1:])))
        for s, alone in walks.again.items():
            found[s] = alone.paths(last[s + 1])
        first = found[..., 0]
        if torch.equal(last[:-1], torch.where(reached, first, -1)):
            return walks.head.paths(last[0]), found


def _through(cut: Cut, start: int, stop: int, entering: Tensor) -> Tensor:
    """The messages (count, g, m, c) that leave steps `start` to before `stop` of the segments, from those entering."""
    leaving: Tensor = kernels.path_messages()(cut.window(start, stop), cut.by_set(entering)).leaving
    return cut.by_segment(leaving)


def _differ(chain: Chain, a: Tensor, b: Tensor) -> Tensor:
    """Whether messages (..., c) differ in a bit, or hold NaN."""
    return (a != b).any(-1)
