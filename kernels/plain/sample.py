"""State paths of a batch of chains drawn backwards from their forward messages, exactly.

    z_{v-1} ~ a_{v-1}        z_{i-1} ~ a_{i-1}(k) P_i(k, z_i)

A state is the first whose cumulated weight reaches u times the total, with u in (0, 1]: never one of weight zero.
Shapes: messages (v, g, m, c), linear or logarithms; `draws` of each sequence; `states` (v, *lead, draws), written.
Numerics: weights and their sums in the dtype of the messages, u and the threshold in float64. What the linear messages
of a certified sequence hold as zero has a share below 2^-40 (`certificate`).
Cost: v c additions a draw, or v c^2 a sequence and v log c a draw where `native_sampling` computes. A few tensors are
made for a block of steps and draws, and written again.
Source: S. L. Scott, "Bayesian methods for hidden Markov models", JASA 97 (2002): forward filtering, backward sampling.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..chain import Chain, Matrices
from ..numbers import exp_shifted, finite

# weights (g, m, draws, c) of a step, uniform numbers (steps, g, m, draws) and matrices (steps, g, c, c) held at a time
_WEIGHTS, _NUMBERS, _MATRICES = 2**22, 2**18, 2**20


def draw(
    chain: Chain,
    messages: Tensor,
    redone: Tensor | None,
    states: Tensor,
    generator: torch.Generator | None,
    block_of: Callable[..., Any],
) -> None:
    """Write states (v, *lead, draws) in int64, -1 behind the ends; those of impossible sequences mean nothing.

    `redone` (g, m) marks the messages that are logarithms, None: all. `block_of` is `draw_block`, or the same compiled.
    """
    g, m, c, count = chain.g, chain.m, chain.c, states.shape[-1]
    if count == 0:
        return
    size = max(1, min(count, _WEIGHTS // (g * m * c))) if block_of is draw_block else count
    for first in range(0, count, size):
        _draw_some(chain, messages, redone, states[..., first : first + size], generator, block_of)


def _draw_some(
    chain: Chain,
    messages: Tensor,
    redone: Tensor | None,
    states: Tensor,
    generator: torch.Generator | None,
    block_of: Callable[..., Any],
) -> None:
    g, m, c, count = chain.g, chain.m, chain.c, states.shape[-1]
    steps = max(1, _NUMBERS // (g * m * count))
    if chain.bulk.shape[0] > 1:
        steps = min(steps, max(1, _MATRICES // (g * c * c)))
    steps = min(steps - steps % 2, chain.v) or 1  # rows of an odd length spread over a cache
    uniform = torch.empty(steps, g, m, count, dtype=torch.float64, device=states.device)
    drawn = torch.zeros(g, m, count, steps + 1, dtype=torch.int64, device=states.device)
    transitions = Transitions(chain, redone, steps)
    for start in reversed(range(0, chain.v, steps)):
        stop = min(start + steps, chain.v)
        # torch's numbers are in [0, 1): u is 1 less one of them
        numbers = uniform[: stop - start].uniform_(generator=generator)
        drawn[..., stop - start] = drawn[..., 0]
        block_of(chain, start, stop, messages, redone, transitions, numbers, drawn)
        written = states[start:stop]
        written.copy_(drawn[..., : stop - start].movedim(-1, 0).view(written.shape))
        if chain.ended is not None:
            written.masked_fill_(chain.ended[start:stop].view(*written.shape[:-1], 1), -1)


class Transitions:
    """The matrices (k, g, c, c) that lead out of a block of steps: linear ones scaled to lie near 1, or logarithms.

    k = 1 where all steps have one matrix. What needs no change is a view of the caller's.
    """

    def __init__(self, chain: Chain, redone: Tensor | None, steps: int) -> None:
        self._chain, self._steps = chain, steps
        self._linear = None if redone is None else Matrices(chain)
        self._buffer: Tensor | None = None
        self._held: dict[bool, tuple[int, Tensor]] = {}

    def __call__(self, start: int, stop: int, *, log: bool) -> Tensor:
        """Those out of the steps from `start` to before `stop`; the last step has none."""
        chain = self._chain
        first, last = (0, 1) if chain.bulk.shape[0] == 1 else (start, min(stop, chain.v - 1))
        if chain.v == 1 or first >= last:
            return chain.new(0, chain.g, chain.c, chain.c)
        if log not in self._held or self._held[log][0] != first:
            self._held[log] = first, self._logarithms(first, last) if log else self._scaled(first, last)
        return self._held[log][1]

    def _logarithms(self, first: int, last: int) -> Tensor:
        chain = self._chain
        raw = chain.bulk[first:last].to(chain.dtype).reshape(-1, chain.g, chain.c, chain.c)
        return raw.contiguous() if chain.log_params else raw.log()

    def _scaled(self, first: int, last: int) -> Tensor:
        chain, linear = self._chain, self._linear
        assert linear is not None
        raw = chain.bulk[first:last]
        if raw.is_contiguous() and linear(first + 1).data_ptr() == raw.data_ptr():
            return raw.view(-1, chain.g, chain.c, chain.c)
        if self._buffer is None:
            self._buffer = chain.new(min(self._steps, len(chain.bulk)), chain.g, chain.c, chain.c)
        for index in range(first, last):
            self._buffer[index - first] = linear(index + 1)
        return self._buffer[: last - first]


def draw_block(
    chain: Chain,
    start: int,
    stop: int,
    messages: Tensor,
    redone: Tensor | None,
    transitions: Transitions,
    uniform: Tensor,
    drawn: Tensor,
) -> None:
    """Write the states of a block of steps to `drawn` (g, m, draws, steps + 1), which holds those of step `stop`.

    `uniform` (steps, g, m, draws) are in [0, 1). If one sequence's messages are logarithms, all are made so.
    """
    log = redone is None or bool(redone.any())
    block, matrices = messages[start:stop], transitions(start, stop, log=log).mT.contiguous()
    if log and redone is not None:
        block = torch.where(redone[..., None], block, block.log())
    _, g, m, count = uniform.shape
    c = chain.c
    weights, sums = chain.new(g, m, count, c), chain.new(g, m, count, c)
    total, threshold = uniform.new_empty(g, m, count, 1), chain.new(g, m, count, 1)
    sets = torch.arange(g, device=uniform.device).view(g, 1, 1, 1) * c
    state = drawn[..., stop - start, None].contiguous()  # (g, m, draws, 1)
    for step in reversed(range(start, stop)):
        message = block[step - start, :, :, None]  # (g, m, 1, c)
        if step == chain.v - 1:
            weights.copy_(message.expand_as(weights))
        else:
            rows = matrices[(step - start) % len(matrices)].view(g * c, c)
            torch.index_select(rows, 0, (state + sets).flatten(), out=weights.view(-1, c))
            weights.add_(message) if log else weights.mul_(message)
            if chain.last is not None:
                torch.where(chain.last[step][..., None], message, weights, out=weights)
        if log:
            exp_shifted(weights, finite(weights.amax(-1, keepdim=True)), weights, sums)
        torch.cumsum(weights, -1, out=sums)
        torch.sub(1.0, uniform[step - start, ..., None], out=total).mul_(sums[..., -1:])
        # rounded to zero the threshold would take in a state of weight zero
        threshold.copy_(total).clamp_(min=torch.finfo(chain.dtype).tiny)
        torch.minimum(threshold, sums[..., -1:], out=threshold)
        torch.searchsorted(sums, threshold, out=state).clamp_(max=c - 1)  # a sum that is NaN is passed by none
        drawn[..., step - start] = state[..., 0]
