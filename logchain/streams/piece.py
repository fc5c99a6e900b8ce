"""A piece of an unbounded chain, and the forward message that enters and leaves it."""

from collections.abc import Callable
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..autograd.scan import Message
from ..kernels.numbers import log_weights, two_sum
from ..kernels.weights import Weights, check_weights, has_negative
from ..operands import at_hand
from ..transitions import LOG, Transition
from ..transitions.dense import Dense


class Piece(NamedTuple):
    """k variables of a chain that a message enters; leading axes of transition and p0 may be missing.

    `name`: "bulk" if the transition is the stream's, "bulk_piece" if it is that of the piece. `fresh`: sequences
    without an earlier variable. `counts`: the number of variables of each sequence; None if all have k. `starting`:
    whether all sequences start with this piece, or none does; None if some do, or if that is unknown.
    """

    x: Tensor  # [*B, k, c]
    transition: Transition  # parameters [*B or ones, k or 1, *own], into each variable
    p0: Tensor  # [*B or ones, c]
    name: str
    fresh: Tensor  # bool [*B]
    counts: Tensor | None  # int64 [*B]
    starting: bool | None
    log_params: bool

    @property
    def bulk(self) -> Tensor:
        """The matrices of a dense transition."""
        return self.transition.parameters[0]

    def part(self, start: int, stop: int) -> "Piece":
        """The piece of the variables from `start` to before `stop`."""
        if stop - start == self.x.shape[-2]:
            return self
        transition = steps_between(self.transition, start, stop)
        counts = None if self.counts is None else (self.counts - start).clamp(0, stop - start)
        piece = self._replace(x=self.x[..., start:stop, :], transition=transition, counts=counts)
        return piece._replace(fresh=torch.zeros_like(self.fresh), starting=False) if start else piece

    def active(self) -> Tensor:
        """Which variables [*B, k] belong to their sequence, not past its end."""
        k = self.x.shape[-2]
        if self.counts is None:
            return self.fresh.new_ones(*self.fresh.shape, k)
        return torch.arange(k, device=self.counts.device) < self.counts[..., None]

    def linked(self) -> Tensor:
        """Which variables [*B, k] of their sequence have another one before them."""
        linked = self.active()
        if self.starting is not False:
            linked[..., :1] &= ~self.fresh[..., None]
        return linked

    def used(self) -> list[Tensor]:
        """Which steps of each parameter lead into a variable of some sequence, as masks that broadcast with it."""
        linked, masks = self.linked(), []
        for parameter, lead in zip(self.transition.parameters, self.transition.leads, strict=True):
            missing = linked.dim() - len(lead)
            shared = [axis for axis in range(linked.dim()) if axis < missing or lead[axis - missing] == 1]
            mask = linked.any(shared, keepdim=True) if shared else linked
            masks.append(mask.reshape(*mask.shape[missing:], *(1 for _ in parameter.shape[len(lead) :])))
        return masks

    def weights(self) -> list[Weights]:
        """The weights that are read, by the names of arguments."""
        names, weights = [self.name], []
        if not isinstance(self.transition, Dense):
            names = [f"{self.name}.{name}" for name in self.transition.names]
        columns = zip(names, self.transition.parameters, self.used(), self.transition.used, strict=True)
        for name, parameter, read, entries in columns:
            weights.append(Weights(name, parameter, read if entries is None else read & entries))
        starts = (self.active() & ~self.linked()).any().view((1,) * self.p0.dim())
        return [*weights, Weights("p0", self.p0, starts)]

    def check_signs(self) -> None:
        """Raise on a CPU for a weight below 0 in p0, or in parameters that serve all steps."""
        if self.log_params or not kernels.in_c(self.x) or not at_hand(self.x, self.p0):
            return
        pairs = zip(self.transition.parameters, self.transition.leads, strict=True)
        below = [lead[-1:] in ((), (1,)) and has_negative(weights) for weights, lead in pairs]
        below.append(has_negative(self.p0))
        if any(below):
            check_weights(*compress(self.weights(), below))

    def masked(self) -> Transition:
        """The transition; where it is that of the piece, with 0 in steps that no sequence uses, which may be NaN."""
        if self.name == "bulk":
            return self.transition
        pairs = zip(self.used(), self.transition.parameters, strict=True)
        return self.transition.with_parameters(*(torch.where(used, weights, 0.0) for used, weights in pairs))

    def logs(self) -> "Piece":
        """The piece in float64 logarithms, of which p0 and parameters have all leading axes."""
        transition = in_logs(self.masked(), self.x.dim() - 1, self.log_params)
        start = log_weights(self.p0, self.log_params, torch.float64).expand(*self.x.shape[:-2], -1)
        return self._replace(x=self.x.double(), transition=transition, p0=start, log_params=True)

    def potentials(self) -> Tensor:
        """The log-potentials [*B, k, c], 0 past the end."""
        return self.x if self.counts is None else torch.where(self.active()[..., None], self.x, 0.0)


def in_logs(transition: Transition, lead: int, log_params: bool) -> Transition:
    """The transition with float64 logarithms of parameters, which have so many leading axes."""

    def logs(weights: Tensor, own: int) -> Tensor:
        return log_weights(weights, log_params, torch.float64)[(None,) * (lead + own - weights.dim())]

    return transition.with_parameters(*map(logs, transition.parameters, transition.own_axes))


def steps_between(transition: Transition, start: int, stop: int) -> Transition:
    """The transition of the steps from `start` to before `stop`; one for all steps as it is."""

    def between(weights: Tensor, lead: torch.Size) -> Tensor:
        return weights if lead[-1:] in ((), (1,)) else weights.narrow(len(lead) - 1, start, stop - start)

    return transition.with_parameters(*map(between, transition.parameters, transition.leads))


def step_at(transition: Transition, step: int, axis: int) -> Transition:
    """The transition of one step, whose parameters have all leading axes, that of steps being `axis`."""
    return transition.map(lambda parameter: parameter.select(axis, step if parameter.shape[axis] > 1 else 0))


def after_each(transition: Transition, messages: Tensor) -> Tensor:
    """The logarithmic messages [*B, k, c], each after its step of a transition with all leading axes."""
    axis = messages.dim() - 2
    if any(parameter.shape[axis] != 1 for parameter in transition.parameters):
        return transition.apply(messages[..., None, :], LOG)[..., 0, :]
    return step_at(transition, 0, axis).apply(messages, LOG)


def before_all(x: Tensor) -> Message:
    """The message before the first variable of a batch like x [*B, k, c]: no state is possible, with scale 0."""
    message = x.new_full((*x.shape[:-2], x.shape[-1]), -torch.inf, dtype=torch.float64)
    zero = x.new_zeros((*x.shape[:-2], 1), dtype=torch.float64)
    return Message(message, zero, zero)


def log_norm(message: Message) -> Tensor:
    """The log-partition [*B] of a message with sum 1, with the gradient that the logarithm of its sum has."""
    values, scale, error = message
    total = (scale + error)[..., 0]
    if not values.requires_grad:
        return total
    norm = LOG.sum(values, -1)
    return total + torch.where(norm == -torch.inf, 0.0, norm - norm.detach())


def scaled(message: Message, term: Tensor) -> Message:
    """The message with a term [*B, 1] added to its scale; an infinite scale has no rounding error."""
    scale, error = two_sum(message.scale, message.error, term)
    return message._replace(scale=scale, error=error.where(scale.isfinite(), 0.0))


def selected(mask: Tensor, message: Message, other: Message) -> Message:
    """The message for the sequences in a mask [*B], and the other one for the rest."""
    return Message(*(torch.where(mask[..., None], *pair) for pair in zip(message, other, strict=True)))


def mapped(function: Callable[..., Tensor], value: Any, *others: Any) -> Any:
    """A value with `function(*tensors)` of each tensor in it and in others, also in tuples and parameters."""
    if isinstance(value, Tensor):
        return function(value, *others)
    if isinstance(value, Transition):
        columns = zip(value.parameters, *(other.parameters for other in others), strict=True)
        return value.with_parameters(*(function(*column) for column in columns))
    if isinstance(value, tuple):
        return type(value)(*(mapped(function, *column) for column in zip(value, *others, strict=True)))
    return value
