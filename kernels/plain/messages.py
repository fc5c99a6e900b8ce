"""Forward and backward messages of a chain in float64 logarithms.

    a_i = log sum_k exp(a_{i-1}(k) + log P_i(k, .)) + x_i
    b_{i-1} = log sum_j exp(log P_i(., j) + x_i(j) + b_i(j))

A message is stored less its largest entry, with the sum of what was subtracted as an offset, so that posteriors are
good however long the chain. Each step is one log-semiring product, by a module `matmul`: `kernels.plain.matmul` or
`kernels.gpu.matmul`. A sequence that has ended keeps its message.
"""

import math
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .. import log_matmul_kernels
from ..chain import Chain
from ..numbers import shifted, two_sum


def messages(chain: Chain, forward: Tensor, backward: Tensor) -> Tensor:
    """The log-partition (g, m); natural logarithms of messages (v, *lead, c) are written, -inf after the end."""
    matmul = log_matmul_kernels(chain.x)
    ahead = forward_messages(chain, matmul)
    log_norm = ahead.log_norm()
    for each, into in ((ahead, forward), (backward_messages(chain, matmul), backward)):
        logs = each.absolute()
        if chain.ended is not None:
            logs.masked_fill_(chain.ended, -math.inf)
        into.copy_(logs.view(chain.v, *chain.lead, chain.c))
    return log_norm


class Steps:
    """A chain's operands as logarithms in float64, one step at a time."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._shape = (chain.g, chain.m, chain.c)
        self._held: Tensor | None = None

    def potential(self, step: int) -> tuple[Tensor, Tensor]:
        """x_i less its maximum (g, m, c), and the maximum (g, m, 1); 0 after a sequence's end."""
        x = self._chain.x[step].reshape(self._shape).double()
        alive = self.alive(step)
        x = x if alive is None else torch.where(alive, x, 0.0)
        return shifted(x)

    def matrix(self, step: int) -> Tensor:
        """log P_i (g, c, c); 0 where all sequences of a set have ended, for the matrix may be NaN there."""
        chain = self._chain
        if self._held is not None:
            return self._held
        weights = chain.matrix(step - 1).double()
        logs = weights if chain.log_params else weights.log()
        one_matrix = len(chain.bulk) == 1
        alive = self.alive(1 if one_matrix else step)
        if alive is not None:
            logs = torch.where(alive.any(1, keepdim=True), logs, 0.0)
        if one_matrix:
            self._held = logs
        return logs

    def alive(self, step: int) -> Tensor | None:
        """Whether a sequence has a step (g, m, 1); None: all have."""
        return None if self._chain.ends is None else self._chain.ends > step


class Messages(NamedTuple):
    """Messages (v, g, m, c) less their maxima, and the sum of what was subtracted as `offset + lost` (v, g, m, 1)."""

    relative: Tensor
    offset: Tensor
    lost: Tensor

    @classmethod
    def new(cls, chain: Chain) -> "Messages":
        """Uninitialised messages of a chain."""
        shape = chain.v, chain.g, chain.m
        new = chain.x.new_empty
        return cls(*(new((*shape, last), dtype=torch.float64) for last in (chain.c, 1, 1)))

    def write(self, step: int, message: Tensor, *shifts: Tensor, before: int | None) -> Tensor:
        """The message less its maximum, as stored at `step`; its offset adds `shifts` to that of the step `before`."""
        relative, top = shifted(message)
        if before is None:
            offset, lost = torch.zeros_like(top), torch.zeros_like(top)
        else:
            offset, lost = self.offset[before], self.lost[before]
        for term in (*shifts, top):
            offset, lost = two_sum(offset, lost, term)
        self.offset[step], self.lost[step] = offset, lost
        return self.relative[step].copy_(relative)

    def absolute(self) -> Tensor:
        """The messages with their offsets added, in the memory of `relative`."""
        return self.relative.add_(self.lost).add_(self.offset)

    def log_norm(self) -> Tensor:
        """The log-partition (g, m), if these are forward messages."""
        return (torch.logsumexp(self.relative[-1], -1, keepdim=True) + self.lost[-1] + self.offset[-1])[..., 0]


def forward_messages(chain: Chain, matmul: ModuleType) -> Messages:
    """The forward messages; after a sequence's end, its last message."""
    steps, messages = Steps(chain), Messages.new(chain)
    x, shift = steps.potential(0)
    p0, top = chain.relative_log_p0()
    message = messages.write(0, p0 + x, shift, top, before=None)
    for step in range(1, chain.v):
        x, shift = steps.potential(step)
        after = matmul.forward(message, steps.matrix(step))[0] + x
        message = messages.write(step, _where(steps.alive(step), after, message), shift, before=step - 1)
    return messages


def backward_messages(chain: Chain, matmul: ModuleType) -> Messages:
    """The backward messages; 0 from the last step of a sequence on."""
    steps, messages = Steps(chain), Messages.new(chain)
    message = messages.write(chain.v - 1, torch.zeros_like(messages.relative[-1]), before=None)
    for step in range(chain.v - 1, 0, -1):
        x, shift = steps.potential(step)
        before = matmul.forward(message + x, steps.matrix(step).mT)[0]
        message = _where(steps.alive(step), before, torch.zeros_like(before))
        message = messages.write(step - 1, message, shift, before=step)
    return messages


def _where(alive: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    return new if alive is None else torch.where(alive, new, old)
