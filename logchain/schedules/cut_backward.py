"""The backward pass of a chain that was cut into a head and segments, whatever found the messages between these."""

from torch import Tensor

from .. import kernels
from ..kernels.message import Kept
from .cut import Cut


class Backward:
    """The backward pass of a cut chain: first of its segments, then of its head.

    `messages` (v + count, g, m, c) are those of the head, and for each segment the one that enters it and its own;
    `redone` (count + 1, g, m) says which are logarithms. Gradients of x and `bulk` are written as
    `kernels.plain.backward` does.
    """

    def __init__(
        self,
        cut: Cut,
        log_norm: Tensor,
        messages: Tensor,
        redone: Tensor,
        weight: Tensor,
        grad_x: Tensor | None,
        grad_bulk: Tensor | None,
    ) -> None:
        self._cut, self._walk, self._weight = cut, kernels.chain_kernels(cut.chain.x), weight
        self._grad_x, self._grad_bulk = grad_x, grad_bulk
        head, segments = cut.parts(messages)
        norms, self._weights, marks = (cut.by_set(one.expand_as(redone[1:])) for one in (log_norm, weight, redone[1:]))
        self._head, self._segments = Kept(log_norm, head, redone[0]), Kept(norms, segments, marks, True)
        self._head_counts: Tensor | None = None
        self._counts: Tensor | None = None
        if grad_bulk is not None:
            self._head_counts, self._counts = cut.counts(grad_bulk)

    def segments(self, following: Tensor) -> Tensor:
        """The messages (count, g, m, c) ahead of the segments, whose gradients are written, from those behind them."""
        cut, grad_x = self._cut, None if self._grad_x is None else self._cut.steps(self._grad_x)
        behind = cut.by_set(following)
        ahead = self._walk.backward(cut.segments(), self._segments, self._weights, behind, grad_x, self._counts)
        return cut.by_segment(ahead)

    def ahead_of_first(self, steps: int, following: Tensor | None = None) -> Tensor:
        """The messages (count, g, m, c) ahead of the segments, from uniform ones, or others, behind their `steps`."""
        kept = self._segments._replace(messages=self._segments.messages[: steps + 1])
        window = self._cut.window(0, steps)
        behind = None if following is None else self._cut.by_set(following)
        return self._cut.by_segment(self._walk.backward(window, kept, self._weights, behind, None, None))

    def ahead_of(self, s: int, following: Tensor) -> Tensor:
        """The message (g, m, c) ahead of one segment, from the one behind it."""
        cut, (log_norm, *_) = self._cut, self._head
        messages = cut.each(self._segments.messages)[s].contiguous()
        redone = cut.by_segment(self._segments.redone)[s]
        kept = Kept(log_norm, messages, redone, True)
        ahead: Tensor = self._walk.backward(cut.segment(s), kept, self._weight, following, None, None)
        return ahead

    def head(self, following: Tensor) -> Tensor:
        """The gradient of p0 (*lead, c), from the message behind the head; the gradients of the head are written."""
        cut, grad_x = self._cut, None if self._grad_x is None else self._grad_x[: self._cut.rest + 1]
        start: Tensor = self._walk.backward(cut.head(), self._head, self._weight, following, grad_x, self._head_counts)
        if cut.homogeneous and self._head_counts is not None and self._grad_bulk is not None:
            self._grad_bulk.add_(self._head_counts)
        return start
