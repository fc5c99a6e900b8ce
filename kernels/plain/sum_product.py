"""The log-partition of a batch of chains and its gradients, in float64 logarithms: one log-semiring product a step.

    a_0 = log p0 + x_0        a_i = log(exp(a_{i-1}) P_i) + x_i        log Z = log(sum of exp(a_{v-1}))
    b_{v-1} = 0               b_{i-1} = log(P_i exp(x_i + b_i))
    d log Z / d x_i = posterior_i = softmax(a_i + b_i)
    d log Z / d log P_i(j, k) = posterior_i(k) P_i(j, k) exp(a_{i-1}(j)) / sum over j

with the largest entry taken out of whatever is added. Each posterior is normalised over its own terms, so that
roundings of the messages do not add up along the chain.

What a backward pass needs lies in tensors of fixed shapes: `messages` (v, g, m, c) over their largest entry, linear or,
of sequences of which linear space does not hold one, logarithms; `redone` (g, m) marks those; `scales` (v + 1, g, m, 1)
are 1 but for the last, the sum of the last message.
"""

import math

import torch
from torch import Tensor

from ..chain import Chain
from ..numbers import FLUSH, exact_sum
from . import matmul as log_matmul


def forward(chain: Chain, *, keep: bool, steps: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The log-partition (g, m) in float64; messages and scales, with room for so many `steps`; what was redone.

    Without `keep` no messages are returned.
    """
    grid = chain.g, chain.m, chain.c
    messages = chain.kept(steps) if keep else chain.new(0)
    scales = chain.new(steps + 1, chain.g, chain.m, 1).fill_(1.0)
    redone = torch.zeros(grid[:2], dtype=torch.bool, device=chain.x.device)
    message = torch.full(grid, -math.inf, dtype=torch.float64, device=chain.x.device)
    taken, lost = (torch.zeros_like(message[..., :1]) for _ in range(2))
    for step in range(chain.v):
        before = message
        x, *tops = _potentials(chain, step)
        if step == 0:
            message, top = _shifted(_logs(chain.p0, chain.log_params).expand(*chain.lead, chain.c).reshape(grid))
        else:
            matrix, top = _matrix(chain, step)
            message = log_matmul.forward(message, matrix, torch.float64)[0]
        message, scale = _shifted(message + x)
        terms = torch.stack([taken, *(term.expand_as(taken) for term in (*tops, top, scale))])
        if chain.ended is not None:  # the last message stays
            message = torch.where(chain.ended[step], before, message)
            terms[1:].masked_fill_(chain.ended[step], 0.0)
        taken, more = exact_sum(terms)
        lost += more
        redone |= ((message > -math.inf) & (message < math.log(FLUSH[chain.dtype]))).any(-1)
        if keep:
            messages[step] = message if chain.ended is None else message.masked_fill(chain.ended[step], -math.inf)
    for kept in messages[: chain.v]:
        kept.copy_(torch.where(redone[..., None], kept, kept.exp()))
    total = torch.logsumexp(message + _final(chain), -1, keepdim=True)
    scales[-1] = total.exp()
    return (taken + lost + total)[..., 0], messages, scales, redone


def backward(
    chain: Chain,
    log_norm: Tensor,
    messages: Tensor,
    scales: Tensor,
    redone: Tensor,
    weight: Tensor,
    grad_x: Tensor | None,
    grad_bulk: Tensor | None,
) -> Tensor:
    """Gradients of `sum(weight * log_norm)` for weights (g, m); a weight of 0 leaves its sequence out.

    `grad_x` (v, *lead, c) and `grad_bulk` (s, g, c, c) are written where they are wanted; that of `p0` is returned, one
    per sequence (*lead, c), in float64: what one sequence gives may exceed float32 though the sum does not.
    """
    weight = weight.double().masked_fill(log_norm == -math.inf, 0.0)[..., None]
    one_matrix, final = len(chain.bulk) == 1, _final(chain)
    counts = torch.zeros(chain.g, chain.c, chain.c, dtype=torch.float64, device=weight.device)
    behind = final
    for step in reversed(range(chain.v)):
        share = weight
        if chain.ended is not None and chain.last is not None:
            behind = torch.where(chain.last[step], final, behind)
            share = weight.masked_fill(chain.ended[step], 0.0)
        message = _kept(messages, redone, step)
        posterior = (torch.softmax(message + behind, -1) * share).masked_fill(share == 0, 0.0)
        if grad_x is not None:
            grad_x[step] = posterior.view(grad_x.shape[1:])
        if step == 0:
            break
        x, (matrix, _) = _potentials(chain, step)[0], _matrix(chain, step)
        if grad_bulk is not None:
            before = _kept(messages, redone, step - 1).masked_fill(share == 0, -math.inf)
            more = log_matmul.backward(posterior, before, matrix, False, True, torch.float64)[1]
            assert more is not None
            if one_matrix:
                counts += more
            else:
                grad_bulk[step - 1] = _gradient(chain, more, chain.bulk[step - 1])
        behind = _shifted(log_matmul.forward(x + behind, matrix.mT, torch.float64)[0])[0]
    if grad_bulk is not None and one_matrix:
        grad_bulk[0] = _gradient(chain, counts, chain.bulk[0])
    return _gradient(chain, posterior.view(*chain.lead, chain.c), chain.p0.expand(*chain.lead, chain.c))


def _potentials(chain: Chain, step: int) -> tuple[Tensor, Tensor]:
    return _shifted(chain.x[step].reshape(chain.g, chain.m, chain.c).double())


def _matrix(chain: Chain, step: int) -> tuple[Tensor, Tensor]:
    """The logarithms of the transitions into a step (g, c, c) less the largest of each set, and that (g, 1, 1)."""
    weights = chain.bulk[0 if len(chain.bulk) == 1 else step - 1].reshape(chain.g, chain.c, chain.c).double()
    top = weights.amax((-2, -1), keepdim=True)
    if chain.log_params:
        top = top.masked_fill(top == -math.inf, 0.0)
        return weights - top, top
    top = top.masked_fill(top == 0, 1.0)
    share, level = weights / top, top.log()
    return torch.where(share < torch.finfo(share.dtype).tiny, weights.log() - level, share.log()), level


def _final(chain: Chain) -> Tensor:
    """The logarithms of the weights of the last states (g, m, c)."""
    if chain.final is None:
        return torch.zeros(chain.g, chain.m, chain.c, dtype=torch.float64, device=chain.x.device)
    return chain.final.double().log()


def _kept(messages: Tensor, redone: Tensor, step: int) -> Tensor:
    """A message as logarithms (g, m, c)."""
    message = messages[step].double()
    return torch.where(redone[..., None], message, message.log())


def _gradient(chain: Chain, counts: Tensor, weights: Tensor) -> Tensor:
    """The gradient of what the caller asks for, from that of its logarithm; exactly 0 at an exact zero."""
    if chain.log_params or chain.by_log:
        return counts
    return (counts / weights.double().reshape(counts.shape)).masked_fill(counts == 0, 0.0)


def _logs(weights: Tensor, log_params: bool) -> Tensor:
    return weights.double() if log_params else weights.double().log()


def _shifted(logs: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithms (..., c) less their largest, and that (..., 1); nothing is taken out of -inf."""
    top = logs.amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)
    return logs - top, top
