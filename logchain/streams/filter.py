"""The filtered posteriors of a piece, and the forward message that it leaves to the next one.

Without gradients the chain kernels compute, a block of steps at a time; with gradients, and for structures, torch's
operations do, step by step.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..arguments import has_values
from ..autograd.operator import operator
from ..kernels.chain import Chain
from ..kernels.message import Message
from ..kernels.numbers import exact_sum, probabilities
from ..layout import Layout
from ..operands import arithmetic_dtype, differentiated
from ..rescues import report_chains
from . import stretch
from .piece import Carried, Piece, RawPiece, added, filtering, normalised, recovered

# numbers of x, and of matrices that change, in a block: some megabytes, and enough to hide the overhead of a block
_BLOCK = 2**19


class Filtered(NamedTuple):
    """The state `carried` to the next piece, and posteriors and forward messages of this one if asked for.

    `posteriors` [*B, k, c]: of each state given all up to it; 0 where a sequence has no variable. `messages` [*B, k, c]
    are logarithms up to a constant for each variable; arbitrary where a sequence has none.
    """

    carried: Carried
    posteriors: Tensor | None
    messages: Tensor | None


def filtered(
    raw: RawPiece, carried: Carried, dtype: torch.dtype | None, piece: Piece | None, calls: stretch.Calls
) -> Filtered:
    """The results of filtering a piece: posteriors if a `dtype` is given, messages if `piece`, its logarithms, is."""
    raw.check_signs()
    if not isinstance(raw.bulk, Tensor) or differentiated(raw.x, raw.bulk, raw.p0, carried.message):
        return _by_autograd(raw, carried, dtype, raw.logs() if piece is None else piece)
    if torch.compiler.is_compiling() or not has_values(raw.x):
        *after, posteriors, messages = _operator(*raw, *carried, dtype, piece is not None)
    else:
        with kernels.arithmetic_on(raw.x):
            *after, posteriors, messages = _by_kernels(raw, carried, dtype, piece is not None, calls)
    logs = None if piece is None else recovered(piece, carried.message, messages)
    return Filtered(Carried(*after), None if dtype is None else posteriors, logs)


def _by_autograd(raw: RawPiece, carried: Carried, dtype: torch.dtype | None, piece: Piece) -> Filtered:
    messages, after = _steps(piece, carried)
    posteriors = None
    if dtype is not None:
        posteriors = torch.where(piece.active[..., None], messages.exp(), 0.0).to(dtype)
    return Filtered(after, posteriors, messages)


def _steps(piece: Piece, carried: Carried) -> tuple[Tensor, Carried]:
    """The messages [*B, k, c] of a piece with sum 1, computed step by step, and what is carried on.

    The log-partition that is carried is a constant to autograd, and so is the sum that the message is divided by:
    derivatives of both would cancel, but for their rounding errors. `Carried.log_norm` has the gradient of the message.
    """
    messages, shifts = filtering(piece, carried.message)
    message = messages[..., -1, :]
    messages, norms = normalised(messages)
    norm = norms[..., -1].detach()
    message = message - norm.masked_fill(norm == -torch.inf, 0.0)[..., None]
    moved = piece.active.any(-1)
    term, lost = exact_sum(torch.stack([torch.zeros_like(norm), *shifts.flatten(-2).unbind(-1)]))
    total = added(carried, torch.where(moved, norm, 0.0))
    total = added(total._replace(lost=total.lost + lost), term)
    # an impossible sequence has gradient 0 in earlier pieces too
    dead = moved & (norm == -torch.inf)
    after = total.total.masked_fill(dead, -torch.inf), total.lost.masked_fill(dead, 0.0)
    return messages[..., 1:, :], Carried(torch.where(moved[..., None], message, carried.message), *after)


def _operator_by_kernels(*args: Any) -> tuple[Tensor, ...]:
    *raw, message, total, lost, dtype, logs = args
    return _by_kernels(RawPiece(*raw), Carried(message, total, lost), dtype, logs, stretch.Calls())


def _by_kernels(
    raw: RawPiece, carried: Carried, dtype: torch.dtype | None, logs: bool, calls: stretch.Calls
) -> tuple[Tensor, ...]:
    x, k = raw.x, raw.x.shape[-2]
    outputs = _outputs(x, dtype, logs)
    if x.numel() == 0:
        return *(tensor.clone() for tensor in carried), *outputs
    posteriors, messages = outputs[0] if dtype is not None else None, outputs[1] if logs else None
    starting, first = _starting(raw), 0
    if starting is None:  # some start and others go on: the first step is computed apart
        alone = raw.part(0, 1)
        _, carried = _steps(alone.logs(), carried)
        first = 1
        if posteriors is not None:
            posteriors[..., 0, :] = carried.message.exp()
        if messages is not None:
            messages[..., 0, :] = carried.message
    in_place, size = stretch.takes(raw), k
    if not in_place:  # some steps at a time
        size = max(1, _BLOCK * k // (x.numel() + (raw.bulk.numel() if raw.bulk.shape[-3] > 1 else 0)))
    for start in range(first, k, size):
        part, head = raw.part(start, min(start + size, k)), not starting or start > 0
        into, logs_into = (None if out is None else out[..., start : start + size, :] for out in (posteriors, messages))
        if in_place:
            carried = stretch.walk(part, carried, head, into, logs_into, calls)
        else:
            carried = _by_any_kernels(part, carried, head, into, logs_into)
    if posteriors is not None and raw.counts is not None:
        posteriors.masked_fill_(~raw.active()[..., None], 0.0)
    return *carried, *outputs


def _by_any_kernels(
    raw: RawPiece, carried: Carried, head: bool, posteriors: Tensor | None, messages: Tensor | None
) -> Carried:
    """The same as `stretch.walk`, by the kernels of any device."""
    x, bulk, counts = raw.x, raw.bulk, raw.counts
    if not head and bulk.shape[-3] > 1:
        bulk = bulk[..., 1:, :, :]
    layout, dtype = Layout.of(x, bulk), arithmetic_dtype(x, bulk, raw.p0)
    steps, ends = layout.steps_first(x), None if counts is None else layout.sequences(counts)[..., None]
    chain = Chain(steps, layout.matrices(bulk), layout.weights(raw.p0), ends, raw.log_params, dtype)
    grid, entering, kept = (chain.g, chain.m, chain.c), None, None
    if head:
        values = layout.weights(carried.message).reshape(grid)
        entering = Message(values, values.new_zeros(2, *grid[:2]))
    if posteriors is not None or messages is not None:
        kept = chain.new(chain.v + head, *grid)
    residuals, leaving = kernels.chain_kernels(x).forward(chain, entering, keep=kept, leave=True)
    report_chains(residuals.redone)
    logs = None if kept is None else residuals.logs(slice(int(head), None)).view(steps.shape)
    if posteriors is not None and logs is not None:
        layout.steps_first(posteriors).copy_(probabilities(logs))
    if messages is not None and logs is not None:
        layout.steps_first(messages).copy_(logs)
    for term in leaving.scale:
        carried = added(carried, layout.batched(term))
    return carried._replace(message=layout.states(leaving.values.view(*chain.lead, chain.c)))


def _outputs(x: Tensor, dtype: torch.dtype | None, logs: bool) -> tuple[Tensor, Tensor]:
    """Memory for posteriors and messages, empty for what is not asked for."""
    return (
        x.new_empty(x.shape if dtype is not None else (0,), dtype=dtype),
        x.new_empty(x.shape if logs else (0,), dtype=torch.float64),
    )


def _shapes(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *carried, dtype, logs = args[-5:]
    return *(torch.empty_like(tensor) for tensor in carried), *_outputs(x, dtype, logs)


_operator = operator(
    "filtered(Tensor x, Tensor bulk, Tensor p0, bool own, Tensor fresh, bool unlinked, bool running, Tensor? counts,"
    " bool log_params, Tensor message, Tensor total, Tensor lost, ScalarType? dtype, bool logs)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _operator_by_kernels,
    _shapes,
)


def _starting(raw: RawPiece) -> bool | None:
    """Whether all sequences start with this piece; None if only some do, or if that is not known."""
    if raw.running:
        return False
    counts = raw.counts
    if kernels.on_gpu(raw.x):  # nothing is looked at
        return True if raw.unlinked and counts is None else None
    if not raw.fresh.any():
        return False
    return True if raw.fresh.all() and (counts is None or bool((counts > 0).all())) else None
