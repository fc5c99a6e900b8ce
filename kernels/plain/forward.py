"""The log-partition of a batch of chains, in float64 logarithms: one log-semiring product a step.

    a_0 = log p0 + x_0        a_i = log(exp(a_{i-1}) P_i) + x_i        log Z = log(sum of exp(a_{v-1}))

The largest entry is taken out of every message, and out of whatever is added to one; what has been taken out is summed
in float64, with what that rounds. This is the definition of the room's doors; kernels/cpu and kernels/gpu have others.
"""

import math

import torch
from torch import Tensor

from ..chain import Chain
from ..message import Kept, Message, normalised, where_moved
from ..numbers import FLUSH, exact_sum
from . import matmul as log_matmul


def forward(
    chain: Chain, entering: Message | None = None, *, keep: Tensor | None = None, leave: bool = False
) -> tuple[Kept, Message | None]:
    """The log-partition of all sequences, and what `backward` needs; the message that leaves, if one is to `leave`.

    Args:
        chain: the operands. Sequences that underflow are recomputed exactly, so that no result is lossy.
        entering: the message of the step before the first; without one the chain begins at its p0.
        keep: memory of the dtype of the arithmetic for the messages (steps, g, m, c), contiguous, with one step more
            than the chain if a message enters, and with room for others behind; None where no gradient is wanted.
        leave: whether the message of each sequence's last step is returned. If a backward message is to follow that
            step in `backward`, one has to leave.
    """
    grid, message, scale = (chain.g, chain.m, chain.c), *_begun(chain, entering)
    deepest = math.log(FLUSH[chain.dtype])
    redone = ((message > -math.inf) & (message < deepest)).any(-1)
    if keep is not None and entering is not None:
        keep[0] = message
    head = int(entering is not None)
    for step in range(chain.v):
        before = message
        x, *tops = potentials(chain, step)
        if step + head == 0:
            weights = chain.p0.double() if chain.log_params else chain.p0.double().log()
            message, top = shifted(weights.expand(*chain.lead, chain.c).reshape(grid))
        else:
            matrix, top = transitions(chain, step, head)
            message = log_matmul.forward(message, matrix, torch.float64)[0]
        message, last_top = shifted(message + x)
        terms = torch.stack([scale[0], *(term[..., 0].expand(grid[:2]) for term in (*tops, top, last_top))])
        if chain.ended is not None:  # the last message stays
            message = torch.where(chain.ended[step], before, message)
            terms[1:].masked_fill_(chain.ended[step][..., 0], 0.0)
        total, lost = exact_sum(terms)
        scale = torch.stack([total, scale[1] + lost])
        redone |= ((message > -math.inf) & (message < deepest)).any(-1)
        if keep is not None:
            keep[step + head] = message if chain.ended is None else message.masked_fill(chain.ended[step], -math.inf)
    for logs in keep[: chain.v + head] if keep is not None else ():
        logs.copy_(torch.where(redone[..., None], logs, logs.exp()))
    values, total = normalised(message)
    scale = torch.stack(exact_sum(torch.stack([scale[0], total, scale[1]])))
    leaving = Message(values, scale)
    if entering is not None and chain.ends is not None:
        leaving = where_moved(chain.ends[..., 0] > 0, leaving, entering)
    residuals = Kept(scale.sum(0), chain.new(0) if keep is None else keep, redone, entering is not None)
    return residuals, leaving if leave else None


def _begun(chain: Chain, entering: Message | None) -> tuple[Tensor, Tensor]:
    """The message before the first step (g, m, c), its largest entry near 0, and the two parts of its scale."""
    if entering is not None:
        return entering.values.double().expand(chain.g, chain.m, chain.c), entering.scale.expand(2, chain.g, chain.m)
    scale = torch.zeros(2, chain.g, chain.m, dtype=torch.float64, device=chain.x.device)
    return scale.new_full((chain.g, chain.m, chain.c), -math.inf), scale


def potentials(chain: Chain, step: int) -> tuple[Tensor, Tensor]:
    """The log-potentials of a step (g, m, c) less the largest of each sequence, and that (g, m, 1)."""
    return shifted(chain.x[step].reshape(chain.g, chain.m, chain.c).double())


def transitions(chain: Chain, step: int, head: int) -> tuple[Tensor, Tensor]:
    """The logarithms of the matrix into a step (g, c, c) less the largest of each set, and that (g, 1, 1).

    `head` is 1 if a message has entered, so that the first matrix leads into step 0, and 0 otherwise.
    """
    weights = chain.bulk[0 if len(chain.bulk) == 1 else step - 1 + head].reshape(chain.g, chain.c, chain.c).double()
    if chain.ended is not None:  # behind all ends of a set there may be NaN
        weights = weights.masked_fill(chain.ended[step].all(1)[:, None], chain.zero)
    top = weights.amax((-2, -1), keepdim=True)
    if chain.log_params:
        top = top.masked_fill(top == -math.inf, 0.0)
        return weights - top, top
    top = top.masked_fill(top == 0, 1.0)
    share, level = weights / top, top.log()
    return torch.where(share < torch.finfo(share.dtype).tiny, weights.log() - level, share.log()), level


def shifted(logs: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithms (..., c) less their largest, and that (..., 1); nothing is taken out of -inf."""
    top = logs.amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)
    return logs - top, top
