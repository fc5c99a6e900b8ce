"""A piece of an unbounded chain, its checks, and the state of a stream before and after it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..arguments import check_has_values, check_tensor, check_values, has_values
from ..autograd.scan import ScaledMessage
from ..internals import is_mapped, takes_forward_derivatives
from ..kernels.numbers import log_weights, two_sum
from ..kernels.weights import Weights, check_weights
from ..operands import check_products, named_weights, transition_of
from ..transitions import LOG, Transition
from ..transitions.dense import Dense


@dataclass
class Piece:
    """k variables of a chain that a message enters; leading axes of transition and p0 may be missing.

    `name`: the argument that is the transition, the stream's "bulk" or the piece's "bulk_piece". `counts`: the number
    of variables of each sequence; None if all have k. `fresh`: sequences without an earlier variable. `going`: no
    sequence is fresh. `starting`: all are known to be fresh, and to have a variable.
    """

    x: Tensor  # [*B, k, c]
    transition: Transition  # parameters [*B or ones, k or 1, *sizes], into each variable
    p0: Tensor  # [*B or ones, c]
    name: str
    counts: Tensor | None  # int64 [*B]
    fresh: Tensor  # bool [*B]
    going: bool
    starting: bool
    log_params: bool

    @property
    def bulk(self) -> Tensor:
        """The matrices of a dense transition."""
        return self.transition.parameters[0]

    def part(self, start: int, stop: int) -> "Piece":
        """The piece of the variables from `start` to before `stop`."""
        x, transition = self.x[..., start:stop, :], self.transition.between(start, stop)
        counts = None if self.counts is None else (self.counts - start).clamp(0, stop - start)
        going, starting = self.going or start > 0, self.starting and start == 0
        return replace(self, x=x, transition=transition, counts=counts, going=going, starting=starting)

    def active(self) -> Tensor:
        """Which variables [*B, k] belong to their sequence, not past its end."""
        k = self.x.shape[-2]
        if self.counts is None:
            return self.fresh.new_ones(*self.fresh.shape, k)
        return torch.arange(k, device=self.counts.device) < self.counts[..., None]

    def linked(self) -> Tensor:
        """Which variables [*B, k] of their sequence have another one before them."""
        linked = self.active()
        if not self.going:
            linked[..., :1] &= ~self.fresh[..., None]
        return linked

    def used(self) -> list[Tensor]:
        """Which steps of each parameter lead into a variable of some sequence, in the shape of its leading axes."""
        linked = self.linked().int()
        return [linked.sum_to_size(lead).bool() for lead in self.transition.leads]

    def masked(self) -> Transition:
        """The transition; that of a piece with 0 in steps that no sequence uses, which may be NaN."""
        if self.name == "bulk":
            return self.transition
        columns = zip(self.used(), self.transition.parameters, self.transition.axes, strict=True)
        weights = [torch.where(used[(..., *(None,) * axes)], weights, 0.0) for used, weights, axes in columns]
        return self.transition.with_parameters(*weights)

    @cached_property
    def logs(self) -> "Piece":
        """The piece in float64 logarithms, with x 0 past the end, and all leading axes of p0 and parameters."""
        x = self.x if self.counts is None else torch.where(self.active()[..., None], self.x, 0.0)
        transition = in_logs(self.masked(), x.dim() - 1, self.log_params)
        start = log_weights(self.p0, self.log_params, torch.float64).expand(*x.shape[:-2], -1)
        return replace(self, x=x.double(), transition=transition, p0=start, log_params=True)

    def weights(self) -> list[Weights]:
        """The weights that are read, by the names of arguments."""
        starts = (self.active() & ~self.linked()).any().view((1,) * self.p0.dim())
        return [*named_weights(self.name, self.transition, self.used()), Weights("p0", self.p0, starts)]

    def check_values(self) -> None:
        """Raise for NaN, +inf or a negative probability in values that have influence."""
        weights = self.weights()
        check_values(Weights("x_piece", self.x, self.active()), *weights)
        if not self.log_params:
            check_weights(*weights)


class Window(NamedTuple):
    """The last n variables, which fewer than `lag` follow, with forward `messages`, -inf where there is no variable.

    `linked`: which have a variable before them. `transition` leads into each; None where the stream has one for all.
    """

    x: Tensor  # [*B, n, c]
    messages: Tensor  # [*B, n, c]
    linked: Tensor  # [*B, n]
    transition: Transition | None  # log-parameters [*B or ones, n, *sizes]


class Survivors(NamedTuple):
    """The best path to each last state, its log-weight, and which variables are a sequence's first."""

    message: Tensor  # [*B, c], the largest 0
    paths: Tensor  # int32 [*B, n, c], -1 where a sequence has no variable
    starts: Tensor  # [*B, n]

    def best(self) -> Tensor:
        """The best path [*B, n]; any of an impossible sequence."""
        return self.paths.take_along_dim(best_for_each(self.message)[..., None, :1], -1)[..., 0]

    def impossible(self) -> Tensor:
        """Which variables [*B, n] belong to the sequence that has started last, where that is impossible."""
        starts = self.starts.long()
        newest = starts.flip(-1).cumsum(-1).flip(-1) == starts
        return newest & (self.message == -torch.inf).all(-1, keepdim=True)


# the fields that are named tuples
_PARTS = {"message": ScaledMessage, "window": Window, "survivors": Survivors}


class State(NamedTuple):
    """The state of a stream between pieces; `window` is None without a lag, `survivors` without best paths.

    `message` [*B, c] has sum 1; it is -inf before the first variable, and if impossible. `fresh` [*B]: no variable yet.
    `over` [*B]: ended. `running`: all are known to go on, without a look at values. `double`: an operand was float64.
    """

    message: ScaledMessage
    fresh: Tensor
    over: Tensor
    running: bool
    double: bool
    window: Window | None
    survivors: Survivors | None

    @classmethod
    def before(cls, x: Tensor, viterbi: bool) -> "State":
        """The state before the first variable of a batch like x."""
        over, survivors = x.new_zeros(x.shape[:-2], dtype=torch.bool), None
        zero = x.new_zeros((*over.shape, 1), dtype=torch.float64)
        message = ScaledMessage(x.new_full((*over.shape, x.shape[-1]), -torch.inf, dtype=torch.float64), zero, zero)
        if viterbi:
            paths = x.new_zeros((*over.shape, 0, x.shape[-1]), dtype=torch.int32)
            survivors = Survivors(message.values, paths, over[..., None][..., :0])
        return cls(message, ~over, over, False, False, None, survivors)

    def piece(
        self, x: Tensor, name: str, transition: Transition, p0: Tensor, ends: Tensor | None, log_params: bool
    ) -> Piece:
        """The next piece, of lengths `ends` [*B]."""
        k, counts = x.shape[-2], None
        readable = has_values(self.fresh) and not kernels.on_gpu(self.fresh)  # on a GPU one would wait for values
        if ends is not None or not self.running:
            counts = torch.where(self.over, 0, k if ends is None else ends.clamp(0, k))
            counts = None if readable and (counts == k).all() else counts
        going = self.running or (readable and not self.fresh.any())
        starting = not going and counts is None and readable and bool(self.fresh.all())
        return Piece(x, transition, p0, name, counts, self.fresh, going, starting, log_params)

    def after(self, piece: Piece, message: ScaledMessage, ends: Tensor | None) -> "State":
        """The state after a piece that leaves a message, of lengths `ends` [*B], with the same window and survivors."""
        k, counts, over = piece.x.shape[-2], piece.counts, self.over
        if ends is not None:
            unknown = ((ends < 0) | (ends > k))[..., None]  # on a GPU lengths have not been checked
            message, over = message._replace(scale=message.scale.masked_fill(unknown, torch.nan)), over | (ends < k)
        fresh = self.fresh & (k == 0 if counts is None else counts == 0)
        running = counts is None and (k > 0 or self.running)
        return self._replace(message=message, fresh=fresh, over=over, running=running)

    def restarted(self, mask: Tensor) -> "State":
        """The state with the sequences in a mask [*B] before their first variable again."""
        message = selected(mask, State.before(self.message.values[..., None, :], False).message, self.message)
        return self._replace(message=message, fresh=self.fresh | mask, over=self.over & ~mask, running=False)

    def detached(self) -> "State":
        """The state without gradients to earlier pieces."""
        leaves = [self.message.values, *(() if self.window is None else (self.window.messages,))]
        detached: State = mapped(Tensor.detach, self) if any(leaf.requires_grad for leaf in leaves) else self
        return detached

    def plain(self) -> dict[str, Any]:
        """A copy as dictionaries of tensors, bools and None, and of the window's structure if there is one."""
        fields: dict[str, Any] = mapped(lambda tensor: tensor.detach().clone(), self)._asdict()
        fields |= {name: fields[name]._asdict() for name in _PARTS if fields[name] is not None}
        if self.window is not None and isinstance(self.window.transition, Dense):
            (fields["window"]["transition"],) = fields["window"]["transition"].parameters
        return fields

    @classmethod
    def of_plain(cls, fields: dict[str, Any]) -> "State":
        """The state from the result of `plain`."""
        parts = {name: kind(**fields[name]) for name, kind in _PARTS.items() if fields[name] is not None}
        if "window" in parts and isinstance(parts["window"].transition, Tensor):
            parts["window"] = parts["window"]._replace(transition=Dense(parts["window"].transition))
        copied: State = mapped(partial(torch.clone, memory_format=torch.contiguous_format), cls(**fields | parts))
        return copied


def as_transition(name: str, matrices: Any, k: int, like: Tensor, viterbi: bool) -> Transition:
    """Matrices that go with p0, or with a piece `like` of k variables, as a transition; raises for others."""
    transition, c = transition_of(matrices, name), like.shape[-1]
    kind, matrix = f"{type(transition).__name__} of shape", None
    if isinstance(transition, Dense):
        kind, matrix = "shape", torch.Size((c, c))
    elif transition.states != c:
        raise ValueError(f"{name}: expected {c} states, got {transition} of {transition.states}")
    if viterbi:
        check_products(transition, name)
    for parameter, axes in zip(transition.parameters, transition.axes, strict=True):
        check_tensor(name, parameter, axes, like=like)
        lead, sizes = parameter.shape[: parameter.dim() - axes], parameter.shape[parameter.dim() - axes :]
        if sizes != (matrix or sizes) or lead[-1:] not in ((), (1,), (k,)):
            steps, remedy = ("1", "; pass matrices that change to update") if name == "bulk" else (f"{k} or 1", "")
            expected = f"{kind} [..., {steps}, {', '.join(map(str, matrix or sizes))}]"
            raise ValueError(f"{name}: expected {expected}, got {list(parameter.shape)}{remedy}")
    return transition


def checked_transition(
    x: Tensor, bulk_piece: Tensor | Transition | None, bulk: Transition | None, p0: Tensor, before: Any, viterbi: bool
) -> tuple[str, Transition]:
    """The transition of a piece, and its name, after checks; `before` is the batch of earlier pieces, if any."""
    if not torch.compiler.is_compiling():
        if is_mapped():
            raise NotImplementedError("Stream: expected no torch.vmap around update; make its axis one of the batch")
        if takes_forward_derivatives():
            raise NotImplementedError("Stream: expected no forward derivative; take gradients instead")
    check_tensor("x_piece", x, 2, like=p0)
    if viterbi:  # the number of final states depends on values
        check_has_values("x_piece", x)
    batch, (k, c) = x.shape[:-2], x.shape[-2:]
    if c != p0.shape[-1] or before not in (None, batch):
        sizes = ", ".join(map(str, (*(batch if before is None else before), "k", p0.shape[-1])))
        raise ValueError(f"x_piece: expected shape [{sizes}], got {list(x.shape)}")
    if (bulk is None) == (bulk_piece is None):
        expected = "a torch.Tensor, since the stream has no" if bulk is None else "None, since the stream has a"
        raise ValueError(f"bulk_piece: expected {expected} bulk for all pieces")
    name = "bulk" if bulk_piece is None else "bulk_piece"
    transition = bulk or as_transition(name, bulk_piece, k, x, viterbi)
    parameters = zip(repeat(name), transition.parameters, transition.leads, strict=False)
    for argument, value, lead in (("p0", p0, p0.shape), *parameters):
        lead = lead[:-1]
        pairs = zip(lead[::-1], batch[::-1], strict=False)
        if len(lead) > len(batch) or any(size not in (1, full) for size, full in pairs):
            expected = f"leading axes of 1 or as in {list(batch)} to go with x_piece {list(x.shape)}"
            raise ValueError(f"{argument}: expected {expected}, got {list(value.shape)}")
    return name, transition


def in_logs(transition: Transition, lead: int, log_params: bool) -> Transition:
    """The transition with float64 logarithms of parameters, which have `lead` leading axes."""
    return transition.with_lead(lead).map(lambda weights: log_weights(weights, log_params, torch.float64))


def after_each(transition: Transition, messages: Tensor) -> Tensor:
    """The logarithmic messages [*B, k, c], each after its step of a transition with all leading axes."""
    axis = messages.dim() - 2
    if any(parameter.shape[axis] != 1 for parameter in transition.parameters):
        return transition.apply(messages[..., None, :], LOG)[..., 0, :]
    return transition.map(lambda parameter: parameter.squeeze(axis)).apply(messages, LOG)


def log_norm(message: ScaledMessage) -> Tensor:
    """The log-partition [*B] of a message with sum 1, with the gradient that the logarithm of its sum has."""
    values, scale, error = message
    total = (scale + error)[..., 0]
    if not values.requires_grad:
        return total
    norm = LOG.sum(values, -1)
    return total + torch.where(norm == -torch.inf, 0.0, norm - norm.detach())


def scaled(message: ScaledMessage, term: Tensor) -> ScaledMessage:
    """The message with a term [*B, 1] added to its scale; an infinite scale has no rounding error."""
    scale, error = two_sum(message.scale, message.error, term)
    return message._replace(scale=scale, error=error.where(scale.isfinite(), 0.0))


def selected(mask: Tensor, message: ScaledMessage, replacement: ScaledMessage) -> ScaledMessage:
    """The message for the sequences in a mask [*B], and the other one for the rest."""
    return ScaledMessage(*(torch.where(mask[..., None], *pair) for pair in zip(message, replacement, strict=True)))


def mapped(function: Callable[..., Tensor], value: Any, *values: Any) -> Any:
    """The value with `function(*tensors)` for each of its tensors and those in its place in `others`."""
    if isinstance(value, Tensor):
        return function(value, *values)
    if isinstance(value, Transition):
        columns = zip(*(structure.parameters for structure in (value, *values)), strict=True)
        return value.with_parameters(*(function(*column) for column in columns))
    if isinstance(value, tuple):
        return type(value)(*(mapped(function, *column) for column in zip(value, *values, strict=True)))
    return value


def best_for_each(message: Tensor) -> Tensor:
    """The best state for each state [*B, c], the lowest of equals; 0 for an impossible sequence."""
    return message.max(-1, keepdim=True).indices.expand_as(message)
