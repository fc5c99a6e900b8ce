"""The best path of an unbounded chain, by on-line Viterbi decoding.

For each state of the last variable the best path that ends in it is a survivor. Once all survivors go through the same
state of a variable, the states up to there are final, and only the later ones are held. Where a sequence ends or
starts anew, the path to its best last state alone survives; states of an impossible sequence are -1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..autograd.paths import log_weight
from ..kernels.numbers import shifted
from ..operands import chain_of
from ..transitions import Transition
from .piece import Piece
from .structures import Matrices

# sums of messages and matrices [*B, c, columns], or log-potentials of chains to each state, in memory at a time
_TERMS = 2**20

# the most states, and the fewest steps, for which one compiled Viterbi to each state is faster than torch step by step
_FEW, _LONG = 32, 16


class Survivors(NamedTuple):
    """The best path to each last state: `paths` int32 [*B, n, c], `message` [*B, c] their log-weights with maximum 0.

    `active` and `linked` [*B, n] are as in `Piece`.
    """

    message: Tensor
    paths: Tensor
    active: Tensor
    linked: Tensor

    @classmethod
    def none(cls, like: Tensor) -> "Survivors":
        """The survivors before the first variable, for a batch of messages [*B, c]."""
        none = like.new_zeros(*like.shape[:-1], 0, dtype=torch.bool)
        paths = like.new_zeros(*none.shape, like.shape[-1], dtype=torch.int32)
        return cls(torch.full_like(like, -torch.inf), paths, none, none)


def extended(held: Survivors, piece: Piece) -> Survivors:
    """The survivors after a piece."""
    k, c = piece.x.shape[-2:]
    dense = isinstance(piece.matrices, Tensor)
    fast = dense and c <= _FEW and k >= _LONG and piece.x.numel() > 0 and kernels.in_c(piece.x)
    if not fast or not piece.active.all() or not (piece.unlinked or piece.linked.all()):
        return _joined(held, piece, *_stepwise(held.message, piece))
    size = max(2, _TERMS // max(1, c * piece.x[..., 0, :].numel()))
    for start in range(0, k, size):
        part = piece.part(start, min(start + size, k))
        held = _joined(held, part, *_to_each(held.message, part))
    return held


def _stepwise(message: Tensor, piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
    """The message after a piece, the paths through it to each state, and the states before it that they come from."""
    pointers, k = [], piece.x.shape[-2]
    first = _best(message)[..., None].clamp(min=0).expand_as(message)
    x = piece.potentials()[0]
    for i in range(k):
        active, linked = piece.active[..., i, None], piece.linked[..., i, None]
        ahead, pointer = piece.start, first
        if not (i == 0 and piece.unlinked):
            ahead, pointer = _step(message, piece.matrix(i))
            ahead, pointer = torch.where(linked, ahead, piece.start), torch.where(linked, pointer, first)
        after = _possible(shifted(ahead + x[..., i, :])[0])
        pointers.append(pointer)
        message = torch.where(active, after, message)
    # only the best path survives the end of a sequence
    last = _best(message)[..., None].clamp(min=0).expand_as(message)
    state = torch.arange(message.shape[-1], device=message.device).expand_as(message)
    paths = torch.empty(*piece.active.shape, message.shape[-1], dtype=torch.int32, device=message.device)
    for i in reversed(range(k)):
        paths[..., i, :] = state
        state = torch.where(piece.active[..., i, None], pointers[i].gather(-1, state), last)
    return message, paths, state


def _to_each(message: Tensor, piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
    """The same as `_stepwise` where every sequence has all variables, by one Viterbi for each last state.

    For each state there is a copy of the chain whose other last states are forbidden.
    """
    x, matrices, p0, c = piece.x, piece.matrices, piece.start, piece.x.shape[-1]
    assert isinstance(matrices, Tensor)
    if not piece.unlinked:
        x, p0 = torch.cat([message[..., None, :], x], -2), piece.start.new_zeros(c)
    elif matrices.shape[-3] != 1:
        matrices = matrices[..., 1:, :, :]
    x = x.expand(c, *x.shape).clone()
    ends = torch.eye(c, dtype=torch.bool, device=x.device).view(c, *(1,) * (x.dim() - 3), c)
    x[..., -1, :].masked_fill_(~ends, -torch.inf)
    layout, chain = chain_of(x, matrices, p0, None, True)
    states, _ = kernels.path_kernels(x).paths(chain, x.shape[-2])
    states = layout.states(states.view(*chain.lead, x.shape[-2]))  # (c, *B, rows)
    after = log_weight(x, matrices, p0, states, None, True).movedim(0, -1)
    states = states.movedim(0, -1).clamp(min=0)  # (*B, rows, c)
    if piece.unlinked:
        return _possible(shifted(after)[0]), states.int(), _best(message)[..., None].clamp(min=0).expand_as(message)
    return _possible(shifted(after)[0]), states[..., 1:, :].int(), states[..., 0, :]


def _possible(message: Tensor) -> Tensor:
    """The message, with -inf for all of a sequence that has NaN or +inf, which has no best path."""
    return message.masked_fill(~(message < torch.inf).all(-1, keepdim=True), -torch.inf)


def _joined(held: Survivors, piece: Piece, message: Tensor, paths: Tensor, before: Tensor) -> Survivors:
    """The survivors with the paths [*B, k, c] through a piece, which come from the states [*B, c] before it."""
    if not held.paths.shape[-2]:
        return Survivors(message, paths, piece.active, piece.linked)
    # a sequence that was impossible has states -1, also when it has started anew since
    anew = (piece.active & ~piece.linked).any(-1)
    lost = (anew & (_best(held.message) < 0))[..., None] & _own(held)
    old = held.paths.masked_fill(lost[..., None], -1)
    old = old.gather(-1, before[..., None, :].expand_as(old))
    return Survivors(
        message,
        torch.cat([old, paths], -2),
        torch.cat([held.active, piece.active], -1),
        torch.cat([held.linked, piece.linked], -1),
    )


def settled(held: Survivors) -> tuple[Tensor, Survivors]:
    """The states that are final in all sequences [*B, m], -1 for no variable, and the survivors from there on."""
    best = _best(held.message)[..., None, None].clamp(min=0)
    dead = (held.message == -torch.inf)[..., None, :]
    same = (held.paths == held.paths.gather(-1, best.expand(*held.paths.shape[:-1], 1))) | dead
    same = same.all(-1) | ~held.active
    # paths that meet are the same before
    return _split(held, int(same.flatten(0, -2).all(0).sum()) if same.dim() > 1 else int(same.sum()))


def ended(held: Survivors) -> tuple[Tensor, Survivors]:
    """All states of the best paths if no variable follows, and survivors without any."""
    return _split(held, held.paths.shape[-2])


def _split(held: Survivors, m: int) -> tuple[Tensor, Survivors]:
    """The first m states of the best paths [*B, m], and the survivors without them, copied to free their memory."""
    best = _best(held.message)
    paths = held.paths[..., :m, :]
    states = paths.gather(-1, best[..., None, None].clamp(min=0).expand(*paths.shape[:-1], 1))[..., 0].long()
    states.masked_fill_((best < 0)[..., None] & _own(held)[..., :m], -1).masked_fill_(~held.active[..., :m], -1)
    active, linked = (part[..., m:].clone() for part in (held.active, held.linked))
    return states, Survivors(held.message, held.paths[..., m:, :].clone(), active, linked)


def _own(held: Survivors) -> Tensor:
    """Which variables [*B, n] belong to the sequence that has started last, not to one before a reset."""
    starts = (held.active & ~held.linked).long()
    return starts.flip(-1).cumsum(-1).flip(-1) - starts == 0


def _best(message: Tensor) -> Tensor:
    """The best state [*B], the lowest of equals, -1 for an impossible sequence."""
    top, state = message.max(-1)
    return state.masked_fill(top == -torch.inf, -1)


def _step(message: Tensor, matrix: Matrices) -> tuple[Tensor, Tensor]:
    """The largest `message(k) + matrix(k, j)` for each j [*B, c], and the lowest k with it; some columns at a time."""
    c = message.shape[-1]
    if isinstance(matrix, Transition):
        values, before = matrix.best(message[..., None, :])
        return values[..., 0, :], before[..., 0, :]
    columns = max(1, min(c, _TERMS // max(1, message.numel())))
    parts = [(message[..., None] + matrix[..., j : j + columns]).max(-2) for j in range(0, c, columns)]
    return torch.cat([part.values for part in parts], -1), torch.cat([part.indices for part in parts], -1)
