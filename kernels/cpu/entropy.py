"""Entropies and Kullback-Leibler divergences of path posteriors, by the C library."""

import ctypes

import torch
from torch import Tensor

from ..chain import Chain
from .arguments import Call, run


def entropy(chain: Chain, other: Chain | None = None) -> tuple[Tensor, Tensor]:
    """The entropies of `chain`, or its divergences from `other`, (g, m) in float64; whether they are unknown (g, m).

    Both chains have the same steps, sets and sequences. A value is unknown, and has no meaning, where the sequence
    would underflow, or where a path that is possible in `chain` is impossible in `other`.
    """
    shape = chain.g, chain.m
    values = torch.empty(shape, dtype=torch.float64, device="cpu")
    unknown = torch.zeros(shape, dtype=torch.uint8, device="cpu")
    calls = [Call(one) for one in (chain, other) if one is not None]
    for call in calls:
        call.set(float32=int(call.chain.dtype == torch.float32))
    calls[0].point(value=values, lossy=unknown)
    if other is not None:
        calls[0].set(other=ctypes.addressof(calls[1].arguments))
    run(calls[0].arguments, torch.float64, "entropy", calls[0].spans())
    return values, unknown.view(torch.bool)
