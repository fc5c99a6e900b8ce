"""The state path of the largest weight: max-plus messages forward, then one state a step back.

    a_i(j) = max_k (a_{i-1}(k) + log P_i(k, j)) + x_i(j)        z_{i-1} = argmax_k (a_{i-1}(k) + log P_i(k, z_i))

The messages are kept instead of back-pointers: on the way back, c terms a step give the state before a known one.
"""

import torch
from torch import Tensor

from ..chain import Chain
from . import semiring


def paths(chain: Chain, steps: int) -> tuple[Tensor, Tensor]:
    """The states (g, m, steps) int64 of the best paths, and whether sequences are `unknown` (g, m).

    Ties go to the lowest last state, then to the lowest state before it, and so on. A state is -1 after its sequence's
    end, and everywhere in a sequence that is impossible or unknown. The chain may be shorter than `steps`.
    """
    g, m = chain.g, chain.m
    messages = chain.new(chain.v, g, m, chain.c)
    total = semiring.forward(chain, semiring.maximum, messages=messages)
    states = torch.full((g, m, steps), -1, device=messages.device)
    sets = torch.arange(g, device=messages.device)[:, None]
    state = torch.empty(0)
    for step in reversed(range(chain.v)):
        terms = messages[step]
        if step + 1 < chain.v:
            columns = semiring.log_weights(chain.matrix(step).mT[sets, state], chain.log_params, chain.dtype)
            into_next = terms + columns
            terms = into_next if chain.ends is None else torch.where(chain.ends == step + 1, terms, into_next)
        state = terms.argmax(-1)
        states[..., step] = state
    no_sum = unknown(chain)
    return without_states(chain, states, no_sum | ~(total > -torch.inf)), no_sum


def unknown(chain: Chain) -> Tensor:
    """Whether a sequence holds NaN or +inf before its end (g, m), so that no path is known to be the best."""
    g, m = chain.g, chain.m
    steps = torch.arange(chain.v, device=chain.x.device).view(-1, 1, 1)
    potentials = ~(chain.x.amax(-1) < torch.inf).reshape(-1, g, m)
    transitions = ~(chain.bulk.flatten(-2).amax(-1) < torch.inf).reshape(-1, g, 1)
    start = ~(chain.p0.amax(-1) < torch.inf).expand(chain.lead).reshape(g, m)
    transitions = transitions[:0] if chain.v == 1 else transitions.expand(chain.v - 1, g, 1)
    if chain.ends is not None:
        potentials = potentials & (steps < chain.ends[..., 0])
        transitions = transitions & (steps[1:] < chain.ends[..., 0])
    return potentials.any(0) | transitions.any(0) | start


def without_states(chain: Chain, states: Tensor, lost: Tensor) -> Tensor:
    """The states (..., g, m, steps), in place, with -1 after sequences' ends and where `lost` (..., g, m) holds."""
    lost = lost[..., None]
    if chain.ends is not None:
        lost = lost | (torch.arange(states.shape[-1], device=states.device) >= chain.ends)
    return states.masked_fill_(lost, -1)
