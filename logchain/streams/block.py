"""Some variables of a piece as a chain of its own, whose messages the chain kernels find.

What earlier ones left, a message in float64 logarithms, is its first row of log-potentials. Its last row is 0 in place
of x, which is added to what arrives there: so nothing that the emission hides is lost to the next block.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd.chain_operators import log_norm_here
from ..kernels.numbers import exact_sum, finite
from ..layout import Layout
from ..operands import Operands, arithmetic_dtype
from .piece import Given, normalised, posterior


class Memory:
    """What every piece uses again: to be given a fresh one each time costs as much as a third of the work."""

    def __init__(self) -> None:
        self._held = self._last = torch.empty(0)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor: the one that was taken before, if it had this shape."""
        if self._held.dtype != dtype or self._held.device != device or self._held.numel() < math.prod(shape):
            self._held = self._last = torch.empty(math.prod(shape), dtype=dtype, device=device)
        if self._last.shape != shape:
            self._last = self._held[: math.prod(shape)].view(shape)
        return self._last


class Rows(NamedTuple):
    """Log-potentials of a block (n, *B, c); as [*B, n, c]; those of its piece; the first and the last ones [*B, c]."""

    memory: Tensor
    all: Tensor
    piece: Tensor
    first: Tensor
    last: Tensor


class Room:
    """Memory for the log-potentials and the messages of a block."""

    def __init__(self) -> None:
        self._memory, self.messages = Memory(), Memory()
        self._rows: tuple[int, Rows] | None = None
        self._stretch: tuple[Any, Any] = None, None
        self._repeated: tuple[Any, Any] = None, None

    def stretch(self, key: Any, make: Callable[[], Any]) -> Any:
        """What was made for the last piece of the same key, or is made."""
        if self._stretch[0] != key:
            self._stretch = key, make()
        return self._stretch[1]

    def repeat(self, x: Tensor, bulk: Tensor, stretch: Any) -> None:
        """Take a stretch for pieces that lie as this one does, behind others and with the stream's own matrix."""
        key = x.shape, x.stride(), x.dtype
        self._repeated = key, stretch.repeated(bulk) if self._repeated[0] == key else None

    def repeated(self, x: Tensor) -> Any:
        """The `Repeated` for a piece that lies as the last one did; None where there is none."""
        key, repeated = self._repeated
        return repeated if key == (x.shape, x.stride(), x.dtype) and not x.is_neg() else None

    def rows(self, x: Tensor, dtype: torch.dtype, head: int) -> Rows:
        """For variables [*B, k, c] behind a head; the views are made once for pieces of one shape."""
        shape = (head + x.shape[-2], *x.shape[:-2], x.shape[-1])
        memory = self._memory.take(shape, dtype, x.device)
        if self._rows is None or self._rows[0] != head or self._rows[1].memory is not memory:
            rows = memory.movedim(0, -2)
            self._rows = head, Rows(memory, rows, rows[..., head:, :], rows[..., 0, :], rows[..., -1, :])
        return self._rows[1]


class Block:
    """The variables from `start` to before `stop` of a piece, behind the message [*B, c] or, without one, at p0.

    It is done with before the next one begins, which takes its room.
    """

    def __init__(self, given: Given, message: Tensor | None, start: int, stop: int, room: Room) -> None:
        x, bulk, p0, *_, counts, log_params, _ = given
        self._start, self._stop, self._before = start, stop, message
        self._head = head = int(message is not None)
        x = x[..., start:stop, :]
        self._rows = rows = room.rows(x, arithmetic_dtype(x, bulk, p0), head)
        rows.piece.copy_(x)
        if message is not None:
            rows.first.copy_(message)
            p0 = rows.first.new_full(p0.shape[-1:], 0.0 if log_params else 1.0)
        if bulk.shape[-3] != 1:
            bulk = bulk[..., start + 1 - head : stop, :, :]
        self._taken = self._take_out(counts) if x.dtype == torch.float64 else []
        self._ends = ends = None
        if counts is None:
            self._last = rows.last.to(torch.float64, copy=True)
            rows.last.fill_(0.0)
        else:
            self._ends = ends = (counts - start).clamp(0, stop - start) + head
            at = (ends - 1)[..., None, None].expand(*ends.shape, 1, x.shape[-1])
            self._last = rows.all.gather(-2, at)[..., 0, :].double()
            rows.all.scatter_(-2, at, 0.0)
        self._layout = Layout.of(rows.all, bulk)
        found = log_norm_here(Operands(rows.all, bulk, p0, ends, log_params), True, 1)
        self._log_norm, self._messages, _, redone = found
        # a CPU keeps linear messages but for the sequences redone
        self._linear = redone.dtype == torch.bool
        self._redone = redone if self._linear and redone.any() else None

    def left(self) -> tuple[Tensor, list[Tensor]]:
        """The message after the block, with sum 1, and the terms that it adds to the log-partition."""
        messages, ends = self._messages, self._ends
        if ends is None:
            arrived = messages[-1]
        else:
            at = self._layout.sequences(ends - 1)[None, ..., None].expand(1, *messages.shape[1:])
            arrived = messages.gather(0, at)[0]
        arrived = self._layout.states(arrived.view(self._lead))
        if self._linear and self._redone is None:
            arrived = arrived.double()
            # what is impossible has no share; a large sum's logarithm would take the message's last digits
            total = arrived.sum(-1, keepdim=True)
            arrived = arrived.div_(total.masked_fill_(total == 0, 1.0)).log_()
            share = torch.zeros_like(total[..., 0])
        else:
            redone = None if self._redone is None else self._layout.batched(self._redone)[..., None]
            arrived = _logs(arrived.double(), self._linear, redone)
            share = finite(torch.logsumexp(arrived, -1))
        message, norm = normalised(arrived + self._last)
        norm = norm - share + self._log_norm
        if ends is not None and self._before is not None:
            moved = ends > 1
            message, norm = torch.where(moved[..., None], message, self._before), torch.where(moved, norm, 0.0)
        return message, [norm, *self._taken]

    def write_posteriors(self, out: Tensor) -> None:
        """The shares of the states [*B, k, c], of this block's part of them, but of each sequence's last variable."""
        messages = self._messages[self._head :]
        view = self._layout.steps_first(out[..., self._start : self._stop, :])
        shape = (len(messages), *self._lead)
        if self._linear:
            flat = messages.view(-1, messages.shape[-1])
            sums = torch.mv(flat, flat.new_ones(flat.shape[-1]))
            sums.masked_fill_(sums == 0, 1.0)  # nothing is possible, and 0 stays 0
            torch.mul(messages.view(shape), sums.reciprocal_().view(*shape[:-1], 1), out=view)
        if not self._linear or self._redone is not None:
            again = posterior(messages).view(shape)
            if self._redone is not None:
                again = torch.where(self._redone.view(*self._lead[:-1], 1), again, view)
            view.copy_(again)

    def write_last(self, out: Tensor, value: Tensor) -> None:
        """The value [*B, c] of each sequence's last variable."""
        counts = None if self._ends is None else self._ends - self._head
        write_last(out[..., self._start : self._stop, :], counts, value)

    def write_messages(self, out: Tensor) -> None:
        """The messages as logarithms, -inf also for what has underflowed."""
        messages = self._messages[self._head :].double()
        messages = _logs(messages, self._linear, None if self._redone is None else self._redone[..., None])
        out = self._layout.steps_first(out[..., self._start : self._stop, :])
        out.copy_(messages.view(len(messages), *self._lead))

    def _take_out(self, counts: Tensor | None) -> list[Tensor]:
        """Take the largest entry out of each variable; returns their sum [*B] in two parts.

        The log-partition of a block is rounded, and large ones of either sign would show that in their sum.
        """
        x = self._rows.piece
        top = x.amax(-1)  # (*B, n)
        top.masked_fill_(top == -torch.inf, 0.0)
        x -= top[..., None]
        if counts is not None:
            there = torch.arange(self._start, self._stop, device=top.device) < counts[..., None]
            top = torch.where(there, top, 0.0)
        return list(exact_sum(top.movedim(-1, 0).contiguous()))

    @property
    def _lead(self) -> tuple[int, ...]:
        """The axes of states, in the order of the kernels."""
        return tuple(self._layout.steps_first(self._rows.all).shape[1:])


def write_last(out: Tensor, counts: Tensor | None, value: Tensor) -> None:
    """The value [*B, c] of the last of so many variables [*B] of each sequence, or of all of them."""
    if counts is None:
        out[..., -1, :] = value
        return
    at = (counts - 1).clamp(min=0)[..., None, None].expand(*value.shape[:-1], 1, value.shape[-1])
    out.scatter_(-2, at, value[..., None, :].to(out.dtype))


def _logs(messages: Tensor, linear: bool, redone: Tensor | None) -> Tensor:
    """Messages as they were kept, as logarithms."""
    return linear_as_logs(messages, redone) if linear else messages


def linear_as_logs(messages: Tensor, redone: Tensor | None) -> Tensor:
    """Linear messages as logarithms; those `redone` are."""
    # the logarithm of a large message would take its last digits
    top = messages.amax(-1, keepdim=True)
    logs = (messages / top.masked_fill(top == 0, 1.0)).log()
    return logs if redone is None else torch.where(redone, messages, logs)
