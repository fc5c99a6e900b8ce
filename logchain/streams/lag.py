"""Fixed-lag smoothing: posteriors of states given everything up to `lag` variables later."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..kernels.numbers import probabilities, shifted
from ..transitions import Transition
from .piece import Piece
from .structures import Matrices, each, parts, steps_between, steps_of, through


class Window(NamedTuple):
    """The last n variables, which fewer than `lag` follow, with forward `messages` [*B, n, c], the rest as in `Piece`.

    `matrices` is None where one matrix serves every step.
    """

    x: Tensor
    messages: Tensor
    active: Tensor
    linked: Tensor
    matrices: Matrices | None


def passed(held: Window | None, piece: Piece, messages: Tensor, one_matrix: bool, lag: int) -> tuple[Tensor, Window]:
    """The posteriors [*B, m, c] of the variables that `lag` others follow after a piece, and the new window."""
    window = Window(piece.x, messages, piece.active, piece.linked, None if one_matrix else piece.matrices)
    if held is not None:
        _check_alike(held.matrices, window.matrices)
        window = _each_field(_joined, held, window)
    waiting = window.active.shape[-1]
    ready = max(0, waiting - lag)
    # copied so that the memory of those before is free
    left = _each_field(lambda value, axis: value.narrow(axis, ready, value.shape[axis] - ready).clone(), window)
    if not ready:
        return window.x[..., :0, :], left
    matrices = piece.matrices if window.matrices is None else window.matrices
    whole = Piece(window.x, matrices, piece.start, window.active, window.linked, False)
    return _smoothed(whole, window.messages, lag), left


def at_the_end(held: Window, matrices: Matrices | None, lag: int) -> Tensor:
    """The posteriors of all variables in the window, if no others follow."""
    batch, c = held.x.shape[:-2], held.x.shape[-1]
    x, none = held.x.new_zeros(*batch, lag, c), held.active.new_zeros(*batch, lag)
    into_nothing = matrices
    if held.matrices is not None:
        into_nothing = each(lambda one, own: one.new_zeros(lag, *one.shape[one.dim() - own :]), held.matrices)
    assert into_nothing is not None
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
        if steps_of(piece.matrices) != 1:
            before = through(ahead[..., None, :], steps_between(piece.matrices, j, j + size).mT)[..., 0, :]
        else:
            before = through(ahead, piece.matrix(0).mT)
        # the backward message of a sequence's last variable is 0
        behind = torch.where(piece.linked[..., j : j + size, None], before, 0.0)
    return torch.where(piece.active[..., :size, None], probabilities(messages[..., :size, :] + behind), 0.0)


def _each_field(function: Callable[..., Tensor], *windows: Window) -> Window:
    """A window of `function(*tensors, axis)` of each tensor, `axis` being that along which variables lie."""
    *fields, matrices = zip(*windows, strict=True)
    found = [function(*tensors, axis) for tensors, axis in zip(fields, (-2, -2, -1, -1), strict=True)]
    one_matrix = windows[0].matrices is None
    into = None if one_matrix else each(lambda *tensors: function(*tensors[:-1], -1 - tensors[-1]), *matrices)
    return Window._make([*found, into])


def _check_alike(old: Matrices | None, new: Matrices | None) -> None:
    """Raise for structures that differ in more than parameters, whose steps cannot lie one behind the other."""
    was, now = _kind(old), _kind(new)
    if len(was) != len(now) or not all(map(_same, was, now)):
        expected = f"that of the last update, {type(old).__name__}, with other parameters, since lag holds both"
        raise ValueError(f"bulk_piece: expected {expected}, got another {type(new).__name__}")


def _kind(matrices: Matrices | None) -> list[Any]:
    """What structures must have in common; nothing for other matrices."""
    if not isinstance(matrices, Transition):
        return []
    sizes = [parameter.shape[parameter.dim() - own :] for parameter, own in parts(matrices)]
    others = {name: value for name, value in vars(matrices).items() if name != "parameters"}
    return [type(matrices), matrices.states, *sizes, *tree_leaves(matrices.pattern or others)]


def _same(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b


def _joined(old: Tensor, new: Tensor, axis: int) -> Tensor:
    """Both tensors, one behind the other along the axis; other axes are broadcast."""
    dim = max(old.dim(), new.dim())
    old, new = (part[(None,) * (dim - part.dim())] for part in (old, new))
    axis += dim
    sizes = [max(a, b) if a and b else 0 for a, b in zip(old.shape, new.shape, strict=True)]
    parts = [part.expand([part.shape[i] if i == axis else size for i, size in enumerate(sizes)]) for part in (old, new)]
    return torch.cat(parts, axis)
