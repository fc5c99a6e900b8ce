"""Forward and backward messages of a chain in float64 logarithms, and derivatives of them and of the log-partition.

    a_i = log sum_k exp(a_{i-1}(k) + log P_i(k, .)) + x_i
    b_{i-1} = log sum_j exp(log P_i(., j) + x_i(j) + b_i(j))

A message is stored less its largest entry, with the sum of what was subtracted as an offset, so that posteriors are
good however long the chain. The derivative of the messages along tangents of the logarithms of all operands is

    da_i(j) = sum_k p(k | j) (da_{i-1}(k) + d log P_i(k, j)) + dx_i(j)

with p(k | j) the posterior of the state before given the state after. The mean of the last da by the last state's
posterior is the derivative of the log-partition: the expected tangent of a path. Second derivatives of the
log-partition follow backwards from the last state's posterior and that posterior's derivative.

Each step is one log-semiring product, by a module `matmul`: `kernels.plain.matmul` or `kernels.gpu.matmul`. A sequence
that has ended keeps its message. Impossible states have derivatives of exactly 0.
"""

import math
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .. import log_matmul_kernels
from ..chain import Chain
from .forward import shifted
from .semiring import probabilities, two_sum


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


class Tangents(NamedTuple):
    """Tangents of x (v, g, m, c), log bulk (s, g, c, c) and log p0 (g, m, c) in float64; None stands for zero."""

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
        """Gradients of zero, to be added to."""
        v, g, m, c = chain.v, chain.g, chain.m, chain.c
        shapes = (v, g, m, c), (len(chain.bulk), g, c, c), (g, m, c)
        return cls(*(chain.x.new_zeros(shape, dtype=torch.float64) for shape in shapes))


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

    def index(self, step: int) -> int:
        """The index of the matrix that leads into a step."""
        return 0 if len(self._chain.bulk) == 1 else step - 1

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


def backward_of_forward(
    chain: Chain, matmul: ModuleType, messages: Tensor, along: Tensor, weight: Tensor, into: Gradients
) -> None:
    """Add to `into` the gradients of `sum(along * a) + sum(weight * log_norm)` for forward messages a (v, g, m, c)."""
    steps = Steps(chain)
    adjoint = probabilities(messages[-1]) * weight[..., None]
    for step in reversed(range(chain.v)):
        adjoint = adjoint + torch.where(_possible(steps, step, messages[step]), along[step], 0.0)
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
    """Add to `into` the gradients of `sum(along * b)` for backward messages b (v, g, m, c)."""
    steps = Steps(chain)
    adjoint = torch.zeros_like(messages[0])
    for step in range(1, chain.v):
        adjoint = adjoint + torch.where(_possible(steps, step - 1, messages[step - 1]), along[step - 1], 0.0)
        ahead = messages[step] + steps.potential(step)[0]
        after, counts = matmul.backward(_alive(steps, step, adjoint), ahead, steps.matrix(step).mT, True, True)
        into.bulk[steps.index(step)] += counts.mT
        adjoint = _alive(steps, step, after)
        into.x[step] += adjoint


def tangent(chain: Chain, matmul: ModuleType, tangents: Tangents) -> Tensor:
    """The derivative (g, m) of the log-partition along the tangents."""
    return _tangent(chain, matmul, tangents)[2]


def second(chain: Chain, matmul: ModuleType, weight: Tensor, tangents: Tangents) -> tuple[Tensor, Gradients, Gradients]:
    """The derivative (g, m) of the log-partition along the tangents, its gradients, and the gradients' derivatives.

    The gradients are those of `sum(weight * log_norm)` for weights (g, m).
    """
    steps = Steps(chain)
    messages, da, along = _tangent(chain, matmul, tangents)
    first, derived = Gradients.zeros(chain), Gradients.zeros(chain)
    posterior = probabilities(messages[-1]) * weight[..., None]
    d_posterior = posterior * (da[-1] - along[..., None])
    for step in reversed(range(chain.v)):
        first.x[step], derived.x[step] = _alive(steps, step, posterior), _alive(steps, step, d_posterior)
        if step:
            operands = messages[step - 1], steps.matrix(step)
            before, counts = matmul.backward(first.x[step], *operands, True, True)
            along_matrix = _matrix_tangent(steps, step, tangents, operands[1])
            _, d_before, d_counts = matmul.second(first.x[step], *operands, da[step - 1], along_matrix, derived.x[step])
            first.bulk[steps.index(step)] += counts
            derived.bulk[steps.index(step)] += d_counts
            posterior = _where(steps.alive(step), before, posterior)
            d_posterior = _where(steps.alive(step), d_before, d_posterior)
    first.p0.copy_(posterior)
    derived.p0.copy_(d_posterior)
    return along, first, derived


def _tangent(chain: Chain, matmul: ModuleType, tangents: Tangents) -> tuple[Tensor, Tensor, Tensor]:
    """Forward messages and their derivatives (v, g, m, c), and the derivative of the log-partition (g, m)."""
    steps = Steps(chain)
    messages = forward_messages(chain, matmul).relative
    da = torch.zeros_like(messages)
    if tangents.p0 is not None:
        da[0] += tangents.p0
    for step in range(chain.v):
        if step:
            matrix = steps.matrix(step)
            along = _matrix_tangent(steps, step, tangents, matrix)
            mean = matmul.tangent(messages[step - 1], matrix, da[step - 1], along)
            da[step] = _where(steps.alive(step), mean, da[step - 1])
        if tangents.x is not None:
            da[step] += torch.where(_possible(steps, step, messages[step]), tangents.x[step], 0.0)
        # tangents of impossible states must have no influence, even if they are NaN
        da[step].masked_fill_(messages[step] == -math.inf, 0.0)
    return messages, da, (probabilities(messages[-1]) * da[-1]).sum(-1)


def _matrix_tangent(steps: Steps, step: int, tangents: Tangents, matrix: Tensor) -> Tensor:
    if tangents.bulk is None:
        return torch.zeros_like(matrix)
    alive = steps.alive(step)
    along = tangents.bulk[steps.index(step)].masked_fill(matrix == -math.inf, 0.0)
    return along if alive is None else torch.where(alive.any(1, keepdim=True), along, 0.0)


def _possible(steps: Steps, step: int, message: Tensor) -> Tensor:
    alive = steps.alive(step)
    possible = message != -math.inf
    return possible if alive is None else possible & alive


def _alive(steps: Steps, step: int, values: Tensor) -> Tensor:
    alive = steps.alive(step)
    return values if alive is None else torch.where(alive, values, 0.0)


def _where(alive: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    return new if alive is None else torch.where(alive, new, old)
