"""The log-partition of few long chains by segments of equal length that are computed side by side, after a short head.

On a CPU, a guess enters each segment but the first: a uniform message after the last steps of the segment before, the
warm-up. Hilbert's metric

    d(a, e) = max log a/e - min log a/e       max and min over states; infinite where only one of a and e is 0

is 0 for messages that differ by a factor alone, and no non-negative matrix makes it larger. If it is at most rounding
between the message that leaves each segment and the one that entered the next, all messages are those of the chain, and
log Z is the sum of the segments' scales. Segments where it is more are computed again from the message that arrives.
Backward messages are warmed up and verified likewise. Source: G. Birkhoff, "Extensions of Jentzsch's theorem", Trans.
AMS 85 (1957).

On a GPU, where nothing is read on the host, each segment is scanned from each of its states, which gives its product.
These products are a short chain, whose forward messages enter the segments and whose backward messages follow them.

The backward pass needs `messages`, those of the head, and for each segment the one that enters it and those after its
steps; which sequences were `recomputed` exactly, in the head and in each segment; and as `extra` the length of the
warm-up, 0 for a sequential scan, whose messages come first, or on a GPU the messages (count + 1, g, m, c) that follow.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..kernels.chain import Chain
from ..kernels.message import Message, Residuals, normalized
from ..kernels.numbers import exact_sum
from ..rescues import report_boundaries, report_chains

# the first length of a warm-up for each byte of a number, the factor to the next, and the part of a segment that it may
# take; the part of the boundaries where messages may disagree after it
_FIRST, _GROWTH, _WARM_PART, _REFUSED = 4, 4, 1 / 6, 1 / 4

Saved = tuple[Tensor, Tensor, Tensor, Tensor]


def saved_shapes(x: Tensor, v: int, g: int, m: int, c: int, segments: int, keep: bool) -> tuple[tuple[int, ...], ...]:
    """The shapes of `messages`, which are empty unless `keep`, of `extra` and of `recomputed`."""
    count = min(segments, v - 1)
    following = (count + 1, g, m, c) if keep else (0,)
    return (v + count, g, m, c) if keep else (0,), following if kernels.on_gpu(x) else (1,), (count + 1, g * m)


def forward(chain: Chain, segments: int, warm_up: int, *, keep: bool) -> Saved:
    """The log-partition (g, m) in float64, messages, extra, recomputed; `warm_up` 0 is a length that is searched."""
    cut, device = Cut(chain, segments), chain.x.device
    messages = kernels.messages_of(chain, chain.v + cut.count) if keep else None
    recomputed = torch.zeros(cut.count + 1, chain.g, chain.m, dtype=torch.bool, device=device)
    if kernels.on_gpu(chain.x):
        log_norm, extra = _by_products(cut, messages, recomputed)
    else:
        guesses, steps = _warmed_up(cut, warm_up)
        if steps > 0:
            log_norm = _in_segments(cut, guesses, messages, recomputed)
        if steps == 0 or not (log_norm < torch.inf).all():  # NaN and +inf are those of a sequential scan
            memory = None if messages is None else messages[: chain.v]
            whole, steps = kernels.forward(chain, keep=memory)[0], 0
            log_norm, recomputed[0], recomputed[1:] = whole.log_norm, whole.recomputed, False
        extra = torch.tensor([steps], device=device)
    report_chains(recomputed.any(0))
    return log_norm, chain.new(0) if messages is None else messages, extra, recomputed.flatten(1)


def backward(
    chain: Chain, segments: int, saved: Saved, weight: Tensor, grad_x: Tensor | None, grad_bulk: Tensor | None
) -> Tensor:
    """The gradient of p0 (*lead, c), as in `kernels.plain.backward`; `saved` is what `forward` returned."""
    log_norm, messages, extra, recomputed = saved
    cut, flags = Cut(chain, segments), recomputed.view(-1, chain.g, chain.m)
    warm_up = None if kernels.on_gpu(chain.x) else int(extra)
    if warm_up == 0:
        whole = Residuals(log_norm, messages[: chain.v], flags[0])
        return kernels.backward(chain, whole, weight, None, grad_x, grad_bulk)
    of_head, of_segments = cut.parts(messages)
    norms, weights = (cut.by_set(values.expand(cut.count, -1, -1)) for values in (log_norm, weight))
    residuals = Residuals(norms, of_segments, cut.by_set(flags[1:]), True)
    (head_x, into_x), (head_bulk, into_bulk) = cut.steps(grad_x), cut.matrices(grad_bulk)
    if grad_bulk is not None and cut.one_matrix:
        head_bulk = torch.empty_like(grad_bulk)

    def before_segments(following: Tensor) -> Tensor:
        before = kernels.backward(cut.segments, residuals, weights, cut.by_set(following), into_x, into_bulk)
        return cut.by_segment(before)

    def before_segment(s: int, following: Tensor) -> Tensor:
        of_segment = cut.by_segment(of_segments, 1)[s].contiguous()
        scanned = Residuals(log_norm, of_segment, flags[1 + s], True)
        return kernels.backward(cut.segment(s), scanned, weight, following, None, None)

    if warm_up is None:
        before_segments(extra[1:])
        following = extra[0]
    else:
        first = residuals._replace(messages=of_segments[: warm_up + 1])
        warmed_up = kernels.backward(cut.window(0, warm_up), first, weights, None, None, None)
        guesses = cut.by_segment(warmed_up).roll(-1, 0)
        guesses[-1] = 0.0
        before = before_segments(guesses)
        if not _verified(cut, before, guesses, -1, before_segment):
            before = before_segments(guesses)
        following = before[0]
    start = kernels.backward(cut.head, Residuals(log_norm, of_head, flags[0]), weight, following, head_x, head_bulk)
    if grad_bulk is not None and cut.one_matrix:
        grad_bulk.add_(head_bulk)
    return start


def _warmed_up(cut: "Cut", warm_up: int) -> tuple[Tensor, int]:
    """Logarithms of messages (count, g, m, c) after the last `warm_up` steps of each segment, from uniform messages.

    `warm_up` 0: the fewest steps that may suffice are searched. Returns their number too, 0 if there are none.
    """
    chain, device = cut.chain, cut.chain.x.device
    uniform = torch.zeros(cut.count, chain.g, chain.m, chain.c, dtype=torch.float64, device=device)
    if warm_up:
        steps = min(warm_up, cut.length)
        return cut.after_last(steps, uniform), steps
    # one state for each boundary, so that chains that never leave a part of their states are noticed
    state = torch.arange(cut.count, device=device) * chain.c // cut.count
    single = uniform.masked_fill(torch.arange(chain.c, device=device) != state[:, None, None, None], -torch.inf)
    steps = _FIRST * chain.dtype.itemsize
    while steps <= _WARM_PART * cut.length:
        messages = cut.after_last(steps, uniform)
        refused = disagree(chain, messages, cut.after_last(steps, single))[:-1] & cut.reached[1:]
        if refused.sum() <= _REFUSED * refused.numel():
            return messages, steps
        steps *= _GROWTH
    return uniform, 0


def _in_segments(cut: "Cut", guesses: Tensor, messages: Tensor | None, recomputed: Tensor) -> Tensor:
    """The log-partition (g, m) by the head and all segments, into each of which but the first a guess enters.

    `messages` are written if there is memory for them, and `recomputed` (count + 1, g, m).
    """
    chain, (of_head, of_segments) = cut.chain, cut.parts(messages)
    head, start = kernels.forward(cut.head, keep=of_head, leave=True)
    entering = torch.cat([start.values[None], guesses[:-1]])
    segments, after = kernels.forward(cut.segments, cut.entering(entering), keep=of_segments, leave=True)
    leaving, scale = cut.by_segment(after.values), cut.by_segment(after.scale, 1)
    recomputed[0], recomputed[1:] = head.recomputed, cut.by_segment(segments.recomputed)

    def leave(s: int, message: Tensor) -> Tensor:
        memory = chain.new(cut.length + 1, *message.shape) if messages is not None else None
        before = Message(message, torch.zeros_like(scale[s]))
        segment, left = kernels.forward(cut.segment(s), before, keep=memory, leave=True)
        scale[s], recomputed[1 + s] = left.scale, segment.recomputed
        if memory is not None:
            cut.by_segment(of_segments, 1)[s] = memory
        result: Tensor = left.values
        return result

    _verified(cut, leaving, entering, 1, leave)
    return _sum(start.scale, *scale)


def _verified(
    cut: "Cut", results: Tensor, guesses: Tensor, step: int, compute: Callable[[int, Tensor], Tensor]
) -> bool:
    """Whether the guesses (count, g, m, c) that entered segments are the results of their neighbors, at s - `step`.

    Guesses that are not are replaced, and the results of their segments computed again.
    """
    source, target = (slice(None, -1), slice(1, None))[::step]
    if not (disagree(cut.chain, results[source], guesses[target]) & cut.reached[1:]).any():
        return True
    for s in range(cut.count)[target][::step]:
        refused = disagree(cut.chain, results[s - step], guesses[s]) & cut.reached[max(s, s - step)]
        if refused.any():
            report_boundaries(refused)
            guesses[s] = results[s - step]
            results[s] = compute(s, guesses[s])
    return False


def disagree(chain: Chain, a: Tensor, b: Tensor) -> Tensor:
    """Whether Hilbert's metric between logarithms of messages (..., c) with sum 1 exceeds their rounding.

    Their rounding is that of four steps by the contract of accuracy, and that of the logarithms in float64.
    """
    gap, rounding = a - b, 2 * torch.finfo(torch.float64).eps * a.abs()
    both_zero = (a == -torch.inf) & (b == -torch.inf)
    most = (gap - rounding).masked_fill(both_zero, -torch.inf).amax(-1)
    distance = most - (gap + rounding).masked_fill(both_zero, torch.inf).amin(-1)
    return ~(distance <= 2 * (chain.c + 8) * torch.finfo(chain.dtype).eps)  # also where one holds NaN


def _sum(*scales: Tensor) -> Tensor:
    """The sum (g, m) of logarithms (k, g, m) and their rounding errors."""
    return torch.stack(exact_sum(torch.cat(scales))).sum(0)


def _by_products(cut: "Cut", messages: Tensor | None, recomputed: Tensor) -> tuple[Tensor, Tensor]:
    """The log-partition (g, m), and the backward messages (count + 1, g, m, c) after the head and after each segment.

    Without `messages` there are none of the second.
    """
    of_head, of_segments = cut.parts(messages)
    head, start = kernels.forward(cut.head, keep=of_head, leave=True)
    products, shift, of_rows = _products(cut)
    x = start.values.new_zeros(cut.chain.c).expand(cut.count + 1, *start.values.shape)
    between = Chain(x, products, start.values, None, True, torch.float64)
    from_first = kernels.forward(between, keep=kernels.messages_of(between, between.v))[0]
    log_norm = _sum(start.scale, shift, from_first.log_norm.view(shift[:1].shape))
    recomputed[0] = head.recomputed
    if messages is None:
        recomputed[0] |= from_first.recomputed.view(head.recomputed.shape)
        recomputed[1:] = of_rows
        return log_norm, x.new_empty(0)
    arriving = normalized(from_first.logs(slice(0, -1)))[0].view(x[1:].shape)
    segments, _ = kernels.forward(cut.segments, cut.entering(arriving), keep=of_segments, leave=True)
    recomputed[1:] = cut.by_segment(segments.recomputed)
    reverse = replace(between, bulk=products.flip(0).mT, p0=torch.zeros_like(between.p0))
    from_last = kernels.forward(reverse, keep=kernels.messages_of(reverse, reverse.v))[0]
    return log_norm, from_last.logs(slice(None)).flip(0).view(x.shape)


def _products(cut: "Cut") -> tuple[Tensor, Tensor, Tensor]:
    """Logarithms (count, g, m, c, c) of the segments' products, scales (count, g, m) taken out of them, and flags."""
    chain, c = cut.chain, cut.chain.c
    assert chain.ends is None  # sequences with lengths are not cut on a GPU
    if cut.one_matrix and chain.g == 1:
        # a GPU reads rows in place if each segment is a separate set, which costs no memory for a single set
        cut = Cut(replace(chain, bulk=chain.bulk.expand(chain.v - 1, *chain.bulk.shape[1:])), cut.count)
    x = cut.segments.x.unsqueeze(-2)
    rows = replace(cut.segments, x=x.expand(*x.shape[:-2], c, c))  # (g', m' c)
    unit = torch.eye(c, dtype=chain.dtype, device=x.device).log_().repeat(cut.segments.m, 1).expand(rows.g, -1, c)
    scale = torch.zeros(1, dtype=torch.float64, device=x.device).expand(2, rows.g, rows.m)
    residuals, after = kernels.forward(rows, Message(unit, scale), leave=True)
    high, low = cut.by_segment(after.scale.unflatten(2, (-1, c)), 1).unbind(1)
    top = high.amax(-1)
    top = top.masked_fill(top == -torch.inf, 0.0)
    matrices = cut.by_segment(after.values.unflatten(1, (-1, c))) + (high - top[..., None] + low)[..., None]
    return matrices, top, cut.by_segment(residuals.recomputed.unflatten(1, (-1, c)).any(-1))


class Cut:
    """A chain as a head of `rest` transitions and `count` segments of `length` transitions each, all of them views.

    The head has one variable more than transitions. All segments together are one chain of g' sets of m' members: a
    segment has separate sets where matrices differ from step to step, and otherwise separate members.
    """

    def __init__(self, chain: Chain, segments: int) -> None:
        self.chain, self.count, self.one_matrix = chain, min(segments, chain.v - 1), len(chain.bulk) == 1
        self.length, self.rest = divmod(chain.v - 1, self.count)
        self.head, self.segments = chain.part(0, self.rest + 1), self.window(0, self.length)
        # whether a sequence has steps in a segment (count, g, m), or (count, 1, 1) if all have
        self.reached = torch.ones(self.count, 1, 1, dtype=torch.bool, device=chain.x.device)
        if self.segments.ends is not None:
            self.reached = self.by_segment(self.segments.ends[..., 0]) > 0

    def window(self, start: int, stop: int) -> Chain:
        """The chain of steps `start` to before `stop` of every segment, which messages enter."""
        (_, x), (_, bulk), ends = self.steps(self.chain.x), self.matrices(self.chain.bulk), self.chain.ends
        if ends is not None:
            first = self.rest + 1 + start + self.length * torch.arange(self.count, device=x.device)
            ends = self.by_set((ends - first.view(-1, 1, 1, 1)).clamp(0, stop - start))
        return replace(self.chain, x=x[start:stop], bulk=bulk if self.one_matrix else bulk[start:stop], ends=ends)

    def segment(self, s: int) -> Chain:
        """The chain of one segment, which a message enters."""
        start = self.rest + 1 + self.length * s
        return self.chain.part(start, start + self.length)

    def after_last(self, steps: int, entering: Tensor) -> Tensor:
        """Logarithms of messages (count, g, m, c) after the last `steps` of each segment, from those before these."""
        window, message = self.window(self.length - steps, self.length), self.entering(entering)
        return self.by_segment(kernels.forward(window, message, leave=True)[1].values)

    def entering(self, logs: Tensor) -> Message:
        """Logarithms (count, g, m, c) of messages with sum 1 as the message (g', m', c) that enters all segments."""
        values = self.by_set(logs)
        return Message(values, values.new_zeros(2, *values.shape[:2]))

    def parts(self, messages: Tensor | None) -> tuple[Any, Any]:
        """Messages (v + count, g, m, c) as those of the head, and those of the segments (length + 1, g', m', c)."""
        if messages is None:
            return None, None
        head, segments = messages[: self.rest + 1], messages[self.rest + 1 :]
        return head, segments.view(self.length + 1, self.segments.g, self.segments.m, self.chain.c)

    def steps(self, x: Tensor | None) -> tuple[Any, Any]:
        """x (v, *lead, c) of the head, and of the segments (length, *lead', c)."""
        if x is None:
            return None, None
        axis = self.chain.bulk.dim() - 2 if self.one_matrix else 1
        return x[: self.rest + 1], x[self.rest + 1 :].unflatten(0, (self.count, self.length)).movedim(0, axis)

    def matrices(self, bulk: Tensor | None) -> tuple[Any, Any]:
        """bulk (s, *sets, c, c) of the head, and of the segments (length or 1, *sets', c, c)."""
        if bulk is None or self.one_matrix:
            return bulk, bulk
        return bulk[: self.rest], bulk[self.rest :].unflatten(0, (self.count, self.length)).transpose(0, 1)

    def by_segment(self, values: Tensor, axes: int = 0) -> Tensor:
        """Values (g', m', ...) as (count, g, m, ...); `axes` before these come after the first."""
        axis = axes + self.one_matrix
        whole: Tensor = values.unflatten(axis, (self.count, -1))
        return whole.movedim(axis, 0)

    def by_set(self, values: Tensor) -> Tensor:
        """Values (count, g, m, ...) as (g', m', ...)."""
        axis = int(self.one_matrix)
        return values.movedim(0, axis).flatten(axis, axis + 1)
