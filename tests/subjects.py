"""Subjects of the contract: calls of public functions with named outputs.

A subject takes x [*B, v, c], bulk, p0 and the options `log_params` and `lengths`. Its outputs are

    log_norm, entropy, divergence, log_prob, score, maximum   [*B]
    states, filtered, smoothed, forward, backward     [*B, v, c]
    best                                              [*B, v]
    scores, paths                                     [*B, 3], [*B, v, 3]
    transitions, counts                               [*B, v-1, c, c], and their sum in the shape of bulk

What each has to be, and how exactly, says `tests.expected`.
"""

import math
import random
import re
from collections.abc import Callable

import torch
from torch import Tensor

import logchain
from logchain import semirings, transitions
from logchain.stream import Stream, StreamUpdate

Found = dict[str, Tensor]
Bulk = Tensor | transitions.Transition
Subject = Callable[..., Found]

LAG, RANKS = 2, 3


def value(function: Callable[..., Tensor], name: str = "log_norm", **fixed) -> Subject:
    """A subject with a single output."""
    return lambda *operands, **options: {name: function(*operands, **fixed, **options)}


def marginals(x: Tensor, bulk: Tensor, p0: Tensor, **options) -> Found:
    found = logchain.marginals(x, bulk, p0, transitions="full", **options)
    return {"log_norm": found.log_norm, "states": found.states, "transitions": found.transitions}


def counts(x: Tensor, bulk: Tensor, p0: Tensor, **options) -> Found:
    found = logchain.marginals(x, bulk, p0, transitions="sum", **options)
    return {"log_norm": found.log_norm, "states": found.states, "counts": found.transitions}


def messages(x: Tensor, bulk: Tensor, p0: Tensor, **options) -> Found:
    return logchain.forward_backward(x, bulk, p0, **options)._asdict()


def filtered(x: Tensor, bulk: Tensor, p0: Tensor, **options) -> Found:
    found = logchain.filtered(x, bulk, p0, **options)
    return {"log_norm": found.log_norm, "filtered": found.states}


def other_chain(x: Tensor, bulk: Tensor, p0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Another chain, which forbids what this one does."""
    return x * 0.75, bulk * 0.5, p0 * 2


def divergence(x: Tensor, bulk: Tensor, p0: Tensor, **options) -> Found:
    other = other_chain(x, bulk, p0)
    return {"divergence": logchain.kl_divergence((x, bulk, p0), other, **options)}


def log_prob(x: Tensor, bulk: Tensor, p0: Tensor, **options) -> Found:
    return {"log_prob": logchain.log_prob(x, bulk, p0, x.detach().argmax(-1), **options)}


def viterbi(x: Tensor, bulk: Tensor, p0: Tensor, **options) -> Found:
    found = logchain.viterbi(x, bulk, p0, **options)
    return {"best": found.states, "score": found.score}


def topk_paths(x: Tensor, bulk: Tensor, p0: Tensor, **options) -> Found:
    found = logchain.topk_paths(x, bulk, p0, RANKS, **options)
    return {"paths": found.states.movedim(-2, -1), "scores": found.scores}


def within_budget(x: Tensor, bulk: Tensor, p0: Tensor, **options) -> Found:
    """With the smallest possible budget, which the error for a smaller one says."""
    try:
        found = logchain.product(x, bulk, p0, memory_budget=1, **options)
    except ValueError as error:
        least = re.search(r"at least (\d+)", str(error))
        assert least, error
        found = logchain.product(x, bulk, p0, memory_budget=int(least[1]), **options)
    return {"log_norm": found}


def total(x: Tensor, bulk: Tensor, p0: Tensor, **options) -> Found:
    """Of both semirings, by the recursion that takes any."""
    of = {"log_norm": semirings.LOG, "maximum": semirings.MAX}
    return {name: semirings.total(x, bulk, p0, semiring, **options) for name, semiring in of.items()}


def ends_of(x: Tensor, lengths) -> Tensor:
    batch = x.shape[:-2]
    if lengths is None:
        return torch.full(batch, x.shape[-2])
    lengths = torch.as_tensor(lengths)
    return lengths.view(*lengths.shape, *(1,) * (len(batch) - lengths.dim())).expand(batch)


def per_step(bulk: Bulk, change: Callable[[Tensor, int], Tensor]) -> Bulk:
    """Matrices, or the parameters of a structure, by a function of a tensor and of the axis of its steps."""
    if isinstance(bulk, Tensor):
        return change(bulk, -3)
    parts = zip(bulk.parameters, bulk.axes, strict=True)
    return bulk.with_parameters(*(change(part, -1 - axes) for part, axes in parts))


def is_one_matrix(bulk: Bulk) -> bool:
    lead = bulk.shape[:-2] if isinstance(bulk, Tensor) else bulk.lead
    return lead[-1:] in ((), (1,))


def pack(x: Tensor, bulk: Bulk, p0: Tensor, lengths=None) -> tuple[Tensor, Bulk, Tensor, Tensor, Tensor]:
    """Rows of x, the matrices into them, one start for each sequence, their offsets, and the mask [*B, v] of rows."""
    *batch, v, c = x.shape
    ends = ends_of(x, lengths)
    inside = torch.arange(v) < ends[..., None]
    starts = p0.expand(*batch, c).reshape(-1, c)
    offsets = torch.cat([ends.new_zeros(1), ends.flatten().cumsum(0)])

    def rows(part: Tensor, axis: int) -> Tensor:
        if part.shape[: axis + 1].numel() == 1:
            return part.reshape(1, *part.shape[axis + 1 :])
        steps = part.expand(*batch, v - 1, *part.shape[axis + 1 :])
        return torch.cat([steps.new_zeros(*batch, 1, *part.shape[axis + 1 :]), steps], axis)[inside]

    return x[inside], per_step(bulk, rows), starts, offsets, inside


def packed(x: Tensor, bulk: Bulk, p0: Tensor, *, lengths=None, **options) -> Found:
    rows, into, starts, offsets, _ = pack(x, bulk, p0, lengths)
    found = logchain.product(rows, into, starts, cu_seqlens=offsets, **options)
    return {"log_norm": found.view(x.shape[:-2])}


def division(v: int, seed: int) -> list[tuple[int, int]]:
    """Pieces of random sizes, 0 among them, that make up v variables."""
    draw, found, start = random.Random(seed), [], 0
    while start < v:
        size = min(v - start, draw.choice([0, 1, 1, 2, 3, 5, 8]))
        found.append((start, start + size))
        start += size
    return found


def each_step(bulk: Bulk, v: int) -> Bulk:
    """The matrices into each variable [*Bb, v, c, c]; what leads into the first one is NaN, and has no influence."""

    def into(part: Tensor, axis: int) -> Tensor:
        steps = part.expand(*part.shape[:axis], v - 1, *part.shape[axis + 1 :])
        first = steps.new_full((*part.shape[:axis], 1, *part.shape[axis + 1 :]), math.nan)
        return torch.cat([first, steps], axis)

    return per_step(bulk, into)


def steps_from(bulk: Bulk, start: int, stop: int) -> Bulk:
    return per_step(bulk, lambda part, axis: part.narrow(axis, start, stop - start))


def joined(updates: list[StreamUpdate], field: int) -> Tensor | None:
    parts = [update[field] for update in updates]
    return None if parts[0] is None else torch.cat(parts, -1 if field == 3 else -2)


def streamed(
    x: Tensor, bulk: Bulk, p0: Tensor, pieces: list[tuple[int, int]], *, lengths=None, one_matrix=False, **options
) -> tuple[Stream, StreamUpdate]:
    """The stream after all pieces and a flush, and what it returned, concatenated."""
    stream, updates = Stream(bulk if one_matrix else None, p0, **options), []
    into = None if one_matrix else each_step(bulk, x.shape[-2])
    for start, stop in pieces:
        ends = None if lengths is None else (ends_of(x, lengths) - start).clamp(0, stop - start)
        matrices = None if into is None else steps_from(into, start, stop)
        updates.append(stream.update(x[..., start:stop, :], matrices, lengths=ends))
    updates.append(stream.flush())
    return stream, StreamUpdate(updates[-1].log_norm, *(joined(updates, field) for field in (1, 2, 3)))


def stream(x: Tensor, bulk: Bulk, p0: Tensor, **options) -> Found:
    v, c = x.shape[-2:]
    best = c < 100 and not getattr(bulk, "sums", False)
    options |= {"one_matrix": is_one_matrix(bulk), "lag": LAG, "viterbi": best, "detach": False}
    log_norm, filtered, smoothed, states = streamed(x, bulk, p0, division(v, v + c), **options)[1]
    found = {"log_norm": log_norm, "filtered": filtered, "smoothed": smoothed}
    if best:  # states that were final before the sequence became impossible have been returned
        found["best"] = states.masked_fill(log_norm.isneginf()[..., None], -1)
    return found


def _ones(bulk: Tensor, *shape: int, log: bool) -> Tensor:
    return bulk.new_zeros(shape) if log else bulk.new_ones(shape)


def _bands(bulk: Tensor, log: bool) -> transitions.Transition:
    c = bulk.shape[-1]
    offsets = list(range(1 - c, c))
    target = torch.arange(c, device=bulk.device)
    values = [bulk[..., (target - offset).clamp(0, c - 1), target] for offset in offsets]
    return transitions.Banded(torch.stack(values, -2), offsets)


def _arcs(bulk: Tensor, log: bool) -> transitions.Transition:
    c = bulk.shape[-1]
    order = torch.randperm(c * c, generator=torch.Generator().manual_seed(c)).to(bulk.device)
    return transitions.Sparse(torch.stack([order // c, order % c]), bulk.flatten(-2)[..., order], c)


def _low_rank(bulk: Tensor, log: bool) -> transitions.Transition:
    unit = torch.eye(bulk.shape[-1], dtype=bulk.dtype, device=bulk.device)
    unit = (unit.log() if log else unit).expand_as(bulk)
    return transitions.LowRank(unit, bulk.mT)


# structures that are equal to any matrix
STRUCTURES: dict[str, Callable[[Tensor, bool], transitions.Transition]] = {
    "banded": _bands,
    "sparse": _arcs,
    "low rank": _low_rank,
    "duration": lambda bulk, log: transitions.Duration(bulk, _ones(bulk, *bulk.shape[:-1], 1, log=log)),
    "blocks": lambda bulk, log: transitions.BlockDiagonal(bulk[..., None, :, :]),
    "kronecker": lambda bulk, log: transitions.Kronecker(bulk, _ones(bulk, *bulk.shape[:-2], 1, 1, log=log)),
    "monarch": lambda bulk, log: transitions.Monarch(
        bulk[..., None, :, :], _ones(bulk, *bulk.shape[:-1], 1, 1, log=log)
    ),
}


def of_structure(name: str, subject: Subject) -> Subject:

    def call(x: Tensor, bulk: Tensor, p0: Tensor, *, log_params=False, **options) -> Found:
        structure = STRUCTURES[name](bulk, log_params)
        return subject(x, structure, p0, log_params=log_params, **options)

    return call


STRATEGIES = ("sequential", "segments:3:2", "tree")
PRODUCTS: dict[str, Subject] = {
    "product": value(logchain.product),
    **{strategy: value(logchain.product, strategy=strategy) for strategy in STRATEGIES},
    "memory_budget": within_budget,
    "packed": packed,
    **{name: of_structure(name, value(logchain.product)) for name in STRUCTURES},
}
OTHERS: dict[str, Subject] = {
    "marginals": marginals,
    "counts": counts,
    "messages": messages,
    "filtered": filtered,
    "entropy": value(logchain.entropy, "entropy"),
    "divergence": divergence,
    "log_prob": log_prob,
    "viterbi": viterbi,
    "topk_paths": topk_paths,
    "stream": stream,
    "total": total,
}
SUBJECTS = PRODUCTS | OTHERS


def floating(found: Found) -> list[Tensor]:
    """What has gradients, with 0 for -inf."""
    return [torch.where(t == -torch.inf, 0.0, t) for t in found.values() if t.is_floating_point()]
