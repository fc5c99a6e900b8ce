"""The k state paths of the largest weights: k max-plus messages per state forward, then back along the choices.

    a_i(j, .) = the k largest a_{i-1}(h, r) + log P_i(h, j), over states h and ranks r, + x_i(j)

State h at rank r is the r-th best path into h, so that all paths differ; the rank is -inf if there is none. The choices
`h k + r` are stored, c k integers for each step and sequence. Definition: `logchain.reference.topk_paths`.
"""

import math

import torch
from torch import Tensor

from ..chain import Chain
from ..numbers import log_weights, shifted
from .viterbi import start, unknown, without_states

# terms (sequences, c k, c) of a step that are computed at a time
_TERMS = 2**20


def paths(chain: Chain, steps: int, k: int) -> tuple[Tensor, Tensor]:
    """The states (g, m, k, steps) int64 of the k best paths, best first, and the `unknown` sequences (g, m).

    A state is -1 where `viterbi.paths` has -1, and everywhere in a rank with no path. The chain may be shorter than
    `steps`.
    """
    v, g, m, c = chain.v, chain.g, chain.m, chain.c
    message = chain.new(g, m, c, k).fill_(-math.inf)
    message[..., 0] = start(chain)
    wide = torch.int32 if c * k < 2**31 else torch.int64
    choices = torch.empty(v - 1, g, m, c, k, dtype=wide, device=message.device)
    same = torch.arange(c * k, dtype=wide, device=message.device).view(c, k)
    for step in range(1, v):
        potential = shifted(chain.x[step].to(chain.dtype).reshape(g, m, c))[0]
        after, choice = _step(message, log_weights(chain.matrix(step - 1), chain.log_params, chain.dtype))
        after = shifted((after + potential[..., None]).flatten(-2))[0].view(g, m, c, k)
        if chain.ends is not None:
            ended = (chain.ends <= step)[..., None]
            after, choice = torch.where(ended, message, after), torch.where(ended, same, choice)
        message, choices[step - 1] = after, choice
    weights, index = message.flatten(-2).topk(k)
    states = torch.full((g, m, k, steps), -1, device=message.device)
    for step in reversed(range(v)):
        states[..., step] = index // k
        if step > 0:
            index = choices[step - 1].flatten(-2).gather(-1, index).long()
    no_sum = unknown(chain)
    masked = no_sum[..., None] | ~(weights > -math.inf)  # (g, m, k)
    return without_states(chain, states.movedim(2, 0), masked.movedim(2, 0)).movedim(0, 2), no_sum


def _step(message: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
    """The k largest weights (g, m, c, k) of paths into each state, and their choices, a few sequences at a time."""
    g, m, c, k = message.shape
    best, choices = torch.empty_like(message), torch.empty_like(message, dtype=torch.int64)
    size = max(1, _TERMS // (c * c * k))
    for s in range(g):
        rows = logs[s].mT[:, :, None]  # (c to, c from, 1)
        for r in range(0, m, size):
            terms = (message[s, r : r + size, None] + rows).flatten(-2)  # (members, c to, c from k)
            best[s, r : r + size], choices[s, r : r + size] = terms.topk(k, -1)
    return best, choices
