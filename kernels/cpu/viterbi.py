"""The best state path, as `kernels.plain.viterbi` defines it, by the C library."""

import torch
from torch import Tensor

from ..chain import Chain
from .arguments import Call


def paths(chain: Chain, steps: int) -> tuple[Tensor, Tensor]:
    """The states of the best paths, see `kernels.plain.viterbi`; those of packed sequences are (rows)."""
    states, unknown = best_paths(chain, steps, "viterbi", 1)
    return states[..., 0, :], unknown


def best_paths(chain: Chain, steps: int, name: str, ranks: int) -> tuple[Tensor, Tensor]:
    """The states (g, m, ranks, steps) by the function `name` of the library; whether sequences are unknown (g, m)."""
    g, m = chain.g, chain.m
    unknown = torch.empty(g, m, dtype=torch.uint8, device="cpu")
    call = Call(chain)
    if chain.starts is None:
        states = torch.empty(g, m, ranks, steps, dtype=torch.int64, device="cpu")
        call.set(path_rank=steps, path_sequence=ranks * steps)
    else:
        states = torch.empty(ranks, steps, dtype=torch.int64, device="cpu")
        call.set(path_rank=steps)
    call.point(paths=states, lossy=unknown)
    call.set(path_steps=steps, ranks=ranks)
    call.run(name, call.spans())
    return states, unknown.view(torch.bool)
