"""The log-partition of a chain as one node of autograd: what is kept for the backward pass, and what is recomputed.

Kept are the operands, one tensor of forward messages, and for the sequences that were redone in log space their
messages once more. The backward pass writes the gradients in the operands' own shapes. A second derivative is taken
through `_twice`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ._layout import Layout
from ._rescues import Rescues, report
from ._twice import differentiable_log_norm
from .kernels import linear_chain, log_chain
from .kernels.chain import Chain


def log_norm(x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool) -> Tensor:
    """The log-partition [*B] in float64. Arguments have been checked."""
    keep = torch.is_grad_enabled() and any(operand.requires_grad for operand in (x, bulk, p0))
    result: Tensor = _LogNorm.apply(x, bulk, p0, lengths, log_params, keep)  # type: ignore[no-untyped-call]
    return result


class _LogNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, keep: bool
    ) -> Tensor:
        ctx.log_params = log_params
        if x.numel() == 0:
            ctx.save_for_backward(x, bulk, p0, lengths)
            return x.new_zeros(x.shape[:-2], dtype=torch.float64)
        with torch.autocast(x.device.type, enabled=False):
            layout, chain = _chain(x, bulk, p0, lengths, log_params)
            result, lossy, linear = linear_chain.forward(chain, keep=keep)
            kept: tuple[Tensor | None, ...] = (linear.messages, linear.scales, linear.total)
            if lossy is not None:
                exact = log_chain.forward(chain, lossy, keep=keep)
                result[exact.sets[:, None], exact.members] = exact.log_norm
                report(Rescues(sequences=exact.log_norm.numel()))
                if exact.log_norm.numel() == result.numel():
                    kept = (None, None, None)
                kept = (*kept, exact.sets, exact.members, exact.log_norm, exact.messages)
        if keep:
            ctx.save_for_backward(x, bulk, p0, lengths, *kept)
        return layout.batched(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bulk, p0, lengths, *kept = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        if x.numel() == 0:
            grads = tuple(torch.zeros_like(t) if need else None for t, need in zip((x, bulk, p0), needs, strict=True))
            return (*grads, None, None, None)
        with torch.autocast(x.device.type, enabled=False):
            if torch.is_grad_enabled():
                return (*_by_composition(x, bulk, p0, lengths, ctx.log_params, grad, needs), None, None, None)
            return (*_gradients(x, bulk, p0, lengths, ctx.log_params, kept, grad, needs), None, None, None)


def _chain(x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool) -> tuple[Layout, Chain]:
    layout = Layout.of(x, bulk)
    dtype = torch.promote_types(torch.promote_types(x.dtype, bulk.dtype), p0.dtype)
    ends, v = None, x.shape[-2]
    if lengths is not None:
        ends, v = layout.sequences(lengths)[..., None], int(lengths.max())
    return layout, Chain(
        layout.steps_first(x)[:v],
        layout.matrices(bulk)[: v - 1],
        layout.weights(p0),
        ends,
        log_params,
        torch.promote_types(dtype, torch.float32),
    )


def _gradients(
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    lengths: Tensor | None,
    log_params: bool,
    kept: list[Any],
    grad: Tensor,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    layout, chain = _chain(x, bulk, p0, lengths, log_params)
    weight, scale = _near_one(layout.sequences(grad))
    weight = weight.to(chain.dtype)
    (messages, *others), exact = kept[:3], kept[3:]
    unwritten = messages is None or chain.v < x.shape[-2] or chain.v == 1
    fresh = torch.zeros if unwritten else torch.empty
    grad_x = fresh(x.shape, dtype=x.dtype, device=x.device) if needs[0] else None
    grad_bulk = fresh(bulk.shape, dtype=chain.dtype, device=x.device) if needs[1] else None
    # in float64: what one sequence gives may exceed float32 though the sum does not
    grad_p0 = torch.zeros(*chain.lead, chain.c, dtype=torch.float64, device=x.device)
    x_view = None if grad_x is None else layout.steps_first(grad_x)[: chain.v]
    bulk_view = None if grad_bulk is None else layout.matrices(grad_bulk)[: chain.v - 1]
    if bulk_view is not None:
        bulk_view = bulk_view.view(len(bulk_view), chain.g, chain.c, chain.c)
    if messages is not None:
        linear_weight = weight
        if exact:
            linear_weight = weight.clone()
            linear_weight[exact[0][:, None], exact[1]] = 0.0
        linear = linear_chain.Kept(messages, *others)
        source = linear_chain.backward(chain, linear, linear_weight, x_view, bulk_view)
        if needs[2]:
            grad_p0 = linear_chain.start_gradient(chain, source)
    if exact:
        log_chain.backward(chain, log_chain.Forward(*exact), weight, x_view, bulk_view, grad_p0)
    start = layout.states(grad_p0).sum_to_size(p0.shape) if needs[2] else None
    grads = []
    for gradient, operand in ((grad_x, x), (grad_bulk, bulk), (start, p0)):
        if gradient is not None:
            gradient = gradient.mul_(scale) if scale != 1.0 else gradient
            gradient = gradient.to(operand.dtype)
        grads.append(gradient)
    return grads[0], grads[1], grads[2]


def _near_one(weight: Tensor) -> tuple[Tensor, float]:
    """The weights over a power of two, and that power: the largest is multiplied with what may be close to overflow."""
    top = weight.abs().amax().item()
    if 2.0**-20 <= top <= 2.0**20 or not math.isfinite(top) or top == 0:
        return weight, 1.0
    scale = 2.0 ** math.frexp(top)[1]
    return weight / scale, scale


def _by_composition(
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    lengths: Tensor | None,
    log_params: bool,
    grad: Tensor,
    needs: tuple[bool, bool, bool],
) -> list[Tensor | None]:
    """The same gradients with a graph of their own."""
    operands = x.view_as(x), bulk.view_as(bulk), p0.view_as(p0)  # one tensor passed twice gets its gradients apart
    result = differentiable_log_norm(*operands, lengths, log_params)
    wanted = [operand for operand, need in zip(operands, needs, strict=True) if need]
    found = iter(torch.autograd.grad(result, wanted, grad, create_graph=True, materialize_grads=True))
    return [next(found) if need else None for need in needs]
