"""A chain as a short head and segments of equal length that are computed side by side; all are views of operands."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels.chain import Chain
from ..kernels.message import Message


@dataclass(frozen=True)
class Cut:
    """A chain as a head of `rest` transitions and `count` segments of `length` transitions each.

    All segments together are one chain of g' sets of matrices, each shared by m' members: a segment has sets of its own
    where matrices differ from step to step, and otherwise members of its own.
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

    def parts(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        """Messages (v + count, g, m, c) as those of the head, and those of the segments (length + 1, g', m', c)."""
        head, segments = messages[: self.rest + 1], messages[self.rest + 1 :]
        return head, segments.view(self.length + 1, *self.shape, self.chain.c)

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

    def each(self, messages: Tensor) -> Tensor:
        """A view of the segments' messages (length + 1, g', m', c) as (count, length + 1, g, m, c)."""
        g, m, c = self.chain.g, self.chain.m, self.chain.c
        if self.homogeneous:
            return messages.view(len(messages), g, self.count, m, c).movedim(2, 0)
        return messages.view(len(messages), self.count, g, m, c).movedim(1, 0)

    @property
    def _first_steps(self) -> Tensor:
        """The first step of each segment (count, 1, 1)."""
        return (self.rest + 1 + self.length * torch.arange(self.count, device=self.chain.x.device)).view(-1, 1, 1)

    def reached(self, after: int = 0) -> Tensor:
        """Whether a sequence has steps in a segment (count, g, m), after the first `after` of them."""
        chain = self.chain
        if chain.ends is None:
            return torch.ones(self.count, chain.g, chain.m, dtype=torch.bool, device=chain.x.device)
        return chain.ends[..., 0] > self._first_steps + after

    def before(self, values: Tensor) -> Tensor:
        """Values (v, ...) of the steps before each segment (count, ...)."""
        return values[self.rest :: self.length][: self.count]

    def entering(self, logs: Tensor) -> Message:
        """Logarithms (count, g, m, c) of messages with sum 1 as the message (g', m', c) that enters all segments."""
        scale = torch.zeros(2, *self.shape, dtype=torch.float64, device=logs.device)
        return Message(self.by_set(logs), scale)
