"""The recursions of a chain in float64 logarithms, one log-semiring product a step: messages, and derivatives of them.

    a_i = log sum_k exp(a_{i-1}(k) + log P_i(k, .)) + x_i        b_{i-1} = log sum_j exp(log P_i(., j) + x_i(j) + b_i(j))

Forward messages `a` have their maximum taken out into an offset, so that posteriors are good however long the chain.
The derivative of a step is an average over the states before it, by their posterior given the state after it. With
tangents of the logarithms of all operands,

    da_i(j) = sum_k p(k | j) (da_{i-1}(k) + d log P_i(k, j)) + dx_i(j)

is the derivative of the messages along them; at the end it is that of the log-partition: the expected tangent of a
path. The gradients' own derivatives are found backwards, from the last state's posterior and its tangent, by averages
over the states after.

How a step is summed, exactly where maxima are misaligned too, is the business of `matmul`: `kernels.log_matmul`, or the
kernels of a GPU. Ended sequences keep their message. What is impossible has derivatives of exactly 0.
"""

import math
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .chain import Chain
from .exponentials import finite


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

    def potential(self, step: int) -> Tensor:
        """x_i (g, m, c), 0 behind the end."""
        x = self._chain.x[step].reshape(self._shape).double()
        alive = self.alive(step)
        return x if alive is None else torch.where(alive, x, 0.0)

    def matrix(self, step: int) -> Tensor:
        """log P_i (g, c, c); anything without a NaN where all sequences of a set have ended."""
        chain = self._chain
        if self._held is not None:
            return self._held
        raw = chain.bulk[self.index(step)].reshape(chain.g, chain.c, chain.c).double()
        logs = raw if chain.log_params else raw.log()
        if len(chain.bulk) == 1:
            self._held = logs
            return logs
        alive = self.alive(step)
        return logs if alive is None else torch.where(alive.any(1, keepdim=True), logs, 0.0)

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
        top = message.amax(-1, keepdim=True)
        return torch.softmax(message - finite(top.clone()), -1).masked_fill(top == -math.inf, 0.0)


def forward(chain: Chain, matmul: ModuleType) -> tuple[Tensor, Tensor, Tensor]:
    """Messages (v, g, m, c) with maximum 0, what was taken out of them (v, g, m, 1), and the log-partition (g, m)."""
    steps = Steps(chain)
    messages, offsets = _new(chain, chain.c), _new(chain, 1)
    message, offset = steps.start() + steps.potential(0), torch.zeros_like(offsets[0])
    for step in range(chain.v):
        if step:
            after = matmul.forward(message, steps.matrix(step))[0] + steps.potential(step)
            message = _where(steps.alive(step), after, message)
        top = finite(message.amax(-1, keepdim=True))
        message = torch.sub(message, top, out=messages[step])
        offset = torch.add(offset, top, out=offsets[step])
    return messages, offsets, torch.logsumexp(message, -1) + offset[..., 0]


def backward(chain: Chain, matmul: ModuleType) -> tuple[Tensor, Tensor]:
    """Messages (v, g, m, c) with maximum 0, and what was taken out of them (v, g, m, 1)."""
    steps = Steps(chain)
    messages, offsets = _new(chain, chain.c), _new(chain, 1)
    messages[-1], offsets[-1] = 0.0, 0.0
    for step in range(chain.v - 1, 0, -1):
        ahead = messages[step] + steps.potential(step)
        message = matmul.forward(ahead, steps.matrix(step).mT)[0]
        message = _where(steps.alive(step), message, torch.zeros_like(message))
        top = finite(message.amax(-1, keepdim=True))
        torch.sub(message, top, out=messages[step - 1])
        torch.add(offsets[step], top, out=offsets[step - 1])
    return messages, offsets


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
        ahead = messages[step] + steps.potential(step)
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
    messages, _, _ = forward(chain, matmul)
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


def _there(steps: Steps, step: int, message: Tensor) -> Tensor:
    alive = steps.alive(step)
    some = message != -math.inf
    return some if alive is None else some & alive


def _alive(steps: Steps, step: int, values: Tensor) -> Tensor:
    alive = steps.alive(step)
    return values if alive is None else torch.where(alive, values, 0.0)


def _where(alive: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    return new if alive is None else torch.where(alive, new, old)


def _new(chain: Chain, last: int) -> Tensor:
    return chain.x.new_empty((chain.v, chain.g, chain.m, last), dtype=torch.float64)
