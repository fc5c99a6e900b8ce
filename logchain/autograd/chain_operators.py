"""What the operators of a chain compute: the log-partition and its gradient, in whichever schedule.

They know shapes, layouts and kernels; which is the derivative of which is said in `autograd.chain`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..arguments import check_chain
from ..kernels.message import Kept
from ..layout import Layout
from ..operands import Operands, arithmetic_dtype, chain_of, exceeds, is_plain, unwritten
from ..rescues import report_chains
from ..schedules import chunked
from . import tree_operators
from .operator import operator

# in place of a number of segments, the schedule that multiplies pairs of matrices
TREE = 0

# the log-partition [*B] in float64; messages; backward messages that follow segments; what was redone
Four = tuple[Tensor, Tensor, Tensor, Tensor]


def _forward(
    x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, keep: bool, segments: int = 1
) -> Four:
    operands = Operands(x, bulk, p0, lengths, log_params)
    if x.numel() == 0:
        return _kept_shapes(*operands, keep, segments)
    if segments == TREE:
        log_norm, messages = tree_operators.forward(*operands)
        return log_norm, messages, messages.new_empty(0), x.new_empty(0, dtype=torch.bool)
    short = short_of(x, bulk, p0, log_params) if lengths is None and segments == 1 else None
    if short is not None:
        log_norm, messages, redone = short.apart(x, bulk, p0, keep)
        report_chains(redone)
        return log_norm, messages, messages.new_empty(0), redone
    layout, chain = chain_of(*operands)
    if _chunked(x, lengths, segments):
        log_norm, messages, following, redone = chunked.forward(chain, segments, keep=keep, steps=x.shape[-2])
        return _in_order(layout, log_norm), messages, following, redone
    room = kernels.new_messages(chain, x.shape[-2]) if keep else None
    kept, _ = kernels.chain_kernels(x).forward(chain, keep=room)
    report_chains(kept.redone)
    return _in_order(layout, kept.log_norm), kept.messages, kept.messages.new_empty(0), kept.redone


def _in_order(layout: Layout, log_norm: Tensor) -> Tensor:
    """(g, m) as [*B], in memory of its own."""
    return layout.batched(log_norm).clone(memory_format=torch.contiguous_format)


def log_norm_here(operands: Operands, keep: bool, segments: int = 1) -> Four:
    """What `log_norm` finds and keeps, past torch's dispatch."""
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
    x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, keep: bool, segments: int = 1
) -> Four:
    """The log-partition [*B], messages (v, g, m, c), nothing, and what was redone (g, m), unwritten.

    Messages are made if they are to be kept; a GPU counts single sums that were redone. For a chain cut into segments
    see `schedules.chunked`, for a tree `autograd.tree_operators`.
    """
    g, m = Layout.of(x, bulk).grid
    v, c = x.shape[-2:]
    dtype = arithmetic_dtype(x, bulk, p0)
    log_norm = x.new_empty(x.shape[:-2], dtype=torch.float64)
    if segments == TREE:
        messages = tree_operators.kept_shapes(x, bulk, p0, lengths, log_params)[1]
        return log_norm, messages, messages.new_empty(0), x.new_empty(0, dtype=torch.bool)
    gpu = kernels.on_gpu(x)
    if _chunked(x, lengths, segments):
        kept, between, redone = chunked.kept_shapes(x, v, g, m, c, segments, keep)
        following = x.new_empty(between, dtype=dtype if gpu else torch.float64)
        return log_norm, x.new_empty(kept, dtype=dtype), following, _marks(x, redone)
    messages = x.new_empty((v, g, m, c) if keep else (0,), dtype=dtype)
    return log_norm, messages, messages.new_empty(0), _marks(x, (1,) if gpu else (g, m))


def _marks(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.new_empty(shape, dtype=torch.int64 if kernels.on_gpu(x) else torch.bool)


def _backward(
    grad: Tensor,
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    lengths: Tensor | None,
    log_norm: Tensor,
    messages: Tensor,
    following: Tensor,
    redone: Tensor,
    log_params: bool,
    by_log: bool,
    need_x: bool,
    need_bulk: bool,
    need_p0: bool,
    segments: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    needs, operands = (need_x, need_bulk, need_p0), Operands(x, bulk, p0, lengths, log_params)
    if x.numel() == 0:
        zero_x, zero_bulk, zero_p0 = unwritten((x, bulk, p0), needs)
        return zero_x.zero_(), zero_bulk.zero_(), zero_p0.zero_()
    if exceeds(grad, arithmetic_dtype(x, bulk, p0)):
        # all once more in float64, from the start; it is rare
        wide = operands._replace(x=x.double())
        found = _backward(grad, *wide[:4], *_forward(*wide, True, segments), log_params, by_log, *needs, segments)
        return found[0].to(x.dtype), *found[1:]
    if segments == TREE:
        return tree_operators.backward(grad, *operands[:4], messages, log_params, *needs)
    short = short_of(x, bulk, p0, log_params) if lengths is None and segments == 1 else None
    if short is not None:
        gradients = short.gradients(x, bulk, p0, (log_norm, messages, redone), grad, needs, by_log=by_log)
        grad_x, grad_bulk, grad_p0 = (x.new_empty(0) if one is None else one for one in gradients)
        return grad_x, grad_bulk, grad_p0
    return _gradients(operands, (log_norm, messages, following, redone), grad, needs, by_log, segments)


def _gradients(
    operands: Operands, kept: Four, grad: Tensor, needs: tuple[bool, bool, bool], by_log: bool, segments: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of operands, in their own shapes, from what `_forward` has kept."""
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
    log_norm, messages, following, redone = kept
    norms, weight = layout.sequences(log_norm), layout.sequences(grad)
    if _chunked(x, lengths, segments):
        whole = norms, messages, following, redone
        start = chunked.backward(chain, segments, whole, weight, into_x, into_bulk, steps=x.shape[-2])
    else:
        start = kernels.chain_kernels(x).backward(chain, Kept(norms, messages, redone), weight, None, into_x, into_bulk)
    if wide is not grad_bulk:
        grad_bulk.copy_(wide)
    if needs[2]:
        grad_p0.copy_(layout.states(start).sum_to_size(p0.shape))
    return grad_x, grad_bulk, grad_p0


def _gradient_shapes(grad: Tensor, x: Tensor, bulk: Tensor, p0: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return unwritten((x, bulk, p0), rest[7:10])


_OPERANDS = "Tensor x, Tensor bulk, Tensor p0, Tensor? lengths"
_KEPT = "Tensor log_norm, Tensor messages, Tensor following, Tensor redone"

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
