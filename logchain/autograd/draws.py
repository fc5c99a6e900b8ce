"""State paths drawn from their posterior, as an operator of torch.

Those of structures are traced back through the log messages m of a forward pass, `z_{i-1}` with the weights
`exp(m_{i-1}) P_i(., z_i)`: in float64, except for bands, arcs and durations on a CPU, which the C library computes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..kernels.chain import Chain
from ..kernels.structured import PATHS
from ..operands import Operands
from ..rescues import report_chains
from ..transitions import LOG
from ..transitions.transition import pick
from .best_paths import possible
from .operator import mapped_first, operator
from .scan import forward_messages, trace_back


@torch.no_grad()
def drawn_paths(operands: Operands, count: int, generator: torch.Generator | None) -> Tensor:
    """Paths int64 [count, *B, v] drawn from the posterior, or [count, total] of packed sequences.

    States are -1 after a sequence's end, and everywhere if there is no path.
    """
    operands = operands.cheapest(PATHS)
    x = operands.x
    if operands.packed:
        with kernels.arithmetic_on(x):
            return _drawn(operands.dense_chain(), (count, len(x)), generator)
    if operands.is_dense:
        *tensors, log_params = operands.dense
        return _sample(*tensors, count, generator, log_params)
    if count == 0 or x.numel() == 0:
        return x.new_empty((count, *x.shape[:-1]), dtype=torch.int64)
    numbers = x.new_empty((count, *x.shape[:-1]), dtype=torch.float64).uniform_(generator=generator)
    in_c: Tensor | None = operands.in_c("draws", numbers)
    if in_c is not None:
        return in_c
    steps = operands.detached().steps()
    values = [message.values for message in forward_messages(steps)]
    numbers = steps.layout.grouped(numbers.movedim(0, -1)).permute(2, 3, 0, 1)  # (v, count, g, m)
    state, _ = pick(values[-1].expand(count, *steps.shape), numbers[-1])
    path = trace_back(steps, state, lambda i, state: steps.transition(i).draw(values[i - 1], state, numbers[i - 1]))
    drawn = torch.stack(path).movedim(1, -1)  # (v, g, m, count)
    weight = LOG.sum(values[-1], -1)[..., None]
    return possible(steps, drawn.permute(1, 2, 3, 0), weight).movedim(-2, 0)


def _forward(*args: Any) -> Tensor:
    x, bulk, p0, lengths, num_samples, generator, log_params = args
    if num_samples == 0 or x.numel() == 0:
        return _shape(*args)
    with torch.no_grad():
        chain = Chain.of(x.detach(), bulk.detach(), p0.detach(), lengths, log_params)
        drawn = _drawn(chain, (num_samples, chain.g, chain.m, x.shape[-2]), generator)
        states: Tensor = chain.layout.states(drawn.view(num_samples, *chain.lead, x.shape[-2]))
        return states.contiguous()


def _drawn(chain: Chain, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """States int64 of a shape that the kernels take; their memory first holds the uniform numbers."""
    residuals = kernels.forward(chain, keep=kernels.messages_of(chain, chain.v))[0]
    report_chains(residuals.recomputed)
    states = torch.empty(shape, dtype=torch.int64, device=chain.x.device)
    states.view(torch.float64).uniform_(generator=generator)
    kernels.module("sample", chain.x).draw(chain, residuals, states)
    return states


def _shape(x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, num_samples: int, *_: Any) -> Tensor:
    return x.new_empty((num_samples, *x.shape[:-1]), dtype=torch.int64)


def _vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
    if info.randomness != "different":
        raise RuntimeError(f"sample: expected vmap(..., randomness='different'), got {info.randomness!r}")
    operands = mapped_first(info.batch_size, in_dims, args[:4], (False, True, True, False))
    return _sample(*operands, *args[4:]), 1


# the tag prevents compilers from merging two calls with equal arguments, which are two draws
_sample: Callable[..., Tensor] = operator(
    "sample(Tensor x, Tensor bulk, Tensor p0, Tensor? lengths, SymInt num_samples, Generator? generator,"
    " bool log_params) -> Tensor",
    _forward,
    _shape,
    vmap=_vmap,
    tags=(torch.Tag.nondeterministic_seeded,),
)
