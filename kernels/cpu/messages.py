"""Forward and backward messages by the loops of the C library."""

import torch
from torch import Tensor

from ..chain import Chain
from .arguments import Call


def messages(chain: Chain, forward: Tensor, backward: Tensor) -> Tensor:
    """The log-partition (g, m); writes messages (v, *lead, c), alike in strides, in the dtype of the arithmetic."""
    log_norm = torch.empty(chain.g, chain.m, dtype=torch.float64, device="cpu")
    call = Call(chain)
    call.rows("grad", forward)
    call.point(log_norm=log_norm, log_forward=forward, log_backward=backward)
    call.run("messages", call.spans())
    return log_norm
