"""The best path of each chain, as `kernels.plain.viterbi` defines it, by the Triton kernels.

    a_i(j) = max_k (a_{i-1}(k) + log P_i(k, j)) + x_i(j)        z_{i-1} = back_i(z_i)

`exact` computes the messages and back-pointers, and follows these from a sequence's end.
"""

import torch
from torch import Tensor

from ..chain import Chain
from ..plain.viterbi import unknown
from . import exact
from .chains import Chains


def paths(chain: Chain) -> tuple[Tensor, Tensor]:
    """The states of the best paths, and `unknown` sequences, as by `kernels.plain.viterbi`.

    The states of a sequence whose length is outside 1..v are -1 too, because lengths are not checked before.
    """
    v, g, m, c = chain.v, chain.g, chain.m, chain.c
    chains, not_known = Chains.of(chain), unknown(chain)
    masked = not_known
    states = chains.new(g, m, v, dtype=torch.int64)
    if states.numel():
        messages, score = chains.new(min(v, 2), g, m, c), chains.new(2, g, m, dtype=torch.float64)
        back = chains.new(v, g, m, c, dtype=torch.int16 if c <= 2**15 else torch.int32)
        exact.forward(chains, None, messages, score, back, states)
        masked = masked | ~(score[0] > -torch.inf)
    if chain.ends is not None:
        masked = masked | ((chain.ends < 1) | (chain.ends > v))[..., 0]
    return states.masked_fill_(masked[..., None], -1), not_known
