"""The forward messages of a piece: those of the chain kernels, a block at a time, where nobody differentiates them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..autograd.operator import operator
from ..kernels.chain import Chain, is_view
from ..kernels.numbers import exact_sum
from ..layout import Layout
from ..operands import arithmetic_dtype, differentiated
from ..rescues import report_chains
from .block import Block, Room, linear_as_logs, write_last
from .piece import Given, Piece, added, filtering, normalised, recovered

# values of x, and of matrices that change, in a block: some megabytes, and enough to hide what a block costs
_BLOCK = 2**19


class Filtered(NamedTuple):
    """After a piece: the message [*B, c] with sum 1, the log-partition [*B], and what its rounding has lost [*B].

    `posteriors` [*B, k, c] of the states given all up to each, and the `messages` [*B, k, c] as logarithms to some
    constant, where they are asked for; 0, and anything, where a sequence has no variable.
    """

    message: Tensor
    total: Tensor
    lost: Tensor
    posteriors: Tensor | None
    messages: Tensor | None


def filtered(
    given: Given, carried: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype | None, piece: Piece | None, room: Room
) -> Filtered:
    """Filter a piece, with posteriors of that dtype, and with messages where its logarithms are there.

    `carried` are the first three fields of what came before.
    """
    if differentiated(given.x, given.bulk, given.p0, carried[0]):
        return _by_autograd(given, carried, dtype, given.logs() if piece is None else piece)
    if torch.compiler.is_compiling():
        found = _operator(*given, *carried, dtype, piece is not None)
    else:
        with kernels.arithmetic_on(given.x):
            found = _by_kernels(given, carried, dtype, piece is not None, room)
    message, total, lost, posteriors, messages = found
    logs = None if piece is None else recovered(piece, carried[0], messages)
    return Filtered(message, total, lost, None if dtype is None else posteriors, logs)


def _by_autograd(
    given: Given, carried: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype | None, piece: Piece
) -> Filtered:
    messages, left = _steps(piece, carried)
    posteriors = None
    if dtype is not None:
        posteriors = torch.where(piece.active[..., None], messages.exp(), 0.0).to(dtype)
    return Filtered(*left, posteriors, messages)


def _steps(piece: Piece, carried: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The messages [*B, k, c] of a piece with sum 1, step by step, and what is carried on."""
    before, found, lost = carried
    messages, taken = filtering(piece, before)
    messages, norms = normalised(messages)
    message, norm = messages[..., -1, :], norms[..., -1]
    moved = piece.active.any(-1)
    term, more = exact_sum(torch.stack([torch.zeros_like(found), *taken.flatten(-2).unbind(-1)]))
    found, lost = added(found, lost, torch.where(moved, norm, 0.0))
    found, lost = added(found, lost + more, term)
    # what came before the impossible has no gradient either
    dead = moved & (norm == -torch.inf)
    found, lost = found.masked_fill(dead, -torch.inf), lost.masked_fill(dead, 0.0)
    return messages[..., 1:, :], (torch.where(moved[..., None], message, before), found, lost)


def _operator_by_kernels(*args: Any) -> tuple[Tensor, ...]:
    *given, message, found, lost, dtype, logs = args
    return _by_kernels(Given(*given), (message, found, lost), dtype, logs, Room())


def _by_kernels(
    given: Given, carried: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype | None, logs: bool, room: Room
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, bulk = given.x, given.bulk
    outs = _outs(x, dtype, logs)
    posteriors, messages = outs[0] if dtype is not None else None, outs[1] if logs else None
    message, found, lost = carried
    if x.numel() == 0:
        return message.clone(), found.clone(), lost.clone(), *outs
    starting, first = _starting(given), 0
    if starting is None:  # some start and others go on
        _, (message, found, lost) = _steps(given.first().logs(), carried)
        first, starting = 1, False
        if posteriors is not None:
            posteriors[..., 0, :] = message.exp()
        if messages is not None:
            messages[..., 0, :] = message
    if kernels.in_c(x) and _in_order(given):
        if x.shape[-2] > first:
            outs_left = (None if out is None else out[..., first:, :] for out in (posteriors, messages))
            message, found, lost = _by_stretch(
                given.behind(first), (message, found, lost), bool(starting), *outs_left, room=room
            )
        first = x.shape[-2]
    # values of x, and of matrices that change, to a step
    step = (x.numel() + (bulk.numel() if bulk.shape[-3] > 1 else 0)) // x.shape[-2]
    size = max(2, _BLOCK // step)
    for start in range(first, x.shape[-2], size):
        block = Block(given, None if starting else message, start, min(start + size, x.shape[-2]), room)
        message, terms = block.left()
        for term in terms:
            found, lost = added(found, lost, term)
        if posteriors is not None:
            block.write_posteriors(posteriors)
            block.write_last(posteriors, message.exp())
        if messages is not None:
            block.write_messages(messages)
            block.write_last(messages, message)
        starting = False
    if posteriors is not None and given.counts is not None:
        posteriors.masked_fill_(~given.active()[..., None], 0.0)
    return message, found, lost, *outs


def _in_order(given: Given) -> bool:
    """Whether axes with matrices of their own come before the others."""
    own = Layout.of(given.x, given.bulk).own
    return own == tuple(range(len(own)))


def _by_stretch(
    given: Given,
    carried: tuple[Tensor, Tensor, Tensor],
    starting: bool,
    posteriors: Tensor | None,
    messages: Tensor | None,
    *,
    room: Room,
) -> tuple[Tensor, Tensor, Tensor]:
    """What is carried on from a piece that the loops in C walk where it lies; posteriors and messages are written."""
    dtype = arithmetic_dtype(given.x, given.bulk, given.p0)
    operands = given.x, given.bulk, given.p0
    x, bulk, p0 = (operand.to(dtype).resolve_neg() for operand in operands)
    x = x if is_view(x, 2) and x.stride(-1) == 1 else x.contiguous()
    if starting:
        bulk = bulk if bulk.shape[-3] == 1 else bulk[..., 1:, :, :]
        p0 = p0.expand(*x.shape[:-2], -1)
        p0 = p0 if is_view(p0, 1) else p0.contiguous()
    bulk = bulk if is_view(bulk, 3) else bulk.contiguous()
    layout = Layout.of(x, bulk)

    def stretch() -> Any:
        chain = Chain(layout.steps_first(x), layout.matrices(bulk), layout.weights(p0), None, given.log_params, dtype)
        return kernels.stretches().Stretch(chain, head=not starting)

    stretch_ = room.stretch((x.shape, x.stride(), bulk.shape, bulk.stride(), p0.stride(), dtype, starting), stretch)
    ends, kept, shares = given.counts, None, posteriors
    if ends is not None:
        ends = layout.sequences(ends + (not starting)).contiguous()
    if messages is not None:
        shape = x.shape[-2] + (not starting), *layout.grid, x.shape[-1]
        kept = room.messages.take(shape, dtype, x.device)
    if shares is not None and shares.dtype != dtype:
        shares = torch.empty_like(shares, dtype=dtype)
    after: tuple[Tensor, Tensor, Tensor]
    message, total, lost = carried
    before = message.contiguous(), total.contiguous(), lost.contiguous()
    after, redone, count = stretch_.forward((x, bulk, p0), before, ends, kept, shares)
    if x is given.x and bulk is given.bulk and given.own and not starting:
        room.repeat(x, bulk, stretch_)
    if count:
        report_chains(redone)
    if posteriors is not None and shares is not None:
        if shares is not posteriors:
            posteriors.copy_(shares)
        write_last(posteriors, given.counts, after[0].exp())
    if messages is not None and kept is not None:
        logs = linear_as_logs(kept[int(not starting) :].double(), redone[..., None] if count else None)
        view = layout.steps_first(messages)
        view.copy_(logs.view(view.shape))
    if given.counts is None or starting:
        return after
    message, found, lost = after
    moved = given.counts > 0
    message = torch.where(moved[..., None], message, carried[0])
    return message, torch.where(moved, found, carried[1]), torch.where(moved, lost, carried[2])


def _outs(x: Tensor, dtype: torch.dtype | None, logs: bool) -> tuple[Tensor, Tensor]:
    """Posteriors and messages, empty where they are not wanted."""
    return (
        x.new_empty(x.shape if dtype is not None else (0,), dtype=dtype),
        x.new_empty(x.shape if logs else (0,), dtype=torch.float64),
    )


def _shapes(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *carried, dtype, logs = args[-5:]
    return *(torch.empty_like(tensor) for tensor in carried), *_outs(x, dtype, logs)


_operator = operator(
    "filtered(Tensor x, Tensor bulk, Tensor p0, bool own, Tensor fresh, bool unlinked, bool running, Tensor? counts,"
    " bool log_params, int number, Tensor message, Tensor total, Tensor lost, ScalarType? dtype, bool logs)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _operator_by_kernels,
    _shapes,
)


def _starting(given: Given) -> bool | None:
    """Whether all sequences start with this piece; None for some, or for not known.

    But in C they must have two variables at least: what p0 alone leads to has not been looked at by any step.
    """
    if given.running:
        return False
    counts = given.counts
    if kernels.on_gpu(given.x):  # nothing is looked at
        return True if given.unlinked and counts is None and given.x.shape[-2] > 1 else None
    if not given.fresh.any():
        return False
    least = 0 if kernels.in_c(given.x) else 1
    many = given.x.shape[-2] > least and (counts is None or bool((counts > least).all()))
    return True if many and given.fresh.all() else None
