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
    spans, counts = _counts(call, grad_bulk)
    field = "counts" if len(chain.bulk) == 1 else "grad_bulk"
    by_thread = [{field: counts[i % len(counts)]} for i in range(len(spans))] if counts else []
    if call.run("backward", spans, by_thread):
        call.run("redo_backward", spans, by_thread)
    for more in counts[1:]:
        counts[0].add_(more)
    if grad_bulk is not None and not counts:
        grad_bulk.zero_()
    elif grad_bulk is not None and len(chain.bulk) == 1:
        grad_bulk[0].copy_(counts[0].view(grad_bulk[0].shape))
    if grad_x is not None and into is not None and into is not grad_x:
        grad_x.copy_(into)
    return preceding if kept.entered else preceding.view(*chain.lead, c)


def _rows_of(chain: Chain, grad_x: Tensor | None) -> Tensor | None:
    """Where the gradient of x is written: its own memory, or a copy of another dtype or with rows apart."""
    if grad_x is None:
        return None
    plain = grad_x.dtype == chain.dtype and (grad_x.stride(-1) == 1 or chain.c == 1)
    return in_large_pages(grad_x) if plain else chain.new(*grad_x.shape)


def _counts(call: Call, grad_bulk: Tensor | None) -> tuple[list[tuple[int, int]], list[Tensor]]:
    """The sequences of each thread; where expected counts of transitions are added up, by all threads or by each.

    One matrix for all steps has its counts added up in float64; many have their gradients written, the first in place.
    """
    chain = call.chain
    g, m, c, one = chain.g, chain.m, chain.c, len(chain.bulk) == 1
    if grad_bulk is None or call.arguments.steps == 1:
        return call.spans(), []
    if g > 1:  # threads share no set of matrices
        spans, copies = call.spans(whole_sets=True), 1
    else:  # copies of the gradient take as much as two messages at most
        spans = call.spans(most=None if one else max(1, m // c))
        copies = len(spans)
    if one:
        return spans, [torch.zeros(g, c, c, dtype=torch.float64, device="cpu") for _ in range(copies)]
    call.matrices("count", in_large_pages(grad_bulk))
    return spans, [grad_bulk, *(torch.empty_like(grad_bulk) for _ in range(1, copies))]
