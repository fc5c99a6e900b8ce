"""The k best paths of a batch of chains.

Of structures they are found one after the other, by deviations from those already found. With the messages m of best
paths, the best path that ends with states z_i, z_{i+1}, ... and has z_{i-1} = k has the weight m_{i-1}(k) +
log P_i(k, z_i) + the weight of these states. The paths that are not found yet and share the states of a found one from
some step i on, but not the one before, are a set for each i: the best of each set is a candidate, and the best
candidate is the next path. A set loses the states before step i that have been taken.

Source: E. L. Lawler, "A procedure for computing the K best solutions to discrete optimization problems", Management
Science 18 (1972), for the partition into sets.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..autograd.paths import log_weight
from ..autograd.scan import Steps
from ..autograd.viterbi import best_paths as dense_best_paths
from .operands import Operands, check_products
from .paths import best_walk, possible


def ranked_paths(operands: Operands, k: int) -> tuple[Tensor, Tensor]:
    """The k best paths int64 [*B, k, v], -1 where there is no state, and their log-weights [*B, k] in falling order."""
    x, transition, p0, lengths, log_params = operands
    check_products(transition)
    if operands.is_dense:
        states, unknown = dense_best_paths(*operands.dense, k)
    else:
        states, unknown = topk_paths(operands, k)
    scores = log_weight(x, transition, p0, states.movedim(-2, 0), lengths, log_params).movedim(0, -1)
    scores = scores.masked_fill(unknown[..., None], math.nan)
    # scores are rounded otherwise than the messages by which the paths were found, and may be in another order
    order = scores.detach().argsort(stable=True, dim=-1, descending=True)
    return states.gather(-2, order[..., None].expand_as(states)), scores.gather(-1, order)


def topk_paths(operands: Operands, k: int) -> tuple[Tensor, Tensor]:
    """The k best paths int64 [*B, k, v], and whether a sequence is unknown [*B]: its weight is NaN or +inf.

    States are -1 behind a sequence's end, in paths that do not exist, and in unknown sequences.
    """
    steps = operands.detached().steps()
    search = _Search(steps)
    last = search.final
    path = search.path(search.ends, torch.zeros_like(search.ends), last.argmax(-1))
    weight = last.amax(-1)
    taken = torch.zeros_like(last, dtype=torch.bool).scatter_(-1, search.before(path, search.ends)[..., None], True)
    search.add(path, search.ends, taken)
    ranked = [(weight, path), *(search.next() for _ in range(1, k))]
    weights, paths = (torch.stack(each, 2) for each in zip(*ranked, strict=True))
    return possible(steps, paths, weights), steps.layout.batched(weight.isnan() | (weight == math.inf))


@dataclass
class _Set:
    """Candidates of a found path (g, m, v): for each i from 1, at i - 1, the weight and the state before step i.

    `path` (g, m, v); `shared` (g, m), the step from which on it shares the states of another; `taken` (g, m, c), the
    states before that step that earlier paths with these states have taken.
    """

    path: Tensor
    shared: Tensor
    taken: Tensor
    weight: Tensor
    state: Tensor


class _Search:
    """The messages of best paths, with what has been found.

    `ends` (g, m) are the steps of each sequence; `final` (g, m, c) the weights of the best paths by their last states.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps, self._sets = steps, list[_Set]()
        walked, self._pointers = best_walk(steps)
        self._messages = torch.stack([message.logs for message in walked])
        self.final = self._messages[-1]
        device = self.final.device
        self.ends = torch.full(steps.shape[:2], steps.v, device=device) if steps.ends is None else steps.ends[..., 0]
        self._positions = torch.arange(steps.v, device=device)

    def before(self, path: Tensor, step: Tensor) -> Tensor:
        """The state of a path (g, m, v) before a step (g, m)."""
        return path.gather(-1, (step - 1)[..., None])[..., 0]

    def path(self, shared: Tensor, path: Tensor, state: Tensor) -> Tensor:
        """The best path (g, m, v) with `state` (g, m) before step `shared`, from where on it is another one."""
        steps, found = self.steps, []
        after = path[..., -1] if path.dim() > 2 else state
        for step in reversed(range(steps.v)):
            if step + 1 < steps.v:
                traced = self._pointers[step].gather(-1, after[..., None])[..., 0].long()
            else:
                traced = state
            after = torch.where(shared == step + 1, state, traced)
            if path.dim() > 2:
                after = torch.where(shared <= step, path[..., step], after)
            found.append(after)
        return torch.stack(found[::-1], -1)

    def add(self, path: Tensor, shared: Tensor, taken: Tensor) -> None:
        """Add the candidates that deviate from a path before `shared` or a step ahead of it."""
        weights = self._messages.movedim(0, -2) + self._into(path)  # (g, m, v, c)
        at = torch.arange(1, self.steps.v + 1, device=path.device)  # the step that each position leads into
        own = torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, path[..., None], True)
        last = (at == shared[..., None])[..., None]
        weights = weights.masked_fill(torch.where(last, taken[..., None, :], own), -math.inf)
        weights = weights.masked_fill((at > shared[..., None])[..., None], -math.inf)
        self._sets.append(_Set(path, shared, taken, *weights.max(-1)))

    def next(self) -> tuple[Tensor, Tensor]:
        """The weight (g, m) of the best candidate, -inf if there is none, and its path (g, m, v)."""
        weights = torch.stack([one.weight for one in self._sets], -2)  # (g, m, found, v)
        weight, place = weights.flatten(-2).max(-1)
        number, shared = place // self.steps.v, place % self.steps.v + 1
        parts = []
        for name in ("path", "state", "taken", "shared"):
            every = torch.stack([getattr(one, name) for one in self._sets])
            index = number.view(1, *number.shape, *(1,) * (every.dim() - 3)).expand(1, *every.shape[1:])
            parts.append(every.gather(0, index)[0])
        path, states, taken, shared_before = parts
        state = self.before(states, shared)
        own = torch.zeros_like(taken).scatter_(-1, self.before(path, shared)[..., None], True)
        taken = torch.where((shared == shared_before)[..., None], taken, own).scatter(-1, state[..., None], True)
        for rank, one in enumerate(self._sets):
            chosen = (number == rank)[..., None] & (self._positions + 1 == shared[..., None])
            one.weight = one.weight.masked_fill(chosen, -math.inf)
        path = self.path(shared, path, state)
        self.add(path, shared, taken)
        # where there was no candidate left, there is none that deviates from it
        self._sets[-1].weight.masked_fill_((weight == -math.inf)[..., None], -math.inf)
        return weight, path

    def _into(self, path: Tensor) -> Tensor:
        """The weights (g, m, v, c) of a path's states from each step on, and of the transitions into them.

        At i - 1 stand those into step i; behind the last step there is nothing.
        """
        steps = self.steps
        weights = torch.zeros(*path.shape, steps.shape[-1], dtype=torch.float64, device=path.device)
        behind = torch.zeros(path.shape[:2], dtype=torch.float64, device=path.device)
        for step in reversed(range(1, steps.v)):
            state = path[..., step]
            columns = steps.transition(step).columns(state)
            moved = behind + steps.potential(step).gather(-1, state[..., None])[..., 0]
            weights[..., step - 1, :] = columns + moved[..., None]
            stayed = columns.gather(-1, path[..., step - 1, None])[..., 0] + moved
            inside = steps.inside(step)
            behind = stayed if inside is None else torch.where(inside[..., 0], stayed, behind)
        return weights.masked_fill((self._positions + 1 >= self.ends[..., None])[..., None], 0.0)
