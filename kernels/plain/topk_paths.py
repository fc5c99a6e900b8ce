"""The k state paths of the largest weights, see `viterbi`; their definition is `logchain.reference.topk_paths`."""

import math

from torch import Tensor

from ..chain import Chain
from .viterbi import Messages, without_states


def paths(chain: Chain, k: int) -> tuple[Tensor, Tensor]:
    """The states (g, m, k, v) int64 of the k best paths, best first, and the `unknown` sequences (g, m).

    A state is -1 where `viterbi.paths` has -1, and everywhere in a rank with no path.
    """
    messages = Messages(chain, None, k)
    weights, index = messages.last.flatten(-2).topk(k)
    states = messages.choose(index).movedim(2, 0)
    masked = messages.unknown[..., None] | ~(weights > -math.inf)  # (g, m, k)
    return without_states(chain, states, masked.movedim(2, 0)).movedim(0, 2), messages.unknown
