"""Means of log-weights of paths, for `kernels.plain.entropy`, by the C library."""

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .. import messages_of
from ..chain import Chain
from .arguments import Call


def means(chains: Sequence[Chain]) -> tuple[Tensor, Tensor, Tensor]:
    """The log-partition of a chain, its mean log-weight, or that less a second chain's, and what underflows (g, m).

    The mean is NaN where loops underflow.
    """
    p, *others = replace(chains[0], by_log=True), *chains[1:]
    log_norm, mean = torch.zeros(2, p.g, p.m, dtype=torch.float64, device="cpu")
    lossy = torch.zeros(p.g, p.m, dtype=torch.uint8, device="cpu")
    uncounted = torch.full((p.g, p.m), p.v, device="cpu")
    messages, states = messages_of(p, p.v), messages_of(p, p.v).view(p.v, *p.lead, p.c)
    call, second = Call(p), [Call(replace(chain, dtype=p.dtype)) for chain in others]
    call.point(log_norm=log_norm, means=mean, weight=torch.ones_like(mean), messages=messages)
    call.point(lossy=lossy, uncounted=uncounted)
    call.rows("out", states)
    call.point(grad_x=states)
    call.arguments.means.less = ctypes.addressof(second[0].arguments) if second else None
    call.run("means", call.spans())
    return log_norm, mean, lossy == 1  # forward
