"""Fixed-lag smoothing: posteriors of states given everything up to `lag` variables later."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..autograd.matmul import broadcast_log_matmul
from .piece import Piece, posterior, shifted


class Window(NamedTuple):
    """The last n variables, which fewer than `lag` follow, with forward `messages` [*B, n, c], the rest as in `Piece`.

    `matrices` is None where one matrix serves every step.
    """

    x: Tensor
    messages: Tensor
    active: Tensor
    linked: Tensor
    matrices: Tensor | None


def passed(held: Window | None, piece: Piece, messages: Tensor, one_matrix: bool, lag: int) -> tuple[Tensor, Window]:
    """The posteriors [*B, m, c] of the variables that `lag` others follow after a piece, and the new window."""
    window = Window(piece.x, messages, piece.active, piece.linked, None if one_matrix else piece.matrices)
    if held is not None:
        window = Window._make(_joined(old, new, axis) for old, new, axis in zip(held, window, _AXES, strict=True))
    waiting = window.active.shape[-1]
    ready = max(0, waiting - lag)
    left = Window._make(_from(value, ready, axis) for value, axis in zip(window, _AXES, strict=True))
    if not ready:
        return window.x[..., :0, :], left
    matrices = piece.matrices if window.matrices is None else window.matrices
    whole = Piece(window.x, matrices, piece.start, window.active, window.linked, False)
    return _smoothed(whole, window.messages, lag), left


def at_the_end(held: Window, matrices: Tensor | None, lag: int) -> Tensor:
    """The posteriors of all variables in the window, if no others follow."""
    batch, c = held.x.shape[:-2], held.x.shape[-1]
    x, none = held.x.new_zeros(*batch, lag, c), held.active.new_zeros(*batch, lag)
    into_nothing = x.new_zeros(lag, c, c) if matrices is None else matrices
    nothing = Piece(x, into_nothing, x[..., 0, :], none, none, False)
    return passed(held, nothing, torch.full_like(x, -torch.inf), matrices is not None, lag)[0]


def _smoothed(piece: Piece, messages: Tensor, lag: int) -> Tensor:
    """The posteriors [*B, k - lag, c] of all but the last `lag` states, given `lag` more variables; 0 for no variable.

    `messages` [*B, k, c] are forward ones. Backward messages go `lag` steps back for all variables side by side.
    """
    size = piece.x.shape[-2] - lag
    x = shifted(torch.where(piece.linked[..., None], piece.x, 0.0))[0]
    behind = torch.zeros_like(messages[..., :size, :])
    for j in range(lag, 0, -1):
        ahead = shifted(behind + x[..., j : j + size, :])[0]
        if piece.matrices.shape[-3] != 1:
            before = broadcast_log_matmul(ahead[..., None, :], piece.matrices[..., j : j + size, :, :].mT)[..., 0, :]
        else:
            before = broadcast_log_matmul(ahead, piece.matrix(0).mT)
        # the backward message of a sequence's last variable is 0
        behind = torch.where(piece.linked[..., j : j + size, None], before, 0.0)
    return torch.where(piece.active[..., :size, None], posterior(messages[..., :size, :] + behind), 0.0)


# the axes along which variables lie
_AXES = -2, -2, -1, -1, -3


def _from(value: Tensor | None, start: int, axis: int) -> Tensor | None:
    """The entries from `start` on, copied so that the memory of those before is free."""
    return None if value is None else value.narrow(axis, start, value.shape[axis] - start).clone()


def _joined(old: Tensor | None, new: Tensor | None, axis: int) -> Tensor | None:
    """Both tensors, one behind the other along the axis; other axes are broadcast."""
    if old is None or new is None:
        return None
    dim = max(old.dim(), new.dim())
    old, new = (part[(None,) * (dim - part.dim())] for part in (old, new))
    axis += dim
    sizes = [max(a, b) if a and b else 0 for a, b in zip(old.shape, new.shape, strict=True)]
    parts = [part.expand([part.shape[i] if i == axis else size for i, size in enumerate(sizes)]) for part in (old, new)]
    return torch.cat(parts, axis)
