"""The gradients of a batch of chains' log-partition, in float64 logarithms, from the messages that were kept.

    b_{v-1} = 0               b_{i-1} = log(P_i exp(x_i + b_i))
    d log Z / d x_i = posterior_i = softmax(a_i + b_i)
    d log Z / d log P_i(j, k) = posterior_i(k) P_i(j, k) exp(a_{i-1}(j)) / sum over j

Each posterior is normalised over its own terms, so that roundings of the messages do not add up along the chain, and
constants in b_{v-1} have no influence: a stretch goes on from whatever multiple the stretch behind it has left.
"""

import math

import torch
from torch import Tensor

from ..chain import Chain
from ..message import Kept
from . import matmul as log_matmul
from .forward import potentials, shifted, transitions


def backward(
    chain: Chain,
    kept: Kept,
    weight: Tensor,
    following: Tensor | None,
    grad_x: Tensor | None,
    grad_bulk: Tensor | None,
) -> Tensor:
    """The gradient of `sum(weight * log_norm)` with respect to p0, or the message that `following` is to be earlier.

    Args:
        chain: the operands that `forward` had.
        kept: what it returned. Of a stretch, the log-partition is to be that of the whole chain, whose -inf says that a
            sequence is impossible.
        weight: (g, m); 0 leaves a sequence out.
        following: logarithms (g, m, c), float64, of the backward message of each sequence's last step, over any
            factor; None for ones, at the chain's end.
        grad_x: memory (v, *lead, c) for the gradient of x, if it is wanted; written.
        grad_bulk: memory (s, *own, c, c), with c by c contiguous, for that of bulk, or of its logarithms; written.

    Returns:
        Where no message entered, the gradient of p0 (*lead, c) of each sequence, in float64: what one sequence
        gives may exceed float32 though the sum does not. Otherwise logarithms (g, m, c), float64, of the
        backward message of the step that entered, over any factor, which the stretch ahead takes as its `following`.
    """
    g, c, head = chain.g, chain.c, int(kept.entered)
    weight = weight.double().masked_fill(kept.log_norm == -math.inf, 0.0)[..., None]
    counts = torch.zeros(g, c, c, dtype=torch.float64, device=weight.device)
    last = torch.zeros(g, chain.m, c, dtype=torch.float64, device=weight.device) if following is None else following
    behind = last
    posterior = torch.zeros_like(behind)
    for step in reversed(range(chain.v)):
        share, alive = weight, None
        if chain.ended is not None and chain.last is not None:
            behind = torch.where(chain.last[step], last, behind)
            alive = ~chain.ended[step]
            share = weight.masked_fill(~alive, 0.0)
        posterior = (torch.softmax(kept.logs(step + head) + behind, -1) * share).masked_fill(share == 0, 0.0)
        if grad_x is not None:
            grad_x[step] = posterior.view(grad_x.shape[1:])
        if step + head == 0:
            break
        x, (matrix, _) = potentials(chain, step)[0], transitions(chain, step, head)
        if grad_bulk is not None:
            before = kept.logs(step - 1 + head).masked_fill(share == 0, -math.inf)
            into_step = log_matmul.backward(posterior, before, matrix, False, True, torch.float64)[1]
            assert into_step is not None
            if len(chain.bulk) == 1:
                counts += into_step
            else:
                grad_bulk[step - 1 + head] = _gradient(chain, into_step, chain.bulk[step - 1 + head])
        earlier = shifted(log_matmul.forward(x + behind, matrix.mT, torch.float64)[0])[0]
        behind = earlier if alive is None else torch.where(alive, earlier, last)
    if grad_bulk is not None and len(chain.bulk) == 1:
        grad_bulk[0] = _gradient(chain, counts, chain.bulk[0])
    if kept.entered:
        return behind.masked_fill(weight == 0, 0.0)
    return _gradient(chain, posterior.view(*chain.lead, c), chain.p0.expand(*chain.lead, c))


def _gradient(chain: Chain, counts: Tensor, weights: Tensor) -> Tensor:
    """The gradient that the caller asks for, from that of logarithms, in the weights' shape; exactly 0 at a zero."""
    counts = counts.view(weights.shape)
    if chain.log_params or chain.by_log:
        return counts
    return (counts / weights.double()).masked_fill(counts == 0, 0.0)
