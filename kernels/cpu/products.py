"""Chains whose matrices are products of factors, as `kernels.plain.products` defines them.

Products of rows with factors are torch's, all between them is the passes of c/passes.h, which says why the results are
exact. Sequences that floats cannot follow are computed again in log space, forward and backward.
"""

import math

import torch
from torch import Tensor

from ..plain import products as plain
from ..structured import Gradients, Structured, Walk, gradient_of_p0
from .rows import Rows
from .walk_back import Backward
from .walk_forth import Forward, Kept

_LOSSY = 1  # the bit of `marks` in c/passes.h


def forward(chain: Structured, keep: bool) -> Walk:
    """The log-partitions, and what `backward` reads: messages, scales, messages of lossy sequences (v, k, c), middles.

    The former are those of `Kept`; the latter are logarithms.
    """
    rows = Rows.of(chain)
    if rows is None:
        return plain.forward(chain, keep)
    walk = Forward(rows, keep)
    walk.run()
    lossy, kept = (walk.marks & _LOSSY).bool(), walk.kept
    chosen = rows.order[lossy]
    again = torch.empty(chain.v, len(chosen), chain.c if keep else 0, dtype=torch.float64)
    if len(chosen):
        wide = sum(one.shape[1] for one in kept.middles) * rows.n + len(chosen) * chain.c * 8 // chain.dtype.itemsize
        if wide > rows.n * chain.c:  # two message tensors in all: middles are computed again
            kept = kept._replace(middles=())
        redone = plain.forward(_selected(chain, chosen), keep)
        walk.log_norm[lossy] = redone.log_norm
        again = redone.kept[0].view(again.shape) if keep else again
    tensors = (kept.messages, kept.scales, again, *kept.middles) if keep else ()
    return Walk(_in_batch(rows, walk.log_norm), tensors, _in_batch(rows, lossy))


def backward(chain: Structured, walk: Walk, weight: Tensor, needs: tuple[bool, bool, bool]) -> Gradients:
    """The gradients of `sum(weight * log_norm)`; see `Gradients`."""
    rows = Rows.of(chain)
    if rows is None:
        return plain.backward(chain, walk, weight, needs)
    messages, scales, again, *middles = walk.kept
    kept = Kept(messages, scales, tuple(middles))
    weight = weight.double().resolve_neg().expand(chain.batch).reshape(-1)[rows.order]
    log_norm, lossy = walk.log_norm.reshape(-1)[rows.order], walk.redone.reshape(-1)[rows.order]
    alive = (weight != 0) & (log_norm != -math.inf)
    lost = torch.zeros_like(lossy)
    while True:  # once, unless something overflows
        live = alive & ~lossy & ~lost
        gradients, more = _gradients(rows, kept, weight, live, needs)
        lost |= more
        if not bool(more.any()):
            break
    for which in (alive & lossy, lost):
        chosen = rows.order[which]
        if len(chosen):
            part = _selected(chain, chosen)
            if which is lost:
                before = plain.forward(part, True)
            else:
                logs = again[:, which[lossy]]
                shape = (chain.v, -1, 1, chain.c) if rows.sets.g > 1 else (chain.v, 1, -1, chain.c)
                before = Walk(log_norm[which], (logs.view(shape),), lossy[which])
            _add(rows, gradients, plain.backward(part, before, weight[which], needs), chosen)
    return gradients


def _gradients(
    rows: Rows, kept: Kept, weight: Tensor, live: Tensor, needs: tuple[bool, bool, bool]
) -> tuple[Gradients, Tensor]:
    """The gradients of live rows, and which rows overflowed; the former count only if none did."""
    chain = rows.chain
    walk = Backward(rows, kept, weight, live, needs)
    if bool(live.any()):
        walk.run()
    elif walk.first is not None:
        walk.first.zero_()
    lost = (walk.marks & _LOSSY).bool()
    grads: tuple[Tensor, ...] | None = None
    if needs[1]:
        parts = walk.counts.gradients() if walk.counts is not None else None
        grads = tuple(
            torch.zeros(one.shape, dtype=chain.dtype) if parts is None else rows.sets.as_parameter(part, one.shape)
            for one, part in zip(chain.parameters, parts or chain.parameters, strict=True)
        )
        if not all(bool(one.isfinite().all()) for one in grads):
            lost = live
    return Gradients(walk.grad_x, grads, None if walk.first is None else _of_p0(rows, walk.first, weight, live)), lost


def _of_p0(rows: Rows, first: Tensor, weight: Tensor, live: Tensor) -> Tensor:
    """The gradient of p0 from the posteriors of step 0 (n, c)."""
    counts = first.double() * weight.masked_fill(~live, 0.0)[:, None]
    counts.masked_fill_(first == 0, 0.0)
    return gradient_of_p0(rows.chain, torch.empty_like(counts).index_copy_(0, rows.order, counts))


def _in_batch(rows: Rows, values: Tensor) -> Tensor:
    """Values of rows (n) as [*B]."""
    return torch.empty_like(values).index_copy_(0, rows.order, values).view(rows.chain.batch)


def _index(chain: Structured, tensor: Tensor, chosen: Tensor) -> tuple[Tensor, ...] | None:
    """The indices of chosen sequences along the batch axes of an operand; None if all share it."""
    sizes = tensor.shape[: len(chain.batch)]
    if all(size == 1 for size in sizes):
        return None
    places = torch.unravel_index(chosen, chain.batch)
    return tuple(place if size > 1 else torch.zeros_like(place) for place, size in zip(places, sizes, strict=True))


def _selected(chain: Structured, chosen: Tensor) -> Structured:
    """The chain of the chosen sequences, indices of the flattened batch, with one batch axis."""

    def of(tensor: Tensor) -> Tensor:
        index = _index(chain, tensor, chosen)
        return tensor[index] if index else tensor[(0,) * len(chain.batch)][None]

    return Structured(
        x=of(chain.x).expand(len(chosen), -1, -1),
        parameters=tuple(of(one) for one in chain.parameters),
        p0=of(chain.p0),
        pattern=chain.pattern,
        ends=None if chain.ends is None else chain.ends.reshape(-1)[chosen],
        log_params=chain.log_params,
        dtype=chain.dtype,
        by_log=chain.by_log,
    )


def _add(rows: Rows, gradients: Gradients, more: Gradients, chosen: Tensor) -> None:
    """Add the gradients of the chosen sequences to those of all."""
    chain = rows.chain

    def add(into: Tensor | None, part: Tensor | None, operand: Tensor) -> None:
        if into is None or part is None:
            return
        index = _index(chain, operand, chosen)
        if index:
            into.index_put_(index, part, accumulate=True)
        else:
            into += part.view(into.shape)

    add(gradients.x, more.x, gradients.x if gradients.x is not None else chain.x)
    add(gradients.p0, more.p0, chain.p0)
    for into, part, operand in zip(gradients.parameters or (), more.parameters or (), chain.parameters, strict=False):
        add(into, part, operand)
