"""What the operators of a chain compute: the log-partition and its gradient, in whichever schedule.

They know shapes, layouts and kernels; which is the derivative of which is said in `autograd.chain`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..arguments import check_chain
from ..kernels.message import Kept
from ..layout import Layout
from ..operands import Operands, arithmetic_dtype, chain_of, is_plain, unwritten
from ..rescues import report_chains
from ..schedules import chunked
from . import tree_operators
from .operator import operator

# in place of a number of segments, the schedule that multiplies pairs of matrices
TREE = 0

# those of x, bulk and p0 in their own shapes, each empty where it is not needed
Gradients = tuple[Tensor, Tensor, Tensor]


class Saved(NamedTuple):
    """The log-partition [*B] in float64, and what the gradient needs beside the operands.

    Of a chain walked in one: messages (v, g, m, c), nothing, and which sequences were redone (g, m); a GPU counts
    single sums that were redone. For a chain cut into segments see `schedules.chunked`, for a tree
    `autograd.tree_operators`.
    """

    log_norm: Tensor
    messages: Tensor
    following: Tensor
    redone: Tensor


def _forward(
    x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, keep: bool, segments: int
) -> Saved:
    operands = Operands(x, bulk, p0, lengths, log_params)
    if x.numel() == 0:
        return _kept_shapes(*operands, keep, segments)
    if segments == TREE:
        log_norm, messages = tree_operators.forward(operands)
        return Saved(log_norm, messages, messages.new_empty(0), x.new_empty(0, dtype=torch.bool))
    short = short_of(x, bulk, p0, log_params) if lengths is None and segments == 1 else None
    if short is not None:
        log_norm, messages, redone = short.apart(x, bulk, p0, keep)
        report_chains(redone)
        return Saved(log_norm, messages, messages.new_empty(0), redone)
    layout, chain = chain_of(*operands)
    if _chunked(x, lengths, segments):
        saved = Saved(*chunked.forward(chain, segments, keep=keep, steps=x.shape[-2]))
        return saved._replace(log_norm=_in_order(layout, saved.log_norm))
    room = kernels.new_messages(chain, x.shape[-2]) if keep else None
    log_norm, messages, redone, _ = kernels.chain_kernels(x).forward(chain, keep=room)[0]
    report_chains(redone)
    return Saved(_in_order(layout, log_norm), messages, messages.new_empty(0), redone)


def _in_order(layout: Layout, log_norm: Tensor) -> Tensor:
    """(g, m) as [*B], in memory of its own."""
    return layout.batched(log_norm).clone(memory_format=torch.contiguous_format)


def log_norm_here(operands: Operands, keep: bool, segments: int) -> Saved:
    """What the operator `log_norm` returns, past torch's dispatch."""
    with kernels.arithmetic_on(operands.x):
        return _forward(*operands, keep, segments)


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


def _chunked(x: Tensor, lengths: Tensor | None, segments: int) -> bool:
    """Whether the chain is cut into segments; on a GPU it is not where sequences have lengths."""
    return min(segments, x.shape[-2] - 1) > 1 and not (lengths is not None and kernels.on_gpu(x))


def _kept_shapes(
    x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, keep: bool, segments: int
) -> Saved:
    """Memory for what `log_norm` returns, unwritten; messages are empty where they are not to be kept."""
    g, m = Layout.of(x, bulk).grid
    v, c = x.shape[-2:]
    dtype = arithmetic_dtype(x, bulk, p0)
    log_norm = x.new_empty(x.shape[:-2], dtype=torch.float64)
    if segments == TREE:
        messages = tree_operators.kept_shapes(x, bulk, p0)[1]
        return Saved(log_norm, messages, messages.new_empty(0), x.new_empty(0, dtype=torch.bool))
    gpu = kernels.on_gpu(x)
    if _chunked(x, lengths, segments):
        inside, between, marks = chunked.kept_shapes(x, v, g, m, c, segments, keep)
        following = x.new_empty(between, dtype=dtype if gpu else torch.float64)
        return Saved(log_norm, x.new_empty(inside, dtype=dtype), following, _marks(x, marks))
    messages = x.new_empty((v, g, m, c) if keep else (0,), dtype=dtype)
    return Saved(log_norm, messages, messages.new_empty(0), _marks(x, (1,) if gpu else (g, m)))


def _marks(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.new_empty(shape, dtype=torch.int64 if kernels.on_gpu(x) else torch.bool)


def _backward(grad: Tensor, *args: Any) -> Gradients:
    x, bulk, p0, lengths, log_norm, messages, following, redone, log_params, by_log, *needs, segments = args
    operands = Operands(x, bulk, p0, lengths, log_params)
    if x.numel() == 0:
        zero_x, zero_bulk, zero_p0 = unwritten((x, bulk, p0), needs)
        return zero_x.zero_(), zero_bulk.zero_(), zero_p0.zero_()
    if segments == TREE:
        return tree_operators.backward(grad, operands, messages, needs)
    short = short_of(x, bulk, p0, log_params) if lengths is None and segments == 1 else None
    if short is None:
        return _gradients(operands, Saved(log_norm, messages, following, redone), grad, needs, by_log, segments)
    gradients = short.gradients(x, bulk, p0, (log_norm, messages, redone), grad, needs, by_log=by_log)
    grad_x, grad_bulk, grad_p0 = (x.new_empty(0) if gradient is None else gradient for gradient in gradients)
    return grad_x, grad_bulk, grad_p0


def _gradients(
    operands: Operands, saved: Saved, grad: Tensor, needs: Sequence[bool], by_log: bool, segments: int
) -> Gradients:
    """The gradients of operands, in their own shapes, by the sequential or the chunked schedule."""
    x, bulk, p0, lengths, _ = operands
    grad_x, grad_bulk, grad_p0 = unwritten((x, bulk, p0), needs)
    layout, chain = chain_of(*operands, by_log=by_log)
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
    saved = saved._replace(log_norm=layout.sequences(saved.log_norm))
    weight = layout.sequences(grad)
    if _chunked(x, lengths, segments):
        start = chunked.backward(chain, segments, saved, weight, into_x, into_bulk, steps=x.shape[-2])
    else:
        residuals = Kept(saved.log_norm, saved.messages, saved.redone)
        start = kernels.chain_kernels(x).backward(chain, residuals, weight, None, into_x, into_bulk)
    if wide is not grad_bulk:
        grad_bulk.copy_(wide)
    if needs[2]:
        grad_p0.copy_(layout.states(start).sum_to_size(p0.shape))
    return grad_x, grad_bulk, grad_p0


def _gradient_shapes(grad: Tensor, x: Tensor, bulk: Tensor, p0: Tensor, *args: Any) -> Gradients:
    return unwritten((x, bulk, p0), args[7:10])


_OPERANDS = "Tensor x, Tensor bulk, Tensor p0, Tensor? lengths"
_KEPT = "Tensor log_norm, Tensor messages, Tensor following, Tensor redone"

log_norm = operator(
    f"log_norm({_OPERANDS}, bool log_params, bool keep, int segments) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _kept_shapes,
)
log_norm_backward = operator(
    f"log_norm_backward(Tensor grad, {_OPERANDS}, {_KEPT}, bool log_params, bool by_log,"
    " bool need_x, bool need_bulk, bool need_p0, int segments) -> (Tensor, Tensor, Tensor)",
    _backward,
    _gradient_shapes,
)
