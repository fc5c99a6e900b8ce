"""Entropies and Kullback-Leibler divergences of path posteriors, by the C library."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..chain import Chain
from ..message import Message, leaving_message
from .arguments import Call, run


class Expected(NamedTuple):
    """Expected terms of paths, in float64, whose sum over all steps is their entropy, or their divergence.

    `values` (g, m): given all up to the last step. `unknown` (g, m): a value has no meaning, as the sequence would
    underflow, or a path that is possible in the first chain is impossible in the second. `terms` (g, m, c): for each
    last state, given that too. `leaving` (chains, g, m, c): the logarithms of the last messages, with sum 1. Of these
    two c is 0 unless they are asked for.
    """

    values: Tensor
    unknown: Tensor
    terms: Tensor
    leaving: Tensor


def expected(chains: Sequence[Chain], entering: Tensor | None = None, *, leave: bool = False) -> Expected:
    """The expected terms of a chain, or of one and another of the same sizes from which it diverges.

    `entering` (chains, g, m, c): messages like `leaving` that enter stretches; None for whole chains. `leave`: `terms`
    and `leaving` are asked for.
    """
    g, m, c = chains[0].g, chains[0].m, chains[0].c if leave else 0
    leaving = torch.empty(len(chains), g, m, c, dtype=torch.float64, device="cpu")
    terms = torch.empty(g, m, c, dtype=torch.float64, device="cpu")
    values = torch.empty(g, m, dtype=torch.float64, device="cpu")
    unknown = torch.zeros(g, m, dtype=torch.uint8, device="cpu")
    calls = [Call(chain, entered=entering is not None) for chain in chains]
    for i, call in enumerate(calls):
        call.set(float32=int(call.chain.dtype == torch.float32))
        call.point(entering=None if entering is None else entering[i].contiguous())
        call.point(leaving=leaving[i] if leave else None)
    calls[0].point(value=values, lossy=unknown, terms=terms if leave else None)
    if len(calls) > 1:
        calls[0].set(other=ctypes.addressof(calls[1].arguments))
    run(calls[0].arguments, torch.float64, "entropy", calls[0].spans())
    return Expected(values, unknown.view(torch.bool), terms, leaving)


def passed(chain: Chain, entering: Message) -> Message:
    """The messages that leave a stretch, in float64 whatever its dtype; NaN for sequences that would underflow."""
    g, m, c = chain.g, chain.m, chain.c
    values = torch.empty(g, m, c, dtype=torch.float64, device="cpu")
    scale = torch.empty(2, g, m, dtype=torch.float64, device="cpu")
    lossy = torch.empty(g, m, dtype=torch.bool, device="cpu")
    call, before = Call(chain, entered=True), entering.scale.contiguous()
    call.set(float32=int(chain.dtype == torch.float32))
    call.point(entering=entering.values.contiguous(), entering_log_norm=before[0], entering_error=before[1])
    call.point(leaving=values, log_norm=scale[0], log_norm_error=scale[1], lossy=lossy)
    run(call.arguments, torch.float64, "forward", call.spans())
    values[lossy] = torch.nan
    return leaving_message(chain.ends, Message(values, scale), entering)
