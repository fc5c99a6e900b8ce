"""The k state paths of the largest weights: k messages a state forward, back along the kept choices, in plain torch.

    a_i(j, .) = the k largest of a_{i-1}(h, r) + log P_i(h, j), over states h and ranks r, + x_i(j)

A state and a rank stand for one path each, so no path comes twice; a rank that no path fills is -inf. Kept are the
choices `h k + r`, c k integers a step and sequence. Tested against `logchain.reference.topk_paths`.
"""

import math

import torch
from torch import Tensor

from ..chain import Chain
from .semiring import log_weights, start

# terms (members, c k, c) that are held at a time
_TERMS = 2**20


def paths(chain: Chain, steps: int, k: int) -> Tensor:
    """The states (g, m, k, steps) int64 of the k best paths, the best first.

    -1 behind the end, in a rank that no path fills, and in all of a sequence that holds NaN. The chain may be shorter
    than `steps`.
    """
    v, g, m, c = chain.v, chain.g, chain.m, chain.c
    message = chain.new(g, m, c, k).fill_(-math.inf)
    message[..., 0] = start(chain)[0]
    wide = torch.int32 if c * k < 2**31 else torch.int64
    choices = torch.empty(v - 1, g, m, c, k, dtype=wide, device=message.device)
    same = torch.arange(c * k, dtype=wide, device=message.device).view(c, k)
    logs = message.new_empty(0)
    for step in range(1, v):
        if step == 1 or chain.bulk.shape[0] > 1:
            logs = log_weights(chain.bulk[step - 1], chain.log_params, chain.dtype).reshape(g, c, c)
        potential = chain.x[step].to(chain.dtype).reshape(g, m, c, 1)
        after, choice = _step(message, logs)
        after = _shifted(after + _shifted(potential))
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
    lost = (weights == -math.inf) | message.isnan().flatten(2).any(-1, keepdim=True)
    lost = lost[..., None]  # (g, m, k, 1)
    if chain.ends is not None:
        lost = lost | (torch.arange(steps, device=states.device) >= chain.ends[..., None])
    return states.masked_fill_(lost, -1)


def _step(message: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
    """The k best ways (g, m, c, k) into each state, and which they are, a few sequences at a time."""
    g, m, c, k = message.shape
    best, choices = torch.empty_like(message), torch.empty_like(message, dtype=torch.int64)
    size = max(1, _TERMS // (c * c * k))
    for s in range(g):
        rows = logs[s].mT[:, :, None]  # (c to, c from, 1)
        for r in range(0, m, size):
            terms = (message[s, r : r + size, None] + rows).flatten(-2)  # (members, c to, c from k)
            best[s, r : r + size], choices[s, r : r + size] = terms.topk(k, -1)
    return best, choices


def _shifted(message: Tensor) -> Tensor:
    """The message (g, m, c, k) with its largest entry taken out; a message of -inf stays one."""
    top = message.amax((-2, -1), keepdim=True)
    return message - top.masked_fill_(top == -math.inf, 0.0)
