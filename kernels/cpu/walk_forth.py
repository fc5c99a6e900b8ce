"""The forward walk through the factors of a product: messages and log-partitions of rows that floats can follow."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .factors import Scaled, Weights
from .gemms import Gemms, Sums
from .rows import Rows


class Kept(NamedTuple):
    """What a backward walk reads of a forward walk.

    Attributes:
        messages: (rows, c).
        scales: (v, 2, n), see `scales` in c/passes.h.
        middles: rows behind each stage but the last, of each transition; none if they are to be computed again.
    """

    messages: Tensor
    scales: Tensor
    middles: tuple[Tensor, ...]


class Forward:
    """One forward walk: `run`, and then the results.

    Attributes:
        log_norm: log-partitions (n), NaN where a row is lossy.
        marks: (n), bits of c/passes.h.
        kept: see `Kept`.
    """

    def __init__(self, rows: Rows, keep: bool) -> None:
        chain, n, c = rows.chain, rows.n, rows.chain.c
        self._rows, self._keep = rows, keep
        self._held = rows.starts[-1] if keep else 2 * n
        self.log_norm = torch.full((n,), math.nan, dtype=torch.float64)
        self.marks = torch.zeros(n, dtype=torch.uint8)
        sizes = [link.size for link in rows.forth[:-1]]
        kept = keep and sum(sizes) <= c
        transitions = rows.starts[-1] if kept else n
        self._middles = tuple(rows.new(transitions, size) for size in sizes)
        messages, scales = rows.new(self._held, c), rows.new(chain.v if keep else 1, 2, n)
        self.kept = Kept(messages, scales, self._middles if kept else ())
        self._support: Support | None = None

    def run(self) -> None:
        """Walk through all steps."""
        rows, passes, chain = self._rows, self._rows.passes, self._rows.chain
        scaled = Scaled(chain, rows.sets)
        gemms = Gemms(rows.forth, rows.n, self.kept.messages)
        last_steps = {len(rows.counts)} if rows.ends is None else set(rows.ends.tolist())
        self._enter()
        for step, count in enumerate(rows.counts):
            passes.set(step=step)
            state = self._state(step)
            if step > 0:
                before, weights = self._state(step - 1), scaled.at(step)
                sums = gemms.run(before, weights.matrices, self._of_transition(step))
                rows.point_sums(sums, gemms.out, before, weights)
                self._point_state(state, step)
                if step == 1 or not scaled.one:
                    passes.point(bounds=weights.bounds, shifts=weights.shifts, exponents=weights.exponents)
                if passes.run("weigh_rows", count):
                    self._verify(scaled, step, before)
            if step + 1 in last_steps:
                passes.run("finish_rows", count)

    def _state(self, step: int) -> Tensor:
        """The rows of a step's messages."""
        if self._keep:
            return self._rows.of_step(self.kept.messages, step)
        first = step % 2 * self._rows.n
        return self.kept.messages[first : first + self._rows.counts[step]]

    def _point_state(self, state: Tensor, step: int) -> None:
        self._rows.passes.point(state=state, scales=self.kept.scales[step if self._keep else 0])

    def _of_transition(self, step: int) -> list[Tensor]:
        """Memory for the rows behind each stage but the last."""
        if self.kept.middles:
            return [self._rows.of_step(one, step - 1) for one in self._middles]
        return [one[: self._rows.counts[step - 1]] for one in self._middles]

    def _enter(self) -> None:
        """Write the messages of step 0."""
        rows, passes, chain = self._rows, self._rows.passes, self._rows.chain
        p0 = chain.p0.to(chain.dtype).resolve_neg().expand(*chain.batch, chain.c)
        self._taken = torch.zeros(rows.n, 2, dtype=torch.float64), torch.zeros(rows.n, dtype=torch.int64)
        passes.point(p0=p0, p0_at=rows.places(p0), taken=self._taken[0], taken_exponents=self._taken[1])
        passes.point(marks=self.marks, log_norm=self.log_norm)
        passes.set(p0_state=p0.stride(-1), logarithms=int(chain.log_params), step=0)
        self._point_state(self._state(0), 0)
        passes.run("enter_rows", rows.n)

    def _verify(self, scaled: Scaled, step: int, before: Tensor) -> None:
        """Mark rows with a sum of 0 at a state that is reached."""
        if self._support is None:
            self._support = Support(self._rows)
        self._support.reach(scaled, step, before)
        self._rows.passes.run("verify_rows", self._rows.counts[step])


class Support:
    """Which states the states of a message reach, computed only where it may have changed."""

    def __init__(self, rows: Rows) -> None:
        n, c = rows.n, rows.chain.c
        self._rows, self._gemms = rows, Gemms(rows.forth, n, rows.new(0))
        self._known, self._found = rows.new(n, c), rows.new(n, c)
        self._middles = [rows.new(n, link.size) for link in rows.forth[:-1]]
        self._weights: Weights | None = None
        self._count = 0
        self._sums = Sums(1, n)

    def reach(self, scaled: Scaled, step: int, before: Tensor) -> None:
        """Let passes read numbers that are positive where a message is reached from that of the step before."""
        count = before.shape[0]
        found = self._found[:count]
        torch.ne(before, 0, out=found)
        if self._weights is None or not scaled.one:
            self._weights, self._count = scaled.supports(step), 0
        if count != self._count or not torch.equal(found, self._known[:count]):
            middles = [one[:count] for one in self._middles]
            self._sums = self._gemms.run(found, self._weights.matrices, middles)
            self._known, self._found, self._count = self._found, self._known, count
        self._rows.point_sums(self._sums, self._gemms.out, self._known, self._weights)
