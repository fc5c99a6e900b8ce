"""A stretch of a longer chain by the C library: a forward message with its scale enters, and another one leaves."""

import ctypes

import torch
from torch import Tensor

from ..chain import Chain
from .arguments import Arguments, Call, function, run
from .library import in_large_pages

# the logarithm of a message [*B, c] with sum 1, the log-partition [*B, 1], and its rounding error [*B, 1]; contiguous
Carried = tuple[Tensor, Tensor, Tensor]


def _carry(a: Arguments, carried: Carried, members: int, shares: Tensor | None) -> Carried:
    """Memory for what leaves a stretch; the arguments point to it, to what enters, and to `shares` if given."""
    message, total, lost = carried
    after = torch.empty_like(message), torch.empty_like(total), torch.empty_like(lost)
    a.entering_log_norm, a.entering_error = total.data_ptr(), lost.data_ptr()
    a.leaving, a.log_norm, a.log_norm_error = after[0].data_ptr(), after[1].data_ptr(), after[2].data_ptr()
    if shares is not None:
        member = shares.stride(-3) if shares.dim() > 2 else 0
        a.filtered, a.grad_step = in_large_pages(shares).data_ptr(), shares.stride(-2)
        a.grad_set, a.grad_member = members * member, member
    return after


class Stretch:
    """The arguments of stretches of one shape except for addresses; only shapes and strides of `chain` are read.

    `head`: a message enters, and the first of the matrices, as many as steps or one, leads from it into the first step;
    otherwise the stretch begins with p0.
    """

    def __init__(self, chain: Chain, *, head: bool) -> None:
        call = Call(chain)
        self._arguments, self._spans, self._dtype = call.arguments, call.spans(), chain.dtype
        self._arguments.steps, self._head, self._members = chain.v + head, head, chain.m
        self._one = chain.new(1).fill_(float(not chain.log_params))
        self._entering = chain.new(chain.g, chain.m, chain.c)
        self._lossy = torch.empty(chain.g, chain.m, dtype=torch.bool, device="cpu")
        if head:
            self._arguments.p0_set = self._arguments.p0_member = self._arguments.p0_state = 0

    def forward(
        self,
        operands: tuple[Tensor, Tensor, Tensor],
        carried: Carried,
        ends: Tensor | None,
        messages: Tensor | None,
        shares: Tensor | None,
    ) -> tuple[Carried, Tensor, int]:
        """The message that leaves; whether sequences were redone (g, m), valid until the next call; and their number.

        `operands` are x, bulk and p0. `ends` int64 (g, m) are numbers of steps, an entering message counted as one.
        Messages are written to `messages` (v, g, m, c), the entering one first, and those with sum 1 to `shares`
        [*B, v, c].
        """
        a, (x, bulk, p0) = Arguments.from_buffer_copy(self._arguments), operands
        after = _carry(a, carried, self._members, shares)
        if self._head:
            self._entering.view(carried[0].shape).copy_(carried[0])
            a.entering = self._entering.data_ptr()
        a.x, a.bulk, a.p0 = x.data_ptr(), bulk.data_ptr(), (self._one if self._head else p0).data_ptr()
        a.lossy = self._lossy.data_ptr()
        if messages is not None:
            a.messages = messages.data_ptr()
        if ends is not None:
            order = torch.argsort(ends, dim=1, descending=True, stable=True)
            a.ends, a.order = ends.data_ptr(), order.data_ptr()
        return after, self._lossy, run(a, self._dtype, "value", self._spans)

    def repeated(self, x: Tensor, bulk: Tensor) -> "Repeated | None":
        """Stretches with a head and one matrix, one after the other; None where several threads share a stretch."""
        if not self._head or len(self._spans) > 1:
            return None
        arguments = Arguments.from_buffer_copy(self._arguments)
        arguments.last = arguments.sets * arguments.members
        arguments.bulk, arguments.p0 = bulk.data_ptr(), self._one.data_ptr()
        return Repeated(arguments, x.new_empty(x.shape[:-2]), [bulk, self._one])


class Repeated:
    """Stretches of one shape but for their lengths: one call of the library for each, with only addresses changed."""

    def __init__(self, arguments: Arguments, log_norm: Tensor, held: list[Tensor]) -> None:
        self._arguments, self._log_norm, self._held = arguments, log_norm, held
        self._call, self._reference = function("stretch", log_norm.dtype), ctypes.byref(arguments)
        self._room = torch.empty(self._call(self._reference) + 64, dtype=torch.uint8, device="cpu")
        arguments.room = self._room.data_ptr() + 63 & ~63

    def forward(self, x: Tensor, carried: Carried, shares: Tensor | None) -> tuple[Carried, Tensor, int]:
        """The message that leaves, the log-partition [*B] in the dtype of x, and the number of redone sequences."""
        a = self._arguments
        after = _carry(a, carried, a.members, shares)
        value = torch.empty_like(self._log_norm)
        a.x, a.entering_double, a.value = x.data_ptr(), carried[0].data_ptr(), value.data_ptr()
        a.steps, a.x_step = x.shape[-2] + 1, x.stride(-2)
        return after, value, self._call(self._reference)
