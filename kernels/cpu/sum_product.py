"""`kernels.plain.sum_product` by the loops of the C library."""

import torch
from torch import Tensor

from ..chain import Chain
from .arguments import Call
from .library import in_large_pages


def forward(chain: Chain, *, keep: bool, steps: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kernels.plain.sum_product`; of the scales, only the sum of the last message is not 1."""
    g, m = chain.g, chain.m
    log_norm = torch.empty(g, m, dtype=torch.float64, device="cpu")
    messages = chain.kept(steps) if keep else chain.new(0)
    scales = chain.new(steps + 1, g, m, 1).fill_(1.0)
    lossy = torch.zeros(g, m, dtype=torch.uint8, device="cpu")
    call = Call(chain)
    if keep and chain.room is None:
        in_large_pages(messages)
    call.point(messages=messages if keep else None, log_norm=log_norm, sums=scales[-1], lossy=lossy)
    spans = call.spans()
    if call.run("forward", spans):
        call.run("redo_forward", spans)
    return log_norm, messages, scales, lossy.view(torch.bool)


def backward(
    chain: Chain,
    log_norm: Tensor,
    messages: Tensor,
    scales: Tensor,
    redone: Tensor,
    weight: Tensor,
    grad_x: Tensor | None,
    grad_bulk: Tensor | None,
) -> Tensor:
    """See `kernels.plain.sum_product`; sequences with a weight of 0 are not looked at."""
    v, g, m, c = chain.v, chain.g, chain.m, chain.c
    weight = weight.double().resolve_neg().contiguous()
    log_norm, lossy = log_norm.contiguous(), redone.to(torch.uint8, copy=True)
    grad_p0 = torch.empty(g, m, c, dtype=torch.float64, device="cpu")
    call = Call(chain)
    call.point(messages=messages, log_norm=log_norm, sums=scales[-1].contiguous(), lossy=lossy, weight=weight)
    call.point(grad_p0=grad_p0, uncounted=torch.empty(g, m, dtype=torch.int64, device="cpu"))
    for gradient in (grad_x, grad_bulk):
        if gradient is not None:
            in_large_pages(gradient)
    into = None
    if grad_x is not None:
        plain = grad_x.dtype == chain.dtype and (grad_x.stride(-1) == 1 or c == 1)
        into = grad_x if plain else messages.new_empty(v, *chain.lead, c)
        call.rows("grad", into)
    counts: list[Tensor] = []
    one, spans = len(chain.bulk) == 1, call.spans()
    if grad_bulk is not None and v > 1:
        # threads that share a matrix count for themselves, as far as two messages have room for it
        spans = call.spans(whole_sets=True) if g > 1 else call.spans(most=None if one else max(1, m // c))
        if one:
            counts = [torch.zeros(g, c, c, dtype=torch.float64, device="cpu") for _ in spans[: 1 if g > 1 else None]]
        else:
            counts = [grad_bulk, *(torch.empty_like(grad_bulk) for _ in spans[1 if g == 1 else len(spans) :])]
            call.set(**dict(zip(("count_step", "count_set"), grad_bulk.stride(), strict=False)))
    name = "counts" if one else "grad_bulk"
    each = [{name: counts[index if len(counts) > 1 else 0]} for index in range(len(spans))] if counts else []
    lossy_count = call.run("backward", spans, each)
    for other in counts[1:]:
        counts[0].add_(other)
    if lossy_count:
        spans = call.spans(whole_sets=True) if counts else spans
        call.run("redo_backward", spans, [{name: counts[0]}] * len(spans) if counts else [])
    if grad_bulk is not None and not counts:
        grad_bulk.zero_()
    elif grad_bulk is not None and one:
        grad_bulk[0].copy_(counts[0])
    if grad_x is not None and into is not grad_x and into is not None:
        grad_x.copy_(into)
    return grad_p0.view(*chain.lead, c)
