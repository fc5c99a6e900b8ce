"""The best path of an unbounded chain, by on-line Viterbi decoding.

For each state of the last variable the best path that ends in it is a survivor. Once all survivors go through the same
state of a variable, the states up to there are final, and only the later ones are held. Where a sequence ends or
starts again, the path to its best last state alone survives; states of an impossible sequence are -1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..autograd.paths import log_weight
from ..kernels.numbers import shifted
from ..operands import chain_of
from ..transitions.dense import Dense
from .piece import Piece, step_at

# log-potentials of chains to each state, in memory at a time
_TERMS = 2**20

# the most states, and the fewest steps, for which one compiled Viterbi to each state is faster than torch step by step
_FEW, _LONG = 32, 16


class Survivors(NamedTuple):
    """The best path to each last state, its log-weight, and which variables are a sequence's first."""

    message: Tensor  # [*B, c], the largest 0
    paths: Tensor  # int32 [*B, n, c], -1 for what is no variable of its sequence
    starts: Tensor  # [*B, n]

    @classmethod
    def none(cls, like: Tensor) -> "Survivors":
        """The survivors before the first variable, for a batch of messages [*B, c]."""
        starts = like.new_zeros(*like.shape[:-1], 0, dtype=torch.bool)
        paths = like.new_zeros(*starts.shape, like.shape[-1], dtype=torch.int32)
        return cls(torch.full_like(like, -torch.inf), paths, starts)


def extended(held: Survivors, piece: Piece) -> Survivors:
    """The survivors after a piece in logarithms."""
    k, c = piece.x.shape[-2:]
    fast = isinstance(piece.transition, Dense) and c <= _FEW and k >= _LONG and kernels.in_c(piece.x)
    if not fast or piece.x.numel() == 0 or piece.counts is not None or piece.starting is None:
        return _joined(held, piece, *_stepwise(held.message, piece))
    size = max(2, _TERMS // max(1, c * piece.x[..., 0, :].numel()))
    for start in range(0, k, size):
        part = piece.part(start, min(start + size, k))
        held = _joined(held, part, *_to_each(held.message, part))
    return held


def _stepwise(message: Tensor, piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
    """The message after a piece, the paths through it to each state, and the states before it that they come from."""
    pointers, first = [], _best_for_each(message)  # only the best path survives the end of a sequence
    active = piece.active()[..., None].unbind(-2)
    columns = zip(shifted(piece.potentials())[0].unbind(-2), active, piece.linked()[..., None].unbind(-2), strict=True)
    for i, (x, inside, linked) in enumerate(columns):
        into, pointer = piece.p0, first
        if i or not piece.starting:
            values, before = step_at(piece.transition, i, piece.x.dim() - 2).best(message[..., None, :])
            into = torch.where(linked, values.squeeze(-2), into)
            pointer = torch.where(linked, before.squeeze(-2), first)
        pointers.append(pointer)
        message = torch.where(inside, _possible(shifted(into + x)[0]), message)
    last = _best_for_each(message)
    state = torch.arange(message.shape[-1], device=message.device).expand_as(message)
    states = [state.new_empty(0)] * len(active)
    for i in reversed(range(len(active))):
        states[i] = torch.where(active[i], state, -1)
        state = torch.where(active[i], pointers[i].gather(-1, state), last)
    paths = torch.stack(states, -2).int() if states else piece.x.int()
    return message, paths, state


def _to_each(message: Tensor, piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
    """The same as `_stepwise` where every sequence has all variables, by one Viterbi for each last state.

    For each state there is a copy of the chain whose other last states are forbidden.
    """
    x, matrices, p0, c = piece.x, piece.bulk, piece.p0, piece.x.shape[-1]
    if not piece.starting:
        x, p0 = torch.cat([message[..., None, :], x], -2), p0.new_zeros(c)
    elif matrices.shape[-3] != 1:
        matrices = matrices[..., 1:, :, :]
    x = x.expand(c, *x.shape).clone()
    ends = torch.eye(c, dtype=torch.bool, device=x.device).view(c, *(1,) * (x.dim() - 3), c)
    x[..., -1, :].masked_fill_(~ends, -torch.inf)
    layout, chain = chain_of(x, matrices, p0, None, True)
    states, _ = kernels.module("viterbi", x).paths(chain, x.shape[-2])
    states = layout.states(states.view(*chain.lead, x.shape[-2]))  # (c, *B, rows)
    after = _possible(shifted(log_weight(x, matrices, p0, states, None, True).movedim(0, -1))[0])
    states = states.movedim(0, -1).clamp(min=0)  # (*B, rows, c)
    if piece.starting:
        return after, states.int(), _best_for_each(message)
    return after, states[..., 1:, :].int(), states[..., 0, :]


def _possible(message: Tensor) -> Tensor:
    """The message, with -inf for all of a sequence that has NaN or +inf, which has no best path."""
    return message.masked_fill(~(message < torch.inf).all(-1, keepdim=True), -torch.inf)


def _joined(held: Survivors, piece: Piece, message: Tensor, paths: Tensor, before: Tensor) -> Survivors:
    """The survivors with the paths [*B, k, c] through a piece, which come from the states [*B, c] before it."""
    starts = piece.active() & ~piece.linked()
    if not held.paths.shape[-2]:
        return Survivors(message, paths, starts)
    # a sequence that was impossible has states -1, also when it has started again since
    impossible = (starts.any(-1) & (_best(held.message) < 0))[..., None] & _newest(held)
    old = held.paths.masked_fill(impossible[..., None], -1)
    old = old.gather(-1, before[..., None, :].expand_as(old))
    return Survivors(message, torch.cat([old, paths], -2), torch.cat([held.starts, starts], -1))


def settled(held: Survivors) -> tuple[Tensor, Survivors]:
    """The states that are final in all sequences [*B, m], -1 for no variable, and the survivors from there on."""
    best = _best(held.message)[..., None, None].clamp(min=0)
    dead = (held.message == -torch.inf)[..., None, :]
    same = (held.paths == held.paths.gather(-1, best.expand(*held.paths.shape[:-1], 1))) | dead
    # paths that meet are the same before
    return first_states(held, int(same.all(-1).flatten(0, -2).all(0).sum() if same.dim() > 2 else same.all(-1).sum()))


def first_states(held: Survivors, m: int) -> tuple[Tensor, Survivors]:
    """The first m states of the best paths [*B, m], and the survivors without them, copied to free their memory."""
    best = _best(held.message)
    paths = held.paths[..., :m, :]
    states = paths.gather(-1, best[..., None, None].clamp(min=0).expand(*paths.shape[:-1], 1))[..., 0].long()
    states.masked_fill_((best < 0)[..., None] & _newest(held)[..., :m], -1)
    return states, Survivors(held.message, held.paths[..., m:, :].clone(), held.starts[..., m:].clone())


def _newest(held: Survivors) -> Tensor:
    """Which variables [*B, n] belong to the sequence that has started last, not to one before a reset."""
    starts = held.starts.long()
    return starts.flip(-1).cumsum(-1).flip(-1) - starts == 0


def _best(message: Tensor) -> Tensor:
    """The best state [*B], the lowest of equals, -1 for an impossible sequence."""
    top, state = message.max(-1)
    return state.masked_fill(top == -torch.inf, -1)


def _best_for_each(message: Tensor) -> Tensor:
    """The best state for each state [*B, c]; 0 for an impossible sequence."""
    return _best(message)[..., None].clamp(min=0).expand_as(message)
