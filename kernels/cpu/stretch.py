"""A stretch of a longer chain: a message with its scale enters it, and one leaves."""

import ctypes

import torch
from torch import Tensor

from ..chain import Chain
from .arguments import Arguments, Call, function, run
from .library import in_large_pages


class Stretch:
    """The arguments of stretches of one shape, but for addresses. Of a chain only shapes and strides are looked at.

    `head`: a message enters, and the first of the matrices, of which there are as many as steps or one, leads from it
    into the first step; otherwise the stretch begins at p0.
    """

    def __init__(self, chain: Chain, *, head: bool) -> None:
        call = Call(chain)
        self._arguments, self._spans, self._dtype = call.arguments, call.spans(), chain.dtype
        self._arguments.steps, self._head = chain.v + head, head
        self._grid = chain.g, chain.m
        self._one, self._entering = chain.new(1).fill_(float(not chain.log_params)), chain.new(*self._grid, chain.c)
        self._lossy = torch.empty(chain.g, chain.m, dtype=torch.bool, device="cpu")

    def forward(
        self,
        operands: tuple[Tensor, Tensor, Tensor],
        carried: tuple[Tensor, Tensor, Tensor],
        ends: Tensor | None,
        messages: Tensor | None,
        shares: Tensor | None,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, int]:
        """What is carried on; which sequences were redone (g, m), valid until the next call, and how many.

        `carried`, contiguous, are the logarithm of a message [*B, c] with sum 1, the log-partition [*B], and what its
        rounding has lost [*B]; `operands` are x, bulk and p0. `ends` int64 (g, m) counts the step of what enters.
        Messages are written into `messages` (v, g, m, c), that of what enters too, and those with sum 1 into `shares`
        [*B, v, c].
        """
        a, (message, total, lost) = Arguments.from_buffer_copy(self._arguments), carried
        found = torch.empty_like(message), torch.empty_like(total), torch.empty_like(lost)
        if self._head:
            self._entering.view(message.shape).copy_(message)
            a.entering, a.p0_set, a.p0_member, a.p0_state = self._entering.data_ptr(), 0, 0, 0
        x, bulk, p0 = operands
        a.x, a.bulk, a.p0 = x.data_ptr(), bulk.data_ptr(), (self._one if self._head else p0).data_ptr()
        a.leaving, a.log_norm, a.lost = (tensor.data_ptr() for tensor in found)
        a.taken, a.lacking = total.data_ptr(), lost.data_ptr()
        a.lossy = self._lossy.data_ptr()
        if shares is not None:
            member = shares.stride(-3) if shares.dim() > 2 else 0
            a.shares, a.grad_step = shares.data_ptr(), shares.stride(-2)
            a.grad_set, a.grad_member = self._grid[1] * member, member
        if messages is not None:
            a.messages = messages.data_ptr()
        if ends is not None:
            order = torch.argsort(ends, dim=1, descending=True, stable=True)
            a.ends, a.order = ends.data_ptr(), order.data_ptr()
        redone = run(a, self._dtype, "forward", self._spans)
        if redone:
            run(a, self._dtype, "redo_forward", self._spans)
        return found, self._lossy, redone

    def repeated(self, bulk: Tensor) -> "Repeated | None":
        """The same with a head, one after the other, by one matrix; None where several threads share a stretch."""
        if not self._head or len(self._spans) > 1:
            return None
        arguments = Arguments.from_buffer_copy(self._arguments)
        arguments.last, arguments.bulk, arguments.p0 = (
            self._grid[0] * self._grid[1],
            bulk.data_ptr(),
            self._one.data_ptr(),
        )
        arguments.p0_set = arguments.p0_member = arguments.p0_state = 0
        return Repeated(arguments, self._dtype, self._grid[1], [bulk, self._one])


class Repeated:
    """Stretches of one shape, one after the other: a call of the library each, of which only addresses change."""

    def __init__(self, arguments: Arguments, dtype: torch.dtype, members: int, held: list[Tensor]) -> None:
        self._arguments, self._dtype, self._members, self._held = arguments, dtype, members, held
        self._call, self._reference = function("stretch", dtype), ctypes.byref(arguments)
        room = function("stretch_room", dtype)(self._reference) + 64
        self._room = torch.empty(room, dtype=torch.uint8, device="cpu")
        arguments.room = self._room.data_ptr() + 63 & ~63

    def forward(
        self, x: Tensor, carried: tuple[Tensor, Tensor, Tensor], shares: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, int]:
        """What is carried on, the log-partition [*B] in the dtype of x, and how many sequences were redone."""
        a, (message, total, lost) = self._arguments, carried
        after = torch.empty_like(message), torch.empty_like(total), torch.empty_like(lost)
        value = torch.empty_like(total, dtype=self._dtype)
        a.x, a.arriving, a.taken, a.lacking = x.data_ptr(), message.data_ptr(), total.data_ptr(), lost.data_ptr()
        a.leaving, a.log_norm, a.lost = after[0].data_ptr(), after[1].data_ptr(), after[2].data_ptr()
        a.value = value.data_ptr()
        if shares is not None:
            member = shares.stride(-3) if shares.dim() > 2 else 0
            a.shares, a.grad_step = in_large_pages(shares).data_ptr(), shares.stride(-2)
            a.grad_set, a.grad_member = self._members * member, member
        return after, value, self._call(self._reference)
