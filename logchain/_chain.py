"""The log-partition of a chain as an operator of torch: what is kept for the backward pass, and what is recomputed.

Kept are the operands and one tensor of forward messages. The backward pass writes the gradients in the operands' own
shapes. A second derivative is taken through `_twice`.
"""

from typing import Any

import torch
from torch import Tensor

from . import _device
from ._arguments import check_lengths
from ._layout import Layout
from ._operators import apply, operator, transform
from ._rescues import report_chains
from ._twice import differentiable_log_norm
from .kernels.chain import Chain

Needs = tuple[bool, bool, bool]


def log_norm(x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool) -> Tensor:
    """The log-partition [*B] in float64. Arguments have been checked."""
    keep = torch.is_grad_enabled() and any(operand.requires_grad for operand in (x, bulk, p0))
    result: Tensor = apply(_LogNorm, _log_norm, x, bulk, p0, lengths, log_params, keep)[0]
    return result


class _LogNorm(torch.autograd.Function):
    """The log-partition, and what `kernels.sum_product` keeps: messages, scales, and what was redone."""

    @staticmethod
    def forward(
        x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, keep: bool
    ) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = _log_norm(x, bulk, p0, lengths, log_params, keep)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *operands, ctx.log_params, _ = inputs
        ctx.save_for_backward(*operands, *output)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        needs = ctx.needs_input_grad[:3]
        found = _Gradient.apply(grad, *ctx.saved_tensors, ctx.log_params, *needs)  # type: ignore[no-untyped-call]
        grads = (gradient if need else None for gradient, need in zip(found, needs, strict=True))
        return (*grads, None, None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        operands = with_batch_first(info.batch_size, in_dims, *args[:4])
        return _LogNorm.apply(*operands, *args[4:]), (0, None, None, None)  # type: ignore[no-untyped-call]


class _Gradient(torch.autograd.Function):
    """The gradients of `sum(grad * log_norm)`; an empty tensor for one that is not needed."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = _log_norm_backward(*args)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        grad, x, bulk, p0, lengths, *_, ctx.log_params, need_x, need_bulk, need_p0 = inputs
        ctx.needs = need_x, need_bulk, need_p0
        ctx.save_for_backward(grad, x, bulk, p0, lengths)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *along: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, x, bulk, p0, lengths = ctx.saved_tensors
        found = _by_composition(grad, x, bulk, p0, lengths, ctx.log_params, ctx.needs, along)
        return (*found, *(None,) * 9)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, int, int]]:
        """Each example has gradients of its own, also of an operand that all share: so the messages are made again."""
        grad, *_ = _aligned(info.batch_size, in_dims[:1], args[:1])
        x, bulk, p0, lengths = with_batch_first(info.batch_size, in_dims[1:5], *args[1:5])
        bulk, p0 = bulk.expand(info.batch_size, *bulk.shape[1:]), p0.expand(info.batch_size, *p0.shape[1:])
        kept = _LogNorm.apply(x, bulk, p0, lengths, args[9], True)  # type: ignore[no-untyped-call]
        needs = args[10:]
        found = _Gradient.apply(grad, x, bulk, p0, lengths, *kept, *args[9:])  # type: ignore[no-untyped-call]
        shapes = [
            [size for axis, size in enumerate(operand.shape) if dim is None or axis != dim % operand.dim()]
            for operand, dim in zip(args[1:4], in_dims[1:4], strict=True)
        ]
        own = [
            gradient.reshape(info.batch_size, *shape) if need else gradient.expand(info.batch_size, 0)
            for gradient, shape, need in zip(found, shapes, needs, strict=True)
        ]
        return (own[0], own[1], own[2]), (0, 0, 0)


def _forward(
    x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if x.numel() == 0:
        return _kept_shapes(x, bulk, p0, lengths, log_params, keep)
    layout, chain = chain_of(x, bulk, p0, lengths, log_params)
    log_norm, messages, scales, redone = _device.chain_kernels(x).forward(chain, keep=keep, steps=x.shape[-2])
    report_chains(redone)
    return layout.batched(log_norm).contiguous(), messages, scales, redone


def _kept_shapes(
    x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The log-partition [*B], messages (v, g, m, c), scales (v + 1, g, m, 1) and what was redone (g, m), unwritten.

    Messages are made if they are to be kept; a GPU does without scales, and counts single sums that were redone.
    """
    g, m = Layout.of(x, bulk).grid
    v, c = x.shape[-2:]
    dtype = arithmetic_dtype(x, bulk, p0)
    return (
        x.new_empty(x.shape[:-2], dtype=torch.float64),
        x.new_empty((v, g, m, c) if keep else (0,), dtype=dtype),
        x.new_empty((0,) if _device.on_gpu(x) else (v + 1, g, m, 1), dtype=dtype),
        x.new_empty((1,), dtype=torch.int64) if _device.on_gpu(x) else x.new_empty((g, m), dtype=torch.bool),
    )


def _backward(
    grad: Tensor,
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    lengths: Tensor | None,
    log_norm: Tensor,
    messages: Tensor,
    scales: Tensor,
    redone: Tensor,
    log_params: bool,
    *needs: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = _gradient_shapes(grad, x, bulk, p0, lengths, log_norm, messages, scales, redone, log_params, *needs)
    grad_x, grad_bulk, grad_p0 = grads
    if x.numel() == 0:
        return grad_x.zero_(), grad_bulk.zero_(), grad_p0.zero_()
    layout, chain = chain_of(x, bulk, p0, lengths, log_params)
    x_view = bulk_view = None
    if needs[0]:
        x_view = layout.steps_first(grad_x)
        x_view[chain.v :] = 0.0
        x_view = x_view[: chain.v]
    wide = grad_bulk if bulk.dtype == chain.dtype else torch.empty_like(grad_bulk, dtype=chain.dtype)
    if needs[1]:
        bulk_view = layout.matrices(wide)
        bulk_view[chain.v - 1 :] = 0.0
        bulk_view = bulk_view[: chain.v - 1]
        bulk_view = bulk_view.view(len(bulk_view), chain.g, chain.c, chain.c)
    start = _device.chain_kernels(x).backward(
        chain,
        layout.sequences(log_norm),
        messages,
        scales,
        redone,
        layout.sequences(grad),
        x_view,
        bulk_view,
    )
    if needs[1] and wide is not grad_bulk:
        grad_bulk.copy_(wide)
    if needs[2]:
        grad_p0.copy_(layout.states(start).sum_to_size(p0.shape))
    return grad_x, grad_bulk, grad_p0


def _gradient_shapes(grad: Tensor, x: Tensor, bulk: Tensor, p0: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, need_x, need_bulk, need_p0 = rest
    return (
        x.new_empty(x.shape if need_x else (0,)),
        bulk.new_empty(bulk.shape if need_bulk else (0,)),
        p0.new_empty(p0.shape if need_p0 else (0,)),
    )


def arithmetic_dtype(x: Tensor, bulk: Tensor, p0: Tensor) -> torch.dtype:
    """float64 if an operand is, otherwise float32."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, bulk.dtype), p0.dtype)
    return torch.promote_types(dtype, torch.float32)


def chain_of(x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool) -> tuple[Layout, Chain]:
    """The chain up to the longest length. On a GPU, where its value is not looked at, the whole one."""
    layout = Layout.of(x, bulk)
    ends, v = None, x.shape[-2]
    if lengths is not None:
        ends = layout.sequences(lengths)[..., None]
        if not _device.on_gpu(x):
            check_lengths(lengths, v)
            v = int(lengths.max())
    return layout, Chain(
        layout.steps_first(x)[:v],
        layout.matrices(bulk)[: v - 1],
        layout.weights(p0),
        ends,
        log_params,
        arithmetic_dtype(x, bulk, p0),
    )


def _by_composition(
    grad: Tensor,
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    lengths: Tensor | None,
    log_params: bool,
    needs: Needs,
    along: tuple[Tensor | None, ...],
) -> list[Tensor | None]:
    """The gradients, with respect to grad, x, bulk and p0, of the gradients' products with `along`."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # views: one tensor passed twice gets its gradients apart
        grad, x, bulk, p0 = operands = [
            operand.view_as(operand) if again and operand.requires_grad else operand.detach().requires_grad_()
            for operand in (grad, x, bulk, p0)
        ]
        result = differentiable_log_norm(x, bulk, p0, lengths, log_params)
        wanted = [
            (operand, tangent)
            for operand, need, tangent in zip((x, bulk, p0), needs, along, strict=True)
            if need and tangent is not None
        ]
        if not wanted:
            return [None] * 4
        first = torch.autograd.grad(
            result, [operand for operand, _ in wanted], grad, create_graph=True, materialize_grads=True
        )
        second = torch.autograd.grad(
            first, operands, [tangent for _, tangent in wanted], create_graph=again, allow_unused=True
        )
    return list(second)


def with_batch_first(
    size: int, in_dims: tuple[Any, ...], x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Operands of `size` chains at once: the mapped axis becomes the first batch axis."""
    (x, lengths), axes = _aligned(size, (in_dims[0], in_dims[3]), (x, lengths)), x.dim() - (in_dims[0] is not None)
    others = []
    for operand, dim, own in ((bulk, in_dims[1], 3), (p0, in_dims[2], 1)):
        moved = operand.unsqueeze(0) if dim is None else operand.movedim(dim, 0)
        missing = axes - 2 - (moved.dim() - 1 - own)
        others.append(moved[(slice(None), *(None,) * missing)])
    assert x is not None
    return x, others[0], others[1], lengths


def _aligned(size: int, in_dims: tuple[Any, ...], tensors: tuple[Any, ...]) -> list[Any]:
    """Each with the mapped axis first; what is not mapped is expanded, not copied."""
    return [
        tensor if tensor is None else tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims, strict=True)
    ]


_OPERANDS = "Tensor x, Tensor bulk, Tensor p0, Tensor? lengths"
_KEPT = "Tensor log_norm, Tensor messages, Tensor scales, Tensor redone"
_log_norm = operator(
    f"log_norm({_OPERANDS}, bool log_params, bool keep) -> (Tensor, Tensor, Tensor, Tensor)", _forward, _kept_shapes
)
_log_norm_backward = operator(
    f"log_norm_backward(Tensor grad, {_OPERANDS}, {_KEPT}, bool log_params, bool need_x, bool need_bulk, bool need_p0)"
    " -> (Tensor, Tensor, Tensor)",
    _backward,
    _gradient_shapes,
)
transform("log_norm", _LogNorm)
transform("log_norm_backward", _Gradient)
