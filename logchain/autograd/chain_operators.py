"""The operators `logchain::log_norm` and `logchain::log_norm_backward`: a chain's log-partition and its gradient.

Their arguments `segments` and `warm_up` are the schedule, see `schedules.choose.Schedule`.
`autograd.chain_functions` registers the second as the derivative of the first.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..arguments import check_chain
from ..kernels.layout import Layout
from ..kernels.message import Kept
from ..operands import Operands, arithmetic_dtype, chain_of, is_plain, unwritten
from ..rescues import report_chains
from ..schedules import segments as by_segments
from .operator import operator

# the gradients of x, bulk and p0 in their own shapes, each empty where it is not needed
Gradients = tuple[Tensor, Tensor, Tensor]


class Saved(NamedTuple):
    """The log-partition [*B] in float64, and what the gradient needs besides the operands.

    Of one scan: forward `messages` (v, g, m, c), which sequences were `redone` exactly (g, m), and as `extra` nothing
    or the `bound` of `kernels.message.Kept`, (s, g), or (1, s, g) if the messages are `halved`. Of several segments:
    see `schedules.segments`.
    """

    log_norm: Tensor
    messages: Tensor
    extra: Tensor
    redone: Tensor


def _forward(
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    lengths: Tensor | None,
    log_params: bool,
    keep: bool,
    segments: int,
    warm_up: int,
) -> Saved:
    operands = Operands(x, bulk, p0, lengths, log_params)
    if x.numel() == 0:
        return _kept_shapes(*operands, keep, segments, warm_up)
    short = short_of(x, bulk, p0, log_params) if lengths is None and segments == 1 else None
    if short is not None:
        log_norm, messages, redone = short.apart(x, bulk, p0, keep)
        report_chains(redone)
        return Saved(log_norm, messages, messages.new_empty(0), redone)
    if _is_cut(x, segments):
        layout, chain = chain_of(*operands, whole=True)
        saved = Saved(*by_segments.forward(chain, segments, warm_up, keep=keep))
        return saved._replace(log_norm=_in_order(layout, saved.log_norm))
    layout, chain = chain_of(*operands)
    memory = kernels.new_messages(chain, x.shape[-2]) if keep else None
    options = {"halved": True} if keep and kernels.halves(x, chain.g, chain.m, chain.dtype) else {}
    kept, _ = kernels.chain_kernels(x).forward(chain, keep=memory, **options)
    report_chains(kept.redone)
    extra = kept.messages.new_empty(0) if kept.bound is None else kept.bound[None] if kept.halved else kept.bound
    return Saved(_in_order(layout, kept.log_norm), kept.messages, extra, kept.redone)


def _in_order(layout: Layout, log_norm: Tensor) -> Tensor:
    """The log-partition (g, m) as [*B], in memory of its own."""
    return layout.batched(log_norm).clone(memory_format=torch.contiguous_format)


def _go_together(x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool) -> bool:
    """True; raises if the operands do not go together."""
    check_chain(x, bulk, p0)
    return True


def short_of(
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    log_params: bool,
    keep: bool = False,
    wanted: Callable[..., bool] = _go_together,
) -> Any:
    """The `kernels.cpu.short.Short` of operands on a CPU, which answers in one call of C; None for all others.

    `wanted` checks the operands and says whether to take a `Short`; it is called once for all chains of the same
    shapes, strides, dtypes, `log_params` and `keep`.
    """
    try:
        if not (type(log_params) is bool and is_plain((x, bulk, p0)) and bulk.is_cpu and p0.is_cpu and kernels.in_c(x)):
            return None
        return kernels.load("cpu.short").short_of(x, bulk, p0, log_params, keep, wanted, chain_of)
    except (AttributeError, RuntimeError):  # an operand that is no dense tensor
        check_chain(x, bulk, p0)
        raise


def _is_cut(x: Tensor, segments: int) -> bool:
    return min(segments, x.shape[-2] - 1) > 1


def _kept_shapes(
    x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, keep: bool, segments: int, _: int
) -> Saved:
    """Memory for the outputs of `log_norm`, unwritten; messages are empty unless they are to be kept."""
    g, m = Layout.of(x, bulk).grid
    v, c = x.shape[-2:]
    dtype = arithmetic_dtype(x, bulk, p0)
    log_norm = x.new_empty(x.shape[:-2], dtype=torch.float64)
    if _is_cut(x, segments):
        inside, between, marks = by_segments.saved_shapes(x, v, g, m, c, segments, keep)
        extra = x.new_empty(between, dtype=torch.float64 if kernels.on_gpu(x) else torch.int64)
        return Saved(log_norm, x.new_empty(inside, dtype=dtype), extra, x.new_empty(marks, dtype=torch.bool))
    messages = x.new_empty((v, g, m, c) if keep else (0,), dtype=dtype)
    extra = messages.new_empty(0)
    if kernels.in_triton(x):
        bound = (1 if v == 1 else bulk.shape[-3], g)
        extra = x.new_empty((1, *bound) if keep and kernels.halves(x, g, m, dtype) else bound, dtype=torch.int32)
    return Saved(log_norm, messages, extra, x.new_empty((g, m), dtype=torch.bool))


def _backward(grad: Tensor, *args: Any) -> Gradients:
    x, bulk, p0, lengths, log_norm, messages, extra, redone, log_params, by_log, *needs, segments, _ = args
    operands = Operands(x, bulk, p0, lengths, log_params)
    if x.numel() == 0:
        zero_x, zero_bulk, zero_p0 = unwritten((x, bulk, p0), needs)
        return zero_x.zero_(), zero_bulk.zero_(), zero_p0.zero_()
    short = short_of(x, bulk, p0, log_params) if lengths is None and segments == 1 else None
    if short is None:
        return _gradients(operands, Saved(log_norm, messages, extra, redone), grad, needs, by_log, segments)
    gradients = short.gradients(x, bulk, p0, (log_norm, messages, redone), grad, needs, by_log=by_log)
    grad_x, grad_bulk, grad_p0 = (x.new_empty(0) if gradient is None else gradient for gradient in gradients)
    return grad_x, grad_bulk, grad_p0


def _gradients(
    operands: Operands, saved: Saved, grad: Tensor, needs: Sequence[bool], by_log: bool, segments: int
) -> Gradients:
    x, bulk, p0, *_ = operands
    grad_x, grad_bulk, grad_p0 = unwritten((x, bulk, p0), needs)
    in_segments = _is_cut(x, segments)
    layout, chain = chain_of(*operands, by_log=by_log, whole=in_segments)
    into_x = into_bulk = None
    if needs[0]:
        into_x = layout.steps_first(grad_x)
        into_x[chain.v :] = 0.0
        into_x = into_x[: chain.v]
    wide = grad_bulk if bulk.dtype == chain.dtype else torch.empty_like(grad_bulk, dtype=chain.dtype)
    if needs[1]:
        into_bulk = layout.matrices(wide)
        into_bulk[chain.v - 1 :] = 0.0
        into_bulk = into_bulk[: chain.v - 1]
    saved = saved._replace(log_norm=layout.grouped(saved.log_norm))
    weight = layout.grouped(grad)
    if in_segments:
        start = by_segments.backward(chain, segments, saved, weight, into_x, into_bulk)
    else:
        halved = saved.extra.dim() == 3
        bound = saved.extra[0] if halved else saved.extra if saved.extra.dim() == 2 else None
        residuals = Kept(saved.log_norm, saved.messages, saved.redone, bound=bound, halved=halved)
        start = kernels.chain_kernels(x).backward(chain, residuals, weight, None, into_x, into_bulk)
    if wide is not grad_bulk:
        grad_bulk.copy_(wide)
    if needs[2]:
        grad_p0.copy_(layout.states(start).sum_to_size(p0.shape))
    return grad_x, grad_bulk, grad_p0


def _gradient_shapes(grad: Tensor, x: Tensor, bulk: Tensor, p0: Tensor, *args: Any) -> Gradients:
    return unwritten((x, bulk, p0), args[7:10])


_OPERANDS = "Tensor x, Tensor bulk, Tensor p0, Tensor? lengths"
_KEPT = "Tensor log_norm, Tensor messages, Tensor extra, Tensor redone"

log_norm = operator(
    f"log_norm({_OPERANDS}, bool log_params, bool keep, int segments, int warm_up) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _kept_shapes,
)
log_norm_backward = operator(
    f"log_norm_backward(Tensor grad, {_OPERANDS}, {_KEPT}, bool log_params, bool by_log,"
    " bool need_x, bool need_bulk, bool need_p0, int segments, int warm_up) -> (Tensor, Tensor, Tensor)",
    _backward,
    _gradient_shapes,
)
