"""The best path of an unbounded chain, by on-line Viterbi decoding.

For each state of the last variable the best path that ends in it is a survivor. Once all survivors pass the same state
of a variable, the states up to there are final, and only later ones are stored. Where a sequence ends or starts again,
only the path to its best last state survives; states of an impossible sequence are -1.
"""

import torch
from torch import Tensor

from .. import kernels
from ..autograd.paths import log_weight
from ..kernels.chain import Chain
from ..kernels.numbers import shifted
from ..transitions.dense import Dense
from .piece import Piece, Survivors, best_for_each

# the most log-potentials of chains to each state that are in memory at a time
_TERMS = 2**20

# the most states, and the fewest steps, for which one compiled Viterbi to each state is faster than torch step by step
_FEW, _LONG = 32, 16


def extended(held: Survivors, piece: Piece) -> Survivors:
    """The survivors after a piece in logarithms."""
    k, c = piece.x.shape[-2:]
    fast = isinstance(piece.transition, Dense) and c <= _FEW and k >= _LONG and kernels.in_c(piece.x)
    if not fast or piece.x.numel() == 0 or piece.counts is not None:
        return _joined(held, piece, *_stepwise(held.message, piece)) if k else held
    if not piece.going:
        return extended(extended(held, piece.part(0, 1)), piece.part(1, k))
    size = max(2, _TERMS // max(1, c * piece.x[..., 0, :].numel()))
    for start in range(0, k, size):
        part = piece.part(start, min(start + size, k))
        held = _joined(held, part, *_to_each(held.message, part))
    return held


def _stepwise(message: Tensor, piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
    """The message after a piece, the paths through it to each state, and the states before it that they come from."""
    pointers, first = [], best_for_each(message)  # only the best path survives the end of a sequence
    active = piece.active()[..., None].unbind(-2)
    columns = zip(shifted(piece.x)[0].unbind(-2), active, piece.linked()[..., None].unbind(-2), strict=True)
    for i, (x, inside, linked) in enumerate(columns):
        after, before = piece.transition.between(i, i + 1).best(message[..., None, None, :])
        after = torch.where(linked, after[..., 0, 0, :], piece.p0)
        pointers.append(torch.where(linked, before[..., 0, 0, :], first))
        message = torch.where(inside, _possible(shifted(after + x)[0]), message)
    last = best_for_each(message)
    state = torch.arange(message.shape[-1], device=message.device).expand_as(message)
    states = []
    for inside, pointer in zip(reversed(active), reversed(pointers), strict=True):
        states.append(torch.where(inside, state, -1))
        state = torch.where(inside, pointer.gather(-1, state), last)
    return message, torch.stack(states[::-1], -2).int(), state


def _to_each(message: Tensor, piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
    """The results of `_stepwise` by a Viterbi scan for each last state, if all sequences go on and have all variables.

    For each state there is a copy of the chain whose other last states are forbidden.
    """
    c = piece.x.shape[-1]
    x, p0 = torch.cat([message[..., None, :], piece.x], -2), message.new_zeros(c)
    x = x.expand(c, *x.shape).clone()
    ends = torch.full((c, c), -torch.inf, dtype=x.dtype, device=x.device).fill_diagonal_(0.0)
    x[..., -1, :] += ends.view(c, *(1,) * (x.dim() - 3), c)  # a NaN remains one in all copies
    chain = Chain.of(x, piece.bulk, p0, None, True)
    states, _ = kernels.module("viterbi", x).paths(chain)
    states = chain.layout.batched(states)  # (c, *B, k + 1)
    after = _possible(shifted(log_weight(x, piece.bulk, p0, states, None, True).movedim(0, -1))[0])
    states = states.movedim(0, -1).clamp(min=0)  # (*B, k + 1, c)
    return after, states[..., 1:, :].int(), states[..., 0, :]


def _possible(message: Tensor) -> Tensor:
    """The message, with -inf for all of a sequence that has NaN or +inf, which has no best path."""
    return message.masked_fill(~(message < torch.inf).all(-1, keepdim=True), -torch.inf)


def _joined(held: Survivors, piece: Piece, message: Tensor, paths: Tensor, before: Tensor) -> Survivors:
    """The survivors with the paths [*B, k, c] through a piece, which come from the states [*B, c] before it."""
    starts = piece.active() & ~piece.linked()
    # a sequence that was impossible has states -1, also when it has started again since
    impossible = starts.any(-1, keepdim=True) & held.impossible()
    old = held.paths.masked_fill(impossible[..., None], -1).take_along_dim(before[..., None, :], -1)
    return Survivors(message, torch.cat([old, paths], -2), torch.cat([held.starts, starts], -1))


def settled(held: Survivors) -> tuple[Tensor, Survivors]:
    """The states that are final in all sequences [*B, m], -1 for no variable, and the survivors from there on."""
    same = ((held.paths == held.best()[..., None]) | (held.message == -torch.inf)[..., None, :]).all(-1)
    same = same.view(same.shape[:-1].numel(), same.shape[-1]).all(0)
    return first_states(held, int(same.sum()))  # paths that meet are the same before


def first_states(held: Survivors, m: int) -> tuple[Tensor, Survivors]:
    """The first m states of the best paths [*B, m], and the survivors without them, copied to free their memory."""
    states = held.best()[..., :m].long().masked_fill(held.impossible()[..., :m], -1)
    return states, Survivors(held.message, held.paths[..., m:, :].clone(), held.starts[..., m:].clone())
