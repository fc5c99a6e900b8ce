"""State paths drawn from the posterior of their chains, backwards through the forward messages.

    z_{v-1} ~ a_{v-1}        z_{i-1} ~ a_{i-1}(k) P_i(k, z_i)

For a uniform number u in [0, 1), a draw is the first state whose cumulative weight reaches (1 - u) times the total, so
never a state of weight zero. Weights, which are exponentials of logarithms less the largest, and u are float64.
Source: S. L. Scott, "Bayesian methods for hidden Markov models", JASA 97 (2002): forward filtering, backward sampling.
"""

import torch
from torch import Tensor

from ..chain import Chain
from ..message import Residuals
from ..numbers import log_weights
from .viterbi import without_states

# weights (draws, g, m, c) of a step that are computed at a time
_WEIGHTS = 2**22


def draw(chain: Chain, residuals: Residuals, states: Tensor) -> None:
    """Write `states` (draws, g, m, steps) int64 over the uniform float64 numbers in [0, 1) that its memory holds.

    `residuals` is the result of `forward`. A state is -1 after its sequence's end, and everywhere in a sequence whose
    log-partition is not finite. In place of a number, -1 - z at a sequence's last step sets its state to z.
    """
    size = max(1, _WEIGHTS // (chain.g * chain.m * chain.c))
    for first in range(0, len(states), size):
        _draw(chain, residuals, states[first : first + size])
    without_states(chain, states, ~residuals.log_norm.isfinite())


def _draw(chain: Chain, residuals: Residuals, states: Tensor) -> None:
    numbers = states.view(torch.float64)
    sets, state = torch.arange(chain.g, device=states.device)[:, None], torch.empty(0)
    for step in reversed(range(chain.v)):
        terms = residuals.logs(step)
        if step + 1 < chain.v:
            # (draws, g, m, c)
            columns = log_weights(chain.matrix(step).mT[sets, state], chain.log_params, torch.float64)
            into_next = terms + columns
            terms = into_next if chain.ends is None else torch.where(chain.ends == step + 1, terms, into_next)
        weights = (terms - terms.amax(-1, keepdim=True)).exp_().expand(len(states), *terms.shape[-3:])
        sums = weights.cumsum(-1).masked_fill_(weights == 0, 0.0)
        threshold = (1.0 - numbers[..., step, None]) * sums.amax(-1, keepdim=True)
        # in sequences that are shorter or have no path this is any state, which `draw` overwrites
        state = ((sums >= threshold) & (sums > 0)).to(torch.int8).argmax(-1)
        state = torch.where(numbers[..., step] < 0, -1 - numbers[..., step].to(torch.int64), state)
        states[..., step] = state
