"""The stationary distribution of a transition matrix."""

import torch
from torch import Tensor

from ..tensors import is_readable


def stationary(transition: Tensor) -> Tensor:
    r"""The solution `p` of `p = p P` with `sum p = 1`, by elimination without subtractions.

    Each entry has the relative accuracy of float64, however small. States are eliminated one at a time, from the
    last: paths through an eliminated state are added to the transitions among the others.

    Args:
        transition: probabilities `[..., c, c]`, `[from, to]`, of an irreducible chain: every state reaches every other.

    Returns:
        float64 `[..., c]`. It can be differentiated.

    Raises:
        ValueError: some state does not reach another (checked on a CPU; elsewhere the result need not be finite).

    Cost: `c^3 / 3` multiply-adds in `c` dependent steps.

    Source: W. Grassmann, M. Taksar and D. Heyman, "Regenerative analysis and steady state distributions for Markov
    chains", Operations Research 33 (1985).

    >>> stationary(torch.tensor([[0.9, 0.1], [0.3, 0.7]]))
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    remaining = transition.double()
    visits = []
    for k in range(remaining.shape[-1] - 1, 0, -1):
        out = remaining[..., k, :k]
        leaving = out.sum(-1, keepdim=True)
        if is_readable(leaving) and bool((leaving == 0).any()):
            raise ValueError("transition: expected every state to reach every other")
        # expected visits of state k for each visit of a state below
        visits_of_k = remaining[..., :k, k] / leaving
        remaining = remaining[..., :k, :k] + visits_of_k[..., :, None] * out[..., None, :]
        visits.append(visits_of_k)
    weights = torch.ones_like(remaining[..., 0])  # (..., 1)
    for visits_of_k in reversed(visits):
        weights = torch.cat([weights, (weights * visits_of_k).sum(-1, keepdim=True)], -1)
    return weights / weights.sum(-1, keepdim=True)
