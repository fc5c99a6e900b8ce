"""The best path of each chain, as `kernels.plain.viterbi` defines it, by the Triton kernels.

    a_i(j) = max_k (a_{i-1}(k) + log P_i(k, j)) + x_i(j)        z_{i-1} = back_i(z_i)

`exact` computes the messages, and back-pointers, which are followed here from a sequence's end.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..chain import Chain
from ..plain.viterbi import unknown
from . import exact
from .chains import Chains


@triton.jit(do_not_specialize=["v", "g", "m", "slots"])
def backtrack_kernel(message_ptr, back_ptr, ends_ptr, path_ptr, v, g, m, slots, C: tl.constexpr, N: tl.constexpr):
    """The best path of one sequence; -1 past its end, and everywhere if there is none."""
    sequence, j = tl.program_id(0).to(tl.int64), tl.arange(0, N)
    pitch = g.to(tl.int64) * m * C
    end = exact.load_end(ends_ptr, sequence, v)
    last = tl.load(message_ptr + (end - 1) % slots * pitch + sequence * C + j, mask=j < C, other=float("-inf"))
    state = tl.argmax(last, 0)
    for back in tl.range(0, v):
        i = v - 1 - back
        tl.store(path_ptr + sequence * v + i, tl.where(i >= end, -1, state).to(tl.int64))
        if (i < end) & (i > 0):
            state = tl.load(back_ptr + i * pitch + sequence * C + state).to(tl.int32)


def paths(chain: Chain, steps: int) -> tuple[Tensor, Tensor]:
    """The states of the best paths, and `unknown` sequences, as by `kernels.plain.viterbi`; the chain has all `steps`.

    The states of a sequence whose length is outside 1..v are -1 too, because lengths are not checked before.
    """
    assert chain.v == steps
    v, g, m, c = chain.v, chain.g, chain.m, chain.c
    chains, not_known = Chains.of(chain), unknown(chain)
    lost = not_known
    states = chains.new(g, m, v, dtype=torch.int64)
    if states.numel():
        messages, score = chains.new(min(v, 2), g, m, c), chains.new(2, g, m, dtype=torch.float64)
        back = chains.new(v, g, m, c, dtype=torch.int16 if c <= 2**15 else torch.int32)
        exact.forward(chains, None, messages, score, back)
        backtrack_kernel[(g * m,)](
            messages, back, chains.ends, states, v, g, m, len(messages), C=c, N=chains.width,
            num_warps=1 if chains.width <= 1024 else 4,
        )  # fmt: skip
        lost = lost | ~(score[0] > -torch.inf)
    if chain.ends is not None:
        lost = lost | ((chain.ends < 1) | (chain.ends > v))[..., 0]
    return states.masked_fill_(lost[..., None], -1), not_known
