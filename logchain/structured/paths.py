"""Paths through a chain of structures: the best ones, drawn ones, and the weights of given ones.

Best paths are traced back through the messages m of a forward pass in the arithmetic of maxima:

    m_0 = log p0 + x_0              m_i = max_k m_{i-1}(k) + log P_i(k, .) + x_i
    z_{v-1} = argmax m_{v-1}        z_{i-1} = argmax_k m_{i-1}(k) + log P_i(k, z_i)

and paths are drawn likewise from log messages. All is float64, but for bands and arcs on a CPU, which C computes.
"""

import math

import torch
from torch import Tensor

from ..autograd.paths import sum_of_logs
from ..autograd.scan import Message, Steps, forward_messages, messages
from ..kernels.numbers import log_weights
from ..transitions import LINEAR, LOG, Transition
from ..transitions.transition import look_up, pick
from .operands import Operands


def log_weight(operands: Operands, states: Tensor) -> Tensor:
    """`log p0(z_0) + sum_i log P_i(z_{i-1}, z_i) + sum_i x_i(z_i)` in float64, [*S, *B], of paths z [*S, *B, v].

    A path with a negative state before its sequence's end is impossible: -inf, with gradient 0.
    """
    x, transition, p0, ends, log_params = operands
    steps = torch.arange(x.shape[-2], device=x.device)
    inside = torch.ones_like(states, dtype=torch.bool) if ends is None else (steps < ends[..., None]).expand_as(states)
    lost, states = inside & (states < 0), torch.where(inside & (states >= 0), states, 0)
    start = log_weights(look_up(p0.unsqueeze(-2), states[..., :1]), log_params, torch.float64)
    if len(transition.parameters) == 1:  # only those on the paths are converted
        weights = transition.entries(states[..., :-1], states[..., 1:], LOG if log_params else LINEAR)
        moved = log_weights(weights, log_params, torch.float64)
    else:  # products may underflow
        logs = transition.map(lambda weight: log_weights(weight, log_params, torch.float64))
        moved = logs.entries(states[..., :-1], states[..., 1:], LOG)
    # parameters of steps after a sequence's end may hold NaN
    weights = torch.where(inside, torch.cat([start, moved.expand(*states.shape[:-1], -1)], -1), 0.0)
    potentials = torch.where(inside, look_up(x, states).double(), 0.0)
    terms = torch.cat([weights, potentials.masked_fill(lost, -math.inf)], -1)
    return sum_of_logs(terms, exact=operands.dtype == torch.float64)


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
    return states, steps.sets.batched(weight.isnan() | (weight == math.inf))


def drawn_paths(operands: Operands, count: int, generator: torch.Generator | None) -> Tensor:
    """Paths int64 [count, *B, v] drawn from the posterior; states are -1 behind a sequence's end, and if impossible."""
    x = operands.x
    numbers = x.new_empty((count, *x.shape[:-1]), dtype=torch.float64).uniform_(generator=generator)
    drawn: Tensor | None = operands.in_c("draws", numbers)
    if drawn is not None:
        return drawn
    steps = operands.detached().steps()
    values = [message.values for message in forward_messages(steps)]
    numbers = steps.sets.grouped(numbers.movedim(0, -1)).permute(2, 3, 0, 1)  # (v, count, g, m)
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
    return steps.sets.batched(states.contiguous()).contiguous()
