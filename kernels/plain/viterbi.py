"""The state paths of the largest weights: k max-plus messages per state forward, then backtracking by choices.

    a_i(j, .) = the k largest a_{i-1}(h, r) + log P_i(h, j), over states h and ranks r, + x_i(j)

State h at rank r is the r-th best path into h, so that all paths differ; the rank is -inf if there is none. The choices
`h k + r` are stored, c k integers for each step and sequence. Their definition is `logchain.reference.topk_paths`.
"""

import math

import torch
from torch import Tensor

from ..chain import Chain
from ..numbers import log_weights, shifted

# terms (sets, sequences, columns, c k) of a step that are in memory at a time
_TERMS = 2**20


def paths(chain: Chain, k: int | None = None) -> tuple[Tensor, Tensor]:
    """The states (g, m, v) int64 of the best paths, or (g, m, k, v) of the k best, and the `unknown` sequences (g, m).

    Ties of best paths go to the lowest last state, then to the lowest state before it, and so on. A state is -1 after
    its sequence's end, and everywhere in a sequence that is impossible or unknown, and in a rank with no path.
    """
    messages = Messages(chain, None, k or 1)
    if k is None:
        states = torch.full((chain.g, chain.m, chain.v), -1, device=chain.x.device)
        messages.follow(states)
        return states, messages.unknown
    weights, index = messages.last.flatten(-2).topk(k)
    masked = messages.unknown[..., None] | ~(weights > -math.inf)  # (g, m, k)
    states = without_states(chain, messages.choose(index).movedim(2, 0), masked.movedim(2, 0))
    return states.movedim(0, 2), messages.unknown


class Messages:
    """The max-plus messages of a chain, or of a stretch that a message enters, and the best paths through them.

    `leaving` (g, m, c), float64: the last message of each sequence, less its largest entry. `unknown` (g, m): whether a
    sequence holds NaN or +inf. `entering` (g, m, c): such a message, which is then step 0 of a path, or None. `last`
    (g, m, c, ranks): the last message of the `ranks` best paths into each state.
    """

    def __init__(self, chain: Chain, entering: Tensor | None, ranks: int = 1) -> None:
        g, m, c, entered = chain.g, chain.m, chain.c, int(entering is not None)
        self._chain, self._entered, self.unknown = chain, entered, unknown(chain, entered)
        message = chain.new(g, m, c, ranks).fill_(-math.inf)
        message[..., 0] = start(chain) if entering is None else entering
        wide = torch.int32 if c * ranks < 2**31 else torch.int64
        same = torch.arange(c * ranks, dtype=wide, device=message.device).view(c, ranks)
        self._choices = same.new_empty(chain.v - 1 + entered, g, m, c, ranks)
        for index, choices in enumerate(self._choices):
            step = index + 1 - entered
            after, choice = _largest(message, log_weights(chain.matrix(index), chain.log_params, chain.dtype))
            potential = shifted(chain.x[step].to(chain.dtype).reshape(g, m, c))[0]
            after = shifted((after + potential[..., None]).flatten(-2))[0].view_as(message)
            if chain.ended is not None:
                ended = chain.ended[step][..., None]
                after, choice = torch.where(ended, message, after), torch.where(ended, same, choice)
            message = after
            choices.copy_(choice)
        self.last, self.leaving = message, message[..., 0].double()

    def follow(self, states: Tensor) -> None:
        """Write into `states` (g, m, steps) the best paths.

        On entry, the last entry of each is the state in which the path has to end, or negative for any state. States
        are -1 past a sequence's end, and everywhere if it is unknown or there is no path.
        """
        final, best = states[..., -1:], self.last[..., 0].argmax(-1, keepdim=True)
        states.copy_(self.choose(torch.where(final >= 0, final, best))[..., 0, :])
        without_states(self._chain, states, self.unknown | ~(self.leaving.amax(-1) > -torch.inf), self._entered)

    def choose(self, index: Tensor) -> Tensor:
        """The states (g, m, k, steps) of paths that end with these entries (g, m, k) of the flattened `last`."""
        ranks, states = self.last.shape[-1], [index]
        for choices in reversed(self._choices.flatten(-2).unbind()):
            states.append(choices.gather(-1, states[-1]).long())
        return torch.stack(states[::-1], -1) // ranks


def _largest(message: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
    """The largest weights (g, m, c, k) of paths into each state, and their choices, for logarithms of matrices."""
    parts, columns = [], logs.mT[:, None, :, :, None]  # (g, 1, to, from, 1)
    for block in columns.split(max(1, _TERMS // max(1, message.numel())), 2):
        terms = (message[:, :, None] + block).flatten(-2)
        parts.append(terms.max(-1, keepdim=True) if message.shape[-1] == 1 else terms.topk(message.shape[-1]))
    values, choices = zip(*parts, strict=True)
    return torch.cat(values, 2), torch.cat(choices, 2)


def start(chain: Chain) -> Tensor:
    """The first message (g, m, c) less its largest entry."""
    weights = log_weights(chain.p0, chain.log_params, torch.float64)
    # the largest x among possible first states
    potential, _ = shifted(chain.x[0].double().masked_fill(weights == -torch.inf, -torch.inf))
    message, _ = shifted((shifted(weights)[0] + potential).reshape(chain.g, chain.m, chain.c))
    return message.to(chain.dtype)


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
