"""The state path of the largest weight: the max-plus recursion forward, then one state a step back, in plain torch.

Kept are the messages, no back-pointers: the state before a known one is the lowest k that attains the largest
`a_{i-1}(k) + log P_i(k, j)`, c terms a step.
"""

import torch
from torch import Tensor

from ..chain import Chain
from . import semiring as semiring_chain


def paths(chain: Chain, steps: int) -> Tensor:
    """The states (g, m, steps) int64 of the best paths; ties go to the lowest state, from the last variable back.

    -1 behind the end, and in all of a sequence that is impossible or holds NaN. The chain may be shorter than `steps`.
    Definition: `logchain.reference.viterbi`.
    """
    g, m, c = chain.g, chain.m, chain.c
    messages = chain.new(chain.v, g, m, c)
    total = semiring_chain.forward(chain, semiring_chain.maximum, messages=messages)
    states = torch.full((g, m, steps), -1, device=messages.device)
    sets = torch.arange(g, device=messages.device)[:, None]
    logs = state = torch.empty(0)
    for step in reversed(range(chain.v)):
        terms = messages[step]
        if step + 1 < chain.v:
            if step + 2 == chain.v or chain.bulk.shape[0] > 1:
                matrix = chain.bulk[step if chain.bulk.shape[0] > 1 else 0]
                logs = semiring_chain.log_weights(matrix, chain.log_params, chain.dtype).reshape(g, c, c)
            joined = terms + logs.mT[sets, state]
            terms = joined if chain.ends is None else torch.where(chain.ends == step + 1, terms, joined)
        state = terms.argmax(-1)
        states[..., step] = state
    lost = ~(total > -torch.inf)[..., None]  # NaN is lost too
    if chain.ends is not None:
        lost = lost | (torch.arange(steps, device=states.device) >= chain.ends)
    return states.masked_fill_(lost, -1)
