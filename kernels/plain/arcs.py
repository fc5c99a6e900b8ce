"""Chains whose transitions are arcs, in float64 logarithms: the definition, on any device.

An arc k leads from state s(k) to state t(k) with weight w(k): `exp b(j) = sum over arcs k to j of exp(a(s(k))) w(k)`.
"""

import math

import torch
from torch import Tensor

from ..structured import Arcs, Gradients, Structured, Walk
from . import structured


def forward(chain: Structured, keep: bool) -> Walk:
    """The log-partitions, and the messages (v, g, m, c) that `backward` reads."""
    return structured.forward(chain, _passing(chain.pattern), keep)


def backward(chain: Structured, walk: Walk, weight: Tensor, needs: tuple[bool, bool, bool]) -> Gradients:
    """The gradients of `sum(weight * log_norm)`; see `Gradients`."""
    return structured.backward(chain, _passing(chain.pattern), walk, weight, needs)


def _passing(arcs: Arcs) -> structured.Passing:
    source, target = arcs

    def forward_step(message: Tensor, parameters: list[Tensor]) -> Tensor:
        return _log_sum(message[..., source] + parameters[0][:, None], target, message.shape[-1])

    def backward_step(message: Tensor, weight: Tensor, parameters: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        terms = message[..., source] + parameters[0][:, None]
        shares = weight[..., target] * (terms - _log_sum(terms, target, message.shape[-1])[..., target]).exp()
        shares = shares.masked_fill((terms == -math.inf) | (weight[..., target] == 0), 0.0)
        return torch.zeros_like(message).index_add(-1, source, shares), [shares.sum(1)]

    return structured.Passing(forward_step, backward_step)


def _log_sum(terms: Tensor, target: Tensor, c: int) -> Tensor:
    """For each state the logsumexp of the terms of arcs that lead there."""
    to = target.expand(terms.shape)
    top = terms.new_full((*terms.shape[:-1], c), -math.inf).scatter_reduce(-1, to, terms, "amax")
    top = top.masked_fill(top == -math.inf, 0.0)
    return top + torch.zeros_like(top).scatter_add(-1, to, (terms - top.gather(-1, to)).exp()).log()
