"""Where a chain is cut: a head of a few steps, then segments of equal length, all of them views.

x_0 ... x_rest | x_b ... x_e | x_b ... x_e | ...        the transition into x_b belongs to its segment
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .chain import Chain
from .numbers import finite

# a GPU leaves so many products to one vector; if there are more, it multiplies so many at a time again
FEW, AGAIN = 48, 8


def count_of(v: int, count: int) -> tuple[int, int]:
    """How many segments, and of how many steps each; no segments for a chain too short for two."""
    count = min(count, v - 1)
    return (count, (v - 1) // count) if count > 1 else (0, 0)


@dataclass(frozen=True)
class Cut:
    """A chain as a head and `count` segments.

    `lead` of the segments' chain has one axis more: among those of the matrices if these differ from step to step, and
    before the members otherwise.
    """

    chain: Chain
    count: int

    @property
    def length(self) -> int:
        """Variables of a segment."""
        return (self.chain.v - 1) // self.count

    @property
    def rest(self) -> int:
        """Transitions of the head; it has one variable more."""
        return (self.chain.v - 1) % self.count

    @property
    def homogeneous(self) -> bool:
        """One matrix for every step."""
        return len(self.chain.bulk) == 1

    @property
    def own(self) -> int:
        """Batch axes of the matrices."""
        return self.chain.bulk.dim() - 3

    def steps(self, x: Tensor) -> Tensor:
        """(v, *lead, c) of the segments: (length, *lead', c)."""
        axis = self.own if self.homogeneous else 0
        whole: Tensor = x[self.rest + 1 :].unflatten(0, (self.count, self.length))
        return whole.movedim(0, axis + 1)

    def matrices(self, bulk: Tensor) -> tuple[Tensor, Tensor]:
        """(s, *own, c, c): those into the segments (*own', c, c), and those within them (s', *own', c, c)."""
        if self.homogeneous:
            return bulk[0], bulk
        whole = bulk[self.rest :].unflatten(0, (self.count, self.length))
        return whole[:, 0], whole[:, 1:].transpose(0, 1)

    def between(self) -> tuple[Tensor, Tensor]:
        """The linear matrices into the segments (g', c, c) over their largest entry, and that (g', 1, 1); float64."""
        first = self.matrices(self.chain.bulk)[0].double().reshape(self.shape[0], self.chain.c, self.chain.c)
        top = first.amax((-2, -1), keepdim=True)
        if self.chain.log_params:
            return (first - finite(top)).exp_(), top
        top.masked_fill_(top == 0, 1.0)
        return first / top, top

    def by_segment(self, values: Tensor) -> Tensor:
        """(g', m', ...) as (count, g, m, ...)."""
        g, m = self.chain.g, self.chain.m
        if self.homogeneous:
            return values.view(g, self.count, m, *values.shape[2:]).transpose(0, 1)
        return values.view(self.count, g, m, *values.shape[2:])

    def by_set(self, values: Tensor) -> Tensor:
        """(count, g, m, ...) as (g', m', ...)."""
        shape = self.shape
        values = values.transpose(0, 1) if self.homogeneous else values
        return values.reshape(*shape, *values.shape[3:])

    @property
    def shape(self) -> tuple[int, int]:
        """Sets g' and members m' of the segments' chain."""
        g, m = self.chain.g, self.chain.m
        return (g, self.count * m) if self.homogeneous else (self.count * g, m)

    @cached_property
    def ends(self) -> Tensor | None:
        """The number of steps of each segment (count, g, m, 1)."""
        chain = self.chain
        if chain.ends is None:
            return None
        begin = self.rest + 1 + self.length * torch.arange(self.count, device=chain.ends.device)
        return (chain.ends - begin.view(-1, 1, 1, 1)).clamp_(0, self.length)

    @cached_property
    def ended(self) -> Tensor | None:
        """Which sequences have ended before a segment's last step (count, g, m, 1)."""
        return None if self.ends is None else self.ends < self.length

    def head(self, final: Tensor | None = None) -> Chain:
        """The first steps, and the weights of the states that they end in (g, m, c)."""
        chain = self.chain
        ends = None if chain.ends is None else chain.ends.clamp(max=self.rest + 1)
        bulk = chain.bulk if self.homogeneous else chain.bulk[: self.rest]
        x = chain.x[: self.rest + 1]
        return Chain(x, bulk, chain.p0, ends, chain.log_params, chain.dtype, chain.by_log, final)

    def segments(self, entering: Tensor | None = None, final: Tensor | None = None) -> Chain:
        """The segments, from what enters them and the weights of the states that they end in, both (count, g, m, c)."""
        chain = self.chain
        x, ends = self.steps(chain.x), None if self.ends is None else self.by_set(self.ends)
        if entering is None:
            p0 = x.new_full((1,) * (x.dim() - 2) + (chain.c,), 0.0 if chain.log_params else 1.0)
        else:
            p0 = self.by_set(entering).view(*x.shape[1:])
            p0 = p0.log() if chain.log_params else p0
        bulk = self.matrices(chain.bulk)[1]
        weights = None if final is None else self.by_set(final)
        return Chain(x, bulk, p0, ends, chain.log_params, chain.dtype, chain.by_log, weights)
