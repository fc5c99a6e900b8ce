"""The k best state paths, as `kernels.plain.topk_paths` defines them, by the C library."""

from torch import Tensor

from ..chain import Chain
from .viterbi import best_paths


def paths(chain: Chain, steps: int, k: int) -> tuple[Tensor, Tensor]:
    """The states of the k best paths, see `kernels.plain.topk_paths`; those of packed sequences are (k, rows)."""
    return best_paths(chain, steps, "topk_paths", k)
