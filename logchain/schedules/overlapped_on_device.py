"""What an overlapped chain does not forget, on a GPU: kernels that return where no mark is set, and nothing waits.

A sequence with a boundary that is refused is walked once more, as one and exactly. Forward, its messages replace those
of the segments. Backward, it is asked for the messages between segments alone, before any gradient is a sum of many.
Either takes one message tensor for a while.
"""

import torch
from torch import Tensor

from .. import kernels
from .cut import Cut


def walk_again(cut: Cut, wrong: Tensor, log_norm: Tensor, messages: Tensor | None, redone: Tensor) -> None:
    """Write log-partitions (g, m), messages and `redone` (count + 1, g, m) of the sequences that are `wrong` (g, m)."""
    whole = None if messages is None else kernels.messages_of(cut.chain, cut.chain.v)
    kernels.walks_again().forward(cut.chain, wrong, log_norm, whole)
    redone |= wrong
    if messages is None or whole is None:
        return
    head, segments = cut.parts(messages)
    entering, rows = cut.each(segments).split([1, cut.length], 1)
    steps = whole[cut.rest + 1 :].unflatten(0, (cut.count, cut.length))
    for part, exact in ((head, whole[: cut.rest + 1]), (entering, cut.before(whole)[:, None]), (rows, steps)):
        torch.where(wrong[..., None], exact, part, out=part)


def behind(cut: Cut, wrong: Tensor, log_norm: Tensor, following: Tensor) -> Tensor:
    """The messages (count, g, m, c) `following` segments, found again for the sequences that are `wrong` (g, m)."""
    chain = cut.chain
    whole = kernels.walks_again().backward_messages(chain, wrong, log_norm)
    ahead = cut.before(whole)[1:]
    x = cut.before(chain.x)[1:].reshape(ahead.shape).double()
    # of no matter where x is -inf, and uniform where the sequence has ended
    exact = torch.where(ahead == -torch.inf, -torch.inf, ahead - (x - x.amax(-1, keepdim=True)))
    exact.masked_fill_(~cut.reached()[1:, ..., None], 0.0)
    return torch.cat([torch.where(wrong[..., None], exact, following[:-1]), following[-1:]])
