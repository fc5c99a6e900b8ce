"""Log-partitions and gradients of chains whose transitions are arcs, as `kernels.plain.arcs` defines them, in C."""

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..structured import Arcs, Gradients, Structured, Walk
from .arguments import function, run_each, shared
from .library import in_large_pages

# LONGEST_ROW of c/arcs.h
_LONGEST_ROW = 64

_SIZES = "steps states arcs first last one_matrix logarithms by_log degree"
_OPERANDS = "*x x_step *x_at *weights weight_step weight_arc *weights_at *p0 p0_state *p0_at *ends *order"
_RESULTS = "*messages *powers *exponents *log_norm *lossy"
_GRADIENTS = "*weight *grad_x *counts *grad_weights *set *grad_p0 *room"


def _fields(names: str) -> list[tuple[str, Any]]:
    return [(name.lstrip("*"), ctypes.c_void_p if name.startswith("*") else ctypes.c_int64) for name in names.split()]


class _Slices(ctypes.Structure):
    """`Slices` of c/arcs.h, field by field."""

    _fields_ = _fields("count shared *start *state *other *arc")


class _Arguments(ctypes.Structure):
    """`ArcChain` of c/arcs.h, field by field."""

    _fields_ = [
        *_fields(f"{_SIZES} {_OPERANDS}"),
        ("into", _Slices),
        ("out", _Slices),
        *_fields(f"{_RESULTS} {_GRADIENTS}"),
    ]


class _Arranged(NamedTuple):
    """Arcs in slices by target and by source, the most arcs into a state, and the arrays that slices point to."""

    into: _Slices
    out: _Slices
    degree: int
    arrays: tuple[NDArray[Any], ...]


# by `source` of the arcs: `target`, versions of both, and how they are arranged
_arranged: WeakIdKeyDictionary = WeakIdKeyDictionary()


def forward(chain: Structured, keep: bool) -> Walk:
    """The log-partitions, and messages for `backward` where `keep` asks for them.

    Kept are messages [n, v, c] in float64 and the powers of two [n, v] that they were scaled by. Messages that were
    computed again are mantissas and exponents: side by side in the same memory in float32, and in float64 in [n, v, c]
    for each.
    """
    call = _Call(chain)
    n, v, c = call.n, chain.v, chain.c
    log_norm, lossy = torch.empty(n, dtype=torch.float64), torch.empty(n, dtype=torch.uint8)
    call.point(log_norm=log_norm, lossy=lossy)
    kept: tuple[Tensor, ...] = ()
    if keep:
        kept = in_large_pages(torch.empty(n, v, c, dtype=torch.float64)), torch.empty(n, v, dtype=torch.float64)
        call.point(messages=kept[0], powers=kept[1])
    spans = call.spans()
    if call.run("arcs_forward", spans):
        if keep and chain.dtype == torch.float64:
            kept = *kept, in_large_pages(torch.empty(n, v, c, dtype=torch.float64))
            call.point(exponents=kept[2])
        call.run("arcs_redo", spans)
    return Walk(log_norm.view(chain.batch), kept, lossy.view(chain.batch).bool())


def backward(chain: Structured, walk: Walk, weight: Tensor, needs: tuple[bool, bool, bool]) -> Gradients:
    """The gradients of `sum(weight * log_norm)` with respect to x, the arcs' weights and p0, where `needs` says so."""
    call = _Call(chain)
    parameter, n = chain.parameters[0], call.n
    weight = weight.double().expand(chain.batch).resolve_neg().contiguous()
    lossy = walk.redone.to(torch.uint8, memory_format=torch.contiguous_format)
    call.point(messages=walk.kept[0], powers=walk.kept[1], exponents=walk.kept[2] if len(walk.kept) > 2 else None)
    call.point(log_norm=walk.log_norm.contiguous(), lossy=lossy, weight=weight)
    grad_x = in_large_pages(torch.empty(chain.x.shape, dtype=chain.dtype)) if needs[0] else None
    grad_p0 = torch.empty(n, chain.c, dtype=torch.float64) if needs[2] else None
    call.point(grad_x=grad_x, grad_p0=grad_p0)
    counted = needs[1] and parameter.numel() > 0
    spans = call.spans(whole_sets=counted)
    counts = call.counts(len(spans)) if counted else []
    field = "counts" if call.arguments.one_matrix else "grad_weights"
    call.run("arcs_backward", spans, [{field: one} for one in counts])
    for more in counts[1:]:
        counts[0].add_(more)
    weights = torch.zeros(parameter.shape, dtype=chain.dtype) if needs[1] else None
    if weights is not None and counted:
        weights = counts[0].view(parameter.shape).to(chain.dtype)
    return Gradients(
        grad_x,
        None if weights is None else (weights,),
        None if grad_p0 is None else _initial_gradient(chain, grad_p0),
    )


class _Call:
    """The arguments of chains, with the tensors that they point to."""

    def __init__(self, chain: Structured) -> None:
        (parameter,), batch, pattern = chain.parameters, chain.batch, chain.pattern
        self.chain, self.n = chain, math.prod(batch)
        # the memory of a negative view holds other numbers
        x, weights, p0 = (operand.to(chain.dtype).resolve_neg() for operand in (chain.x, parameter, chain.p0))
        x = x if x.stride(-1) == 1 or chain.c == 1 else x.contiguous()
        own = parameter.shape[:-2]
        self.sets = math.prod(own)
        of_sequence = torch.arange(self.sets).view(own).expand(batch).reshape(-1).contiguous()
        self.order = torch.argsort(of_sequence, stable=True)
        self.of_sequence = of_sequence
        arranged = _arrange(pattern, chain.c)
        self._held: list[Any] = [arranged]
        self.arguments = a = _Arguments(steps=chain.v, states=chain.c, arcs=weights.shape[-1], degree=arranged.degree)
        a.one_matrix, a.logarithms, a.by_log = weights.shape[-2] == 1, chain.log_params, chain.by_log
        a.x_step, a.weight_step, a.weight_arc, a.p0_state = x.stride(-2), *weights.stride()[-2:], p0.stride(-1)
        a.into, a.out = arranged.into, arranged.out
        self.point(x=x, weights=weights, p0=p0, order=self.order, set=of_sequence)
        self.point(x_at=_offsets(x, batch, 2), weights_at=_offsets(weights, batch, 2), p0_at=_offsets(p0, batch, 1))
        self.point(ends=None if chain.ends is None else chain.ends.expand(batch).contiguous())

    def point(self, **tensors: Tensor | None) -> None:
        """Set pointers to tensors; None is a null pointer."""
        for name, tensor in tensors.items():
            setattr(self.arguments, name, None if tensor is None else tensor.data_ptr())
            self._held.append(tensor)

    def spans(self, *, whole_sets: bool = False) -> list[tuple[int, int]]:
        """The first place of each thread and the one after its last.

        With `whole_sets`, each set of weights belongs to one thread; the threads of an only set have a gradient each,
        which together take no more memory than the messages do.
        """
        chain, arcs = self.chain, self.arguments.arcs
        work = chain.v * self.n * arcs
        if not whole_sets or self.sets == 1:
            per_step = whole_sets and not self.arguments.one_matrix
            return shared(self.n, work, max(1, self.n * chain.c // arcs) if per_step else None)
        sizes = torch.bincount(self.of_sequence, minlength=self.sets).cumsum(0).tolist()
        ends = [0, *sizes]
        return [(ends[first], ends[last]) for first, last in shared(self.sets, work)]

    def counts(self, threads: int) -> list[Tensor]:
        """Zeros for the gradients of weights: a tensor, or one for each thread if these share an only set."""
        steps, dtype = (1, torch.float64) if self.arguments.one_matrix else (self.chain.v - 1, self.chain.dtype)
        shape = self.sets, steps, self.arguments.arcs
        if self.sets > 1:
            return [torch.zeros(shape, dtype=dtype)] * 1
        return [torch.zeros(shape, dtype=dtype) for _ in range(threads)]

    def run(self, name: str, spans: Sequence[tuple[int, int]], each: Sequence[dict[str, Tensor]] = ()) -> int:
        """The sum of what a function of the library returns for spans of places, each on a thread of its own.

        `each`: the tensors, by the name of a field, to which only a thread's arguments point; one for all, or each its.
        """
        copies = (_Arguments * len(spans))(*[self.arguments] * len(spans))
        for index, (copy, span) in enumerate(zip(copies, spans, strict=True)):
            copy.first, copy.last = span
            for field, tensor in each[index % len(each)].items() if each else ():
                setattr(copy, field, tensor.data_ptr())
        return sum(run_each(copies, self.chain.dtype, name))


def _offsets(operand: Tensor, batch: torch.Size, own: int) -> Tensor:
    """The offset (n) of each sequence's entries in an operand with batch axes and so many of its own."""
    strides = operand.expand(*batch, *operand.shape[operand.dim() - own :]).stride()
    places = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(batch, strides, strict=False):
        places = places[..., None] + torch.arange(size) * stride
    return places.reshape(-1).contiguous()


def _initial_gradient(chain: Structured, posteriors: Tensor) -> Tensor:
    """The gradient of p0 from weighted posteriors of the first step (n, c)."""
    posteriors = posteriors.view(*chain.batch, chain.c)
    if not (chain.log_params or chain.by_log):
        posteriors = torch.where(posteriors == 0, 0.0, posteriors / chain.p0.double())
    return posteriors.sum_to_size(chain.p0.shape).to(chain.dtype).contiguous()


# ------------------------------------------------------------------------------------------------------------- slices


def _arrange(arcs: Arcs, c: int) -> _Arranged:
    """The arcs in slices, found once for tensors that stay the same."""
    versions = arcs.source._version, arcs.target._version, c
    known = _arranged.get(arcs.source)
    if known is not None and known[0] is arcs.target and known[1] == versions:
        arranged: _Arranged = known[2]
        return arranged
    source, target = (end.contiguous().numpy() for end in arcs)
    slice_size = int(function("arcs_slice", torch.float32)())
    into, arrays_in = _slices(target, source, _sorted_by(target), c, slice_size)
    out, arrays_out = _slices(source, target, np.arange(len(source)), c, slice_size)
    degree = int(np.bincount(target, minlength=1).max())
    arranged = _Arranged(into, out, degree, arrays_in + arrays_out)
    _arranged[arcs.source] = arcs.target, versions, arranged
    return arranged


def _sorted_by(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """The stable order of numbers from 0 to below 2^32, by their lower and then by their upper 16 bits."""
    order = np.argsort(keys.astype(np.uint16), kind="stable")  # numpy sorts 16 bits by counting
    upper = (keys >> 16).astype(np.uint16)
    return order[np.argsort(upper[order], kind="stable")] if upper.any() else order


def _slices(
    own: NDArray[np.int64], other: NDArray[np.int64], order: NDArray[np.int64], c: int, size: int
) -> tuple[_Slices, tuple[NDArray[Any], ...]]:
    """Slices of `size` rows of arcs by their state `own`, and the arrays that they point to; `order` sorts the arcs."""
    degree = np.bincount(own, minlength=c)
    rows = -(-degree // _LONGEST_ROW)  # of each state
    state, several = np.repeat(np.arange(c), rows), np.repeat(rows > 1, rows)
    done = (np.arange(len(state)) - np.repeat(np.cumsum(rows) - rows, rows)) * _LONGEST_ROW
    length = np.minimum(degree[state] - done, _LONGEST_ROW)
    by_length = _sorted_by(2 * _LONGEST_ROW - length - several * _LONGEST_ROW)
    place = np.empty_like(by_length)  # of each row
    place[by_length] = np.arange(len(state))
    count = -(-len(state) // size)
    longest = np.zeros(count * size, np.int64)
    longest[: len(state)] = length[by_length]
    start = np.concatenate([[0], np.cumsum(longest.reshape(count, size).max(1, initial=0))])
    states, others = np.zeros(count * size, np.int32), np.zeros(start[-1] * size, np.int32)
    states[: len(state)] = state[by_length]
    arcs = np.full(start[-1] * size, -1, np.int32)
    # arcs of a row are neighbours in `order`, and a whole vector apart in a slice
    first_slot = start[place // size] * size + place % size
    slot = np.repeat(first_slot - (np.cumsum(length) - length) * size, length) + np.arange(len(order)) * size
    others[slot], arcs[slot] = other[order], order
    arrays = start, states, others, arcs
    pointers = (array.ctypes.data for array in arrays)
    return _Slices(count, -(-int(several.sum()) // size), *pointers), arrays
