"""The best path of an unbounded chain: which states of it are final, and what must be held until the others are.

Held is a back-pointer for each state of each variable that is not final yet. Once all paths that may still win go
through one state of a variable, the states up to there are final. A sequence that ended, and one that starts anew, has
its best last state as the only one before; one that is impossible has none, -1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ._stream import Piece, shifted

# terms [*B, c, columns] that are held at a time
_TERMS = 2**20


class Survivors(NamedTuple):
    """Max-plus message [*B, c] with maximum 0, pointers int32 [*B, n, c] to the state before, and as in `Piece`."""

    message: Tensor
    pointers: Tensor
    active: Tensor
    linked: Tensor


def extended(held: Survivors, piece: Piece) -> Survivors:
    """The survivors after a piece."""
    message, pointers = held.message, []
    x = piece.potentials()[0]
    for i in range(piece.x.shape[-2]):
        active, linked = piece.active[..., i, None], piece.linked[..., i, None]
        best = _best(message)[..., None].expand_as(message)
        ahead, pointer = piece.start, best
        if not (i == 0 and piece.unlinked):
            ahead, pointer = _step(message, piece.matrix(i))
            ahead, pointer = torch.where(linked, ahead, piece.start), torch.where(linked, pointer, best)
        after = shifted(ahead + x[..., i, :])[0]
        # neither NaN nor infinity has a best path
        lost = ~(after < torch.inf).all(-1, keepdim=True)
        after = after.masked_fill(lost, -torch.inf)
        pointer = torch.where(active, pointer, best)
        pointers.append(pointer.int()[..., None, :])
        message = torch.where(active, after, message)
    return Survivors(
        message,
        torch.cat([held.pointers, *pointers], -2),
        torch.cat([held.active, piece.active], -1),
        torch.cat([held.linked, piece.linked], -1),
    )


def settled(held: Survivors) -> tuple[Tensor, Survivors]:
    """The states that are final in all sequences [*B, m], -1 for no variable, and what is still to be held."""
    n = held.pointers.shape[-2]
    alive = held.message > -torch.inf
    states = torch.arange(held.message.shape[-1], device=alive.device).expand(alive.shape)
    if n:  # where a sequence has no variable its state is not asked for
        states = torch.where(held.active[..., -1:], states, 0)
    for last in range(n - 1, -1, -1):
        high = torch.where(alive, states, -1).amax(-1)
        if bool(((states == high[..., None]) | ~alive).all()):
            return _back(held, high, last), _after(held, last)
        states = _before(held, states, last)
    return torch.empty(*alive.shape[:-1], 0, dtype=torch.int64, device=alive.device), held


def ended(held: Survivors) -> tuple[Tensor, Survivors]:
    """The states of the best paths as they are now, and nothing held."""
    last = held.pointers.shape[-2] - 1
    return _back(held, _best(held.message), last), _after(held, last)


def _after(held: Survivors, last: int) -> Survivors:
    """What is held of the variables after the last final one; it does not keep the others' memory."""
    active, linked = (part[..., last + 1 :].clone() for part in (held.active, held.linked))
    return Survivors(held.message, held.pointers[..., last + 1 :, :].clone(), active, linked)


def _best(message: Tensor) -> Tensor:
    """The lowest best state [*B], -1 for none."""
    top, state = message.max(-1)
    return state.masked_fill(top == -torch.inf, -1)


def _step(message: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The largest `message(k) + matrix(k, j)` [*B, c], and the lowest k that attains it; a few columns at a time."""
    c = message.shape[-1]
    columns = max(1, min(c, _TERMS // max(1, message.numel())))
    parts = [(message[..., None] + matrix[..., j : j + columns]).max(-2) for j in range(0, c, columns)]
    return torch.cat([part.values for part in parts], -1), torch.cat([part.indices for part in parts], -1)


def _before(held: Survivors, states: Tensor, at: int) -> Tensor:
    """The states [*B, s] before those of a variable."""
    found = held.pointers[..., at, :].long().gather(-1, states.clamp(min=0))
    # what is impossible is so from its own start only
    return found.masked_fill((states < 0) & held.linked[..., at, None], -1)


def _back(held: Survivors, state: Tensor, last: int) -> Tensor:
    """The path [*B, last + 1] that ends in the states [*B] of the variable `last`."""
    path = torch.full((*state.shape, last + 1), -1, device=state.device)
    for at in range(last, -1, -1):
        path[..., at] = state
        state = _before(held, state[..., None], at)[..., 0]
    return path.masked_fill_(~held.active[..., : last + 1], -1)
