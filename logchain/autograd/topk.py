"""The k best paths of a batch of chains.

Bands, arcs and durations whose dense matrices are small are computed with these on a CPU. Paths of other structures are
searched in order of weight, as deviations from earlier paths. With the messages m of best paths, the best path that
ends with states z_i, z_{i+1}, ... and has z_{i-1} = k has the weight m_{i-1}(k) + log P_i(k, z_i) + the weight of these
states. The paths that share the states of an earlier one from some step i on, but not the state before it, are a set
for each i: the best of each set is a candidate, and the best candidate is the next path. A set excludes the states
before step i that have been taken.

Source: E. L. Lawler, "A procedure for computing the K best solutions to discrete optimization problems", Management
Science 18 (1972), for the partition into sets.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..operands import Operands, check_products
from .best_paths import best_messages, dense_best_paths, possible
from .paths import weight_of
from .scan import Steps

# the most entries of dense matrices for which their paths take less time on a CPU than the search
_ENTRIES = 2**21


def ranked_paths(operands: Operands, k: int) -> tuple[Tensor, Tensor]:
    """The k best paths int64 [k, *B, v] or [k, total], -1 where there is no state; log-weights [*B, k], descending."""
    check_products(operands.transition)
    dense = operands.has_matrices and operands.matrices_fit(_ENTRIES)
    searched = operands.detached().with_matrices() if dense else operands
    states, unknown = dense_best_paths(searched, k) if searched.is_dense else topk_paths(searched, k)
    states = states if operands.packed else states.movedim(-2, 0)
    scores = weight_of(operands, states).masked_fill(unknown, math.nan)
    # scores are rounded differently from the messages of the search, and may be in another order
    order = scores.detach().argsort(stable=True, dim=0, descending=True)
    ranks = order.repeat_interleave(operands.packed.lengths, -1) if operands.packed else order[..., None]
    return states.gather(0, ranks.expand_as(states)), scores.gather(0, order).movedim(0, -1)


def topk_paths(operands: Operands, k: int) -> tuple[Tensor, Tensor]:
    """The k best paths int64 [*B, k, v], and whether sequences are unknown [*B]: their weight is NaN or +inf.

    States are -1 past a sequence's end, in paths that do not exist, and in unknown sequences.
    """
    steps = operands.detached().steps()
    search = _Search(steps)
    weights, paths = (torch.stack(column, 2) for column in zip(*(search.next() for _ in range(k)), strict=True))
    best = weights[..., 0]
    return possible(steps, paths, weights), steps.layout.batched(best.isnan() | (best == math.inf))


class _Sets(NamedTuple):
    """The candidates of each earlier path (g, m, path, v): at i - 1 their weight, and their state before step i.

    They share the states of `path` from a step on that is `shared` (g, m, path, 1) at most. Before that step, `taken`
    states (g, m, path, c) are those of other paths with the same states from there on.
    """

    path: Tensor
    shared: Tensor
    taken: Tensor
    weight: Tensor
    state: Tensor


class _Search:
    """The messages of best paths (g, m, v, c), and the sets of paths that have not been returned yet."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        best, self._pointers = best_messages(steps)
        self._messages = torch.stack([message.logs for message in best], -2)
        final = self._messages[..., -1, :]
        ends = self._ends = (
            steps.ends if steps.ends is not None else final.new_full((*final.shape[:2], 1), steps.v).long()
        )
        self._into = torch.arange(1, steps.v + 1, device=final.device)  # the step that each position leads into
        # initially all paths are one set, which excludes no state
        weight, state = final.max(-1, keepdim=True)
        weight = torch.where(self._into == ends, weight, -math.inf)
        path = torch.zeros_like(weight, dtype=torch.int64)
        first = path, ends, torch.zeros_like(final, dtype=torch.bool), weight, state.expand_as(path)
        self._sets = _Sets(*(field[:, :, None] for field in first))

    def next(self) -> tuple[Tensor, Tensor]:
        """The weight (g, m) of the best candidate, -inf if there is none, and its path (g, m, v)."""
        weight, place = self._sets.weight.flatten(2).max(-1, keepdim=True)
        rank, position = place[..., None] // self.steps.v, place % self.steps.v
        path, before, taken, _, states = (field.take_along_dim(rank, 2)[:, :, 0] for field in self._sets)
        shared, state = position + 1, states.gather(-1, position)
        visited = torch.zeros_like(taken).scatter_(-1, path.gather(-1, position), True)
        taken = torch.where(shared == before, taken, visited).scatter(-1, state, True)
        path = self._best(path, shared, state)
        best, states = self._deviations(path, shared, taken)
        best = best.masked_fill(weight == -math.inf, -math.inf)  # no path deviates from one that does not exist
        rest = self._sets.weight.flatten(2).scatter(-1, place, -math.inf).view_as(self._sets.weight)
        pairs = zip(self._sets._replace(weight=rest), (path, shared, taken, best, states), strict=True)
        self._sets = _Sets(*(torch.cat([old, new[:, :, None]], 2) for old, new in pairs))
        return weight[..., 0], path

    def _best(self, path: Tensor, shared: Tensor, state: Tensor) -> Tensor:
        """The best path (g, m, v) with `state` (g, m, 1) before step `shared`, from which on it is `path`."""
        states, after = [], state
        for step in reversed(range(self.steps.v)):
            if step + 1 < self.steps.v:
                after = self._pointers[step].gather(-1, after).long()
            after = torch.where(shared == step + 1, state, after)
            after = torch.where(shared <= step, path[..., step : step + 1], after)
            states.append(after)
        return torch.cat(states[::-1], -1)

    def _deviations(self, path: Tensor, shared: Tensor, taken: Tensor) -> tuple[Tensor, Tensor]:
        """The weight and state (g, m, v) of the best path that deviates before each step up to `shared`."""
        weights = self._messages + self._continued(path)
        visited = torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, path[..., None], True)
        excluded = torch.where((self._into == shared)[..., None], taken[..., None, :], visited)
        excluded |= (self._into > shared)[..., None]
        weight, state = weights.masked_fill(excluded, -math.inf).max(-1)
        return weight, state

    def _continued(self, path: Tensor) -> Tensor:
        """The weights (g, m, v, c) of a path's states after each position, and of each transition into them."""
        steps = self.steps
        rest = torch.zeros(*path.shape[:2], 1, dtype=torch.float64, device=path.device)
        weights = [torch.zeros(steps.shape, dtype=torch.float64, device=path.device)]
        for step in reversed(range(1, steps.v)):
            state = path[..., step : step + 1]
            columns = steps.transition(step).columns(state[..., 0])
            into = rest + steps.potential(step).gather(-1, state) + columns
            weights.append(into)
            into, inside = into.gather(-1, path[..., step - 1 : step]), steps.inside(step)
            rest = into if inside is None else torch.where(inside, into, rest)
        return torch.stack(weights[::-1], -2).masked_fill((self._into >= self._ends)[..., None], 0.0)
