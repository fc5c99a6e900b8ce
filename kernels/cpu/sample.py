"""`kernels.plain.sample` by the loops of the C library."""

import torch
from torch import Tensor

from ..chain import Chain
from ..message import Kept
from .arguments import Call, shared

# states of so many draws go back together: DRAWS of c/sample.h
_DRAWS = 512


def draw(chain: Chain, kept: Kept, states: Tensor) -> None:
    """See `kernels.plain.sample`; sequences one behind the other have their states (draws, steps) so too."""
    count, places = len(states), chain.g * chain.m * -(-len(states) // _DRAWS)
    logs = torch.ones_like(kept.log_norm, dtype=torch.uint8) if kept.all_logs else kept.redone.to(torch.uint8)
    call = Call(chain)
    call.point(paths=states, messages=kept.messages, log_norm=kept.log_norm.contiguous(), lossy=logs)
    call.set(path_steps=states.shape[-1], path_rank=states.stride(0), ranks=count)
    if chain.starts is None:
        call.set(path_sequence=states.stride(2))
    # a state that a draw comes from has a column of its own, as far as there are states
    work = chain.v * chain.g * chain.m * chain.c * min(chain.c, count)
    call.run("sample", shared(places, work))
