"""A stretch of a longer chain by the C library: a forward message with its scale enters, and another one leaves."""

import torch
from torch import Tensor

from ..chain import Chain
from .arguments import offsets
from .library import in_large_pages
from .template import Template

# the logarithm of a message [*B, c] with sum 1, the log-partition [*B, 1], and its rounding error [*B, 1]
Carried = tuple[Tensor, Tensor, Tensor]


class Stretch(Template):
    """The arguments of stretches of one shape except for addresses; only shapes and strides of `chain` are read.

    If it is `entered`, the first of the matrices, as many as steps or one, leads from the message that enters into the
    first step; otherwise it starts at p0.
    """

    def __init__(self, chain: Chain, *, entered: bool) -> None:
        super().__init__(chain, entered=entered)
        self._name, shares = "stretch" if entered else "value", self.arguments.out
        self._places = offsets((chain.g * chain.m,), (chain.v * chain.c,))
        shares.step, shares.at = chain.c, self._places.data_ptr()

    def forward(
        self,
        x: Tensor,
        bulk: Tensor,
        carried: Carried,
        *,
        p0: Tensor | None = None,
        ends: Tensor | None = None,
        messages: Tensor | None = None,
        redone: Tensor | None = None,
        shares: Tensor | None = None,
        value: Tensor | None = None,
    ) -> tuple[Carried, int]:
        """The message that leaves, and the number of sequences that were computed exactly.

        Without a message that enters there is a p0. `ends` int64 (g, m) are numbers of steps, that message counted as
        one. Where there is memory, messages are written to `messages` (v, g, m, c), the entering one first, and which
        of them are logarithms to `redone` (g, m); those with sum 1 to `shares` [*B, v, c], contiguous, and
        log-partitions to `value`.
        """
        a = self.of(x, bulk, p0)
        message, total, error = (part.contiguous() for part in carried)
        after = torch.empty_like(message), torch.empty_like(total), torch.empty_like(error)
        before = a.around
        before.entering_double, before.entering_log_norm = message.data_ptr(), total.data_ptr()
        before.entering_error, before.leaving = error.data_ptr(), after[0].data_ptr()
        a.log_norm, before.log_norm_error = after[1].data_ptr(), after[2].data_ptr()
        if shares is not None:
            a.filtered = in_large_pages(shares).data_ptr()
        if messages is not None and redone is not None:
            a.messages.data, a.lossy = messages.data_ptr(), redone.data_ptr()
        if ends is not None:
            order = torch.argsort(ends, dim=1, descending=True, stable=True)
            a.ends, a.order = ends.data_ptr(), order.data_ptr()
        if value is not None:
            a.value = value.data_ptr()
        return after, self.run(self._name, a)
