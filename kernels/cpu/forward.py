"""The log-partition of a batch of chains, as `kernels.plain.forward` defines it, by the C library."""

import torch
from torch import Tensor

from ..chain import Chain
from ..message import Kept, Message, leaving_message
from .arguments import Call


def forward(
    chain: Chain, entering: Message | None = None, *, keep: Tensor | None = None, leave: bool = False
) -> tuple[Kept, Message | None]:
    """The log-partitions and kept messages, and the last forward message; arguments as in `kernels.plain.forward`."""
    g, m = chain.g, chain.m
    scale = torch.empty(2, g, m, dtype=torch.float64, device="cpu")
    lossy = torch.zeros(g, m, dtype=torch.bool, device="cpu")
    values = torch.empty(g, m, chain.c, dtype=torch.float64, device="cpu") if leave else None
    call = Call(chain, entered=entering is not None)
    call.point(messages=keep, log_norm=scale[0], lossy=lossy)
    call.point(leaving=values, log_norm_error=scale[1])
    if entering is not None:
        before = entering.scale.expand(2, g, m).contiguous()
        values_before = entering.values.to(chain.dtype).contiguous()
        call.point(entering=values_before, entering_log_norm=before[0], entering_error=before[1])
    call.run("value", call.spans())
    kept = Kept(scale[0], chain.new(0) if keep is None else keep, lossy, entering is not None)
    if values is None:
        return kept, None
    return kept, leaving_message(chain.ends, Message(values, scale), entering)
