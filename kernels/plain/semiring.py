"""The forward recursion in any semiring whose product adds logarithms: plain torch, differentiable by autograd.

    a_0 = log p0 + x_0
    a_i(j) = add_k(a_{i-1}(k) + log P_i(k, j)) + x_i(j)

`add` is the semiring's sum; a constant added to all its terms is added to it, so each step subtracts the largest entry
from its message. An entry D nats below the largest has an error of D roundings. -inf is the semiring's zero, exactly,
with gradient 0.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..chain import Chain

# the semiring's sum along an axis
Add = Callable[[Tensor, int], Tensor]

# terms (sets, sequences, c, c) of a step that are computed at a time
_TERMS = 2**20


def forward(
    chain: Chain, add: Add, *, messages: Tensor | None = None, entering: tuple[Tensor, Tensor, Tensor] | None = None
) -> Tensor:
    """The sum over all paths (g, m), in float64.

    Messages, less their largest entries, are written to `messages` (v, g, m, c) if given; after a sequence's end, its
    last message. `entering`: what `start` returns, of the step before the first of a stretch.
    """
    (g, m), c = grid(chain), chain.c
    message, scale, lost = start(chain) if entering is None else entering
    logs, entered = message.new_empty(0), int(entering is not None)
    for step in range(chain.v):
        if step + entered > 0:
            # NaN after a sequence's end must not be computed with, or it gets into the gradients
            ended = None if chain.ends is None else chain.ends <= step
            if step + entered == 1 or chain.bulk.shape[0] > 1:
                matrix = chain.bulk[step - 1 + entered].reshape(g, c, c)
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
            scale, lost = two_sum(*two_sum(scale, lost, shift), top)
        if messages is not None:
            messages[step] = message.detach()
    # so that autograd finds a gradient of 0 for a bulk that is not used
    unused = chain.bulk[:0].sum().double() if chain.v == 1 else 0.0
    return (_sum(message[..., None], None, add).double() + lost + scale)[..., 0] + unused


def start(chain: Chain) -> tuple[Tensor, Tensor, Tensor]:
    """The first message (g, m, c) less its largest entry, that scale in float64 (g, m, 1), and its rounding error."""
    weights = log_weights(chain.p0, chain.log_params, torch.float64)
    # the largest x among possible first states
    potential, shift = shifted(chain.x[0].double().masked_fill(weights == -math.inf, -math.inf))
    weights, first = shifted(weights)
    message, top = shifted((weights + potential).reshape(*grid(chain), chain.c))
    scale, lost = two_sum(shift, torch.zeros_like(shift), first)
    return message.to(chain.dtype), *two_sum(scale.reshape(top.shape), lost.reshape(top.shape), top)


def shifted(message: Tensor) -> tuple[Tensor, Tensor]:
    """The message less its largest entry, and that entry in float64 (..., 1), 0 in place of -inf."""
    top = message.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)
    return message - top, top.double()


def grid(chain: Chain) -> tuple[int, int]:
    """`g` and `m` of the chain; `torch.compile` cannot trace the cached properties of these names."""
    axes = chain.bulk.dim() - 3
    return math.prod(chain.bulk.shape[1 : 1 + axes]), math.prod(chain.x.shape[1 + axes : -1])


def maximum(terms: Tensor, dim: int) -> Tensor:
    """The largest term; the gradient goes to one of the largest."""
    return terms.max(dim).values


def log_weights(weights: Tensor, log_params: bool, dtype: torch.dtype) -> Tensor:
    """The logarithms of weights, which are logarithms already with `log_params`, in `dtype`; gradient 0 at weight 0."""
    weights = weights.to(dtype)
    if log_params or not weights.requires_grad:
        return weights if log_params else weights.log()
    zero = weights == 0
    return weights.masked_fill(zero, 1.0).log().masked_fill(zero, -math.inf)


def probabilities(message: Tensor) -> Tensor:
    """The probabilities of states (..., c) with log-weights `message`, exactly 0 if all are -inf."""
    dead = (message == -math.inf).all(-1, keepdim=True)
    return torch.softmax(message.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)


def two_sum(total: Tensor, lost: Tensor, term: Tensor) -> tuple[Tensor, Tensor]:
    """A running sum with one more term, and the sum of its rounding errors (D. E. Knuth's two-sum)."""
    after = total + term
    part = after - total
    return after, lost + ((total - (after - part)) + (term - part))


def _step(message: Tensor, logs: Tensor, ended: Tensor | None, add: Add) -> Tensor:
    """`add_k(message(k) + logs(k, j))` (g, m, c), a few sets, sequences and columns at a time."""
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
    """The semiring's sum over the last axis but one; -inf, with gradient 0, of only -inf or in ended sequences."""
    dead = (terms == -math.inf).all(-2)
    if ended is not None:
        dead = dead | ended
    return add(terms.masked_fill(dead[..., None, :], 0.0), -2).masked_fill(dead, -math.inf)
