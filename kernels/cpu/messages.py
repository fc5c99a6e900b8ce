"""Forward and backward messages of a chain, by the C library."""

import torch
from torch import Tensor

from ..chain import Chain, has_idle_threads
from .arguments import Call
from .library import in_large_pages


def messages(chain: Chain, forward: Tensor, backward: Tensor) -> Tensor:
    """The log-partition (g, m); messages (v, *lead, c) of equal strides and the chain's dtype are written.

    Forward and backward messages are found at once where threads have no sequence of their own.
    """
    log_norm, unused = (torch.empty(chain.g, chain.m, dtype=torch.float64, device="cpu") for _ in range(2))
    call = Call(chain)
    call.rows("out", in_large_pages(forward))
    in_large_pages(backward)
    spans = call.spans()
    idle = chain.ends is None and has_idle_threads(torch.get_num_threads(), chain.g * chain.m, chain.v, chain.c)
    if idle:
        lossy = torch.empty(2, chain.g, chain.m, dtype=torch.uint8, device="cpu")
        onward = {"log_forward": forward, "log_norm": log_norm, "lossy": lossy[0]}
        reverse = {"log_backward": backward, "log_norm": unused, "lossy": lossy[1]}
        call.run("messages_one_way", spans + spans, [onward] * len(spans) + [reverse] * len(spans))
        if not lossy.any():
            return log_norm
        call.point(lossy=lossy.amax(0))
    call.point(log_norm=log_norm, log_forward=forward, log_backward=backward)
    call.run("redo_messages" if idle else "messages", spans)
    return log_norm
