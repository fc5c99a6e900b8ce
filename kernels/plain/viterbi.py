"""The state path of the largest weight: max-plus messages forward, then one state a step back.

    a_i(j) = max_k (a_{i-1}(k) + log P_i(k, j)) + x_i(j)        z_{i-1} = argmax_k (a_{i-1}(k) + log P_i(k, z_i))

Messages are stored instead of back-pointers: c terms per step give the state before a known one.
"""

import torch
from torch import Tensor

from ..chain import Chain
from ..numbers import log_weights, shifted

# terms (sets, sequences, states, columns) of a step that are held at a time
_TERMS = 2**20


def paths(chain: Chain, steps: int) -> tuple[Tensor, Tensor]:
    """The states (g, m, steps) int64 of the best paths, and whether sequences are `unknown` (g, m).

    Ties go to the lowest last state, then to the lowest state before it, and so on. A state is -1 after its sequence's
    end, and everywhere in a sequence that is impossible or unknown. The chain may be shorter than `steps`.
    """
    messages = Messages(chain, None)
    states = torch.full((chain.g, chain.m, steps), -1, device=chain.x.device)
    messages.follow(states[..., : chain.v])
    return states, messages.unknown


class Messages:
    """The max-plus messages of a chain, or of a stretch that a message enters, and the best paths through them.

    `leaving` (g, m, c), float64: the last message of each sequence, less its largest entry. `unknown` (g, m): whether a
    sequence holds NaN or +inf. `entering` (g, m, c): such a message, which is then step 0 of a path, or None.
    """

    def __init__(self, chain: Chain, entering: Tensor | None) -> None:
        self._chain, self._entered = chain, int(entering is not None)
        self._messages = chain.new(chain.v + self._entered, chain.g, chain.m, chain.c)
        self.unknown = unknown(chain, self._entered)
        message = start(chain) if entering is None else entering.to(chain.dtype)
        self._messages[0] = message
        for step in range(1, len(self._messages)):
            message = self._messages[step] = _after(chain, message, step - self._entered, step - 1)
        self.leaving = self._messages[-1].double()

    def follow(self, states: Tensor) -> None:
        """Write into `states` (g, m, steps) the best paths that end, at a sequence's end, there.

        The last entry of each is the state in which it ends, or negative for any. States are -1 past a sequence's end,
        and everywhere if it is unknown or there is no path.
        """
        chain, steps = self._chain, states.shape[-1]
        sets = torch.arange(chain.g, device=states.device)[:, None]
        final, state = states[..., -1].clone(), torch.empty(0)
        ends = None if chain.ends is None else chain.ends[..., 0] + self._entered
        for step in reversed(range(steps)):
            terms = self._messages[step]
            if step + 1 < steps:
                columns = log_weights(chain.matrix(step).mT[sets, state], chain.log_params, chain.dtype)
                into_next = terms + columns
                terms = into_next if ends is None else torch.where(ends[..., None] == step + 1, terms, into_next)
            state = terms.argmax(-1)
            is_last = step + 1 == (steps if ends is None else ends)
            state = torch.where((final >= 0) & is_last, final, state)
            states[..., step] = state
        without_states(chain, states, self.unknown | ~(self.leaving.amax(-1) > -torch.inf), self._entered)


def start(chain: Chain) -> Tensor:
    """The first message (g, m, c) less its largest entry."""
    weights = log_weights(chain.p0, chain.log_params, torch.float64)
    # the largest x among possible first states
    potential, _ = shifted(chain.x[0].double().masked_fill(weights == -torch.inf, -torch.inf))
    message, _ = shifted((shifted(weights)[0] + potential).reshape(chain.g, chain.m, chain.c))
    return message.to(chain.dtype)


def _after(chain: Chain, message: Tensor, step: int, index: int) -> Tensor:
    """The message of a step less its largest entry, of that before it and the matrices at an index."""
    logs = log_weights(chain.matrix(index), chain.log_params, chain.dtype)[:, None]
    columns = logs.split(max(1, _TERMS // message.numel()), -1)
    largest = torch.cat([(message[..., None] + part).amax(-2) for part in columns], -1)
    potential, _ = shifted(chain.x[step].to(chain.dtype).reshape(message.shape))
    after, _ = shifted(largest + potential)
    return after if chain.ended is None else torch.where(chain.ended[step], message, after)


def unknown(chain: Chain, entered: int = 0) -> Tensor:
    """Whether a sequence holds NaN, +inf or a negative weight before its end (g, m): no path is known to be the best.

    `entered`: 1 for a stretch that a message enters, and 0 for a chain.
    """
    g, m, count = chain.g, chain.m, chain.v - 1 + entered
    potentials = _invalid(chain.x, True).reshape(-1, g, m)
    transitions = _invalid(chain.bulk.flatten(-2), chain.log_params).reshape(-1, g, 1)[:count].expand(count, g, m)
    if chain.ends is not None:
        inside = torch.arange(chain.v, device=chain.x.device).view(-1, 1, 1) < chain.ends[..., 0]
        potentials, transitions = potentials & inside, transitions & inside[1 - entered :]
    invalid = potentials.any(0) | transitions.any(0)
    return invalid if entered else invalid | _invalid(chain.p0, chain.log_params).expand(chain.lead).reshape(g, m)


def _invalid(weights: Tensor, log_params: bool) -> Tensor:
    """Whether weights (..., k) hold NaN or +inf, or a negative one that is no logarithm."""
    invalid = ~(weights.amax(-1) < torch.inf)
    return invalid if log_params else invalid | (weights.amin(-1) < 0)


def without_states(chain: Chain, states: Tensor, masked: Tensor, entered: int = 0) -> Tensor:
    """The states (..., g, m, steps), in place, with -1 after sequences' ends and in those that are masked (..., g, m).

    `entered`: see `unknown`.
    """
    masked = masked[..., None]
    if chain.ends is not None:
        invalid = (chain.ends < 1 - entered) | (chain.ends > chain.v)  # on a GPU, lengths are not checked before
        masked = masked | invalid | (torch.arange(states.shape[-1], device=states.device) >= chain.ends + entered)
    return states.masked_fill_(masked, -1)
