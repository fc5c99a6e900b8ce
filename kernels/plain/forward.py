"""The log-partition of a batch of chains by the forward recursion, in float64 logarithms.

    a_0 = log p0 + x_0        a_i = log(exp(a_{i-1}) P_i) + x_i        log Z = log(sum of exp(a_{v-1}))

A forward message a_i is held with its largest entry subtracted, and so are x_i and log P_i before they are used. The
message's scale is the float64 sum of all that was subtracted, with its rounding error. This function defines what
`forward` in kernels/cpu and kernels/gpu computes.
"""

import math

import torch
from torch import Tensor

from ..chain import Chain
from ..message import Message, Residuals, encoded, leaving_message, normalized
from ..numbers import FLUSH, exact_sum, relative_logs, shifted
from . import matmul as log_matmul


def forward(
    chain: Chain,
    entering: Message | None = None,
    *,
    keep: Tensor | None = None,
    leave: bool = False,
    halved: bool = False,
) -> tuple[Residuals, Message | None]:
    """The log-partitions (g, m) with the messages that `backward` reads, and the last forward message or None.

    Args:
        chain: operands for v steps of g sets of m sequences with c states. Sequences whose messages would underflow in
            its dtype are computed exactly too. A length outside 1..v gives NaN.
        entering: the forward message of the step before the first; None: the chain begins with p0.
        keep: memory (steps, g, m, c), contiguous, of the dtype of the arithmetic, into which all messages are written,
            `entering` first, so that `steps` is at least their number; None where no gradient is wanted.
        leave: whether the message of each sequence's last step is returned. It must be if `backward` will be called
            with a message `following`.
        halved: not read, see `kernels.gpu.forward`.
    """
    grid = chain.g, chain.m, chain.c
    if entering is None:
        scale = torch.zeros(2, *grid[:2], dtype=torch.float64, device=chain.x.device)
        message = scale.new_full(grid, -math.inf)
    else:
        message, scale = entering.values.double().expand(grid), entering.scale.expand(2, *grid[:2])
        if keep is not None:
            keep[0] = message
    entered = int(entering is not None)
    recomputed = _underflows(message, chain.dtype)
    for step in range(chain.v):
        before = message
        x, x_shift = potentials(chain, step)
        if step + entered == 0:
            message, shift = relative_logs(chain.p0.double(), -1, log=chain.log_params)
            message, shift = (part.expand(*chain.lead, -1).reshape(*grid[:2], -1) for part in (message, shift))
        else:
            matrix, shift = transitions(chain, step, entered)
            message = log_matmul.forward(message, matrix, torch.float64)[0]
        message, message_shift = shifted(message + x)
        terms = torch.stack([scale[0], *(term[..., 0].expand(grid[:2]) for term in (x_shift, shift, message_shift))])
        if chain.ended is not None:  # a sequence that has ended keeps its last message and scale
            message = torch.where(chain.ended[step], before, message)
            terms[1:].masked_fill_(chain.ended[step][..., 0], 0.0)
        total, error = exact_sum(terms)
        scale = torch.stack([total, scale[1] + error])
        recomputed |= _underflows(message, chain.dtype)
        if keep is not None:
            keep[step + entered] = message if chain.ended is None else message.masked_fill(chain.ended[step], -math.inf)
    # stored messages are linear, but in sequences where one would underflow they are logarithms
    for logs in keep[: chain.v + entered] if keep is not None else ():
        logs.copy_(torch.where(recomputed[..., None], encoded(logs, chain.dtype), logs.exp()))
    values, total = normalized(message)
    scale = torch.stack(exact_sum(torch.stack([scale[0], total, scale[1]])))
    if chain.ends is not None and entering is None:  # on a GPU, lengths are not checked before
        scale[0].masked_fill_(((chain.ends < 1) | (chain.ends > chain.v))[..., 0], math.nan)
    leaving = leaving_message(chain.ends, Message(values, scale), entering)
    residuals = Residuals(scale.sum(0), chain.new(0) if keep is None else keep, recomputed, entering is not None)
    return residuals, leaving if leave else None


def _underflows(message: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether a state of nonzero weight in a message of logarithms (g, m, c) is NaN or would be 0 in `dtype` (g, m)."""
    return ~((message == -math.inf) | (message >= math.log(FLUSH[dtype]))).all(-1)


def potentials(chain: Chain, step: int) -> tuple[Tensor, Tensor]:
    """The log-potentials of a step less their largest (g, m, c), and the largest (g, m, 1)."""
    return shifted(chain.x[step].reshape(chain.g, chain.m, chain.c).double())


def transitions(chain: Chain, step: int, entered: int) -> tuple[Tensor, Tensor]:
    """The logarithms of the transition matrices into a step less their largest (g, c, c), and the largest (g, 1, 1).

    `entered`: 1 if the first matrix leads from an entering message into step 0, and 0 if it leads into step 1.
    """
    weights = chain.matrix(step - 1 + entered).double()
    if chain.ended is not None:  # matrices that no sequence of a set uses may hold NaN
        weights = weights.masked_fill(chain.ended[step].all(1)[:, None], chain.zero)
    return relative_logs(weights, (-2, -1), log=chain.log_params)
