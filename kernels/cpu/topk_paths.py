"""`kernels.plain.topk_paths` by the loops of the C library."""

from torch import Tensor

from ..chain import Chain
from .viterbi import best_paths


def paths(chain: Chain, steps: int, k: int) -> tuple[Tensor, Tensor]:
    """See `kernels.plain.topk_paths`; sequences one behind the other have their states (k, steps) so too."""
    return best_paths(chain, steps, "topk_paths", k)
