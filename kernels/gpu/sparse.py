"""Log-partitions and gradients of chains whose states have few transitions each, by the Triton kernels.

Nothing waits for the device. Forward messages that are kept for the gradients are two tensors [*B, v, c], mantissas and
exponents. Parameters' gradients need backward messages too: a part of the steps at a time, and are added up part by
part.
"""

import torch
from torch import Tensor

from ..sets import Sets
from ..structured import Arcs, Gradients, Structured, Walk
from . import sparse_backward, sparse_forward
from .sparse_backward import Walked
from .sparse_counts import Counts
from .sparse_rows import Rows, operands

# from so many steps on, so many launches, which divide the memory of backward messages
_LONG, _PARTS = 64, 4


def forward(chain: Structured, incoming: Rows, keep: bool) -> Walk:
    """The log-partitions, with all messages if they are to be kept."""
    slots = chain.v if keep else min(chain.v, 2)
    log_norm = chain.x.new_empty(chain.batch, dtype=torch.float64)
    mantissas = chain.x.new_empty(*chain.batch, slots, chain.c, dtype=chain.dtype)
    exponents = torch.empty_like(mantissas, dtype=torch.int32)
    if log_norm.numel():
        flat = (len(log_norm.view(-1)), slots, chain.c)
        sparse_forward.forward(operands(chain), incoming, mantissas.view(flat), exponents.view(flat), log_norm)
    return Walk(log_norm, (mantissas, exponents) if keep else (), torch.zeros_like(log_norm, dtype=torch.bool))


def backward(
    chain: Structured, outgoing: Rows, walk: Walk, weight: Tensor, needs: tuple[bool, bool, bool]
) -> Gradients:
    """The gradients of x, of the parameter and of p0, times `weight` [*B]; None for what is not needed."""
    batch, v, c = chain.batch, chain.v, chain.c
    n, by_log = batch.numel(), chain.by_log or chain.log_params
    counted = needs[1] and v > 1 and chain.parameters[0].numel() > 0
    length = -(-v // _PARTS) if counted and v >= _LONG else v
    ops = operands(chain)
    make = torch.empty if chain.ends is None else torch.zeros
    grad_x = make(*batch, v, c, dtype=chain.dtype, device=chain.x.device) if needs[0] else None
    grad_p0 = chain.x.new_empty(n, c, dtype=chain.dtype) if needs[2] else None
    counts = None
    if counted:
        pattern = chain.pattern if isinstance(chain.pattern, Arcs) else outgoing.first
        sequences = torch.arange(n, device=chain.x.device).view(batch)
        counts = Counts(ops, pattern, Sets.of(chain).grouped(sequences).contiguous(), length, by_log=by_log)
    if n:
        walked = Walked.new(n, length + 1 if counted else 2, v, c, walk.kept[0])
        # a NaN counts also where it led nowhere, but not where it has no weight
        weight = torch.where(walk.log_norm.isnan() & (weight != 0.0), torch.nan, weight).expand(batch).reshape(-1)
        for begin in reversed(range(0, v, length)):
            stop = min(begin + length, v)
            sparse_backward.backward(
                ops, outgoing, walk.kept, weight, walked, grad_x, grad_p0, (begin, stop),
                by_log=by_log,
            )  # fmt: skip
            if counts is not None and begin + 1 < v:
                counts.add(walk.kept, walked, begin, min(stop, v - 1) - begin)
    grad_parameter = None
    if needs[1]:
        grad_parameter = counts.total() if counts else torch.zeros_like(chain.parameters[0], dtype=chain.dtype)
    return Gradients(
        grad_x,
        None if grad_parameter is None else (grad_parameter.contiguous(),),
        None if grad_p0 is None else _of_p0(chain, grad_p0.view(*batch, c), by_log),
    )


def _of_p0(chain: Structured, gradient: Tensor, by_log: bool) -> Tensor:
    """The gradient of p0 in its shape, of those of sequences [*B, c]."""
    shared = [axis for axis, size in enumerate(gradient.shape) if chain.p0.shape[axis] != size]
    found = gradient.sum(shared, keepdim=True) if shared else gradient
    return found if by_log else found.masked_fill(chain.p0 == 0, 0.0)
