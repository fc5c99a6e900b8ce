"""The k most probable state paths of a chain."""

from functools import partial
from typing import NamedTuple

from torch import Tensor

from .arguments import Lengths, check_integer
from .autograd.topk import ranked_paths
from .chain import Chain
from .transitions import Transition


class Paths(NamedTuple):
    """State paths int64 `[*B, k, v]`, best first, and their log-weights `[*B, k]` in nats."""

    states: Tensor
    scores: Tensor


def topk_paths(
    x: Tensor,
    bulk: Tensor | Transition,
    p0: Tensor,
    k: int,
    *,
    log_params: bool = False,
    lengths: Lengths | None = None,
    cu_seqlens: Tensor | None = None,
) -> Paths:
    r"""Returns the `k` paths z of the largest weights `log p0(z_0) + sum_i log P_i(z_{i-1}, z_i) + sum_i x_i(z_i)`.

    `x` `[*B, v, c]` in nats, `bulk` `[*B or ones, v-1 or 1, c, c]`, `p0` `[*B or ones, c]`, the options and the errors
    are those of `logchain.product`; with `cu_seqlens`, states are `[k, total]` and scores `[n, k]`.

    `k`: the number of paths, at least 1.

    Returns:
        `Paths(states, scores)`: different paths int64 `[*B, k, v]`, -1 past a sequence's end, and their weights
        `[*B, k]` in falling order. Each score is the weight of exactly its states, summed in float64: float64 if an
        operand is, otherwise float32. Where fewer than `k` paths are possible, the others have score -inf and states
        -1. A sequence that holds NaN before its end has scores NaN and states -1. The order of paths of equal weight,
        and the choice among them for the last place, is unspecified, but always the same on one device.

    The scores can be differentiated: see `viterbi`, whose result is the first path (up to ties). The choice of the
    paths is not differentiated.

    Operands may be float32, float64, bfloat16 or float16; messages are float32 or float64 with their largest entry 0.
    The order of weights that differ by less than the error bound of `viterbi`'s score may be wrong.

    Cost: `v c^2 k` additions and a selection of the k largest of c k for each state and step, in `v` dependent steps.
    Memory: `[*B, v, c, k]` integers of the operands' size; on a CPU, if all steps share one matrix, only those of one
    sequence a thread. `Banded` and `Sparse` are computed as dense matrices on a CPU if these have 2^21 entries at most;
    of other structures `3 k` passes of torch operations through all steps are made, and messages `[*B, v, c]` are
    float64.

    Source: F. K. Soong, E.-F. Huang, "A tree-trellis based fast search for finding the N best sentence hypotheses",
    ICASSP (1991); the parallel list algorithm of N. Seshadri, C.-E. W. Sundberg, IEEE Trans. Commun. 42 (1994).
    Definition: `logchain.reference.topk_paths`.

    >>> import torch
    >>> x = torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 0.0]])  # three variables, two states
    >>> bulk = torch.tensor([[[0.9, 0.1], [0.2, 0.8]]])  # one matrix for every step
    >>> topk_paths(x, bulk, torch.tensor([0.5, 0.5]), 3)
    Paths(states=tensor([[1, 1, 1],
            [0, 0, 0],
            [1, 1, 0]]), scores=tensor([-0.1394, -0.9039, -1.5257]))
    """
    chain = Chain.of(x, bulk, p0, log_params, lengths, cu_seqlens).in_place(one_matrix=True)
    check_integer("k", k, 1)
    ranked, scores_of = zip(*chain.map(partial(ranked_paths, k=k)), strict=True)
    states, scores = chain.by_variable(ranked, 1), chain.by_sequence(scores_of)
    return Paths(states if chain.packed else states.movedim(0, -2), scores.to(chain.dtype))
