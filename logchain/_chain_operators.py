"""What the operators of a chain compute: the log-partition, its gradient, and the derivative of either along tangents.

They know shapes, layouts and kernels, and nothing of autograd: how they are each other's derivatives is `_chain`'s
business.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import _device, _frames
from ._arguments import check_lengths
from ._layout import Layout
from ._operators import operator
from ._rescues import report_chains
from .kernels import log_messages
from .kernels.chain import Chain
from .kernels.log_messages import Gradients, Tangents


def chain_of(
    x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, *, by_log: bool = False
) -> tuple[Layout, Chain]:
    """The chain up to the longest length. On a GPU, where its value is not looked at, the whole one."""
    layout = Layout.of(x, bulk)
    ends, v = None, x.shape[-2]
    if lengths is not None:
        ends = layout.sequences(lengths)[..., None]
        if not _device.on_gpu(x):
            check_lengths(lengths, v)
            v = int(lengths.max())
    steps, matrices = layout.steps_first(x), layout.matrices(bulk)
    if lengths is not None or v == 1:
        steps, matrices = steps[:v], matrices[: v - 1]
    return layout, Chain(steps, matrices, layout.weights(p0), ends, log_params, arithmetic_dtype(x, bulk, p0), by_log)


def marked(chain: Chain, found: Tensor) -> Tensor:
    """What was found for sequences (..., g, m, k), in place, with NaN where a length that nobody looked at is wrong."""
    if chain.ends is None:
        return found
    return found.masked_fill_((chain.ends < 1) | (chain.ends > chain.v), torch.nan)


def arithmetic_dtype(x: Tensor, bulk: Tensor, p0: Tensor) -> torch.dtype:
    """float64 if an operand is, otherwise float32."""
    return torch.float64 if torch.float64 in (x.dtype, bulk.dtype, p0.dtype) else torch.float32


def _forward(
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    lengths: Tensor | None,
    log_params: bool,
    keep: bool,
    segments: int = 1,
    room: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if x.numel() == 0:
        return _kept_shapes(x, bulk, p0, lengths, log_params, keep, segments)
    frame = _small_frame(x, bulk, p0, lengths, log_params, segments)
    if frame is not None:
        found: tuple[Tensor, Tensor, Tensor, Tensor] | None = frame.forward(x, bulk, p0, keep, room)
        if found is not None:
            return found
    layout, chain = chain_of(x, bulk, p0, lengths, log_params)
    chain = chain if room is None else replace(chain, room=room)
    kernels, v = _device.chain_kernels(x), x.shape[-2]
    if _chunked(x, lengths, segments):
        forward = _device.chunked_kernels(x).forward
        log_norm, messages, scales, redone = forward(chain, kernels, keep=keep, steps=v, segments=segments)
        report_chains(redone if _device.on_gpu(x) else redone[0])
    else:
        log_norm, messages, scales, redone = kernels.forward(chain, keep=keep, steps=v)
        report_chains(redone)
    return layout.batched(log_norm).clone(memory_format=torch.contiguous_format), messages, scales, redone


def log_norm_within(
    x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, workspace: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `log_norm` finds and keeps, with the messages in a `Workspace`."""
    shape = (x.shape[-2], *Layout.of(x, bulk).grid, x.shape[-1])
    room = workspace.take(shape, arithmetic_dtype(x, bulk, p0), x.device)
    with _device.arithmetic_on(x):
        return _forward(x, bulk, p0, lengths, log_params, True, 1, room)


def _small_frame(x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, segments: int) -> Any:
    """Where the operands of a small chain lie; None for others."""
    if lengths is not None or segments != 1 or not _device.native(x):
        return None
    return _frames.frame_of(x, bulk, p0, log_params, partial(chain_of, lengths=None, log_params=log_params))


def _chunked(x: Tensor, lengths: Tensor | None, segments: int) -> bool:
    """Whether the chain is cut into segments; on a GPU it is not where sequences have lengths."""
    return min(segments, x.shape[-2] - 1) > 1 and not (lengths is not None and _device.on_gpu(x))


def _kept_shapes(
    x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, keep: bool, segments: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The log-partition [*B], messages (v, g, m, c), scales (v + 1, g, m, 1) and what was redone (g, m), unwritten.

    Messages are made if they are to be kept; a GPU does without scales, and counts single sums that were redone. For a
    chain cut into segments see `kernels.chunked`.
    """
    g, m = Layout.of(x, bulk).grid
    v, c = x.shape[-2:]
    dtype = arithmetic_dtype(x, bulk, p0)
    if _chunked(x, lengths, segments):
        messages, scales, redone = _device.chunked_kernels(x).kept_shapes(v, g, m, c, segments, keep)
        return (
            x.new_empty(x.shape[:-2], dtype=torch.float64),
            x.new_empty(messages, dtype=dtype),
            x.new_empty(scales, dtype=dtype),
            x.new_empty(redone, dtype=torch.int64 if _device.on_gpu(x) else torch.bool),
        )
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
    by_log: bool,
    need_x: bool,
    need_bulk: bool,
    need_p0: bool,
    segments: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x, grad_bulk, grad_p0 = _gradient_shapes(
        grad, x, bulk, p0, lengths, log_norm, messages, scales, redone, log_params, by_log, need_x, need_bulk, need_p0
    )
    if x.numel() == 0:
        return grad_x.zero_(), grad_bulk.zero_(), grad_p0.zero_()
    frame = _small_frame(x, bulk, p0, lengths, log_params, segments)
    if frame is not None and not redone.any():
        if frame.backward(x, bulk, p0, messages, grad, by_log, (grad_x, grad_bulk, grad_p0)):
            return grad_x, grad_bulk, grad_p0
    layout, chain = chain_of(x, bulk, p0, lengths, log_params, by_log=by_log)
    x_view = bulk_view = None
    if need_x:
        x_view = layout.steps_first(grad_x)
        x_view[chain.v :] = 0.0
        x_view = x_view[: chain.v]
    wide = grad_bulk if bulk.dtype == chain.dtype else torch.empty_like(grad_bulk, dtype=chain.dtype)
    if need_bulk:
        bulk_view = layout.matrices(wide)
        bulk_view[chain.v - 1 :] = 0.0
        bulk_view = bulk_view[: chain.v - 1]
        bulk_view = bulk_view.view(len(bulk_view), chain.g, chain.c, chain.c)
    kernels, norms, weight = _device.chain_kernels(x), layout.sequences(log_norm), layout.sequences(grad)
    kept = messages, scales, redone, weight, x_view, bulk_view
    if _chunked(x, lengths, segments):
        steps = x.shape[-2]
        start = _device.chunked_kernels(x).backward(chain, kernels, norms, *kept, steps=steps, segments=segments)
    else:
        start = kernels.backward(chain, norms, *kept)
    if need_bulk and wide is not grad_bulk:
        grad_bulk.copy_(wide)
    if need_p0:
        grad_p0.copy_(layout.states(start).sum_to_size(p0.shape))
    return grad_x, grad_bulk, grad_p0


def _gradient_shapes(grad: Tensor, x: Tensor, bulk: Tensor, p0: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    need_x, need_bulk, need_p0 = rest[7:10]
    return (
        x.new_empty(x.shape if need_x else (0,)),
        bulk.new_empty(bulk.shape if need_bulk else (0,)),
        p0.new_empty(p0.shape if need_p0 else (0,)),
    )


def _along(
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    lengths: Tensor | None,
    along_x: Tensor | None,
    along_bulk: Tensor | None,
    along_p0: Tensor | None,
    log_params: bool,
    by_log: bool,
) -> Tensor:
    if x.numel() == 0:
        return x.new_zeros(x.shape[:-2], dtype=torch.float64)
    layout, chain = chain_of(x, bulk, p0, lengths, log_params)
    tangents = _tangents(layout, chain, along_x, along_bulk, along_p0, log_params or by_log)
    found = log_messages.tangent(chain, _device.log_matmul_kernels(x), tangents)
    return layout.batched(marked(chain, found[..., None])[..., 0]).contiguous()


def _along_shapes(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[:-2], dtype=torch.float64)


def _second(
    grad: Tensor,
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    lengths: Tensor | None,
    along_x: Tensor | None,
    along_bulk: Tensor | None,
    along_p0: Tensor | None,
    log_params: bool,
    by_log: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if x.numel() == 0:
        return torch.zeros_like(grad), torch.zeros_like(x), torch.zeros_like(bulk), torch.zeros_like(p0)
    layout, chain = chain_of(x, bulk, p0, lengths, log_params)
    tangents = _tangents(layout, chain, along_x, along_bulk, along_p0, log_params or by_log)
    weight = layout.sequences(grad).double()
    along, first, derived = log_messages.second(chain, _device.log_matmul_kernels(x), weight, tangents)
    if not log_params and not by_log:  # the first derivative is that of the logarithm over the weight itself
        for found, counts, tangent in zip(derived[1:], first[1:], tangents[1:], strict=True):
            if tangent is not None:
                found -= torch.where(counts == 0, 0.0, counts * tangent)
    out = torch.empty_like(grad, memory_format=torch.contiguous_format).copy_(layout.batched(along))
    return out, *gradients_of(layout, chain, derived, x, bulk, p0)


def gradients_of(
    layout: Layout, chain: Chain, found: Gradients, x: Tensor, bulk: Tensor, p0: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in the operands' own shapes, from those of logarithms, which are divided in place."""
    if not chain.log_params:
        linear = chain.bulk.reshape(found.bulk.shape).double(), _own(chain, chain.p0)
        for value, gradient in zip(linear, found[1:], strict=True):
            # 0 also for a NaN that nothing has used, behind the ends
            nothing = (gradient == 0) | (value == 0)
            gradient.div_(value).masked_fill_(nothing, 0.0)
    out = tuple(torch.zeros_like(value, memory_format=torch.contiguous_format) for value in (x, bulk, p0))
    layout.steps_first(out[0])[: chain.v] = found.x.view(chain.v, *chain.lead, chain.c)
    matrices = layout.matrices(out[1])[: chain.v - 1]
    matrices.copy_(found.bulk.view(matrices.shape))
    out[2].copy_(layout.states(found.p0.view(*chain.lead, chain.c)).sum_to_size(p0.shape))
    return out[0], out[1], out[2]


def _second_shapes(grad: Tensor, x: Tensor, bulk: Tensor, p0: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(operand.new_empty(operand.shape) for operand in (grad, x, bulk, p0))


def _tangents(
    layout: Layout, chain: Chain, x: Tensor | None, bulk: Tensor | None, p0: Tensor | None, by_log: bool
) -> Tangents:
    """Tangents of the logarithms; exactly 0 where a linear parameter is."""
    shape = (len(chain.bulk), chain.g, chain.c, chain.c)
    if x is not None:
        x = layout.steps_first(x)[: chain.v].reshape(chain.v, chain.g, chain.m, chain.c).double()
    if bulk is not None:
        bulk = layout.matrices(bulk)[: chain.v - 1].reshape(shape).double()
    if p0 is not None:
        p0 = _own(chain, layout.weights(p0))
    if not by_log:
        if bulk is not None:
            linear = chain.bulk.reshape(shape).double()
            bulk = (bulk / linear).masked_fill_(linear == 0, 0.0)
        if p0 is not None:
            linear = _own(chain, chain.p0)
            p0 = (p0 / linear).masked_fill_(linear == 0, 0.0)
    return Tangents(x, bulk, p0)


def _own(chain: Chain, p0: Tensor) -> Tensor:
    """(*lead or ones, c) as (g, m, c) in float64."""
    return p0.double().expand(*chain.lead, chain.c).reshape(chain.g, chain.m, chain.c)


_OPERANDS = "Tensor x, Tensor bulk, Tensor p0, Tensor? lengths"
_KEPT = "Tensor log_norm, Tensor messages, Tensor scales, Tensor redone"
_ALONG = "Tensor? along_x, Tensor? along_bulk, Tensor? along_p0"

log_norm = operator(
    f"log_norm({_OPERANDS}, bool log_params, bool keep, int segments=1) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _kept_shapes,
)
log_norm_backward = operator(
    f"log_norm_backward(Tensor grad, {_OPERANDS}, {_KEPT}, bool log_params, bool by_log,"
    " bool need_x, bool need_bulk, bool need_p0, int segments=1) -> (Tensor, Tensor, Tensor)",
    _backward,
    _gradient_shapes,
)
log_norm_along = operator(
    f"log_norm_along({_OPERANDS}, {_ALONG}, bool log_params, bool by_log) -> Tensor", _along, _along_shapes
)
log_norm_second = operator(
    f"log_norm_second(Tensor grad, {_OPERANDS}, {_ALONG}, bool log_params, bool by_log)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _second,
    _second_shapes,
)
