"""State paths drawn from the posterior of their chains, as `kernels.plain.sample` defines them, by the C library."""

import torch
from torch import Tensor

from ..chain import Chain
from ..message import Kept
from .arguments import Call, shared

# draws of one sequence that one call of the library computes at a time: DRAWS of c/sample.h
_DRAWS = 512


def draw(chain: Chain, kept: Kept, states: Tensor) -> None:
    """Write states, see `kernels.plain.sample`; those of packed sequences are (draws, rows), packed alike."""
    count, places = len(states), chain.g * chain.m * -(-len(states) // _DRAWS)
    call = Call(chain)
    call.point(messages=kept.messages, log_norm=kept.log_norm.contiguous(), lossy=kept.recomputed.to(torch.uint8))
    call.paths(states, count, states.shape[-1], rank=states.stride(0), sequence=states.stride(-2))
    # the columns of a step's matrix that are read: one for every draw, at most all
    work = chain.v * chain.g * chain.m * chain.c * min(chain.c, count)
    call.run("sample", shared(places, work))
