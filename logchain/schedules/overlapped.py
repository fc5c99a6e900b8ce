"""The log-partition of few long chains that forget how they began: segments side by side, each begun some steps early.

    e_s = u W_s             u: a uniform message; W_s: the last steps before segment s, its warm-up
    a_s = e_{s-1} M_{s-1}   M_s: the product of segment s; a_0, which enters the first, is the head's message

    d(a, e) = max log a/e - min log a/e       max and min over states; infinite where only one of a and e is 0

Hilbert's metric d is 0 for messages that differ by a factor alone, and no non-negative matrix makes it larger. If every
d(a_s, e_s) is at most `tolerance`, all messages are those of the chain up to rounding, log Z is the sum of the
segments' own, and no step waited for a segment before. Segments that fail are walked again from what has arrived.
Backward messages start early likewise. See "When a chain forgets" in the documentation for the proof.

How many steps a warm-up takes is found out at a few places first, where messages that begin in two states have to
agree in the end. Where they do not within a small part of the chain, one sequential scan computes it. A GPU takes the
chunked schedule instead, which reads nothing on the host.

The backward pass needs `messages`, those of the head, and for each segment the e that enters it and its own; `warm`,
the steps of a warm-up, 0 for a chain that was walked as one, whose messages come first; and which sequences were
`redone` exactly, in the head and in each segment.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .. import kernels
from ..kernels.chain import Chain, segments_of
from ..kernels.message import Kept, Message
from ..kernels.numbers import exact_sum
from ..rescues import report_boundaries, report_chains
from .cost_counts import WARM_PART, first_warm_up
from .cut import Cut
from .cut_backward import Backward

# at how many places steps to forget are counted, by how much their number grows, and which share of all it may be
_PROBES, _GROWTH, _SHARE = 4, 4, 64

# above these bits, a number of segments holds the steps that they begin early, or 0 if these are to be found out
WARM_UP_SHIFT = 20

# the part of the boundaries that may be walked again
_MENDED = 1 / 4

# the messages (count, g, m, c) that leave some of the steps of the segments of a cut, from those that enter
Walk = Callable[[Cut, int, int, Tensor], Tensor]

# whether messages of a chain are not the same
Differ = Callable[[Chain, Tensor, Tensor], Tensor]


def unlike(chain: Chain, a: Tensor, b: Tensor) -> Tensor:
    """Whether logarithms of messages (..., c) differ by more than a factor and their rounding, or hold NaN."""
    return ~(distance(a, b) <= tolerance(chain.c, chain.dtype))


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Hilbert's metric between logarithms of messages (..., c) with sum 1, less what these are rounded by in float64.

    NaN or infinite where they have different zeros.
    """
    gap, rounding = a - b, 2 * torch.finfo(torch.float64).eps * a.abs()
    neither = (a == -torch.inf) & (b == -torch.inf)
    most = (gap - rounding).masked_fill(neither, -torch.inf).amax(-1)
    return most - (gap + rounding).masked_fill(neither, torch.inf).amin(-1)


def tolerance(c: int, dtype: torch.dtype) -> float:
    """The largest distance that is accepted: the rounding that four steps may have, by the contract of accuracy."""
    return 2 * (c + 8) * torch.finfo(dtype).eps


def _count(v: int, segments: int) -> int:
    return segments_of(v, segments % 2**WARM_UP_SHIFT)[0]


def kept_shapes(v: int, g: int, m: int, c: int, segments: int, keep: bool) -> tuple[tuple[int, ...], ...]:
    """The shapes of `messages`, which is empty unless it is to be kept, of `warm` and of `redone`."""
    count = _count(v, segments)
    return (v + count, g, m, c) if keep else (0,), (1,), (count + 1, g * m)


def forward(chain: Chain, segments: int, *, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The log-partition (g, m) in float64, messages, warm, redone."""
    walk, grid = kernels.chain_kernels(chain.x), chain.g * chain.m
    shapes = kept_shapes(chain.v, chain.g, chain.m, chain.c, segments, keep)
    messages = kernels.messages_of(chain, shapes[0][0]) if keep else chain.new(0)
    warm = torch.zeros(shapes[1], dtype=torch.int64, device=chain.x.device)
    redone = torch.zeros(shapes[2], dtype=torch.bool, device=chain.x.device)
    cut = Cut(chain, _count(chain.v, segments))
    steps, in_segments = min(segments >> WARM_UP_SHIFT, cut.length) or early(cut), redone.view(-1, chain.g, chain.m)
    if steps > 0:
        log_norm = _side_by_side(cut, steps, messages if keep else None, in_segments)
        if not (log_norm < torch.inf).all():  # what is not finite is that of one walk
            steps = 0
            redone.zero_()
    warm[0] = steps
    if steps == 0:
        whole = walk.forward(chain, keep=messages[: chain.v] if keep else None)[0]
        redone[0] = whole.redone.view(grid)
        log_norm = whole.log_norm
    report_chains(redone.any(0))
    return log_norm, messages, warm, redone


def _side_by_side(cut: Cut, steps: int, messages: Tensor | None, redone: Tensor) -> Tensor:
    """The log-partition (g, m) by segments that begin some steps early.

    `messages` are written if there is memory for them, and `redone` (count + 1, g, m).
    """
    walk = kernels.chain_kernels(cut.chain.x)
    head_messages, segment_messages = (None, None) if messages is None else cut.parts(messages)
    head, start = walk.forward(cut.head(), keep=head_messages, leave=True)
    redone[0] = head.redone
    entering = assumed(cut, steps, start.values)
    scale = _segments(cut, entering, segment_messages, redone[1:])
    return torch.stack(exact_sum(torch.cat([start.scale, scale.flatten(0, 1)]))).sum(0)


def in_order(chain: Chain, segments: int) -> Kept:
    """The forward messages (v, g, m, c) of a chain in the order of its steps, as `kernels.plain.forward` keeps them."""
    log_norm, messages, warm, redone = forward(chain, segments, keep=True)
    marks = redone.view(-1, chain.g, chain.m)
    if int(warm) == 0:
        return Kept(log_norm, messages[: chain.v], marks[0])
    cut, some = Cut(chain, _count(chain.v, segments)), marks.any(0)
    ordered = kernels.messages_of(chain, chain.v)
    head, rows = ordered[: cut.rest + 1], ordered[cut.rest + 1 :].unflatten(0, (cut.count, cut.length))
    found = cut.parts(messages)
    head.copy_(found[0])
    rows.copy_(cut.each(found[1])[:, 1:])
    if (marks != some).any():  # all messages of a sequence are logarithms if some are
        for part, mark in ((head, marks[0]), (rows, marks[1:, None])):
            part.copy_(torch.where(some[..., None], Kept(log_norm, part, mark).logs(slice(None)), part))
    return Kept(log_norm, ordered, some)


def early(cut: Cut, walk: Walk | None = None, differ: Differ | None = None, mended: float = _MENDED) -> int:
    """The number of steps that segments begin early; 0: the chain is walked as one.

    `walk` and `differ` are those of other messages than `through` and `unlike`; `mended` is the part of the boundaries
    that may be recomputed.
    """
    steps = steps_to_forget(cut.chain, cut.length // WARM_PART, walk or through, differ or unlike, mended)
    return min(steps + steps // 2, cut.length)


def steps_to_forget(chain: Chain, longest: int, walk: Walk, differ: Differ, mended: float = _MENDED) -> int:
    """A number of steps, at most `longest`, after which all but a part of messages agree; 0 if they did not."""
    cut = Cut(_twice(chain), min(_PROBES, chain.v - 1))
    reached, beginnings = cut.reached()[:, : chain.g], _beginnings(cut)
    first = steps = first_warm_up(chain.v, chain.dtype.itemsize)
    while steps <= min(longest, cut.length, max(first, chain.v // _SHARE)):
        apart = walk(cut, cut.length - steps, cut.length, beginnings)
        unmet = differ(chain, apart[:, : chain.g], apart[:, chain.g :]) & reached
        if unmet.sum() <= mended * unmet.numel():
            return steps
        steps *= _GROWTH
    return 0


def _twice(chain: Chain) -> Chain:
    """The chain with all of its sets of matrices twice, and their sequences."""
    x, bulk = chain.x.unsqueeze(1), chain.bulk.unsqueeze(1)
    x, bulk = x.expand(len(x), 2, *x.shape[2:]), bulk.expand(len(bulk), 2, *bulk.shape[2:])
    return replace(chain, x=x, bulk=bulk, ends=None if chain.ends is None else chain.ends.repeat(2, 1, 1))


def _beginnings(cut: Cut) -> Tensor:
    """Logarithms (count, 2 g, m, c) of messages of a single state each, another one for half the sets and each place.

    Chains that never leave a part of their states are told by this from chains that forget.
    """
    chain = cut.chain
    one = torch.arange(cut.count, device=chain.x.device) * chain.c // cut.count
    states = torch.stack([one, chain.c - 1 - one], 1).repeat_interleave(chain.g // 2, 1)
    logs = torch.zeros(*states.shape, chain.m, chain.c, dtype=torch.float64, device=chain.x.device)
    other = torch.arange(chain.c, device=chain.x.device) != states[..., None]
    return logs.masked_fill_(other[..., None, :], -torch.inf)


def through(cut: Cut, start: int, stop: int, entering: Tensor) -> Tensor:
    """The messages (count, g, m, c) that leave steps `start` to before `stop` of the segments, from those entering."""
    window, message = cut.window(start, stop), cut.entering(entering)
    return cut.by_segment(kernels.chain_kernels(window.x).forward(window, message, leave=True)[1].values)


def assumed(cut: Cut, steps: int, first: Tensor, walk: Walk | None = None) -> Tensor:
    """The messages (count, g, m, c) that enter segments: the `first`, and uniform ones after their last `steps`."""
    uniform = first.new_zeros(cut.count, *first.shape)
    begun = (walk or through)(cut, cut.length - steps, cut.length, uniform)
    return torch.cat([first[None], begun[:-1]])


def wrong(cut: Cut, arrived: Tensor, entering: Tensor, reached: Tensor, differ: Differ | None = None) -> Iterator[int]:
    """The segments that another message has entered than arrives there (count, g, m, c), each to be walked again.

    Before the next is found, `arrived` has to hold the message that leaves such a segment then.
    """
    for s in range(1, cut.count):
        unequal = (differ or unlike)(cut.chain, arrived[s - 1], entering[s]) & reached[s]
        if unequal.any():
            report_boundaries(unequal)
            yield s


def _segments(cut: Cut, entering: Tensor, messages: Tensor | None, redone: Tensor) -> Tensor:
    """The scales (2, count, g, m) of all segments; those with a wrong entering message are recomputed.

    `messages` are written if there is memory for them, and into `redone` (count, g, m) what was redone exactly.
    """
    chain, walk, reached = cut.chain, kernels.chain_kernels(cut.chain.x), cut.reached()
    passed, after = walk.forward(cut.segments(), cut.entering(entering), keep=messages, leave=True)
    arrived = cut.by_segment(after.values)
    scale = torch.stack([cut.by_segment(part) for part in after.scale])
    redone.copy_(cut.by_segment(passed.redone))
    if not (unlike(chain, arrived[:-1], entering[1:]) & reached[1:]).any():
        return scale
    memory = None if messages is None else chain.new(cut.length + 1, chain.g, chain.m, chain.c)
    for s in wrong(cut, arrived, entering, reached):
        message = Message(arrived[s - 1], torch.zeros_like(scale[:, s]))
        alone, left = walk.forward(cut.segment(s), message, keep=memory, leave=True)
        arrived[s], scale[:, s], redone[s] = left.values, left.scale, alone.redone
        if messages is not None and memory is not None:
            cut.each(messages)[s].copy_(memory)
    return scale


def backward(
    chain: Chain,
    segments: int,
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    weight: Tensor,
    grad_x: Tensor | None,
    grad_bulk: Tensor | None,
) -> Tensor:
    """The gradient of p0 (*lead, c), as in `kernels.plain.backward`; `saved` is what `forward` returned."""
    log_norm, messages, warm, redone = saved
    cut = Cut(chain, _count(chain.v, segments))
    steps, marks = int(warm), redone.view(-1, chain.g, chain.m)
    if steps == 0:
        whole = Kept(log_norm, messages[: chain.v], marks[0])
        walk = kernels.chain_kernels(chain.x)
        start: Tensor = walk.backward(chain, whole, weight, None, grad_x, grad_bulk)
        return start
    passes = Backward(cut, log_norm, messages, marks, weight, grad_x, grad_bulk)
    begun = passes.ahead_of_first(steps)
    following = torch.cat([begun[1:], torch.zeros_like(begun[:1])])
    ahead = passes.segments(following)
    if unlike(chain, ahead[1:], following[:-1]).any():
        for s in range(cut.count - 2, -1, -1):
            unequal = unlike(chain, ahead[s + 1], following[s])
            if unequal.any():
                report_boundaries(unequal)
                following[s] = ahead[s + 1]
                ahead[s] = passes.ahead_of(s, following[s])
        ahead = passes.segments(following)
    return passes.head(ahead[0])
