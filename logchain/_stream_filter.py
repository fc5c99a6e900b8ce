"""The forward messages of a piece that nobody differentiates: those of the chain kernels, a block of steps at a time.

A block is a chain of its own. What earlier ones left, a message in float64 logarithms, is its first row of
log-potentials. Its last row is 0 in place of x, which is added to what arrives there: so nothing that the emission
hides is lost to the next block.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _device
from ._chain_operators import chain_of
from ._operators import operator
from ._rescues import report_chains
from ._stream import Given, Piece, differentiable, filtering, posterior, recovered, shifted
from .kernels.exponentials import finite
from .kernels.summation import exact_sum

# values of x, and of matrices that change, in a block: some megabytes, and enough to hide what a block costs
_BLOCK = 2**19


class Filtered(NamedTuple):
    """After a piece: the message [*B, c] with maximum 0, what was taken out [*B], and what its rounding lost [*B].

    `posteriors` [*B, k, c] of the states given all up to each, and the `messages` [*B, k, c] as logarithms with maximum
    0, where they are asked for; 0, and anything, where a sequence has no variable.
    """

    message: Tensor
    taken: Tensor
    lost: Tensor
    posteriors: Tensor | None
    messages: Tensor | None


class Room:
    """Memory that every piece uses again: to be given a fresh one each time costs as much as a third of the work."""

    def __init__(self) -> None:
        self._held = torch.empty(0, dtype=torch.float64)

    def of(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """An uninitialised float64 tensor on the device of `like`."""
        if self._held.device != like.device or self._held.numel() < math.prod(shape):
            self._held = like.new_empty(math.prod(shape), dtype=torch.float64)
        return self._held[: math.prod(shape)].view(shape)


def filtered(given: Given, message: Tensor, dtype: torch.dtype | None, piece: Piece | None, room: Room) -> Filtered:
    """Filter a piece, with posteriors of that dtype, and with messages where its logarithms are there."""
    if differentiable(given.x, given.bulk, given.p0, message):
        return _by_autograd(given, message, dtype, given.logs() if piece is None else piece)
    with torch.no_grad():
        if torch.compiler.is_compiling():
            after, taken, lost, posteriors, messages = _operator(*given, message, dtype, piece is not None)
        else:
            with _device.arithmetic_on(given.x):
                found = _by_kernels(given, message, dtype, piece is not None, room)
            after, taken, lost, posteriors, messages = found
        logs = None if piece is None else recovered(piece, message, messages)
        return Filtered(after, taken, lost, None if dtype is None else posteriors, logs)


def _by_autograd(given: Given, message: Tensor, dtype: torch.dtype | None, piece: Piece) -> Filtered:
    messages, terms = filtering(piece, message)
    posteriors = None
    if dtype is not None:
        posteriors = torch.where(piece.active[..., None], posterior(messages[..., 1:, :]), 0.0).to(dtype)
    sums = _total([torch.zeros_like(message[..., 0]), *terms.flatten(-2).unbind(-1)])
    return Filtered(messages[..., -1, :].clone(), *sums, posteriors, messages[..., 1:, :])


def _operator_by_kernels(*args: Any) -> tuple[Tensor, ...]:
    *given, message, dtype, logs = args
    return _by_kernels(Given(*given), message, dtype, logs, Room())


def _by_kernels(
    given: Given, message: Tensor, dtype: torch.dtype | None, logs: bool, room: Room
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, bulk = given.x, given.bulk
    outs = _outs(x, dtype, logs)
    posteriors, messages = outs[0] if dtype is not None else None, outs[1] if logs else None
    if x.numel() == 0:
        nothing = message.new_zeros(message.shape[:-1])
        return message.clone(), nothing, nothing.clone(), *outs
    starting, first = _starting(given), 0
    terms: list[Tensor] = []
    if starting is None:  # some start and others go on
        found, taken = filtering(given.first().logs(), message)
        message, first, starting = found[..., 1, :].clone(), 1, False
        terms += taken.flatten(-2).unbind(-1)
        for out, value in ((posteriors, posterior(message)), (messages, message)):
            if out is not None:
                out[..., 0, :] = value
    # values of x, and of matrices that change, to a step
    step = (x.numel() + (bulk.numel() if bulk.shape[-3] > 1 else 0)) // x.shape[-2]
    size = max(2, _BLOCK // step)
    rows = room.of(x, (min(size, x.shape[-2]) + 1, *message.shape))
    for start in range(first, x.shape[-2], size):
        block = _Block(given, None if starting else message, start, min(start + size, x.shape[-2]), rows)
        if posteriors is not None:
            block.write_posteriors(posteriors)
        if messages is not None:
            block.write_messages(messages)
        message, parts = block.left()
        terms += parts
        for out, value in ((posteriors, posterior(message)), (messages, message)):
            if out is not None:
                block.write_last(out, value)
        starting = False
    if posteriors is not None and given.counts is not None:
        posteriors.masked_fill_(~given.active()[..., None], 0.0)
    return message, *_total(terms), *outs


def _total(terms: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of terms [*B], and what its rounding lost."""
    if len(terms) == 1:
        return terms[0], torch.zeros_like(terms[0])
    found, lost = exact_sum(torch.stack(terms))
    return found.clone(), lost


def _outs(x: Tensor, dtype: torch.dtype | None, logs: bool) -> tuple[Tensor, Tensor]:
    """Posteriors and messages, empty where they are not wanted."""
    return (
        x.new_empty(x.shape if dtype is not None else (0,), dtype=dtype),
        x.new_empty(x.shape if logs else (0,), dtype=torch.float64),
    )


def _shapes(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    message, dtype, logs = args[-3:]
    sums = (message.new_empty(message.shape[:-1]) for _ in range(2))
    return torch.empty_like(message), *sums, *_outs(x, dtype, logs)


_operator = operator(
    "filtered(Tensor x, Tensor bulk, Tensor p0, bool own, Tensor fresh, bool unlinked, Tensor? counts, bool log_params,"
    " Tensor message, ScalarType? dtype, bool logs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _operator_by_kernels,
    _shapes,
)


def _starting(given: Given) -> bool | None:
    """Whether all sequences start with this piece, and have two variables at least; None for some, or for not known.

    What p0 alone leads to has not been looked at by any step.
    """
    counts, long = given.counts, given.x.shape[-2] > 1
    if _device.on_gpu(given.x):  # nothing is looked at
        return True if given.unlinked and counts is None and long else None
    if not given.fresh.any():
        return False
    return True if long and given.fresh.all() and (counts is None or bool((counts > 1).all())) else None


class _Block:
    """The variables from `start` to before `stop` of a piece, behind the message [*B, c] or, without one, at p0.

    `room` (stop - start + 1 or more, *B, c) float64 is written, and must stay until the block is done with.
    """

    def __init__(self, given: Given, message: Tensor | None, start: int, stop: int, room: Tensor) -> None:
        x, bulk, p0, *_, counts, log_params = given
        self._start, self._stop, self._before = start, stop, message
        self._head = head = int(message is not None)
        self._rows = rows = room[: head + stop - start].movedim(0, -2)  # (*B, rows, c)
        rows[..., head:, :] = x[..., start:stop, :]
        if message is not None:
            rows[..., 0, :] = message
            p0 = p0.new_full(p0.shape[-1:], 0.0 if log_params else 1.0)
        if bulk.shape[-3] != 1:
            bulk = bulk[..., start + 1 - head : stop, :, :]
            if not _device.on_gpu(x):
                bulk = bulk.double()  # a CPU's loops take one dtype
        self._counts = None if counts is None else (counts - start).clamp(0, stop - start)
        self._taken = self._take_out() if x.dtype == torch.float64 else []
        if self._counts is None:
            ends = None
            self._last = rows[..., -1, :].clone()
            rows[..., -1, :] = 0.0
        else:
            ends = self._counts + head
            at = (ends - 1)[..., None, None].expand(*x.shape[:-2], 1, x.shape[-1])
            self._last = rows.gather(-2, at)[..., 0, :]
            rows.scatter_(-2, at, 0.0)
        self._layout, self._chain = chain_of(rows, bulk, p0, ends, log_params)
        kernels = _device.chain_kernels(rows)
        found = kernels.forward(self._chain, keep=True, steps=rows.shape[-2])
        self._log_norm, self._messages, _, self.redone = found
        # a CPU keeps linear messages but for the sequences redone
        self._linear = self.redone.dtype == torch.bool
        self._some_logs = not self._linear or bool(self.redone.any())
        report_chains(self.redone)

    def left(self) -> tuple[Tensor, list[Tensor]]:
        """The message after the block, and what was taken out of it."""
        layout, messages, ends = self._layout, self._messages, self._chain.ends
        if ends is None:
            arrived = messages[-1]
        else:
            arrived = messages.gather(0, (ends - 1)[None].expand(1, *messages.shape[1:]))[0]
        message, top = shifted(layout.states(self._shares(arrived).view(self._lead)) + self._last)
        norm = layout.batched(self._log_norm)
        taken = norm.masked_fill(norm == -torch.inf, 0.0) + top[..., 0]
        if self._counts is not None and self._before is not None:
            moved = self._counts > 0
            message = torch.where(moved[..., None], message, self._before)
            taken = torch.where(moved, taken, 0.0)
        return message, [taken, *self._taken]

    def write_posteriors(self, out: Tensor) -> None:
        """The shares of the states [*B, k, c], of this block's part of them, but of each sequence's last variable."""
        messages = self._messages[self._head :]
        view = self._layout.steps_first(out[..., self._start : self._stop, :])
        shape = (len(messages), *self._lead)
        if self._linear:
            sums = messages.sum(-1, keepdim=True)
            sums.masked_fill_(sums == 0, 1.0)
            torch.div(messages.view(shape), sums.view(*shape[:-1], 1), out=view)
        if self._some_logs:
            again = posterior(messages).view(shape)
            if self._linear:
                again = torch.where(self.redone.view(*self._lead[:-1], 1), again, view.double())
            view.copy_(again)

    def write_last(self, out: Tensor, value: Tensor) -> None:
        """The value [*B, c] of each sequence's last variable."""
        out = out[..., self._start : self._stop, :]
        if self._counts is None:
            out[..., -1, :] = value
            return
        at = (self._counts - 1).clamp(min=0)[..., None, None].expand(*value.shape[:-1], 1, value.shape[-1])
        out.scatter_(-2, at, value[..., None, :].to(out.dtype))

    def write_messages(self, out: Tensor) -> None:
        """The messages as logarithms, -inf also for what has underflowed."""
        messages = self._logs(self._messages[self._head :])
        out = self._layout.steps_first(out[..., self._start : self._stop, :])
        out.copy_(messages.view(len(messages), *self._lead))

    def _take_out(self) -> list[Tensor]:
        """Take the largest entry out of each variable; returns their sum [*B] in two parts.

        The log-partition of a block is rounded, and large ones of either sign would show that in their sum.
        """
        x = self._rows[..., self._head :, :]
        top = x.amax(-1)  # (*B, n)
        top.masked_fill_(top == -torch.inf, 0.0)
        x -= top[..., None]
        if self._counts is not None:
            there = torch.arange(top.shape[-1], device=top.device) < self._counts[..., None]
            top = torch.where(there, top, 0.0)
        return list(exact_sum(top.movedim(-1, 0).contiguous()))

    @property
    def _lead(self) -> tuple[int, ...]:
        return (*self._chain.lead, self._chain.c)

    def _shares(self, message: Tensor) -> Tensor:
        """Logarithms (g, m, c) of a message less that of its sum."""
        if self._linear and not self._some_logs:
            total = message.sum(-1, keepdim=True)
            return (message / total.masked_fill_(total == 0, 1.0)).log_()
        message = self._logs(message)
        return message - finite(torch.logsumexp(message, -1, keepdim=True))

    def _logs(self, messages: Tensor) -> Tensor:
        """(..., g, m, c) as they were kept, as logarithms."""
        if not self._linear:
            return messages
        if not self._some_logs:
            return messages.log()
        return torch.where(self.redone[..., None], messages, messages.log())
