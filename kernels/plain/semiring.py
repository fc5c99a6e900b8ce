"""The chain recursion in any semiring whose product is the sum of logarithms: plain torch, differentiable by autograd.

    a_0 = log p0 + x_0
    a_i(j) = add_k(a_{i-1}(k) + log P_i(k, j)) + x_i(j)

What is added to every term is added to their sum, so each step takes its largest entry out of the message, which then
is known to D roundings at an entry D nats below. -inf is the semiring's zero, exactly, with gradient 0.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..chain import Chain

# adds terms along an axis
Add = Callable[[Tensor, int], Tensor]

# terms (sets, members, c, c) that are held at a time
_TERMS = 2**20


def forward(chain: Chain, add: Add, *, messages: Tensor | None = None) -> Tensor:
    """The total (g, m) in float64; the messages, largest entry 0, are written to `messages` (v, g, m, c) if given.

    Behind a sequence's end they stay as at its end.
    """
    (g, m), c = grid(chain), chain.c
    message, scale, lost = start(chain)
    logs = message.new_empty(0)
    for step in range(chain.v):
        if step > 0:
            # NaN behind the end must not come near, or it is in the gradients
            ended = None if chain.ends is None else chain.ends <= step
            if step == 1 or chain.bulk.shape[0] > 1:
                matrix = chain.bulk[step - 1].reshape(g, c, c)
                if ended is not None:
                    matrix = matrix.masked_fill(ended.all(1, keepdim=True), 1.0)
                logs = log_weights(matrix, chain.log_params, chain.dtype)
            potential = chain.x[step].to(chain.dtype).reshape(g, m, c)
            if ended is not None:
                potential = potential.masked_fill(ended, 0.0)
            potential, shift = shifted(potential)
            after, top = shifted(_step(message, logs, ended, add) + potential)
            if ended is not None:
                after, top = torch.where(ended, message, after), top.masked_fill(ended, 0.0)
            message = after
            scale, lost = _add(*_add(scale, lost, shift), top)
        if messages is not None:
            messages[step] = message.detach()
    # what is not asked for has a gradient too, of 0
    nothing = chain.bulk[:0].sum().double() if chain.v == 1 else 0.0
    return (_sum(message[..., None], None, add).double() + lost + scale)[..., 0] + nothing


def start(chain: Chain) -> tuple[Tensor, Tensor, Tensor]:
    """The first message (g, m, c), its scale in float64 (g, m, 1), and what the scale's rounding has lost."""
    weights = log_weights(chain.p0, chain.log_params, torch.float64)
    # the largest x is that of a state where one may start
    potential, shift = shifted(chain.x[0].double().masked_fill(weights == -math.inf, -math.inf))
    weights, first = shifted(weights)
    message, top = shifted((weights + potential).reshape(*grid(chain), chain.c))
    scale, lost = _add(shift, torch.zeros_like(shift), first)
    return message.to(chain.dtype), *_add(scale.reshape(top.shape), lost.reshape(top.shape), top)


def shifted(message: Tensor) -> tuple[Tensor, Tensor]:
    """The message with its largest entry taken out, and that entry in float64 (..., 1); 0 for none."""
    top = message.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)
    return message - top, top.double()


def grid(chain: Chain) -> tuple[int, int]:
    """`g` and `m` of the chain, whose own properties `torch.compile` cannot trace."""
    axes = chain.bulk.dim() - 3
    return math.prod(chain.bulk.shape[1 : 1 + axes]), math.prod(chain.x.shape[1 + axes : -1])


def maximum(terms: Tensor, dim: int) -> Tensor:
    """The largest term, whose gradient goes to one of the largest."""
    return terms.max(dim).values


def log_weights(weights: Tensor, log_params: bool, dtype: torch.dtype) -> Tensor:
    """The logarithm of weights, or what is one already, in `dtype`; with gradient 0 at weight 0."""
    weights = weights.to(dtype)
    if log_params or not weights.requires_grad:
        return weights if log_params else weights.log()
    zero = weights == 0
    return weights.masked_fill(zero, 1.0).log().masked_fill(zero, -math.inf)


def _add(total: Tensor, lost: Tensor, term: Tensor) -> tuple[Tensor, Tensor]:
    """A running sum, and what its rounding has lost (D. E. Knuth's two-sum)."""
    after = total + term
    part = after - total
    return after, lost + ((total - (after - part)) + (term - part))


def _step(message: Tensor, logs: Tensor, ended: Tensor | None, add: Add) -> Tensor:
    """`add_k(message(k) + logs(k, j))` (g, m, c), a few sets, members and columns at a time."""
    g, m, c = message.shape
    if g * m * c * c <= _TERMS:
        return _sum(message[..., None] + logs[:, None], ended, add)
    columns = max(1, min(c, _TERMS // c))
    members = max(1, min(m, _TERMS // (c * columns)))
    sets = max(1, min(g, _TERMS // (c * columns * members)))
    rows = []
    for s in range(0, g, sets):
        parts = []
        for r in range(0, m, members):
            column = message[s : s + sets, r : r + members, :, None]
            dead = None if ended is None else ended[s : s + sets, r : r + members]
            pieces = [logs[s : s + sets, None, :, j : j + columns] for j in range(0, c, columns)]
            parts.append(torch.cat([_sum(column + piece, dead, add) for piece in pieces], -1))
        rows.append(torch.cat(parts, 1))
    return torch.cat(rows)


def _sum(terms: Tensor, ended: Tensor | None, add: Add) -> Tensor:
    """The sum over the last axis but one; -inf, with gradient 0, where all are or where a sequence has ended."""
    dead = (terms == -math.inf).all(-2)
    if ended is not None:
        dead = dead | ended
    return add(terms.masked_fill(dead[..., None, :], 0.0), -2).masked_fill(dead, -math.inf)
