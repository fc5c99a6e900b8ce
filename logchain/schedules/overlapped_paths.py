"""The best paths of few long chains: segments side by side on a CPU, each begun some steps early, as in `overlapped`.

Max-plus messages are rounded alike wherever they come from. Once the best paths into all states go through one state,
what was before is lost in them, and messages that began apart are soon the same, bit for bit. Where that is so at all
boundaries, messages and path are those of the walk through the whole chain, ties included. A segment that a wrong
message entered is walked again.

On the way back each segment ends in the state that the best path of the next segment's first steps comes from, or,
where that was wrong, in the state that its whole path comes from.
"""

import torch
from torch import Tensor

from .. import kernels
from ..kernels.chain import Chain, segments_of
from ..rescues import report_boundaries
from .cost_counts import WARM_PART
from .cut import Cut
from .overlapped import steps_to_forget


def paths(chain: Chain, steps: int, segments: int) -> tuple[Tensor, Tensor]:
    """The states (g, m, steps) of the best paths, and whether sequences are unknown, as of `kernels.plain.viterbi`."""
    cut, kept = Cut(chain, max(1, segments_of(chain.v, segments)[0])), kernels.path_messages()
    early = steps_to_forget(chain, cut.length // WARM_PART, _through, _differ) if cut.count > 1 else 0
    if early == 0:
        whole: tuple[Tensor, Tensor] = kernels.path_kernels(chain.x).paths(chain, steps)
        return whole
    early = min(early + early // 2, cut.length)
    head = kept(cut.head(), None)
    begun = _through(cut, cut.length - early, cut.length, head.leaving.new_zeros(cut.count, *head.leaving.shape))
    entering, reached = torch.cat([head.leaving[None], begun[:-1]]), cut.reached()
    side_by_side = kept(cut.segments(), cut.by_set(entering))
    arrived, marks = cut.by_segment(side_by_side.leaving), cut.by_segment(side_by_side.unknown)
    unknown, again = head.unknown | marks.any(0), {}
    for s in range(1, cut.count):
        wrong = _differ(chain, arrived[s - 1], entering[s]) & reached[s] & ~unknown
        if wrong.any():
            report_boundaries(wrong)
            again[s] = kept(cut.segment(s), arrived[s - 1])
            arrived[s] = again[s].leaving
    last = torch.full((cut.count + 1, chain.g, chain.m), -1)  # of the head and each segment, -1 for any
    first = cut.by_segment(side_by_side.paths(cut.by_set(last[1:]), early + 1))[..., 0]
    while True:
        last[:-1] = torch.where(reached, first, -1)
        found = cut.by_segment(side_by_side.paths(cut.by_set(last[1:])))
        for s, alone in again.items():
            found[s] = alone.paths(last[s + 1])
        first = found[..., 0]
        if torch.equal(last[:-1], torch.where(reached, first, -1)):
            break
    states = torch.empty(chain.g, chain.m, steps, dtype=torch.int64)
    states[..., : cut.rest + 1] = head.paths(last[0])
    states[..., cut.rest + 1 : chain.v].unflatten(-1, (cut.count, cut.length)).copy_(found[..., 1:].movedim(0, 2))
    states[..., chain.v :] = -1
    ends = torch.full_like(last[0], chain.v) if chain.ends is None else chain.ends[..., 0]
    states[unknown | (states.gather(-1, ends[..., None] - 1)[..., 0] < 0)] = -1
    return states, unknown


def _through(cut: Cut, start: int, stop: int, entering: Tensor) -> Tensor:
    """The messages (count, g, m, c) that leave steps `start` to before `stop` of the segments, from those entering."""
    return cut.by_segment(kernels.path_messages()(cut.window(start, stop), cut.by_set(entering)).leaving)


def _differ(chain: Chain, a: Tensor, b: Tensor) -> Tensor:
    """Whether messages (..., c) differ in a bit, or hold NaN."""
    return (a != b).any(-1)
