"""Log-partitions and gradients of chains whose transitions are arcs, as `kernels.plain.arcs` defines them, in C."""

import ctypes
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..structured import Arcs, Gradients, Structured, Walk, gradient_of_p0, places
from .arguments import fields, function
from .library import in_large_pages
from .sparse import SparseCall

# LONGEST_ROW of c/arcs.h
_LONGEST_ROW = 64

_SIZES = "steps states arcs first last one_matrix logarithms by_log degree"
_OPERANDS = "*x x_step *x_at *weights weight_step weight_arc *weights_at *p0 p0_state *p0_at *ends *order"
_RESULTS = "*messages *powers *exponents *log_norm *lossy"
_GRADIENTS = "*weight *grad_x *counts *grad_weights *set *grad_p0 *room"


class _Slices(ctypes.Structure):
    """`Slices` of c/arcs.h, field by field."""

    _fields_ = fields("count shared *start *state *other *arc")


class _Arguments(ctypes.Structure):
    """`ArcChain` of c/arcs.h, field by field."""

    _fields_ = [
        *fields(f"{_SIZES} {_OPERANDS}"),
        ("into", _Slices),
        ("out", _Slices),
        *fields(f"{_RESULTS} {_GRADIENTS}"),
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
    spans = call.spans(call.work)
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
    # copies of gradients of each step take no more memory than the messages
    most = None if call.one else max(1, n * chain.c // max(1, parameter.shape[-1]))
    spans = call.spans(call.work, whole_sets=counted, most=most)
    counts = call.sums(len(spans)) if counted else []
    call.run("arcs_backward", spans, "counts" if call.one else "grad_weights", counts)
    weights = torch.zeros(parameter.shape, dtype=chain.dtype) if needs[1] else None
    if counts:
        weights = counts[0].to(chain.dtype)
    return Gradients(
        grad_x,
        None if weights is None else (weights,),
        None if grad_p0 is None else gradient_of_p0(chain, grad_p0),
    )


class _Call(SparseCall):
    """The arguments of a chain of arcs, with the tensors that they point to."""

    def __init__(self, chain: Structured) -> None:
        arranged = _arrange(chain.pattern, chain.c)
        super().__init__(_Arguments(into=arranged.into, out=arranged.out, degree=arranged.degree), chain)
        weights = self.parameter
        self._held["arranged"] = arranged
        self.work = chain.v * self.n * weights.shape[-1]
        self.set(arcs=weights.shape[-1], weight_step=weights.stride(-2), weight_arc=weights.stride(-1))
        self.point(weights=weights, weights_at=places(weights, chain.batch), set=self.set_of)


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
