"""The gradients of chains' log-partition, as `kernels.plain.backward` defines them, by the C library."""

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
    """The gradient of p0, or the backward message of the step that entered; see `kernels.plain.backward`."""
    g, m, c = chain.g, chain.m, chain.c
    weight = weight.double().resolve_neg().contiguous()
    lossy = kept.recomputed.to(torch.uint8, copy=True, memory_format=torch.contiguous_format)
    log_norm = kept.log_norm.contiguous()
    preceding = torch.empty(g, m, c, dtype=torch.float64, device="cpu")
    call = Call(chain, entered=kept.entered)
    call.point(messages=kept.messages, log_norm=log_norm, lossy=lossy, weight=weight)
    call.point(uncounted=torch.empty(g, m, dtype=torch.int64, device="cpu"))
    if kept.entered:  # the first of the kept messages is the one that entered
        call.point(entering=kept.messages, leaving=preceding)
    else:
        call.point(grad_p0=preceding)
    if following is not None:
        call.point(following=following.contiguous())
    written = None
    if grad_x is not None:  # written in place, or in a copy of another dtype or with contiguous states
        plain = grad_x.dtype == chain.dtype and (grad_x.stride(-1) == 1 or c == 1)
        written = in_large_pages(grad_x) if plain else chain.new(*grad_x.shape)
        call.rows("out", written)
        call.point(grad_x=written)
    spans, counts = _counts(call, grad_bulk)
    field = "counts" if len(chain.bulk) == 1 else "grad_bulk"
    begun = [counts[i % len(counts)] for i in range(len(spans))] if counts else []
    by_thread = [{field: one} for one in begun]
    if call.run("backward", spans, by_thread):
        call.run("redo_backward", spans, by_thread)
    for more in counts[1:]:
        counts[0].add_(more)
    if grad_bulk is not None and not counts:
        grad_bulk.zero_()
    elif grad_bulk is not None and len(chain.bulk) == 1:
        grad_bulk[0].copy_(counts[0].reshape(grad_bulk[0].shape))
    if grad_x is not None and written is not None and written is not grad_x:
        grad_x.copy_(written)
    return preceding if kept.entered else preceding.view(*chain.lead, c)


def _counts(call: Call, grad_bulk: Tensor | None) -> tuple[list[tuple[int, int]], list[Tensor]]:
    """The sequences of each thread, and the memory for expected counts of transitions: one tensor, or one per thread.

    If all steps share a matrix, each tensor holds float64 counts. Otherwise each holds gradients: the first is
    `grad_bulk`, to which the others are added.
    """
    chain = call.chain
    g, m, c, one = chain.g, chain.m, chain.c, len(chain.bulk) == 1
    if grad_bulk is None or call.arguments.steps == 1:
        return call.spans(), []
    if g > 1:  # each set of matrices belongs to one thread
        spans, copies = call.spans(whole_sets=True), 1
    else:  # so few threads that their copies of the gradient take no more memory than the messages
        spans = call.spans(most=None if one else max(1, m // c))
        copies = len(spans)
    if one:
        return spans, [torch.zeros(g, c, c, dtype=torch.float64, device="cpu") for _ in range(copies)]
    call.matrices("grad_bulk", in_large_pages(grad_bulk))
    return spans, [grad_bulk, *(torch.empty_like(grad_bulk) for _ in range(1, copies))]
