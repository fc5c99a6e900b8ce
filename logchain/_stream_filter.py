"""The forward messages of a piece: those of the chain kernels, a block at a time, where nobody differentiates them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import kernels
from ._operators import differentiated, operator
from ._stream import Given, Piece, added, filtering, normalised, recovered
from ._stream_block import Block, Room
from .kernels.summation import exact_sum

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
    """Whether all sequences start with this piece, and have two variables at least; None for some, or for not known.

    What p0 alone leads to has not been looked at by any step.
    """
    if given.running:
        return False
    counts, long = given.counts, given.x.shape[-2] > 1
    if kernels.on_gpu(given.x):  # nothing is looked at
        return True if given.unlinked and counts is None and long else None
    if not given.fresh.any():
        return False
    return True if long and given.fresh.all() and (counts is None or bool((counts > 1).all())) else None
