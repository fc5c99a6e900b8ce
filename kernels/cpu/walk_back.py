"""The backward walk through the factors of a product: posteriors, and what the counts of factors are made of.

With T and B of c/passes.h, B of a step is T of the next through the transposed factors.
"""

import torch
from torch import Tensor

from .counts import Counts
from .factors import Scaled
from .gemms import Gemms
from .rows import Rows
from .walk_forth import Kept


class Backward:
    """One backward walk: `run`, and then the results.

    Attributes:
        grad_x: posteriors times weight [*B, v, c], or None.
        first: posteriors of step 0 (n, c), or None.
        counts: gradients of the parameters, or None.
        lost: how many rows overflowed.
        marks: (n), not 0 for these.
    """

    def __init__(self, rows: Rows, kept: Kept, weight: Tensor, live: Tensor, needs: tuple[bool, bool, bool]) -> None:
        chain, n, c = rows.chain, rows.n, rows.chain.c
        self._rows, self._kept, self._last, self.lost = rows, kept, len(rows.counts) - 1, 0
        self._weight, self._scaled = weight.masked_fill(~live, 0.0), Scaled(chain, rows.sets)
        self.marks = torch.zeros(n, dtype=torch.uint8)
        self.grad_x = rows.new(*chain.batch, chain.v, c) if needs[0] else None
        if self.grad_x is not None and (rows.ends is not None or not bool(live.any())):
            self.grad_x.zero_()
        self.first = rows.new(n, c) if needs[2] else None
        self.counts = Counts(rows, self._scaled, self._weight) if needs[1] and self._last > 0 else None
        self._together = self.counts.together if self.counts else 1
        slots = max((self._at(step)[1] for step in range(1, self._last + 1)), default=0)
        self._sources = rows.new(slots, c)
        self._behind = [rows.new(slots, link.size) for link in rows.back[:-1]]
        again = self.counts is not None and len(rows.forth) > 1 and not kept.middles
        self._middles = [rows.new(slots, link.size) for link in rows.forth[:-1]] if again else []
        rows.passes.point(marks=self.marks, live=live.to(torch.uint8), weight=self._weight, grad_x=self.grad_x)
        rows.passes.point(count_weight=None if self.counts is None else self.counts.shares)
        if self.grad_x is not None:
            rows.passes.point(grad_at=rows.places(self.grad_x))
            rows.passes.set(grad_step=c)

    def _first(self, step: int) -> int:
        """The step from which the first of the transitions leads that are counted with the one into a step."""
        return max(self._last - ((self._last - step) // self._together + 1) * self._together, 0)

    def _at(self, step: int) -> tuple[int, int]:
        """The first row of the transition into a step among those that are counted with it, and the one behind."""
        starts, base = self._rows.starts, self._rows.starts[self._first(step)]
        return starts[step - 1] - base, starts[step] - base

    def _of_transition(self, tensor: Tensor, step: int) -> Tensor:
        first, behind = self._at(step)
        return tensor[first:behind]

    def run(self) -> None:
        """Walk through all steps."""
        rows = self._rows
        back = Gemms(rows.back, rows.n, self._sources)
        again = Gemms(rows.forth, rows.n, self._sources) if self._middles else None
        top = self._last
        self._meet(top)
        for step in range(self._last, 0, -1):
            source, weights = self._of_transition(self._sources, step), self._scaled.at(step)
            behind = [self._of_transition(one, step) for one in self._behind]
            sums = back.run(source, [one.mT for one in weights.matrices[::-1]], behind)
            if again is not None:
                again.between(
                    rows.of_step(self._kept.messages, step - 1),
                    weights.matrices,
                    [self._of_transition(one, step) for one in self._middles],
                )
            low = self._first(step)
            counted = self.counts is not None and step == low + 1
            if counted:
                self._count(low, top)
                top = low
            rows.point_sums(sums, back.out, source, weights)
            self._meet(step - 1)
            if self.counts is not None and counted:
                self.counts.add_diagonal(step)

    def _count(self, low: int, top: int) -> None:
        """Count the transitions from step `low` on into steps up to `top`."""
        assert self.counts is not None
        first, behind = self._rows.starts[low], self._rows.starts[top]
        count = behind - first
        kept = [one[first:behind] for one in self._kept.middles] or [one[:count] for one in self._middles]
        entering = [self._kept.messages[first:behind], *kept]
        leaving = [one[:count] for one in self._behind[::-1]]
        self.counts.add(low, top, entering, [*leaving, self._sources[:count]])

    def _meet(self, step: int) -> None:
        """Write the posteriors of a step, and T unless it is the first."""
        rows, passes, kept = self._rows, self._rows.passes, self._kept
        source = self._of_transition(self._sources, step) if step > 0 else None
        passes.set(step=step)
        passes.point(state=rows.of_step(kept.messages, step), scales=kept.scales[step], source=source)
        if step == 0 and self.first is not None:
            self._meet_first()
        elif step > 0 or self.grad_x is not None or rows.chain.pattern.diagonal:  # whose counts are added here
            self.lost += passes.run("meet_rows", rows.counts[max(step - 1, 0)])

    def _meet_first(self) -> None:
        """Write the posteriors of step 0 without weights, and their gradient."""
        rows, passes, chain = self._rows, self._rows.passes, self._rows.chain
        assert self.first is not None
        ones = torch.ones_like(self._weight)
        passes.point(grad_x=self.first, grad_at=torch.arange(rows.n) * chain.c, weight=ones)
        self.lost += passes.run("meet_rows", rows.n)
        if self.grad_x is not None:
            into = self.grad_x.view(rows.n, chain.v, chain.c)
            into[rows.order, 0] = (self.first * self._weight[:, None]).to(chain.dtype)
