"""The log-partition of few long chains by segments of equal length that are computed side by side, after a short head.

    a_s = a_{s-1} M_s        M_s: the product of segment s; a_s: the message that leaves it

A segment needs the message e_s that enters it, which is computed in one of two ways:

By warm-up, on a CPU: e_{s+1} is a uniform message after the last steps of segment s. Hilbert's metric

    d(a, e) = max log a/e - min log a/e       max and min over states; infinite where only one of a and e is 0

is 0 for messages that differ by a factor alone, and no non-negative matrix makes it larger. If every d(a_s, e_{s+1}) is
at most `tolerance`, all messages are those of the chain up to rounding, and log Z is the sum of the segments' own.
Segments where it is more are computed again from what arrives. Backward messages are warmed up and certified likewise.
See "When a chain forgets" in the documentation for the proof. The warm-up is the first of a few lengths after which a
uniform message and one of a single state agree at most boundaries; without one, a sequential scan computes the chain.

By products, on a GPU, where nothing is read on the host: each segment is scanned from each of its states, which gives
the rows of M_s. These products are a short chain of their own, whose forward messages enter the segments and whose
backward messages f_s follow them.

The backward pass needs `messages`, those of the head, and for each segment the one that enters it and its own; which
sequences were `recomputed` exactly, in the head and in each segment; and as `extra` the length of the warm-up, 0 for a
sequential scan, whose messages come first, or on a GPU the f (count + 1, g, m, c).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import kernels
from ..kernels.chain import Chain
from ..kernels.message import Kept, Message, normalised
from ..kernels.numbers import exact_sum
from ..rescues import report_boundaries, report_chains

# the first length of a warm-up for each byte of a number, the factor to the next, and the part of a segment that it may
# take; the part of the boundaries where messages may disagree after it
_FIRST, _GROWTH, _WARM_PART, _REFUSED = 4, 4, 1 / 6, 1 / 4

Saved = tuple[Tensor, Tensor, Tensor, Tensor]


def saved_shapes(x: Tensor, v: int, g: int, m: int, c: int, segments: int, keep: bool) -> tuple[tuple[int, ...], ...]:
    """The shapes of `messages`, which are empty unless they are to be kept, of `extra` and of `recomputed`."""
    count = min(segments, v - 1)
    extra: tuple[int, ...] = (1,)
    if kernels.on_gpu(x):
        extra = (count + 1, g, m, c) if keep else (0,)
    return (v + count, g, m, c) if keep else (0,), extra, (count + 1, g * m)


def forward(chain: Chain, segments: int, warm_up: int, *, keep: bool) -> Saved:
    """The log-partition (g, m) in float64, messages, extra, recomputed; `warm_up` 0 is a length that is searched."""
    cut = Cut(chain, min(segments, chain.v - 1))
    messages = kernels.messages_of(chain, chain.v + cut.count) if keep else chain.new(0)
    recomputed = torch.zeros(cut.count + 1, chain.g, chain.m, dtype=torch.bool, device=chain.x.device)
    if kernels.on_gpu(chain.x):
        log_norm, extra = _by_products(cut, messages if keep else None, recomputed)
    else:
        log_norm, steps = _by_warm_up(cut, warm_up, messages if keep else None, recomputed)
        extra = torch.tensor([steps], device=chain.x.device)
    report_chains(recomputed.any(0))
    return log_norm, messages, extra, recomputed.flatten(1)


def backward(
    chain: Chain, segments: int, saved: Saved, weight: Tensor, grad_x: Tensor | None, grad_bulk: Tensor | None
) -> Tensor:
    """The gradient of p0 (*lead, c), as in `kernels.plain.backward`; `saved` is what `forward` returned."""
    log_norm, messages, extra, recomputed = saved
    cut, marks = Cut(chain, min(segments, chain.v - 1)), recomputed.view(-1, chain.g, chain.m)
    by_products = kernels.on_gpu(chain.x)
    if not by_products and int(extra) == 0:
        whole, scan = Kept(log_norm, messages[: chain.v], marks[0]), kernels.chain_kernels(chain.x)
        start: Tensor = scan.backward(chain, whole, weight, None, grad_x, grad_bulk)
        return start
    passes = _Backward(cut, log_norm, messages, marks, weight, grad_x, grad_bulk)
    if by_products:
        passes.segments(extra[1:])
        return passes.head(extra[0])
    following = passes.before_segments(int(extra)).roll(-1, 0)
    following[-1] = 0.0
    arriving = passes.segments(following)
    if disagree(chain, arriving[1:], following[:-1]).any():
        for s in range(cut.count - 2, -1, -1):
            refused = disagree(chain, arriving[s + 1], following[s])
            if refused.any():
                report_boundaries(refused)
                following[s] = arriving[s + 1]
                arriving[s] = passes.before_segment(s, following[s])
        arriving = passes.segments(following)
    return passes.head(arriving[0])


def _by_warm_up(cut: "Cut", warm_up: int, messages: Tensor | None, recomputed: Tensor) -> tuple[Tensor, int]:
    """The log-partition (g, m), and the length of the warm-up; 0 for a sequential scan."""
    chain, scan = cut.chain, kernels.chain_kernels(cut.chain.x)
    entering, steps = _warmed_up(cut, warm_up)
    if steps > 0:
        head, start = scan.forward(cut.head(), keep=None if messages is None else cut.parts(messages)[0], leave=True)
        recomputed[0] = head.redone
        scale = _certified(cut, torch.cat([start.values[None], entering[:-1]]), messages, recomputed[1:])
        log_norm = _sum([start.scale, scale.flatten(0, 1)])
        if (log_norm < torch.inf).all():  # what is not finite comes from a sequential scan
            return log_norm, steps
    recomputed.zero_()
    whole, _ = scan.forward(chain, keep=None if messages is None else messages[: chain.v])
    recomputed[0] = whole.redone
    return whole.log_norm, 0


def _warmed_up(cut: "Cut", steps: int) -> tuple[Tensor, int]:
    """Logarithms of messages (count, g, m, c) after the last `steps` of each segment, from uniform ones.

    `steps` 0: after the fewest that may do, which are returned, or 0 if there are none.
    """
    chain = cut.chain
    uniform = torch.zeros(cut.count, chain.g, chain.m, chain.c, dtype=torch.float64, device=chain.x.device)
    if steps > 0:
        steps = min(steps, cut.length)
        return cut.after_last(steps, uniform), steps
    # one state for each boundary, so that chains that never leave a part of their states are found out
    state = torch.arange(cut.count, device=chain.x.device) * chain.c // cut.count
    others = torch.arange(chain.c, device=chain.x.device) != state[:, None, None, None]
    starts = torch.cat([uniform, uniform.masked_fill(others, -torch.inf)], 1)
    twice, reached = cut.twice(), cut.reached()[1:]
    steps = _FIRST * chain.dtype.itemsize
    while steps <= _WARM_PART * cut.length:
        from_uniform, from_state = twice.after_last(steps, starts).chunk(2, 1)
        refused = disagree(chain, from_uniform[:-1], from_state[:-1]) & reached
        if refused.sum() <= _REFUSED * refused.numel():
            return from_uniform, steps
        steps *= _GROWTH
    return uniform, 0


def _certified(cut: "Cut", entering: Tensor, messages: Tensor | None, recomputed: Tensor) -> Tensor:
    """The scales (2, count, g, m) of all segments; those that a wrong message entered are computed again.

    `messages` are written if there is memory for them, and `recomputed` (count, g, m).
    """
    chain, scan, reached = cut.chain, kernels.chain_kernels(cut.chain.x), cut.reached()
    kept = None if messages is None else cut.parts(messages)[1]
    segments, after = scan.forward(cut.segments(), cut.entering(entering), keep=kept, leave=True)
    leaving = cut.by_segment(after.values)
    scale = torch.stack([cut.by_segment(part) for part in after.scale])
    recomputed.copy_(cut.by_segment(segments.redone))
    if not (disagree(chain, leaving[:-1], entering[1:]) & reached[1:]).any():
        return scale
    memory = None if kept is None else chain.new(cut.length + 1, chain.g, chain.m, chain.c)
    for s in range(1, cut.count):
        refused = disagree(chain, leaving[s - 1], entering[s]) & reached[s]
        if not refused.any():
            continue
        report_boundaries(refused)
        message = Message(leaving[s - 1], torch.zeros_like(scale[:, s]))
        segment, left = scan.forward(cut.segment(s), message, keep=memory, leave=True)
        leaving[s], scale[:, s], recomputed[s] = left.values, left.scale, segment.redone
        if kept is not None and memory is not None:
            cut.each(kept)[s].copy_(memory)
    return scale


def disagree(chain: Chain, a: Tensor, b: Tensor) -> Tensor:
    """Whether logarithms of messages (..., c) differ by more than a factor and their rounding."""
    return ~(hilbert_distance(a, b) <= tolerance(chain.c, chain.dtype))  # also where one holds NaN


def hilbert_distance(a: Tensor, b: Tensor) -> Tensor:
    """Hilbert's metric between logarithms of messages (..., c) with sum 1, less what these are rounded by in float64.

    NaN or infinite where they have different zeros.
    """
    gap, rounding = a - b, 2 * torch.finfo(torch.float64).eps * a.abs()
    both_zero = (a == -torch.inf) & (b == -torch.inf)
    most = (gap - rounding).masked_fill(both_zero, -torch.inf).amax(-1)
    return most - (gap + rounding).masked_fill(both_zero, torch.inf).amin(-1)


def tolerance(c: int, dtype: torch.dtype) -> float:
    """The largest distance that is accepted: the rounding that four steps may have, by the contract of accuracy."""
    return 2 * (c + 8) * torch.finfo(dtype).eps


def _sum(scales: list[Tensor]) -> Tensor:
    """The sum (g, m) of logarithms (2, g, m) and their rounding errors."""
    return torch.stack(exact_sum(torch.cat(scales))).sum(0)


def _by_products(cut: "Cut", messages: Tensor | None, recomputed: Tensor) -> tuple[Tensor, Tensor]:
    """The log-partition (g, m), and the backward messages (count + 1, g, m, c) after the head and after each segment.

    Without `messages` there are none of the second.
    """
    scan, chain = kernels.chain_kernels(cut.chain.x), cut.chain
    head, start = scan.forward(cut.head(), keep=None if messages is None else cut.parts(messages)[0], leave=True)
    recomputed[0] = head.redone
    by_row = cut.by_row()
    rows, products = scan.forward(by_row.rows(), by_row.unit_rows(), leave=True)
    between, shift = by_row.between(start.values, products)
    if messages is None:
        recomputed[1:] = by_row.by_segment(rows.redone.view(*by_row.shape, chain.c).any(-1))
        last = scan.forward(between)[0]
        recomputed[0] |= last.redone.view(head.redone.shape)
        return _sum([start.scale, shift, last.log_norm.view(shift[:1].shape)]), start.values.new_empty(0)
    reverse = replace(between, bulk=between.bulk.flip(0).mT, p0=torch.zeros_like(between.p0))
    from_first, from_last = (scan.forward(one, keep=kernels.messages_of(one, one.v))[0] for one in (between, reverse))
    arriving = normalised(from_first.logs(slice(0, -1)))[0].view(cut.count, *start.values.shape)
    entering = cut.entering(arriving)
    passed = scan.forward(cut.segments(), entering, keep=cut.parts(messages)[1], leave=True)[0]
    recomputed[1:] = cut.by_segment(passed.redone)
    following = from_last.logs(slice(None)).flip(0).view(cut.count + 1, *start.values.shape)
    return _sum([start.scale, shift, from_first.log_norm.view(shift[:1].shape)]), following


class _Backward:
    """The backward pass of a cut chain: first of its segments, then of its head.

    `recomputed` (count + 1, g, m) says which messages are logarithms. Gradients are written as by
    `kernels.plain.backward`.
    """

    def __init__(
        self,
        cut: "Cut",
        log_norm: Tensor,
        messages: Tensor,
        recomputed: Tensor,
        weight: Tensor,
        grad_x: Tensor | None,
        grad_bulk: Tensor | None,
    ) -> None:
        self._cut, self._scan, self._weight = cut, kernels.chain_kernels(cut.chain.x), weight
        self._grad_x, self._grad_bulk = grad_x, grad_bulk
        head, segments = cut.parts(messages)
        norms, self._weights, marks = (
            cut.by_set(one.expand_as(recomputed[1:])) for one in (log_norm, weight, recomputed[1:])
        )
        self._head, self._segments = Kept(log_norm, head, recomputed[0]), Kept(norms, segments, marks, True)
        self._head_counts: Tensor | None = None
        self._counts: Tensor | None = None
        if grad_bulk is not None:
            self._head_counts, self._counts = cut.counts(grad_bulk)

    def segments(self, following: Tensor) -> Tensor:
        """The messages (count, g, m, c) before all segments from those after them; gradients are written."""
        cut, grad_x = self._cut, None if self._grad_x is None else self._cut.steps(self._grad_x)
        after = cut.by_set(following)
        before = self._scan.backward(cut.segments(), self._segments, self._weights, after, grad_x, self._counts)
        return cut.by_segment(before)

    def before_segments(self, steps: int) -> Tensor:
        """The messages (count, g, m, c) before all segments, from uniform ones after their first `steps`."""
        kept = self._segments._replace(messages=self._segments.messages[: steps + 1])
        window = self._cut.window(0, steps)
        return self._cut.by_segment(self._scan.backward(window, kept, self._weights, None, None, None))

    def before_segment(self, s: int, following: Tensor) -> Tensor:
        """The message (g, m, c) before one segment, from the one after it."""
        cut = self._cut
        messages = cut.each(self._segments.messages)[s].contiguous()
        kept = Kept(self._head.log_norm, messages, cut.by_segment(self._segments.redone)[s], True)
        before: Tensor = self._scan.backward(cut.segment(s), kept, self._weight, following, None, None)
        return before

    def head(self, following: Tensor) -> Tensor:
        """The gradient of p0 (*lead, c), from the message after the head; gradients of the head are written."""
        cut, grad_x = self._cut, None if self._grad_x is None else self._grad_x[: self._cut.rest + 1]
        start: Tensor = self._scan.backward(cut.head(), self._head, self._weight, following, grad_x, self._head_counts)
        if cut.homogeneous and self._head_counts is not None and self._grad_bulk is not None:
            self._grad_bulk.add_(self._head_counts)
        return start


@dataclass(frozen=True)
class Cut:
    """A chain as a head of `rest` transitions and `count` segments of `length` transitions each, all of them views.

    All segments together are one chain of g' sets of matrices, each shared by m' members: a segment has separate sets
    where matrices differ from step to step, and otherwise separate members.
    """

    chain: Chain
    count: int

    @property
    def length(self) -> int:
        """The number of variables of a segment, and of transitions: the first leads into it from the part before."""
        return (self.chain.v - 1) // self.count

    @property
    def rest(self) -> int:
        """Transitions of the head, which has one variable more."""
        return (self.chain.v - 1) % self.count

    @property
    def homogeneous(self) -> bool:
        """Whether one matrix serves every step."""
        return len(self.chain.bulk) == 1

    @property
    def shape(self) -> tuple[int, int]:
        """Sets g' and members m' of the segments' chain."""
        g, m = self.chain.g, self.chain.m
        return (g, self.count * m) if self.homogeneous else (self.count * g, m)

    def head(self) -> Chain:
        """The chain of the first steps."""
        chain = self.chain
        ends = None if chain.ends is None else chain.ends.clamp(max=self.rest + 1)
        bulk = chain.bulk if self.homogeneous else chain.bulk[: self.rest]
        return replace(chain, x=chain.x[: self.rest + 1], bulk=bulk, ends=ends)

    def segments(self) -> Chain:
        """The chain of the segments, which messages enter."""
        return self.window(0, self.length)

    def window(self, start: int, stop: int) -> Chain:
        """The chain of steps `start` to before `stop` of every segment, which messages enter."""
        chain, ends = self.chain, None
        x, bulk = self.steps(chain.x)[start:stop], self.matrices(chain.bulk)
        bulk = bulk if self.homogeneous else bulk[start:stop]
        if chain.ends is not None:
            ends = self.by_set((chain.ends - start - self._first_steps[..., None]).clamp(0, stop - start))
        return replace(chain, x=x, bulk=bulk, ends=ends)

    def segment(self, s: int) -> Chain:
        """The chain of one segment, which a message enters."""
        chain, start = self.chain, self.rest + 1 + self.length * s
        ends = None if chain.ends is None else (chain.ends - start).clamp(0, self.length)
        bulk = chain.bulk if self.homogeneous else chain.bulk[start - 1 : start - 1 + self.length]
        return replace(chain, x=chain.x[start : start + self.length], bulk=bulk, ends=ends)

    def twice(self) -> "Cut":
        """The cut of a chain that has all sets of matrices twice, with their sequences."""
        chain = self.chain
        x, bulk = chain.x.unsqueeze(1), chain.bulk.unsqueeze(1)
        x, bulk = x.expand(len(x), 2, *x.shape[2:]), bulk.expand(len(bulk), 2, *bulk.shape[2:])
        ends = None if chain.ends is None else chain.ends.repeat(2, 1, 1)
        return Cut(replace(chain, x=x, bulk=bulk, ends=ends), self.count)

    def after_last(self, steps: int, entering: Tensor) -> Tensor:
        """Logarithms of messages (count, g, m, c) after the last `steps` of each segment, from those before these."""
        window, message = self.window(self.length - steps, self.length), self.entering(entering)
        return self.by_segment(kernels.chain_kernels(window.x).forward(window, message, leave=True)[1].values)

    def reached(self) -> Tensor:
        """Whether a sequence has steps in a segment (count, g, m)."""
        chain = self.chain
        if chain.ends is None:
            return torch.ones(self.count, chain.g, chain.m, dtype=torch.bool, device=chain.x.device)
        return chain.ends[..., 0] > self._first_steps

    @property
    def _first_steps(self) -> Tensor:
        """The first step of each segment (count, 1, 1)."""
        return (self.rest + 1 + self.length * torch.arange(self.count, device=self.chain.x.device)).view(-1, 1, 1)

    def entering(self, logs: Tensor) -> Message:
        """Logarithms (count, g, m, c) of messages with sum 1 as the message (g', m', c) that enters all segments."""
        scale = torch.zeros(2, *self.shape, dtype=torch.float64, device=logs.device)
        return Message(self.by_set(logs), scale)

    def parts(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        """Messages (v + count, g, m, c) as those of the head, and those of the segments (length + 1, g', m', c)."""
        head, segments = messages[: self.rest + 1], messages[self.rest + 1 :]
        return head, segments.view(self.length + 1, *self.shape, self.chain.c)

    def each(self, messages: Tensor) -> Tensor:
        """A view of the segments' messages (length + 1, g', m', c) as (count, length + 1, g, m, c)."""
        g, m, c = self.chain.g, self.chain.m, self.chain.c
        if self.homogeneous:
            return messages.view(len(messages), g, self.count, m, c).movedim(2, 0)
        return messages.view(len(messages), self.count, g, m, c).movedim(1, 0)

    def steps(self, x: Tensor) -> Tensor:
        """x (v, *lead, c) of the segments: (length, *lead', c)."""
        axis = self.chain.bulk.dim() - 3 if self.homogeneous else 0
        whole: Tensor = x[self.rest + 1 :].unflatten(0, (self.count, self.length))
        return whole.movedim(0, axis + 1)

    def matrices(self, bulk: Tensor) -> Tensor:
        """bulk (s, *own, c, c) of the segments: (length or 1, *own', c, c)."""
        if self.homogeneous:
            return bulk
        whole: Tensor = bulk[self.rest :].unflatten(0, (self.count, self.length))
        return whole.transpose(0, 1)

    def counts(self, grad_bulk: Tensor) -> tuple[Tensor, Tensor]:
        """Memory for the gradients of the head's matrices, and of the segments'."""
        head = torch.empty_like(grad_bulk) if self.homogeneous else grad_bulk[: self.rest]
        return head, self.matrices(grad_bulk)

    def by_segment(self, values: Tensor) -> Tensor:
        """Values (g', m', ...) as (count, g, m, ...)."""
        g, m = self.chain.g, self.chain.m
        if self.homogeneous:
            return values.reshape(g, self.count, m, *values.shape[2:]).transpose(0, 1)
        return values.reshape(self.count, g, m, *values.shape[2:])

    def by_set(self, values: Tensor) -> Tensor:
        """Values (count, g, m, ...) as (g', m', ...)."""
        values = values.transpose(0, 1) if self.homogeneous else values
        return values.reshape(*self.shape, *values.shape[3:])

    def by_row(self) -> "Cut":
        """The cut with which segments are scanned from each of their states.

        A GPU reads rows in place if each segment is a separate set, which costs no memory for a single set.
        """
        chain = self.chain
        if not (self.homogeneous and chain.g == 1):
            return self
        return Cut(replace(chain, bulk=chain.bulk.expand(chain.v - 1, *chain.bulk.shape[1:])), self.count)

    def rows(self) -> Chain:
        """The chain of the segments, each of them c times (g', m' c)."""
        chain, c = self.segments(), self.chain.c
        assert chain.ends is None  # sequences with lengths are not cut on a GPU
        return replace(chain, x=chain.x.unsqueeze(-2).expand(*chain.x.shape[:-1], c, c))

    def unit_rows(self) -> Message:
        """A message (g', m' c) into each segment for each state, that has all its weight on this state."""
        (sets, members), c = self.shape, self.chain.c
        rows = torch.eye(c, dtype=self.chain.dtype, device=self.chain.x.device).log_().repeat(members, 1)
        scale = torch.zeros(1, dtype=torch.float64, device=rows.device)
        return Message(rows.expand(sets, -1, c), scale.expand(2, sets, members * c))

    def between(self, start: Tensor, products: Message) -> tuple[Chain, Tensor]:
        """The chain of the segments' products, after the head's message, and their scales taken out (count, g, m)."""
        chain, c = self.chain, self.chain.c
        high, low = (self.by_segment(part.view(*self.shape, c)) for part in products.scale)
        top = high.amax(-1)
        top = top.masked_fill(top == -torch.inf, 0.0)
        matrices = self.by_segment(products.values.view(*self.shape, c, c))
        matrices.add_((high - top[..., None] + low)[..., None])
        x = matrices.new_zeros(c).expand(self.count + 1, chain.g, chain.m, c)
        return Chain(x, matrices, start, None, True, torch.float64), top
