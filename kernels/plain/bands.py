"""Chains whose matrices have entries on a few diagonals only, in float64 logarithms: the definition, on any device.

With `o` the offset of band `d`, `V(d, j)` leads from state `j - o` to `j`: `exp b(j) = sum over d of exp(a(j - o)) V(d,
j)`, of the bands for which the state `j - o` exists.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..structured import Gradients, Structured, Walk
from . import structured


def forward(chain: Structured, keep: bool) -> Walk:
    """The log-partitions, and the messages (v, g, m, c) that `backward` reads."""
    return structured.forward(*_with_sources(chain), keep)


def backward(chain: Structured, walk: Walk, weight: Tensor, needs: tuple[bool, bool, bool]) -> Gradients:
    """The gradients of `sum(weight * log_norm)`; see `Gradients`."""
    return structured.backward(*_with_sources(chain), walk, weight, needs)


def _with_sources(chain: Structured) -> tuple[Structured, structured.Passing]:
    """The chain with weight 0 for values that no state leads to, and how messages pass."""
    (values,) = chain.parameters
    offsets = torch.tensor(chain.pattern, device=values.device)
    source = torch.arange(chain.c, device=values.device) - offsets[:, None]  # (bands, c)
    inside = (source >= 0) & (source < chain.c)
    values = values.masked_fill(~inside, -math.inf if chain.log_params else 0.0)
    source = source.clamp(0, chain.c - 1)

    def terms_of(message: Tensor, parameters: list[Tensor]) -> Tensor:
        # (g, m, bands, c); what comes from no state is not looked at, as it may be NaN
        return torch.where(inside, message[..., source] + parameters[0][:, None], -math.inf)

    def forward_step(message: Tensor, parameters: list[Tensor]) -> Tensor:
        return torch.logsumexp(terms_of(message, parameters), -2)

    def backward_step(message: Tensor, weight: Tensor, parameters: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        terms, weight = terms_of(message, parameters), weight[..., None, :]
        shares = weight * (terms - torch.logsumexp(terms, -2, keepdim=True)).exp()
        shares = shares.masked_fill((terms == -math.inf) | (weight == 0), 0.0)
        earlier = torch.zeros_like(message).index_add(-1, source.flatten(), shares.flatten(-2))
        return earlier, [shares.sum(1)]

    return replace(chain, parameters=(values,)), structured.Passing(forward_step, backward_step)
