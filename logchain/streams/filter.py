"""The filtered posteriors of a piece, and the forward message that it leaves to the next one.

Dense matrices without gradients are computed by the kernels of chains, others by the differentiable scan.
"""

from functools import partial

import torch
from torch import Tensor

from .. import kernels
from ..arguments import has_values
from ..autograd.scan import Message, Steps, forward_messages
from ..internals import between_graphs
from ..kernels import message as linear
from ..kernels.chain import Chain
from ..kernels.layout import Layout
from ..kernels.numbers import probabilities, shifted
from ..operands import arithmetic_dtype, differentiated
from ..rescues import report_chains
from ..transitions import LOG
from ..transitions.dense import Dense
from . import stretch
from .piece import Piece, after_each, scaled, selected

# numbers of x, and of matrices that change, in a block: some megabytes, and enough to hide the overhead of a block
_BLOCK = 2**19


@partial(between_graphs, reason="a stream is computed between graphs; logchain.product has one")
def filtered(
    piece: Piece, entering: Message, dtype: torch.dtype | None, logs: Piece | None
) -> tuple[Message, Tensor | None, Tensor | None]:
    """The message with sum 1 that leaves a piece, posteriors if there is a `dtype`, messages if there are `logs` of it.

    Posteriors are 0, and messages [*B, k, c], logarithms up to a constant, -inf where a sequence has no variable.
    """
    piece.check_signs()
    dense = isinstance(piece.transition, Dense) and has_values(piece.x)
    if not dense or differentiated(piece.x, piece.p0, entering.values, *piece.transition.parameters):
        return _by_scan(piece.logs() if logs is None else logs, entering, dtype)
    x = piece.x
    posteriors = None if dtype is None else x.new_empty(x.shape, dtype=dtype)
    messages = None if logs is None else x.new_empty(x.shape, dtype=torch.float64)
    if x.numel() == 0:
        return entering, posteriors, messages
    with kernels.arithmetic_on(x):
        leaving = _by_kernels(piece, entering, posteriors, messages)
    return leaving, posteriors, messages if logs is None else _recovered(logs, entering.values, messages)


def _by_scan(
    piece: Piece, entering: Message, dtype: torch.dtype | None
) -> tuple[Message, Tensor | None, Tensor | None]:
    """The same for a piece in logarithms, step by step.

    The scale is a constant to autograd, and so is the sum that a message is divided by: derivatives of both would
    cancel, but for their rounding errors. `log_norm` has the gradient of the message.
    """
    if piece.x.numel() == 0:
        return entering, None if dtype is None else piece.x.to(dtype), piece.x
    fresh = None if piece.starting is False else piece.fresh
    steps = Steps(piece.potentials(), piece.transition, piece.p0, None, True, entered=True, fresh=fresh)
    first = Message(*map(steps.layout.grouped, entering))
    columns = [*map(steps.by_step, zip(first, *forward_messages(steps, first), strict=True))]  # [*B, k + 1, c or 1]
    messages, last = columns[0][..., 1:, :], Message(*(column[..., -1, :] for column in columns))
    if piece.counts is not None:
        messages = torch.where(piece.active()[..., None], messages, -torch.inf)
        index = piece.counts[..., None, None]
        last = Message(*(column.gather(-2, index.expand_as(column[..., :1, :])).squeeze(-2) for column in columns))
    norm = LOG.sum(last.values.detach(), -1)[..., None]
    leaving = scaled(last, norm)._replace(values=last.values - norm.masked_fill(norm == -torch.inf, 0.0))
    if piece.counts is not None:
        leaving = selected(piece.counts > 0, leaving, entering)
    return leaving, None if dtype is None else probabilities(messages).to(dtype), messages


def _by_kernels(piece: Piece, entering: Message, posteriors: Tensor | None, messages: Tensor | None) -> Message:
    """The message that leaves a dense piece; posteriors and messages are written where there is memory for them."""
    x, k, first, message = piece.x, piece.x.shape[-2], 0, entering
    if piece.starting is None:  # some start and others go on: the first step is computed apart
        first = 1
        message, *values = _by_scan(piece.part(0, 1).logs(), message, torch.float64)
        for into, value in zip((posteriors, messages), values, strict=True):
            if into is not None and value is not None:
                into[..., :1, :] = value
    size, in_place = k, kernels.in_c(x) and stretch.in_place(x, piece.bulk)
    if not in_place:  # some steps at a time
        size = max(1, _BLOCK * k // (x.numel() + (piece.bulk.numel() if piece.bulk.shape[-3] > 1 else 0)))
    for start in range(first, k, size):
        part, head = piece.part(start, min(start + size, k)), not piece.starting or start > 0
        into, logs_into = (None if out is None else out[..., start : start + size, :] for out in (posteriors, messages))
        if in_place:
            message = stretch.walk(part, message, head, into, logs_into)
        else:
            message = _by_any_kernels(part, message, head, into, logs_into)
    if posteriors is not None and piece.counts is not None:
        posteriors.masked_fill_(~piece.active()[..., None], 0.0)
    return message


def _by_any_kernels(
    piece: Piece, entering: Message, head: bool, posteriors: Tensor | None, messages: Tensor | None
) -> Message:
    """The same as `stretch.walk`, by the kernels of any device."""
    x, bulk, counts = piece.x, piece.bulk, piece.counts
    if not head and bulk.shape[-3] > 1:
        bulk = bulk[..., 1:, :, :]
    layout, dtype = Layout.of(x, bulk), arithmetic_dtype(x, bulk, piece.p0)
    steps, ends = layout.steps_first(x), None if counts is None else layout.grouped(counts)[..., None]
    chain = Chain(steps, layout.matrices(bulk), layout.weights(piece.p0), ends, piece.log_params, dtype)
    grid, before, kept = (chain.g, chain.m, chain.c), None, None
    if head:
        values = layout.weights(entering.values).reshape(grid)
        before = linear.Message(values, values.new_zeros(2, *grid[:2]))
    if posteriors is not None or messages is not None:
        kept = chain.new(chain.v + head, *grid)
    residuals, after = kernels.chain_kernels(x).forward(chain, before, keep=kept, leave=True)
    report_chains(residuals.redone)
    if kept is not None:
        logs = residuals.logs(slice(int(head), None)).view(steps.shape)
        if posteriors is not None:
            layout.steps_first(posteriors).copy_(probabilities(logs))
        if messages is not None:
            layout.steps_first(messages).copy_(logs)
    leaving = entering._replace(values=layout.states(after.values.view(*chain.lead, chain.c)))
    for term in after.scale:
        leaving = scaled(leaving, layout.batched(term)[..., None])
    return leaving


def _recovered(piece: Piece, before: Tensor, messages: Tensor | None) -> Tensor:
    """The forward messages [*B, k, c] with maximum 0 and small entries, which linear `messages` had flushed to zero.

    Each is computed again, in log space, from the one before it, which small entries hardly count for. `before` [*B, c]
    is the message before the piece.
    """
    assert messages is not None
    into = after_each(piece.transition, torch.cat([before[..., None, :], messages[..., :-1, :]], -2))
    into = torch.where(piece.linked()[..., None], into, piece.p0[..., None, :])
    return torch.where(piece.active()[..., None], shifted(into + shifted(piece.potentials())[0])[0], -torch.inf)
