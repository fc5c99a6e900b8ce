"""One scan for every transition and semiring, in float64, which torch's autograd differentiates to any order.

    a_0 = log p0 + x_0        a_i = apply(a_{i-1}) + x_i        total = sum of a_{v-1} over states

A message is stored minus its largest entry; its scale is the sum of the entries that were subtracted, with the rounding
error of that sum. Second derivatives of log-partitions are torch's, through this scan.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..internals import autograd_in_operators
from ..kernels.chain import Layout
from ..kernels.numbers import log_weights, probabilities, shifted, two_sum
from ..tensors import with_axes
from ..transitions.semiring import LOG, Semiring
from ..transitions.transition import Transition

# the logarithms after a transition, of those of a message (g, m, c)
Apply = Callable[[Transition, Tensor], Tensor]


class ScaledMessage(NamedTuple):
    """A message: logarithms `values` (g, m, c) with the largest 0, plus `scale` and its rounding `error` (g, m, 1)."""

    values: Tensor
    scale: Tensor
    error: Tensor

    @property
    def logs(self) -> Tensor:
        """The logarithms (g, m, c)."""
        return self.values + (self.error + self.scale)


class Steps:
    """A chain in float64 logarithms, by steps: g sets of m sequences that share parameters, c states.

    Operands are those of queries, of which leading axes may be missing; `shape` is that of a message, (g, m, c).
    `entered`: a message enters, in place of p0, and the first matrix leads into the first step. `fresh` [*B]: sequences
    that start with p0 all the same.
    """

    def __init__(
        self,
        x: Tensor,
        transition: Transition,
        p0: Tensor,
        lengths: Tensor | None,
        log_params: bool,
        *,
        entered: bool = False,
        fresh: Tensor | None = None,
    ) -> None:
        self.entered = int(entered)
        self.batch, self.v, self.device = x.shape[:-2], x.shape[-2], x.device
        self.parameters = transition.with_lead(x.dim() - 1).parameters
        self.layout = Layout.of_parameters(self.batch, self.parameters)
        self.shape = *self.layout.grid, x.shape[-1]
        self.ends = None if lengths is None else self.layout.grouped(lengths)[..., None]
        self.fresh = None if fresh is None else self.layout.grouped(fresh)[..., None]
        self._transition, self._log = transition, log_params
        self._p0 = self.layout.grouped(with_axes(p0, x.dim() - 1))
        # all steps at once: a gradient through a look-up of each takes time quadratic in v
        self._x = self.layout.grouped(x).unbind(2)
        self._by_step = [self.layout.parameter(parameter).unbind() for parameter in self.parameters]
        shared = self.v + self.entered > 1 and all(len(parameter) == 1 for parameter in self._by_step)
        self._shared = self._at(0) if shared else None

    def inside(self, step: int) -> Tensor | None:
        """Whether a sequence has a step (g, m, 1); None: all have."""
        return None if self.ends is None else self.ends > step

    def unknown(self, ends: Tensor) -> Tensor:
        """Which ends (g, m, 1) are out of range: on a GPU, lengths are not checked before."""
        return (ends < 1) | (ends > self.v)

    def potential(self, step: int) -> Tensor:
        """x_i (g, m, c), 0 after a sequence's end."""
        x, inside = self._x[step].double(), self.inside(step)
        return x if inside is None else x.masked_fill(~inside, 0.0)

    def start(self) -> Tensor:
        """log p0 (g, m, c)."""
        return log_weights(self._p0, self._log, torch.float64)

    def transition(self, step: int) -> Transition:
        """The structure that leads into a step, with logarithms (g or 1, *sizes) of its parameters."""
        return self._shared or self._at(step - 1 + self.entered)

    def _at(self, index: int) -> Transition:
        """The structure at an index of its step axis; parameters of sets whose sequences have all ended are 1."""
        inside, logs = self.inside(index + 1 - self.entered), []
        for parameter in self._by_step:
            weights = parameter[index if len(parameter) > 1 else 0]
            if inside is not None:
                over = ~(inside.any(1) if len(weights) > 1 else inside.any().view(1, 1))
                over = over.view(-1, *(1 for _ in weights.shape[1:]))
                weights = weights.masked_fill(over, 0.0 if self._log else 1.0)
            logs.append(log_weights(weights, self._log, torch.float64))
        return self._transition.with_parameters(*logs)


def first(steps: Steps) -> ScaledMessage:
    """The forward message of the first step."""
    weights, scale = shifted(steps.start())
    potential = steps.potential(0)
    # the largest x among possible first states
    _, shift = shifted(potential.masked_fill(weights == -math.inf, -math.inf))
    message, top = shifted(weights + (potential - shift))
    return ScaledMessage(message, *two_sum(*two_sum(scale, torch.zeros_like(scale), shift), top))


def trace_back(steps: Steps, state: Tensor, before: Callable[[int, Tensor], Tensor]) -> list[Tensor]:
    """The state (..., g, m) of each step, from the last one's; `before(i, states)` are those before step i."""
    path = [state]
    for step in reversed(range(1, steps.v)):
        previous, inside = before(step, state), steps.inside(step)
        state = previous if inside is None else torch.where(inside[..., 0], previous, state)
        path.append(state)
    return path[::-1]


def messages(steps: Steps, apply: Apply, entering: ScaledMessage | None = None) -> Iterator[ScaledMessage]:
    """The forward message of each step; after a sequence's end, its last."""
    message = entering or first(steps)
    if entering is None:
        yield message
    for step in range(1 - steps.entered, steps.v):
        # the largest potential is taken out first: a sum is rounded by its own size
        potential, shift = shifted(steps.potential(step))
        inside, values = steps.inside(step), message.values
        # sequences that have ended may be NaN, which must not reach the gradients of matrices
        after = apply(steps.transition(step), values if inside is None else values.masked_fill(~inside, 0.0))
        if step == 0 and steps.fresh is not None:
            after = torch.where(steps.fresh, steps.start(), after)
        message = _next(message, after + potential, shift, inside)
        yield message


def _next(last: ScaledMessage, values: Tensor, shift: Tensor, inside: Tensor | None) -> ScaledMessage:
    """The message of `values` times `exp(shift)` and the scale of the last one, which stays where there is no step."""
    values, top = shifted(values)
    if inside is not None:
        values = torch.where(inside, values, last.values)
        shift, top = shift.masked_fill(~inside, 0.0), top.masked_fill(~inside, 0.0)
    return ScaledMessage(values, *two_sum(*two_sum(last.scale, last.error, shift), top))


def forward_messages(steps: Steps, entering: ScaledMessage | None = None) -> Iterator[ScaledMessage]:
    """The forward messages of log-partitions, see `messages`."""
    return messages(steps, lambda transition, message: transition.apply(message, LOG), entering)


def backward_messages(steps: Steps) -> list[Tensor]:
    """The logarithms (g, m, c) of each step's backward message, 0 at and after a sequence's last step."""
    values = torch.zeros(steps.shape, dtype=torch.float64, device=steps.device)
    message = ScaledMessage(values, values[..., :1], values[..., :1])
    logs = [values]
    for step in reversed(range(1, steps.v)):
        potential, shift = shifted(steps.potential(step))
        before = steps.transition(step).mT.apply(message.values + potential, LOG)
        message = _next(message, before, shift, steps.inside(step))
        logs.append(message.logs)
    return logs[::-1]


def both_messages(steps: Steps) -> tuple[Tensor, Tensor, Tensor]:
    """Forward and backward messages [*B, v, c], -inf after a sequence's end, and the log-partition [*B].

    Entries that are -inf have gradient 0.
    """
    forward = list(forward_messages(steps))
    messages = [message.logs for message in forward], backward_messages(steps)
    first, last = (_until_ends(steps, values, -math.inf) for values in messages)
    first, last = (values.masked_fill(values == -math.inf, -math.inf) for values in (first, last))
    return first, last, _sum(steps, forward[-1], LOG)


def filtered_messages(steps: Steps) -> tuple[Tensor, Tensor]:
    """Forward messages [*B, v, c] with sum 1, or 0 if impossible or after an end, and the log-partition [*B]."""
    messages = list(forward_messages(steps))
    states = _until_ends(steps, [probabilities(message.values) for message in messages], 0.0)
    return states, _sum(steps, messages[-1], LOG)


def _until_ends(steps: Steps, values: Sequence[Tensor], padding: float) -> Tensor:
    """Values (g, m, c) of each step as [*B, v, c], `padding` after a sequence's end."""
    by_step, ends = torch.stack(list(values), 2), steps.ends
    if ends is not None:
        inside = torch.arange(steps.v, device=steps.device)[:, None] < ends[..., None]
        by_step = torch.where(inside, by_step, padding).masked_fill(steps.unknown(ends)[..., None], math.nan)
    return steps.layout.batched(by_step)


def total(steps: Steps, semiring: Semiring = LOG) -> Tensor:
    """The sum over all paths [*B]."""
    for message in messages(steps, lambda transition, values: transition.apply(values, semiring)):
        last = message  # one at a time in memory, unless autograd keeps them
    return _sum(steps, last, semiring)


def _sum(steps: Steps, last: ScaledMessage, semiring: Semiring) -> Tensor:
    """The sum of the last message [*B], NaN for a length out of range; all parameters have a gradient."""
    value = semiring.sum(last.values, -1) + last.error[..., 0] + last.scale[..., 0]
    if steps.ends is not None:
        value = value.masked_fill(steps.unknown(steps.ends)[..., 0], math.nan)
    if value.requires_grad:  # parameters without influence have gradients of 0
        value = value + torch.stack([parameter.reshape(-1)[:0].sum().double() for parameter in steps.parameters]).sum()
    return steps.layout.batched(value)


def second_derivatives(
    log_norm: Callable[..., Tensor],
    operands: Sequence[Tensor],
    weight: Tensor,
    tangents: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """The gradients of `sum(gradient * tangents)` with respect to the weight and to the operands, without a graph.

    `gradient` is that of `sum(weight * log_norm(*operands))` with respect to the operands. Tangents of
    impossible states and transitions have no influence, even if they are NaN.
    """
    with autograd_in_operators(), torch.enable_grad():
        weight, *leaves = (tensor.detach().requires_grad_() for tensor in (weight, *operands))
        value = log_norm(*leaves)
        first = torch.autograd.grad(value, leaves, weight.to(value.dtype), create_graph=True)
        pairs = [(output, tangent) for output, tangent in zip(first, tangents, strict=True) if tangent is not None]
        along = [torch.where((a == 0) & ~tangent.isfinite(), 0.0, tangent).to(a.dtype) for a, tangent in pairs]
        return torch.autograd.grad([a for a, _ in pairs], [weight, *leaves], along, materialize_grads=True)
