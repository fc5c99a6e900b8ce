"""The log-partition of few long chains: products of segments side by side, then products of those, then one vector.

    log p0 D_0 (P_1 D_1 ... P_L D_L) (P_{L+1} D_{L+1} ...) ...

A vector carried through v steps waits v times and leaves the device idle where there are few sequences. Segments of L
steps are multiplied at the same time, each by one program that reads every matrix once (`forward_chain`); the products
are a shorter chain of the same kind. The work is c times that of the vector, the waiting v / segments at a level.

`x` (v, g, m, c), `bulk` (v - 1 or 1, g, c, c) with g = 1 or m = 1, `start` (g, m, c) float64 logarithms; c at most 64.
Without messages, so for a forward pass that is not differentiated. Definition: `logchain.reference.product`.
"""

import math

import torch
from torch import Tensor

from . import forward_chain
from .launch import processors

# segments that one multiprocessor works on at a time, from their registers; not measured yet
_RESIDENT = 8

# fewer matrices to a segment are not worth a launch
_SHORTEST = 8

# a chain of so many matrices is left to one vector
_SHORT = 48


def worthwhile(x: Tensor, bulk: Tensor) -> bool:
    """Whether the device would be idle otherwise: a model, not measured yet."""
    v, g, m, c = x.shape
    return c <= 64 and 1 in (g, m) and v >= 4 * _SHORT and 4 * g * m <= processors(x)


def log_norm(
    x: Tensor, bulk: Tensor, start: Tensor, *, log_params: bool, rescued: Tensor, segments: int | None = None
) -> Tensor:
    """The log-partitions (g, m) in float64; `rescued`, an int64 tensor of one element, counts the outputs redone."""
    v, g, m, c = x.shape
    sequences = g * m
    if segments is None:
        segments = max(1, _RESIDENT * processors(x) // sequences)
    shift = x[0].amax(-1, keepdim=True).double()
    shift.masked_fill_(shift == -math.inf, 0.0)
    head = (start + (x[0] - shift)).reshape(sequences, 1, c)
    taken = shift.reshape(sequences)
    matrices = bulk.expand(v - 1, g, c, c)
    matrices = matrices if m == 1 else matrices.expand(v - 1, m, c, c)
    potentials: Tensor | None = x[1:].reshape(v - 1, sequences, c)
    while len(matrices) > _SHORT:
        length = max(_SHORTEST, math.ceil(len(matrices) / segments))
        matrices, offsets = _products(matrices, potentials, length, log_params, rescued)
        taken = taken + offsets.sum(0)
        potentials, log_params = None, True
    if potentials is None:
        potentials = matrices.new_zeros(()).expand(len(matrices), sequences, c)
    beside = torch.cat([torch.zeros_like(potentials[:1]), potentials])[:, :, None]
    found, _ = forward_chain.forward(beside, matrices, head, None, log_params=log_params, keep=False, rescued=rescued)
    return (found.view(-1) + taken).view(g, m)


def _products(
    matrices: Tensor, potentials: Tensor | None, length: int, log_params: bool, rescued: Tensor
) -> tuple[Tensor, Tensor]:
    """The products of each `length` matrices (s, sequences, c, c) and of the rest, and what was taken out of them."""
    count, sequences, c, _ = matrices.shape
    whole, rest = divmod(count, length)
    dtype = forward_chain.arithmetic_dtype(matrices if potentials is None else potentials, matrices)
    out = torch.empty(whole + (rest > 0), sequences, c, c, dtype=dtype, device=matrices.device)
    offsets = torch.empty(out.shape[:2], dtype=torch.float64, device=matrices.device)
    for first, segments, steps in ((0, whole, length), (whole, 1, rest)):
        if steps:
            part = slice(first * length, first * length + segments * steps)
            forward_chain.segment_product(
                matrices[part].unflatten(0, (segments, steps)).transpose(0, 1),
                None if potentials is None else potentials[part].unflatten(0, (segments, steps)).transpose(0, 1),
                log_params=log_params,
                out=out[first : first + segments],
                offset=offsets[first : first + segments],
                rescued=rescued,
            )
    return out, offsets
