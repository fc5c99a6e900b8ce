"""What the operators of a chain compute: the log-partition and its gradient.

They know shapes, layouts and kernels; which is the derivative of which is said in `autograd.chain`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..arguments import check_chain
from ..layout import Layout
from ..operands import arithmetic_dtype, chain_of, exceeds, is_plain, unwritten
from ..rescues import report_chains
from .operator import operator


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
    short = short_of(x, bulk, p0, log_params) if lengths is None and segments == 1 else None
    if short is not None:
        kept: tuple[Tensor, Tensor, Tensor, Tensor] = short.apart(x, bulk, p0, keep, room)
        report_chains(kept[-1])
        return kept
    layout, chain = chain_of(x, bulk, p0, lengths, log_params)
    chain = chain if room is None else replace(chain, room=room)
    backend, v = kernels.chain_kernels(x), x.shape[-2]
    if _chunked(x, lengths, segments):
        forward = kernels.chunked_kernels(x).forward
        log_norm, messages, scales, redone = forward(chain, backend, keep=keep, steps=v, segments=segments)
        report_chains(redone if kernels.on_gpu(x) else redone[0])
    else:
        log_norm, messages, scales, redone = backend.forward(chain, keep=keep, steps=v)
        report_chains(redone)
        scales = scales[-1:].clone() if _in_c(x) else scales
    return layout.batched(log_norm).clone(memory_format=torch.contiguous_format), messages, scales, redone


def log_norm_here(
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    lengths: Tensor | None,
    log_params: bool,
    keep: bool,
    segments: int,
    workspace: Any = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `log_norm` finds and keeps, past torch's dispatch; with the messages in a `Workspace`, if there is one."""
    room = None
    if workspace is not None:
        shape = (x.shape[-2], *Layout.of(x, bulk).grid, x.shape[-1])
        room = workspace.take(shape, arithmetic_dtype(x, bulk, p0), x.device)
    with kernels.arithmetic_on(x):
        return _forward(x, bulk, p0, lengths, log_params, keep, segments, room)


def is_good(x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool) -> bool:
    """True of operands that go together; raises."""
    check_chain(x, bulk, p0)
    return True


def short_of(
    x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool, keep: bool = False, wanted: Callable[..., bool] = is_good
) -> Any:
    """What is known of short chains like these on a CPU, see `kernels.cpu.short`; None for others.

    `wanted` is asked, and checks the operands, at the first of them; what `keep` is may count.
    """
    try:
        if not (type(log_params) is bool and is_plain((x, bulk, p0)) and bulk.is_cpu and p0.is_cpu and kernels.in_c(x)):
            return None
        return kernels.short_calls().short_of(x, bulk, p0, log_params, keep, wanted, chain_of)
    except (AttributeError, RuntimeError):  # one is no dense tensor
        check_chain(x, bulk, p0)
        raise


def _in_c(x: Tensor) -> bool:
    """Whether the loops in C compute for it."""
    return kernels.in_c(x)


def _chunked(x: Tensor, lengths: Tensor | None, segments: int) -> bool:
    """Whether the chain is cut into segments; on a GPU it is not where sequences have lengths."""
    return min(segments, x.shape[-2] - 1) > 1 and not (lengths is not None and kernels.on_gpu(x))


def _kept_shapes(
    x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, keep: bool, segments: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The log-partition [*B], messages (v, g, m, c), scales (v + 1, g, m, 1) and what was redone (g, m), unwritten.

    Messages are made if they are to be kept; a GPU does without scales, and counts single sums that were redone; the
    loops in C do without all but the last. For a chain cut into segments see `kernels.chunked`.
    """
    g, m = Layout.of(x, bulk).grid
    v, c = x.shape[-2:]
    dtype = arithmetic_dtype(x, bulk, p0)
    if _chunked(x, lengths, segments):
        messages, scales, redone = kernels.chunked_kernels(x).kept_shapes(v, g, m, c, segments, keep)
        return (
            x.new_empty(x.shape[:-2], dtype=torch.float64),
            x.new_empty(messages, dtype=dtype),
            x.new_empty(scales, dtype=dtype),
            x.new_empty(redone, dtype=torch.int64 if kernels.on_gpu(x) else torch.bool),
        )
    return (
        x.new_empty(x.shape[:-2], dtype=torch.float64),
        x.new_empty((v, g, m, c) if keep else (0,), dtype=dtype),
        x.new_empty((0,) if kernels.on_gpu(x) else (1 if _in_c(x) else v + 1, g, m, 1), dtype=dtype),
        x.new_empty((1,), dtype=torch.int64) if kernels.on_gpu(x) else x.new_empty((g, m), dtype=torch.bool),
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
    if x.numel() == 0:
        zero_x, zero_bulk, zero_p0 = unwritten((x, bulk, p0), (need_x, need_bulk, need_p0))
        return zero_x.zero_(), zero_bulk.zero_(), zero_p0.zero_()
    if exceeds(grad, arithmetic_dtype(x, bulk, p0)):
        # all again in float64, from the start; it is rare
        again = x.double()
        finer = _forward(again, bulk, p0, lengths, log_params, True, segments)
        found = _backward(
            grad, again, bulk, p0, lengths, *finer, log_params, by_log, need_x, need_bulk, need_p0, segments
        )
        return found[0].to(x.dtype), *found[1:]
    short = short_of(x, bulk, p0, log_params) if lengths is None and segments == 1 else None
    if short is not None:
        needs, kept = (need_x, need_bulk, need_p0), (log_norm, messages, scales, redone)
        gradients = short.gradients(x, bulk, p0, kept, grad, needs, by_log=by_log)
        grad_x, grad_bulk, grad_p0 = (x.new_empty(0) if one is None else one for one in gradients)
        return grad_x, grad_bulk, grad_p0
    grad_x, grad_bulk, grad_p0 = unwritten((x, bulk, p0), (need_x, need_bulk, need_p0))
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
    backend, norms, weight = kernels.chain_kernels(x), layout.sequences(log_norm), layout.sequences(grad)
    others = messages, scales, redone, weight, x_view, bulk_view
    if _chunked(x, lengths, segments):
        steps = x.shape[-2]
        start = kernels.chunked_kernels(x).backward(chain, backend, norms, *others, steps=steps, segments=segments)
    else:
        start = backend.backward(chain, norms, *others)
    if need_bulk and wide is not grad_bulk:
        grad_bulk.copy_(wide)
    if need_p0:
        grad_p0.copy_(layout.states(start).sum_to_size(p0.shape))
    return grad_x, grad_bulk, grad_p0


def _gradient_shapes(grad: Tensor, x: Tensor, bulk: Tensor, p0: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return unwritten((x, bulk, p0), rest[7:10])


_OPERANDS = "Tensor x, Tensor bulk, Tensor p0, Tensor? lengths"
_KEPT = "Tensor log_norm, Tensor messages, Tensor scales, Tensor redone"

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
