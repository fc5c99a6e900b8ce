"""The stationary distribution of a transition matrix."""

import torch
from torch import Tensor

from ..operands import at_hand


def stationary(transition: Tensor) -> Tensor:
    r"""`p` with `p = p P` and `sum p = 1`, without subtractions: each entry is good to float64, however small.

    States are eliminated one after the other, detours through them added to the rest, and then substituted back.

    Args:
        transition: probabilities `[..., c, c]`, `[from, to]`, of an irreducible chain: every state reaches every other.

    Returns:
        float64 `[..., c]`. It can be differentiated.

    Raises:
        ValueError: some state does not reach another (looked at on a CPU; elsewhere the result need not be finite).

    Cost: `c^3 / 3` multiply-adds in `c` dependent steps.

    Source: W. Grassmann, M. Taksar and D. Heyman, "Regenerative analysis and steady state distributions for Markov
    chains", Operations Research 33 (1985).

    >>> stationary(torch.tensor([[0.9, 0.1], [0.3, 0.7]]))
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    left = transition.double()
    entries = []
    for k in range(left.shape[-1] - 1, 0, -1):
        out = left[..., k, :k]
        leaves = out.sum(-1, keepdim=True)
        if at_hand(leaves) and bool((leaves == 0).any()):
            raise ValueError("transition: expected every state to reach every other")
        # the weight of k, if that of the states below is 1
        enter = left[..., :k, k] / leaves
        left = left[..., :k, :k] + enter[..., :, None] * out[..., None, :]
        entries.append(enter)
    weights = torch.ones_like(left[..., 0])  # (..., 1)
    for enter in reversed(entries):
        weights = torch.cat([weights, (weights * enter).sum(-1, keepdim=True)], -1)
    return weights / weights.sum(-1, keepdim=True)
