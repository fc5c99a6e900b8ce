"""The sum-product recursion in log space, float64, for the sequences that linear space cannot represent.

    a_i = log sum_j exp(a_{i-1}(j) + log P_i(j, .)) + x_i
    b_{i-1} = log sum_k exp(log P_i(., k) + x_i(k) + b_i(k))

with the scale taken out of the messages every few steps; how a step is summed is `log_steps`'s business. The forward
messages are kept in the chain's own dtype with largest entry 0: an entry D nats below that is known to D roundings.
Every probability of the backward pass is normalised over its own terms, so that those roundings do not add up along the
chain.

Messages are laid out (g', c, m'), the sequences innermost: the few states of a step are then combined in long vectors.
"""

import math

import torch
from torch import Tensor

from .chain import Chain
from .exponentials import finite
from .log_steps import Rows, steps_for
from .summation import exact_sum

# entries of x in a block of steps: as many float64 values, for transitions a few times as many, are held at a time
_BLOCK = 2**15

# steps between two scales: what float64 holds beyond float32 is room for a few
_PERIOD = {torch.float32: 8, torch.float64: 1}


def forward(chain: Chain, lossy: Tensor, log_norm: Tensor, messages: Tensor | None) -> Tensor:
    """Redo the sequences marked in `lossy` (g, m), and those that complete their rectangle; which these are (g, m).

    Their log-partition is written into `log_norm` (g, m), float64, and their messages over those in `messages` (v, g,
    m, c), if that is given.
    """
    rows = Rows(chain, *_rectangle(lossy))
    steps, period = steps_for(rows), _PERIOD[chain.dtype]
    message = rows.start()
    scales = message.new_zeros(chain.v, rows.shape[0], 1, rows.shape[2])
    shifts, last = torch.empty_like(scales), torch.zeros_like(scales[0])
    for start, stop in chain.blocks(_BLOCK):
        block, shifts[start:stop] = rows.potentials(start, stop)
        for step, potential in enumerate(block, start):
            message = potential.add_(steps.forward(message, step) if step else message)
            if rows.ends is not None:
                message.masked_fill_(rows.ends <= step, -math.inf)
            if step % period == 0:
                scales[step] = _normalise(message)
            if rows.ends is not None:
                torch.where(rows.ends == step + 1, _total(message), last, out=last)
        if messages is not None:
            message = message.clone()
            _normalise(block)
            if len(rows.sets) * len(rows.members) == chain.g * chain.m:  # no need to look places up
                messages[start:stop] = block.mT
            else:
                messages[start:stop, rows.sets[:, None], rows.members] = block.mT.to(messages.dtype)
    if rows.ends is None:
        last = _total(message)
    else:
        ended = rows.ends <= rows.numbers(0, chain.v)
        scales.masked_fill_(ended, 0.0)
        shifts.masked_fill_(ended, 0.0)
    place = rows.sets[:, None], rows.members
    log_norm[place] = torch.stack(exact_sum(torch.cat([scales, shifts, last[None]]))).sum(0)[:, 0]
    redone = torch.zeros_like(lossy)
    redone[place] = True
    return redone


def backward(
    chain: Chain,
    redone: Tensor,
    log_norm: Tensor,
    messages: Tensor,
    weight: Tensor,
    grad_x: Tensor | None,
    grad_bulk: Tensor | None,
    grad_p0: Tensor,
) -> None:
    """Gradients of `sum(weight * log_norm)` for weights (g, m), from the messages (v, g, m, c) of those `redone`.

    They are written over those of these sequences in `grad_x` (v, *lead, c) and `grad_p0` (*lead, c), and added to
    `grad_bulk` (s, g, c, c).
    """
    rows = Rows(chain, *_rectangle(redone))
    steps, period = steps_for(rows), _PERIOD[chain.dtype]
    weight = weight.double().masked_fill(log_norm == -math.inf, 0.0)[rows.sets][:, None, rows.members]
    message = torch.zeros(rows.shape, dtype=torch.float64, device=weight.device)
    for start, stop in reversed(chain.blocks(_BLOCK)):
        after, _ = rows.potentials(start, stop)  # becomes x_i + b_i
        behind = torch.empty_like(after)  # b_i
        for step in reversed(range(start, stop)):
            if rows.ends is not None:
                message.masked_fill_(rows.ends <= step, -math.inf).masked_fill_(rows.ends == step + 1, 0.0)
            behind[step - start] = message
            ahead = after[step - start].add_(message)
            if rows.ends is not None:
                ahead.masked_fill_(rows.ends <= step, -math.inf)
            if step > 0:
                message = steps.backward(ahead, step)
                if step % period == 0:
                    _normalise(message)
        active = (
            weight if rows.ends is None else weight * (rows.ends > rows.numbers(start, stop))
        )  # (k or 1, g', 1, m')
        states = _shares(behind.add_(_kept(messages, rows, start, stop)), active)
        if grad_x is not None:
            rows.write(states, grad_x[start:stop])
        if start == 0:
            rows.write(rows.gradient(states[:1], rows.start()), grad_p0[None])
        first = max(start, 1)
        if grad_bulk is not None and first < stop:
            before = _kept(messages, rows, first - 1, stop - 1).double()
            skip = first - start
            active = active if active is weight else active[skip:]
            steps.transitions(before, after[skip:], states[skip:], active, first, grad_bulk)


def _rectangle(marked: Tensor) -> tuple[Tensor, Tensor]:
    """The sets and the members of the sequences marked in (g, m)."""
    return marked.any(1).nonzero()[:, 0], marked.any(0).nonzero()[:, 0]


def _kept(messages: Tensor, rows: Rows, start: int, stop: int) -> Tensor:
    """The messages of a block of steps (k, g', c, m')."""
    if len(rows.sets) * len(rows.members) == messages[0, ..., 0].numel():
        return messages[start:stop].mT
    return messages[start:stop, rows.sets[:, None], rows.members].mT


def _normalise(message: Tensor) -> Tensor:
    """Take the largest state of each sequence out of it, in place, and return it; a message of -inf stays one."""
    top = finite(message.amax(-2, keepdim=True))
    message.sub_(top)
    return top


def _total(message: Tensor) -> Tensor:
    return torch.logsumexp(message, -2, keepdim=True)


def _shares(joint: Tensor, weight: Tensor) -> Tensor:
    """`weight * softmax(joint)` over the states; 0 where the weight is."""
    return torch.softmax(joint, -2).mul_(weight).masked_fill_(weight == 0, 0.0)
