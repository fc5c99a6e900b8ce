"""The best paths of a batch of chains, and drawn ones.

Best paths of structures are traced back through the messages m of a forward pass in the semiring of maxima:

    m_0 = log p0 + x_0              m_i = max_k m_{i-1}(k) + log P_i(k, .) + x_i
    z_{v-1} = argmax m_{v-1}        z_{i-1} = argmax_k m_{i-1}(k) + log P_i(k, z_i)

and paths are drawn likewise from log messages. All is float64, but for bands and arcs on a CPU, which C computes.
"""

import math

import torch
from torch import Tensor

from ..autograd.paths import log_weight
from ..autograd.scan import Message, Steps, forward_messages, messages
from ..autograd.viterbi import best_paths as dense_best_paths
from ..transitions import LOG, Transition
from ..transitions.transition import pick
from .operands import Operands, check_products


def best_path(operands: Operands) -> tuple[Tensor, Tensor]:
    """The best path int64 [*B, v], -1 where there is no state, and its log-weight [*B], NaN for an unknown sequence."""
    x, transition, p0, lengths, log_params = operands
    check_products(transition)
    states, unknown = best_paths(operands)
    return states, log_weight(x, transition, p0, states, lengths, log_params).masked_fill(unknown, math.nan)


def best_walk(steps: Steps) -> tuple[list[Message], list[Tensor]]:
    """The messages of best paths, and the state before each state (g, m, c) of the best path into it, from step 1 on.

    Of equals it is the lowest state.
    """
    pointers = []

    def through(transition: Transition, message: Tensor) -> Tensor:
        values, before = transition.best(message)
        pointers.append(before.int())
        return values

    return list(messages(steps, through)), pointers


def best_paths(operands: Operands) -> tuple[Tensor, Tensor]:
    """The best path int64 [*B, v], and whether a sequence is unknown [*B]: its weight is NaN or +inf.

    States are -1 behind a sequence's end, of impossible and of unknown sequences.
    """
    if operands.is_dense:
        return dense_best_paths(*operands.dense, None)
    best: tuple[Tensor, Tensor] | None = operands.in_c("best_paths")
    if best is not None:
        return best
    steps = operands.detached().steps()
    walked, pointers = best_walk(steps)
    weight, state = walked[-1].values.max(-1)
    found = [state]
    for step in reversed(range(1, steps.v)):
        before = pointers[step - 1].gather(-1, state[..., None])[..., 0].long()
        inside = steps.inside(step)
        state = before if inside is None else torch.where(inside[..., 0], before, state)
        found.append(state)
    states = possible(steps, torch.stack(found[::-1], -1), weight)
    return states, steps.layout.batched(weight.isnan() | (weight == math.inf))


@torch.no_grad()
def drawn_paths(operands: Operands, count: int, generator: torch.Generator | None) -> Tensor:
    """Paths int64 [count, *B, v] drawn from the posterior; states are -1 behind a sequence's end, and if impossible."""
    x = operands.x
    if operands.is_dense:
        *tensors, log_params = operands.dense
        paths: Tensor = torch.ops.logchain.sample(*tensors, count, generator, log_params)
        return paths
    if count == 0 or x.numel() == 0:
        return x.new_empty((count, *x.shape[:-1]), dtype=torch.int64)
    numbers = x.new_empty((count, *x.shape[:-1]), dtype=torch.float64).uniform_(generator=generator)
    drawn: Tensor | None = operands.in_c("draws", numbers)
    if drawn is not None:
        return drawn
    steps = operands.detached().steps()
    values = [message.values for message in forward_messages(steps)]
    numbers = steps.layout.grouped(numbers.movedim(0, -1)).permute(2, 3, 0, 1)  # (v, count, g, m)
    state, _ = pick(values[-1].expand(count, *steps.shape), numbers[-1])
    found = [state]
    for step in reversed(range(1, steps.v)):
        before = steps.transition(step).draw(values[step - 1], state, numbers[step - 1])
        inside = steps.inside(step)
        state = before if inside is None else torch.where(inside[..., 0], before, state)
        found.append(state)
    drawn = torch.stack(found[::-1]).movedim(1, -1)  # (v, g, m, count)
    weight = LOG.sum(values[-1], -1)[..., None]
    return possible(steps, drawn.permute(1, 2, 3, 0), weight).movedim(-2, 0)


def possible(steps: Steps, states: Tensor, weight: Tensor) -> Tensor:
    """Paths (g, m, ..., v) as [*B, ..., v], -1 behind ends and in sequences whose weight (g, m, ...) is not finite."""
    states = states.masked_fill(~weight.isfinite()[..., None], -1)
    if steps.ends is not None:
        ends = steps.ends.view(*steps.shape[:2], *(1 for _ in states.shape[2:]))
        states = states.masked_fill(torch.arange(steps.v, device=states.device) >= ends, -1)
    return steps.layout.batched(states.contiguous()).contiguous()
