"""Forward and backward messages of a chain, by the C library."""

import torch
from torch import Tensor

from ..chain import Chain
from .arguments import Call


def messages(chain: Chain, forward: Tensor, backward: Tensor) -> Tensor:
    """The log-partition (g, m); messages (v, *lead, c) of equal strides and the chain's dtype are written."""
    log_norm = torch.empty(chain.g, chain.m, dtype=torch.float64, device="cpu")
    call = Call(chain)
    call.rows("grad", forward)
    call.point(log_norm=log_norm, log_forward=forward, log_backward=backward)
    call.run("messages", call.spans())
    return log_norm
