"""The best paths of chains, as an operator of torch; its states are integers, which have no gradient.

Those of structures are traced back through the messages m of a forward pass in the semiring of maxima:

    m_0 = log p0 + x_0              m_i = max_k m_{i-1}(k) + log P_i(k, .) + x_i
    z_{v-1} = argmax m_{v-1}        z_{i-1} = argmax_k m_{i-1}(k) + log P_i(k, z_i)

These are computed in float64, except for bands, arcs and durations on a CPU, which the C library computes.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..kernels.chain import Chain
from ..kernels.structured import PATHS
from ..operands import Operands, check_products
from ..tensors import differentiated, is_plain
from ..transitions import Transition
from .operator import operator
from .paths import weight_of
from .scan import ScaledMessage, Steps, messages, trace_back


def best_path(operands: Operands) -> tuple[Tensor, Tensor]:
    """The best path int64 [*B, v], -1 where there is no state, and its log-weight [*B], NaN for unknown sequences."""
    check_products(operands.transition)
    x, tensors = operands.x, operands.tensors
    in_c = operands.is_dense and x.numel() > 0 and kernels.in_c(x) and is_plain(tensors)
    # in float64 the last digit would be another one than that of a score with a gradient
    if in_c and operands.dtype == torch.float32 and not differentiated(*tensors):
        chain = operands.dense_chain()
        weights = torch.empty(chain.g, chain.m, dtype=torch.float64)
        states, _ = _computed(chain, None, weights=weights)
        return states, chain.layout.batched(weights).contiguous()
    states, unknown = best_paths(operands if operands.is_dense else operands.detached().cheapest(PATHS))
    return states, weight_of(operands, states).masked_fill(unknown, math.nan)


def dense_best_paths(operands: Operands, k: int | None) -> tuple[Tensor, Tensor]:
    """The best path [*B, v], or the k best [*B, k, v], of dense matrices, and whether sequences are unknown [*B].

    A sequence is unknown if it has a NaN or +inf. States are -1 after a sequence's end, in paths that do not exist, and
    in unknown sequences. The k best paths of packed sequences are [k, total].
    """
    detached = operands.detached()
    if operands.packed:
        with kernels.arithmetic_on(operands.x):
            return _computed(detached.dense_chain(), k)
    return _best_paths(*detached.dense, k)


def best_messages(steps: Steps) -> tuple[list[ScaledMessage], list[Tensor]]:
    """The max-plus messages, and from step 1 on the predecessor (g, m, c) of each state on the best path into it.

    Ties go to the lowest state.
    """
    pointers = []

    def through(transition: Transition, message: Tensor) -> Tensor:
        values, before = transition.best(message)
        pointers.append(before.int())
        return values

    return list(messages(steps, through)), pointers


def best_paths(operands: Operands) -> tuple[Tensor, Tensor]:
    """The best path int64 [*B, v], and whether sequences are unknown [*B]: their weight is NaN or +inf.

    States are -1 past a sequence's end, and everywhere in impossible and in unknown sequences.
    """
    if operands.is_dense:
        return dense_best_paths(operands, None)
    best: tuple[Tensor, Tensor] | None = operands.in_c("best_paths")
    if best is not None:
        return best
    steps = operands.detached().steps()
    forward, pointers = best_messages(steps)
    weight, state = forward[-1].values.max(-1)
    path = trace_back(steps, state, lambda i, state: pointers[i - 1].gather(-1, state[..., None])[..., 0].long())
    return possible(steps, torch.stack(path, -1), weight), steps.layout.batched(weight.isnan() | (weight == math.inf))


def possible(steps: Steps, states: Tensor, weight: Tensor) -> Tensor:
    """Paths (g, m, ..., v) as [*B, ..., v], -1 past ends and in sequences whose weight (g, m, ...) is not finite."""
    states = states.masked_fill(~weight.isfinite()[..., None], -1)
    if steps.ends is not None:
        ends = steps.ends.view(*steps.shape[:2], *(1 for _ in states.shape[2:]))
        states = states.masked_fill(torch.arange(steps.v, device=states.device) >= ends, -1)
    return steps.layout.batched(states.contiguous()).contiguous()


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    x, *_, k = args
    return _computed(Chain.of(*args[:5]), k) if x.numel() else _shapes(*args)


def _computed(chain: Chain, k: int | None, **options: Tensor) -> tuple[Tensor, Tensor]:
    # Triton has no kernels for several paths
    any_device = k is None or kernels.in_c(chain.x)
    module = kernels.module("viterbi", chain.x) if any_device else kernels.load("plain.viterbi")
    states, unknown = module.paths(chain, *(() if k is None else (k,)), **options)
    states = states if chain.starts is not None else chain.layout.batched(states).contiguous()
    return states, chain.layout.batched(unknown).contiguous()


def _shapes(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    (*batch, v, _), k = x.shape, args[-1]
    shape = (*batch, v) if k is None else (*batch, k, v)
    return x.new_empty(shape, dtype=torch.int64), x.new_empty(batch, dtype=torch.bool)


_best_paths: Callable[..., tuple[Tensor, Tensor]] = operator(
    "best_paths(Tensor x, Tensor bulk, Tensor p0, Tensor? lengths, bool log_params, int? k) -> (Tensor, Tensor)",
    _forward,
    _shapes,
)
