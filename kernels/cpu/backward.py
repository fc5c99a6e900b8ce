"""`kernels.plain.backward` by the loops of the C library."""

import torch
from torch import Tensor

from ..chain import Chain
from ..message import Kept
from .arguments import Call
from .library import in_large_pages


def backward(
    chain: Chain,
    kept: Kept,
    weight: Tensor,
    following: Tensor | None,
    grad_x: Tensor | None,
    grad_bulk: Tensor | None,
) -> Tensor:
    """See `kernels.plain.backward`; sequences with a weight of 0 are not looked at."""
    g, m, c = chain.g, chain.m, chain.c
    weight = weight.double().resolve_neg().contiguous()
    lossy, log_norm = kept.redone.to(torch.uint8, copy=True), kept.log_norm.contiguous()
    preceding = torch.empty(g, m, c, dtype=torch.float64, device="cpu")
    call = Call(chain, entered=kept.entered)
    call.point(messages=kept.messages, log_norm=log_norm, lossy=lossy, weight=weight)
    call.point(uncounted=torch.empty(g, m, dtype=torch.int64, device="cpu"))
    if kept.entered:  # of what entered the kept message is read, and only that
        call.point(entering=kept.messages, leaving=preceding)
    else:
        call.point(grad_p0=preceding)
    if following is not None:
        call.point(following=following.contiguous())
    into = _rows_of(chain, grad_x)
    if into is not None:
        call.rows("grad", into)
    counts = _Counts(call, grad_bulk)
    lossy_count = call.run("backward", counts.spans, counts.by_thread)
    counts.add_up()
    if lossy_count:
        call.run("redo_backward", *counts.one_by_one())
    counts.write()
    if grad_x is not None and into is not None and into is not grad_x:
        grad_x.copy_(into)
    return preceding if kept.entered else preceding.view(*chain.lead, c)


def _rows_of(chain: Chain, grad_x: Tensor | None) -> Tensor | None:
    """Where the gradient of x is written: its own memory, or a copy of another dtype or with rows apart."""
    if grad_x is None:
        return None
    plain = grad_x.dtype == chain.dtype and (grad_x.stride(-1) == 1 or chain.c == 1)
    return in_large_pages(grad_x) if plain else chain.new(*grad_x.shape)


class _Counts:
    """The expected counts of transitions: each thread's own where threads share a matrix, as far as memory goes.

    One matrix for all steps has its counts added up in float64; many have their gradients written in place.
    """

    def __init__(self, call: Call, grad_bulk: Tensor | None) -> None:
        chain = call.chain
        self._call, self._into, self.spans = call, grad_bulk, call.spans()
        self._one, self._sums, self.by_thread = len(chain.bulk) == 1, list[Tensor](), list[dict[str, Tensor]]()
        if grad_bulk is None or call.arguments.steps == 1:
            return
        g, m, c = chain.g, chain.m, chain.c
        in_large_pages(grad_bulk)
        if g > 1:
            self.spans = call.spans(whole_sets=True)
        else:  # copies of the gradient take as much as two messages at most
            self.spans = call.spans(most=None if self._one else max(1, m // c))
        copies = len(self.spans) if g == 1 else 1
        if self._one:
            self._sums = [torch.zeros(g, c, c, dtype=torch.float64, device="cpu") for _ in range(copies)]
        else:
            self._sums = [grad_bulk, *(torch.empty_like(grad_bulk) for _ in range(1, copies))]
            call.matrices("count", grad_bulk)
        name = "counts" if self._one else "grad_bulk"
        self.by_thread = [{name: self._sums[i if copies > 1 else 0]} for i in range(len(self.spans))]

    def add_up(self) -> None:
        """Add the counts of the other threads to those of the first."""
        for counts in self._sums[1:]:
            self._sums[0].add_(counts)

    def one_by_one(self) -> tuple[list[tuple[int, int]], list[dict[str, Tensor]]]:
        """The spans of threads none of which shares a set of matrices with another, and where they add to."""
        if not self._sums:
            return self.spans, []
        spans = self._call.spans(whole_sets=True)
        return spans, self.by_thread[:1] * len(spans)

    def write(self) -> None:
        """Write what has been added up into the gradient."""
        if self._into is None:
            return
        if not self._sums:
            self._into.zero_()
        elif self._one:
            self._into[0].copy_(self._sums[0].view(self._into[0].shape))
