"""The k most probable state paths of a chain."""

from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import Lengths, check_question
from .autograd.paths import log_weight
from .autograd.viterbi import best_paths, packed_paths
from .schedules.packed import Packed


class Paths(NamedTuple):
    """State paths int64 `[*B, k, v]`, best first, and their log-weights `[*B, k]` in nats."""

    states: Tensor
    scores: Tensor


def topk_paths(
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    k: int,
    *,
    log_params: bool = False,
    lengths: Lengths | None = None,
    cu_seqlens: Tensor | None = None,
) -> Paths:
    r"""The `k` different paths z of the largest `log p0(z_0) + sum_i log P_i(z_{i-1}, z_i) + sum_i x_i(z_i)`.

    Args:
        x: log-potentials `[*B, v, c]` in nats: `v` variables (time steps), `c` states. -inf forbids a state.
        bulk: transition weights `[*B or ones, v-1 or 1, c, c]`, `[from, to]`, non-negative, not necessarily normalised.
            Leading axes may be of size 1 or left out; a size of 1 on the step axis means one matrix for every step.
        p0: initial weights `[*B or ones, c]`, non-negative; `p0` is not multiplied by a transition.
        k: how many paths, at least 1.
        log_params: `bulk` and `p0` are logarithms (nats).
        lengths: integers from 1 to v, of the shape of the first axes of `B`, or one for all: how many variables each
            sequence has. What lies behind has no influence; two paths differ before the end.
        cu_seqlens: sequences one behind the other, as in `logchain.product`: states are `[k, total]`, scores `[n, k]`.

    Returns:
        `Paths(states, scores)`. `states` `[*B, k, v]` int64, -1 behind a sequence's end; `scores` `[*B, k]`, falling,
        each the weight of just its states, summed in float64: float64 if an operand is, otherwise float32. Where fewer
        than `k` paths are possible the scores of the rest are exactly -inf and their states -1. Where a sequence holds
        NaN before its end, its scores are NaN and its states -1. Paths of equal weight come in any order, though always
        in the same one on one device; if they tie for the last place, so is the choice among them.

    The scores can be differentiated: see `viterbi`, whose result is the first path (up to ties). The choice of the
    paths is not differentiated.

    Operands may be float32, float64, bfloat16 or float16; messages are float32 or float64 with their largest entry 0:
    weights that differ by less than the bound on `viterbi`'s score may be mistaken for each other.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together, or `k` or a length is out of range. `logchain.check` checks values.

    Cost: `v c^2 k` additions and a selection of the k largest of c k for each state and step, in `v` dependent steps.
    Memory: `[*B, v, c, k]` integers of the operands' size; on a CPU, where all steps have one matrix, those of one
    sequence a thread.

    Source: F. K. Soong, E.-F. Huang, "A tree-trellis based fast search for finding the N best sentence hypotheses",
    ICASSP (1991); the parallel list algorithm of N. Seshadri, C.-E. W. Sundberg, IEEE Trans. Commun. 42 (1994).
    Definition: `logchain.reference.topk_paths`.

    >>> x = torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 0.0]])  # three variables, two states
    >>> bulk = torch.tensor([[[0.9, 0.1], [0.2, 0.8]]])  # one matrix for every step
    >>> topk_paths(x, bulk, torch.tensor([0.5, 0.5]), 3)
    Paths(states=tensor([[1, 1, 1],
            [0, 0, 0],
            [1, 1, 0]]), scores=tensor([-0.1394, -0.9039, -1.5257]))
    """
    packed = None if cu_seqlens is None else Packed(x, bulk, p0, cu_seqlens, lengths)
    ends = None if packed else check_question(x, bulk, p0, log_params, lengths)
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"k: expected an integer, got {k!r}")
    if k < 1:
        raise ValueError(f"k: expected at least 1, got {k}")
    double = torch.float64 in (x.dtype, bulk.dtype, p0.dtype)
    if packed and not packed.walks_in_place(log_params):
        pieces = [topk_paths(*one[:3], k, log_params=log_params, lengths=one.lengths) for one in packed]
        states = packed.by_row([one.states.mT for one in pieces]).mT.contiguous()
        return Paths(states, packed.by_sequence([one.scores for one in pieces]))
    if packed:
        states, scores, _ = packed_paths(packed, log_params, k)
        scores = scores.mT
    else:
        states, unknown = best_paths(x, bulk, p0, ends, log_params, k)
        scores = log_weight(x, bulk, p0, states.movedim(-2, 0), ends, log_params).movedim(0, -1)
        scores = scores.masked_fill(unknown[..., None], torch.nan)
    # messages and scores are rounded differently
    order = scores.detach().argsort(stable=True, dim=-1, descending=True)  # [*B, k]
    ranks = order[..., None] if packed is None else torch.repeat_interleave(order.mT, packed.lengths, -1)
    states = states.gather(-2, ranks.expand_as(states))
    scores = scores.gather(-1, order)
    return Paths(states, scores if double else scores.float())
