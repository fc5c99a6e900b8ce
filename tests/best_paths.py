"""Chains, their best paths by the reference, and how far a path's weight may lie from its own sum."""

import math
from typing import NamedTuple

import numpy as np
import torch

from logchain import reference
from tests.contract import value_bound
from tests.families import F64, INF, Chain, Draw


def numbers(chain: Chain) -> list[np.ndarray]:
    return [operand.detach().double().numpy() for operand in chain[:3]]


def weigh(chain: Chain, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The weight of each path of states [*B, v], added without rounding, and the sum of the logarithms' sizes."""
    (x, bulk, p0), batch = numbers(chain), states.shape[:-1]
    if not chain.log_params:
        with np.errstate(divide="ignore"):
            bulk, p0 = np.log(bulk), np.log(p0)
    c = x.shape[-1]
    bulk = np.broadcast_to(bulk, (*batch, states.shape[-1] - 1, c, c))
    p0, found, sizes = np.broadcast_to(p0, (*batch, c)), np.full(batch, -INF), np.zeros(batch)
    for b in np.ndindex(*batch):
        path = [z for z in states[b] if z >= 0]
        if path:
            taken = [p0[b][path[0]], *(bulk[b][i, z, y] for i, (z, y) in enumerate(zip(path, path[1:], strict=False)))]
            found[b] = math.fsum([*taken, *(x[b][i, z] for i, z in enumerate(path))])
            sizes[b] = 0.0 if chain.log_params else np.abs(taken).sum()
    return found, sizes


class Truth(NamedTuple):
    """The best paths by the reference, their weights, and how far a score may lie from these."""

    states: np.ndarray
    score: np.ndarray
    bound: np.ndarray


def truth_of(chain: Chain, lengths=None) -> Truth:
    options = {"log_params": chain.log_params, "lengths": lengths}
    dtype = F64 if F64 in (operand.dtype for operand in chain[:3]) else torch.float32
    best = reference.viterbi(*numbers(chain), **options)
    forward = reference.forward_backward(*numbers(chain), **options).forward
    inside = best.states >= 0
    own = np.take_along_axis(forward, np.maximum(best.states, 0)[..., None], -1)[..., 0]
    depth = (np.where(inside, forward.max(-1), 0.0) - np.where(inside, own, 0.0)).max(-1)
    score, sizes = weigh(chain, best.states)
    return Truth(best.states, score, value_bound(score, *forward.shape[-2:], depth, dtype=dtype) + 2.0**-52 * sizes)


def small(seed: int, zeros: float = 0.0, v: int = 5, c: int = 3) -> Chain:
    draw = Draw(seed, 1, 1, v, c, False)
    x, bulk, p0 = draw.normal(v, c), draw.bulk()[0, 0], draw.p0()[0, 0]
    x[draw.uniform(*x.shape) < zeros / 2] = -INF
    return Chain(x, bulk * (draw.uniform(*bulk.shape) >= zeros), p0 * (draw.uniform(*p0.shape) >= zeros))
