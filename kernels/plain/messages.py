"""The recursions of a chain in float64 logarithms, one log-semiring product a step: messages, and derivatives of them.

    a_i = log sum_k exp(a_{i-1}(k) + log P_i(k, .)) + x_i
    b_{i-1} = log sum_j exp(log P_i(., j) + x_i(j) + b_i(j))

Messages have their maximum taken out into an offset, so that posteriors are good however long the chain.
The derivative of a step is an average over the states before it, by their posterior given the state after it. With
tangents of the logarithms of all operands,

    da_i(j) = sum_k p(k | j) (da_{i-1}(k) + d log P_i(k, j)) + dx_i(j)

is the derivative of the messages along them; at the end it is that of the log-partition: the expected tangent of a
path. The gradients' own derivatives are found backwards, from the last state's posterior and its tangent, by averages
over the states after.

How a step is summed, exactly where maxima are misaligned too, is the business of `matmul`: `kernels.plain.matmul`, or
the kernels of a GPU. Ended sequences keep their message. What is impossible has derivatives of exactly 0.
"""

import math
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .. import log_matmul_kernels
from ..chain import Chain


def messages(chain: Chain, forward: Tensor, backward: Tensor) -> Tensor:
    """The log-partition (g, m), -inf behind ends; writes messages (v, *lead, c), natural logarithms."""
    matmul = log_matmul_kernels(chain.x)
    ahead = forward_messages(chain, matmul)
    log_norm = ahead.log_norm()
    for relative, into in ((ahead, forward), (backward_messages(chain, matmul), backward)):
        logs = relative.absolute()
        if chain.ended is not None:
            logs.masked_fill_(chain.ended, -math.inf)
        into.copy_(logs.view(chain.v, *chain.lead, chain.c))
    return log_norm


class Tangents(NamedTuple):
    """Tangents of x (v, g, m, c), log bulk (s, g, c, c) and log p0 (g, m, c) in float64; None is zero."""

    x: Tensor | None
    bulk: Tensor | None
    p0: Tensor | None


class Gradients(NamedTuple):
    """Gradients with respect to x (v, g, m, c), log bulk (s, g, c, c) and log p0 (g, m, c) in float64."""

    x: Tensor
    bulk: Tensor
    p0: Tensor

    @classmethod
    def zeros(cls, chain: Chain) -> "Gradients":
        """None yet."""
        v, g, m, c = chain.v, chain.g, chain.m, chain.c
        zeros = chain.x.new_zeros
        return cls(
            zeros((v, g, m, c), dtype=torch.float64),
            zeros((len(chain.bulk), g, c, c), dtype=torch.float64),
            zeros((g, m, c), dtype=torch.float64),
        )


class Steps:
    """A chain's operands as logarithms in float64, one step at a time."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._shape = (chain.g, chain.m, chain.c)
        self._held: Tensor | None = None

    def potential(self, step: int) -> tuple[Tensor, Tensor]:
        """x_i less its maximum (g, m, c), and that (g, m, 1); 0 behind the end."""
        x = self._chain.x[step].reshape(self._shape).double()
        alive = self.alive(step)
        x = x if alive is None else torch.where(alive, x, 0.0)
        top = _top(x)
        return x - top, top

    def matrix(self, step: int) -> Tensor:
        """log P_i (g, c, c); anything without a NaN where all sequences of a set have ended."""
        chain = self._chain
        if self._held is not None:
            return self._held
        raw = chain.bulk[self.index(step)].reshape(chain.g, chain.c, chain.c).double()
        logs = raw if chain.log_params else raw.log()
        one_matrix = len(chain.bulk) == 1
        alive = self.alive(1 if one_matrix else step)
        if alive is not None:
            logs = torch.where(alive.any(1, keepdim=True), logs, 0.0)
        if one_matrix:
            self._held = logs
        return logs

    def index(self, step: int) -> int:
        """Which matrix leads into a step."""
        return 0 if len(self._chain.bulk) == 1 else step - 1

    def start(self) -> Tensor:
        """log p0 (g, m, c)."""
        chain = self._chain
        start = chain.p0.double() if chain.log_params else chain.p0.double().log()
        return start.expand(*chain.lead, chain.c).reshape(self._shape)

    def alive(self, step: int) -> Tensor | None:
        """Which sequences have a step (g, m, 1); None for all."""
        return None if self._chain.ends is None else self._chain.ends > step

    def shares(self, message: Tensor) -> Tensor:
        """The posterior of the last state, 0 where nothing is possible."""
        dead = (message == -math.inf).all(-1, keepdim=True)
        return torch.softmax(message.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)


class Messages(NamedTuple):
    """Messages (v, g, m, c) with maximum 0, and what was taken out of each (v, g, m, 1), to more than float64."""

    relative: Tensor
    offset: Tensor
    lost: Tensor

    @classmethod
    def new(cls, chain: Chain) -> "Messages":
        """Room for them."""
        shape = chain.v, chain.g, chain.m
        new = chain.x.new_empty
        return cls(*(new((*shape, last), dtype=torch.float64) for last in (chain.c, 1, 1)))

    def write(self, step: int, message: Tensor, *shifts: Tensor, before: int | None) -> Tensor:
        """Put a message there, whose offset is that of the step `before` and its shifts; return it."""
        top = _top(message)
        if before is None:
            offset, lost = torch.zeros_like(top), torch.zeros_like(top)
        else:
            offset, lost = self.offset[before], self.lost[before]
        for term in (*shifts, top):
            total = offset + term
            back = total - offset
            offset, lost = total, lost + ((offset - (total - back)) + (term - back))
        self.offset[step], self.lost[step] = offset, lost
        return torch.sub(message, top, out=self.relative[step])

    def absolute(self) -> Tensor:
        """Natural logarithms; overwrites the relative ones."""
        return self.relative.add_(self.lost).add_(self.offset)

    def log_norm(self) -> Tensor:
        """The log-partition (g, m), of forward messages."""
        return (torch.logsumexp(self.relative[-1], -1, keepdim=True) + self.lost[-1] + self.offset[-1])[..., 0]


def forward_messages(chain: Chain, matmul: ModuleType) -> Messages:
    """The forward messages; those of a sequence that has ended stay."""
    steps, messages = Steps(chain), Messages.new(chain)
    x, shift = steps.potential(0)
    message = messages.write(0, steps.start() + x, shift, before=None)
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


def backward_of_forward(
    chain: Chain, matmul: ModuleType, messages: Tensor, along: Tensor, weight: Tensor, into: Gradients
) -> None:
    """Add the gradients of `sum(along * a)` (v, g, m, c) and of `sum(weight * log_norm)` (g, m)."""
    steps = Steps(chain)
    adjoint = steps.shares(messages[-1]) * weight[..., None]
    for step in reversed(range(chain.v)):
        adjoint = adjoint + torch.where(_there(steps, step, messages[step]), along[step], 0.0)
        adjoint = torch.where(messages[step] == -math.inf, 0.0, adjoint)
        into.x[step] += _alive(steps, step, adjoint)
        if step:
            before, counts = matmul.backward(
                _alive(steps, step, adjoint), messages[step - 1], steps.matrix(step), True, True
            )
            into.bulk[steps.index(step)] += counts
            adjoint = _where(steps.alive(step), before, adjoint)
    into.p0.add_(adjoint)


def backward_of_backward(chain: Chain, matmul: ModuleType, messages: Tensor, along: Tensor, into: Gradients) -> None:
    """Add the gradients of `sum(along * b)` (v, g, m, c)."""
    steps = Steps(chain)
    adjoint = torch.zeros_like(messages[0])
    for step in range(1, chain.v):
        adjoint = adjoint + torch.where(_there(steps, step - 1, messages[step - 1]), along[step - 1], 0.0)
        ahead = messages[step] + steps.potential(step)[0]
        after, counts = matmul.backward(_alive(steps, step, adjoint), ahead, steps.matrix(step).mT, True, True)
        into.bulk[steps.index(step)] += counts.mT
        adjoint = _alive(steps, step, after)
        into.x[step] += adjoint


def tangent(chain: Chain, matmul: ModuleType, tangents: Tangents) -> Tensor:
    """The derivative of the log-partition along the tangents (g, m)."""
    return _tangent(chain, matmul, tangents)[2]


def second(chain: Chain, matmul: ModuleType, weight: Tensor, tangents: Tangents) -> tuple[Tensor, Gradients, Gradients]:
    """The gradients of `sum(weight * log_norm)` for weights (g, m), and their derivatives along the tangents.

    The first is the derivative of the log-partition (g, m).
    """
    steps = Steps(chain)
    messages, dots, along = _tangent(chain, matmul, tangents)
    first, derived = Gradients.zeros(chain), Gradients.zeros(chain)
    posterior = steps.shares(messages[-1]) * weight[..., None]
    dot = posterior * (dots[-1] - along[..., None])
    for step in reversed(range(chain.v)):
        first.x[step], derived.x[step] = _alive(steps, step, posterior), _alive(steps, step, dot)
        if step:
            operands = messages[step - 1], steps.matrix(step)
            before, counts = matmul.backward(first.x[step], *operands, True, True)
            along_matrix = _matrix_tangent(steps, step, tangents, operands[1])
            _, dot_before, dot_counts = matmul.second(
                first.x[step], *operands, dots[step - 1], along_matrix, derived.x[step]
            )
            first.bulk[steps.index(step)] += counts
            derived.bulk[steps.index(step)] += dot_counts
            posterior = _where(steps.alive(step), before, posterior)
            dot = _where(steps.alive(step), dot_before, dot)
    first.p0.copy_(posterior)
    derived.p0.copy_(dot)
    return along, first, derived


def _tangent(chain: Chain, matmul: ModuleType, tangents: Tangents) -> tuple[Tensor, Tensor, Tensor]:
    """Forward messages and their derivatives (v, g, m, c), and the log-partition's (g, m)."""
    steps = Steps(chain)
    messages = forward_messages(chain, matmul).relative
    dots = torch.zeros_like(messages)
    if tangents.p0 is not None:
        dots[0] += tangents.p0
    for step in range(chain.v):
        if step:
            matrix = steps.matrix(step)
            along = _matrix_tangent(steps, step, tangents, matrix)
            mean = matmul.tangent(messages[step - 1], matrix, dots[step - 1], along)
            dots[step] = _where(steps.alive(step), mean, dots[step - 1])
        if tangents.x is not None:
            dots[step] += torch.where(_there(steps, step, messages[step]), tangents.x[step], 0.0)
        # whatever an impossible state's tangent is, it has no influence
        dots[step].masked_fill_(messages[step] == -math.inf, 0.0)
    return messages, dots, (steps.shares(messages[-1]) * dots[-1]).sum(-1)


def _matrix_tangent(steps: Steps, step: int, tangents: Tangents, matrix: Tensor) -> Tensor:
    if tangents.bulk is None:
        return torch.zeros_like(matrix)
    alive = steps.alive(step)
    along = tangents.bulk[steps.index(step)].masked_fill(matrix == -math.inf, 0.0)
    return along if alive is None else torch.where(alive.any(1, keepdim=True), along, 0.0)


def _top(message: Tensor) -> Tensor:
    """The largest entry of each message (g, m, 1), 0 where there is none."""
    top = message.amax(-1, keepdim=True)
    return top.masked_fill_(top == -math.inf, 0.0)


def _there(steps: Steps, step: int, message: Tensor) -> Tensor:
    alive = steps.alive(step)
    possible = message != -math.inf
    return possible if alive is None else possible & alive


def _alive(steps: Steps, step: int, values: Tensor) -> Tensor:
    alive = steps.alive(step)
    return values if alive is None else torch.where(alive, values, 0.0)


def _where(alive: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    return new if alive is None else torch.where(alive, new, old)
