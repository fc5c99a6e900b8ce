"""Fixed-lag smoothing: posteriors of states given everything up to `lag` variables later."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..internals import tree_leaves
from ..kernels.numbers import probabilities, shifted
from ..transitions import Transition
from .piece import Piece, after_each, mapped, steps_between


class Window(NamedTuple):
    """The last n variables, which fewer than `lag` follow, with forward `messages`, -inf for what is no variable.

    `linked`: which have a variable before them. `transition` leads into each; None where the stream has one for all.
    """

    x: Tensor  # [*B, n, c]
    messages: Tensor  # [*B, n, c]
    linked: Tensor  # [*B, n]
    transition: Transition | None  # log-parameters [*B or ones, n, *own]


def passed(before: Window | None, piece: Piece, messages: Tensor, lag: int) -> tuple[Tensor, Window]:
    """The posteriors [*B, m, c] of the variables that `lag` others follow after a piece in logarithms, and the rest."""
    axis, k, transition = piece.x.dim() - 2, piece.x.shape[-2], None

    def joined(old: Tensor, new: Tensor) -> Tensor:
        lead = torch.broadcast_shapes(old.shape[:axis], new.shape[:axis])
        return torch.cat([part.expand(*lead, *part.shape[axis:]) for part in (old, new)], axis)

    if piece.name == "bulk_piece":
        transition = piece.transition.map(lambda one: one.expand(*one.shape[:axis], k, *one.shape[axis + 1 :]))
    window = Window(piece.x, messages, piece.linked(), transition)
    if before is not None:
        if before.transition is not None and transition is not None:
            _check_alike(before.transition, transition)
        window = mapped(joined, before, window)
    ready = max(0, window.x.shape[axis] - lag)
    # copied so that the memory of those before is free
    rest = mapped(lambda one: one.narrow(axis, ready, one.shape[axis] - ready).clone(), window)
    return smoothed(window, piece.transition, ready, lag), rest


def smoothed(window: Window, transition: Transition | None, ready: int, lag: int) -> Tensor:
    """The posteriors [*B, ready, c] of the first states, given up to `lag` more variables; 0 for no variable.

    Their backward messages pass `lag` steps at once. `transition` is that of the stream, not read where it has none.
    """
    n, transition = window.x.shape[-2], window.transition or transition
    assert transition is not None
    transposed = transition.mT
    x = shifted(torch.where(window.linked[..., None], window.x, 0.0))[0]
    backward = torch.zeros_like(window.messages[..., :ready, :])
    for j in range(min(lag, n - 1) if backward.numel() else 0, 0, -1):
        stop = min(j + ready, n)
        into = shifted(backward[..., : stop - j, :] + x[..., j:stop, :])[0]
        before = after_each(steps_between(transposed, j, stop), into)
        # the backward message of a sequence's last variable is 0
        before = torch.where(window.linked[..., j:stop, None], before, 0.0)
        backward = torch.cat([before, backward[..., stop - j :, :]], -2)
    return probabilities(window.messages[..., :ready, :] + backward)


def _check_alike(old: Transition, new: Transition) -> None:
    """Raise for structures that differ in more than parameters, whose steps cannot be concatenated."""
    was, now = map(_properties, (old, new))
    pairs = zip(was, now, strict=False)
    if len(was) != len(now) or not all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs):
        expected = f"that of the last update, {type(old).__name__}, with other parameters, since lag holds both"
        raise ValueError(f"bulk_piece: expected {expected}, got another {type(new).__name__}")


def _properties(one: Transition) -> list[Any]:
    """What transitions must have in common: all but leading axes and values of parameters."""
    sizes = [parameter.shape[len(lead) :] for parameter, lead in zip(one.parameters, one.leads, strict=True)]
    return [type(one), *sizes, *tree_leaves(one.pattern or vars(one.with_parameters()))]
