"""The best paths of few long chains: segments side by side on a CPU, each begun some steps early, as in `overlapped`.

Once the best paths into all states go through one state, what was before is lost, and max-plus messages that began
apart are soon the same, bit for bit. Where the message that arrives at each boundary is the one that was assumed there,
all messages are those of the walk through the whole chain, and so is the path, ties included. A segment that a wrong
message entered is walked again.

On the way back each segment ends in the state that the best path of the next segment's first steps comes from, or,
where that was wrong, in the state that its whole path comes from.
"""

from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..kernels.chain import Chain, segments_of
from .cut import Cut
from .overlapped import assumed, early, wrong


def paths(chain: Chain, steps: int, segments: int) -> tuple[Tensor, Tensor]:
    """The states (g, m, steps) of the best paths, and whether sequences are unknown, as of `kernels.plain.viterbi`."""
    cut = Cut(chain, max(1, segments_of(chain.v, segments)[0]))
    begun = early(cut, through, differ) if cut.count > 1 else 0
    if begun == 0:
        whole: tuple[Tensor, Tensor] = kernels.path_kernels(chain.x).paths(chain, steps)
        return whole
    kept, grid = kernels.path_messages(chain.x), (chain.g, chain.m)
    head = kept(cut.head(), None)
    entering = assumed(cut, begun, head.leaving, through)
    side_by_side = kept(cut.segments(), cut.by_set(entering))
    unknown = head.unknown | cut.by_segment(side_by_side.unknown).any(0)
    arrived = cut.by_segment(side_by_side.leaving)  # a view
    for s in wrong(cut, arrived, entering, cut.reached() & ~unknown, differ):
        side_by_side.replace(_numbers(cut, s), kept(cut.segment(s), arrived[s - 1]))
    found = _followed(cut, side_by_side, begun)
    first = torch.empty(*grid, cut.rest + 1, dtype=torch.int64, device="cpu")
    first[..., -1] = torch.where(cut.reached()[0], found[0, ..., 0], -1)
    head.follow(first)
    states = torch.empty(*grid, steps, dtype=torch.int64, device="cpu")
    states[..., chain.v :] = -1
    states[..., : cut.rest + 1] = first
    states[..., cut.rest + 1 : chain.v].unflatten(-1, (cut.count, cut.length)).copy_(found[..., 1:].movedim(0, 2))
    last = states[..., chain.v - 1, None] if chain.ends is None else states.gather(-1, chain.ends - 1)
    states[unknown | (last[..., 0] < 0)] = -1
    return states, unknown


def _followed(cut: Cut, side_by_side: Any, steps: int) -> Tensor:
    """The states (count, g, m, length + 1) of each segment's best path, from that of the step before it on."""
    reached = cut.reached()
    guess, states = (torch.empty(*cut.shape, k + 1, dtype=torch.int64, device="cpu") for k in (steps, cut.length))
    guess[..., -1] = states[..., -1] = -1
    side_by_side.follow(guess)
    found, last = cut.by_segment(states), torch.where(reached[1:], cut.by_segment(guess)[1:, ..., 0], -1)
    found[:-1, ..., -1] = last
    side_by_side.follow(states)
    for s in reversed(range(cut.count - 1)):
        right = torch.where(reached[s + 1], found[s + 1, ..., 0], -1)
        if not torch.equal(right, last[s]):
            found[s, ..., -1] = right
            side_by_side.follow(states, _numbers(cut, s))
    return found


def _numbers(cut: Cut, s: int) -> Tensor:
    """The numbers of the sequences (g m) of one segment among those of all."""
    (sets, members) = cut.shape
    return cut.by_segment(torch.arange(sets * members, device="cpu").view(sets, members))[s].flatten()


def through(cut: Cut, start: int, stop: int, entering: Tensor) -> Tensor:
    """The messages (count, g, m, c) that leave steps `start` to before `stop` of the segments, from those entering."""
    messages = kernels.path_messages(cut.chain.x)
    leaving: Tensor = messages(cut.window(start, stop), cut.by_set(entering)).leaving
    return cut.by_segment(leaving)


def differ(chain: Chain, a: Tensor, b: Tensor) -> Tensor:
    """Whether messages (..., c) differ in a bit, or hold NaN."""
    return (a != b).any(-1)
