"""Chains whose transitions are bands, arcs or durations, by the exact scan of the C library.

Messages are numbers of a mantissa and an exponent, in which nothing underflows. Exponents are exact up to 2^24 in
float32, and to 2^53 in float64; where larger ones matter, a chain is computed in float64, or by the scan of any
structure: where float64 is not enough, functions here return None.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..structured import POSTERIORS, Arcs, Durations, Gradients, Saved, Structured
from .arguments import Pointing, function, places, run, thread_spans
from .library import fields, in_large_pages, struct

_Result = TypeVar("_Result")

# arcs in a row of a slice; a state with more has several rows
_LONGEST_ROW = 64

# bytes of the back-pointers of one sequence, beyond which they are recomputed from every sqrt(v)-th message
_POINTERS = 2**26

_BANDS, _ARCS, _DURATIONS = 0, 1, 3


# `Exact` and `Slices` of c/entries.h
_Arguments = struct(
    "kind steps states terms first last one_matrix logarithms by_log *places *pattern *x x_step *weights"
    " weights_step weights_outer weights_inner *p0 p0_state *mantissas *exponents *taken *log_norm *weight *grad_x"
    " *counts *grad_weights counts_step *grad_p0 *log_forward *log_backward *filtered *paths draws"
    " sequences every *scratch *dense"
)
_Slices = struct("blocks shared *start *state *other *arc")


class _Graph(ctypes.Structure):
    """`Graph` of c/entries.h: arcs in slices by target and by source, and the arrays that it points to."""

    _fields_ = [("into", _Slices), ("out", _Slices), *fields("*first *order *source")]
    arrays: tuple[NDArray[Any], ...]


def _or_wider(function: Callable[..., _Result | None]) -> Callable[..., _Result | None]:
    """The function of a chain in place of a call: in the dtype of the chain, or, if that returns None, in float64."""

    @wraps(function)
    def compute(chain: Structured, *arguments: Any) -> _Result | None:
        result = function(_Call(chain, chain.dtype), *arguments)
        if result is None and chain.dtype != torch.float64:
            result = function(_Call(chain, torch.float64), *arguments)
        return result

    return compute


def _forward(call: "_Call", keep: bool) -> Saved | None:
    """The log-partitions; kept are mantissas and exponents of forward messages, and what these lack of each step."""
    saved: Saved = ()
    if keep:
        saved = call.numbers(), call.numbers(), torch.empty(call.n, call.chain.v, dtype=torch.float64, device="cpu")
        call.set(mantissas=saved[0], exponents=saved[1], taken=saved[2])
    log_norm = call.log_norm()
    inexact = call.run("forward", call.spans())
    return None if inexact else (log_norm, torch.zeros_like(log_norm, dtype=torch.bool), *saved)


forward = _or_wider(_forward)


@_or_wider
def backward(call: "_Call", saved: Saved, weight: Tensor, needs: Sequence[bool], by_log: bool) -> Gradients | None:
    """The gradients of `sum(weight * log_norm)`, of logarithms of parameters and p0 if `by_log`."""
    if saved[2].dtype != call.dtype:  # messages in float64 are those of a chain that needs them
        messages = _forward(call, True) if call.dtype == torch.float64 else None
        if messages is None:
            return None
        saved = messages
    chain, (log_norm, _, mantissas, exponents, taken) = call.chain, saved
    call.set(mantissas=mantissas, exponents=exponents, taken=taken, log_norm=log_norm.contiguous())
    call.set(weight=weight.double().expand(chain.batch).resolve_neg().contiguous(), by_log=by_log)
    grad_x = call.states() if needs[0] else None
    grad_p0 = torch.empty(*chain.batch, chain.c, dtype=torch.float64, device="cpu") if needs[1] else None
    call.set(grad_x=grad_x, grad_p0=grad_p0)
    counted = any(needs[2:]) and call.parameter.numel() > 0
    # copies of gradients of each step take no more memory than the messages
    most = None if call.one_matrix else max(1, call.n * chain.c // max(1, call.entries))
    spans = call.spans(whole_sets=counted, most=most)
    counts = call.sums(len(spans) if counted else 1)
    if call.run("backward", spans, "counts" if call.one_matrix else "grad_weights", counts if counted else []):
        return None
    grad_p0 = None if grad_p0 is None else grad_p0.sum_to_size(chain.p0.shape).to(chain.dtype)
    if not any(needs[2:]):
        return grad_x, grad_p0
    return grad_x, grad_p0, *chain.transition.from_pattern((counts[0].to(chain.dtype),))


def messages(chain: Structured) -> tuple[Tensor, Tensor, Tensor] | None:
    """Forward and backward messages [*B, v, c] as logarithms, -inf after sequences' ends, and log-partitions [*B]."""
    call = _Call(chain, torch.float64)
    into, out, log_norm = call.states(), call.states(), call.log_norm()
    call.set(log_forward=into)
    if call.run("forward", call.spans()):
        return None
    call.set(log_forward=None, log_backward=out, log_norm=None)
    return None if call.run("backward", call.spans()) else (into, out, log_norm)


@_or_wider
def filtered(call: "_Call") -> tuple[Tensor, Tensor] | None:
    """Forward messages [*B, v, c] divided by their sums, 0 after sequences' ends, and log-partitions [*B]."""
    states, log_norm = call.states(), call.log_norm()
    call.set(filtered=states)
    return None if call.run("forward", call.spans()) else (states, log_norm)


def draws(chain: Structured, numbers: Tensor) -> Tensor | None:
    """Paths int64 [*S, *B, v] drawn by `numbers` in [0, 1) of the same shape; see `autograd.draws`."""
    saved = forward(chain, True)
    if saved is None:
        return None
    log_norm, _, mantissas, exponents, _ = saved
    chain = chain._replace(p0=chain.p0.to(mantissas.dtype))  # of which then all operands are
    call, states = _Call(chain, chain.dtype), torch.empty(numbers.shape, dtype=torch.int64, device="cpu")
    call.set(draws=states.numel() // max(1, call.n * chain.v), sequences=call.n, paths=states)
    call.set(mantissas=mantissas, exponents=exponents, log_norm=log_norm, weight=numbers.contiguous())
    call.run("draw", call.spans())
    return states


def best_paths(chain: Structured) -> tuple[Tensor, Tensor]:
    """The best paths int64 [*B, v], see `autograd.best_paths`, and whether sequences hold NaN or +inf."""
    call = _Call(chain, chain.dtype)
    log_norm, states = call.log_norm(), torch.empty(chain.x.shape[:-1], dtype=torch.int64, device="cpu")
    every = chain.v if 4 * chain.v * chain.c <= _POINTERS else math.isqrt(chain.v)
    call.set(every=max(1, every), paths=states)
    call.run("best", call.spans())
    return states, log_norm.isnan()


class _Call(Pointing):
    """The arguments of a chain with one parameter and a dtype of its arithmetic, with the tensors that they point to.

    Attributes:
        chain: the chain.
        parameter: the parameter.
        n: the number of sequences.
        one: whether all steps share the parameter.
        entries: the entries of the parameter of a step.
    """

    def __init__(self, chain: Structured, dtype: torch.dtype) -> None:
        (parameter,), batch, pattern = chain.parameters, chain.batch, chain.transition.pattern
        self.chain, self.dtype, self.n, self._of_operands = chain, dtype, batch.numel(), chain.dtype
        # the memory of a negative view holds other numbers
        x, parameter, p0 = (operand.to(self._of_operands).resolve_neg() for operand in (chain.x, parameter, chain.p0))
        x = x if x.stride(-1) == 1 or chain.c == 1 else x.contiguous()
        self.parameter, self._lanes = parameter, int(function("lanes", dtype)())
        sets, (steps, *entries) = parameter.shape[: len(batch)], parameter.shape[len(batch) :]
        self._sets, self.one_matrix, self.entries = sets.numel(), steps == 1, math.prod(entries)
        self._set_of = set_of = torch.arange(self._sets, device="cpu").view(sets).expand(batch).flatten()
        ends = torch.full((self.n,), chain.v) if chain.lengths is None else chain.lengths.expand(batch).flatten()
        at = (places(operand, batch) for operand in (x, p0, parameter))
        table = torch.stack([torch.arange(self.n), ends, *at, set_of * steps * self.entries], 1)
        table, self._held = table if self._sets == 1 else table[torch.argsort(set_of, stable=True)], {}
        self.arguments = _Arguments(steps=chain.v, states=chain.c, one_matrix=self.one_matrix)
        self.set(logarithms=chain.log_params, x_step=x.stride(-2), p0_state=p0.stride(-1), counts_step=self.entries)
        self.set(weights_step=parameter.stride(len(batch)), weights_inner=parameter.stride(-1))
        self.set(places=table, x=x, weights=parameter, p0=p0)
        self._work = self.n * chain.v * self.entries
        if isinstance(pattern, Arcs):
            graph = _graph(pattern, chain.c, self._lanes)
            self.set(kind=_ARCS, terms=self.entries, pattern=ctypes.addressof(graph))
        elif isinstance(pattern, Durations):
            self.set(kind=_DURATIONS, terms=pattern.segments)
            self._work *= POSTERIORS.of_band
        else:
            terms = len(pattern)
            self.set(kind=_BANDS, terms=terms, pattern=_bands(pattern), weights_outer=parameter.stride(-2))
            self._work = self.n * chain.v * chain.c * (terms + 4) * POSTERIORS.of_band

    def numbers(self) -> Tensor:
        """Memory for a number of each state of each variable, in whole vectors."""
        size = -(-self.chain.c // self._lanes) * self._lanes
        return in_large_pages(torch.empty(self.n, self.chain.v, size, dtype=self.dtype, device="cpu"))

    def log_norm(self) -> Tensor:
        """Memory for the log-partitions, to which the arguments point."""
        log_norm = torch.empty(self.chain.batch, dtype=torch.float64, device="cpu")
        self.set(log_norm=log_norm)
        return log_norm

    def states(self) -> Tensor:
        """Memory like x, contiguous, of the chain's dtype."""
        return in_large_pages(torch.empty(self.chain.x.shape, dtype=self._of_operands, device="cpu"))

    def spans(self, *, whole_sets: bool = False, most: int | None = None) -> list[tuple[int, int]]:
        """The first place of each thread and the one after its last.

        With `whole_sets`, each set of parameters belongs to one thread; at most `most` threads share an only set.
        """
        if not whole_sets or self._sets == 1:
            return thread_spans(self.n, self._work, most if whole_sets else None)
        ends = [0, *torch.bincount(self._set_of, minlength=self._sets).cumsum(0).tolist()]
        return [(ends[first], ends[last]) for first, last in thread_spans(self._sets, self._work)]

    def sums(self, threads: int) -> list[Tensor]:
        """Zeros like the parameter for its gradient: one tensor, or one for each thread if these share an only set.

        They are in float64 where all steps share the parameter.
        """
        dtype, copies = torch.float64 if self.one_matrix else self._of_operands, threads if self._sets == 1 else 1
        return [torch.zeros(self.parameter.shape, dtype=dtype, device="cpu") for _ in range(copies)]

    def run(self, name: str, spans: Sequence[tuple[int, int]], field: str = "", sums: Sequence[Tensor] = ()) -> int:
        """The sum of what a function returns for spans of places, a thread for each; `sums` add up in the first."""
        per_thread = [{field: sums[i % len(sums)]} for i in range(len(spans))] if sums else ()
        kind = "exact" if self.dtype == self._of_operands else "wide"
        count = run(self.arguments, self._of_operands, f"{kind}_{name}", spans, per_thread)
        for more in sums[1:]:
            sums[0].add_(more)
        return count


@lru_cache(maxsize=1024)
def _bands(offsets: tuple[int, ...]) -> Tensor:
    """The offsets of bands, and the bands by falling offsets, int64 (2, bands), to be read only."""
    values = torch.tensor(offsets, dtype=torch.int64, device="cpu")
    return torch.stack([values, values.argsort(descending=True)])


def _graph(arcs: Arcs, c: int, size: int) -> _Graph:
    """The arcs in slices of `size` rows, computed once."""
    if (c, size) not in arcs.arranged:
        source, target = arcs.source.numpy(), arcs.target.numpy()
        order = _sorted_by(target)
        into, arrays_in = _slices(target, source, order, c, size)
        out, arrays_out = _slices(source, target, np.arange(len(source)), c, size)
        by_target = np.concatenate([[0], np.cumsum(np.bincount(target, minlength=c))]), order, source
        arcs.arranged[c, size] = graph = _Graph(into, out, *(array.ctypes.data for array in by_target))
        graph.arrays = arrays_in + arrays_out + by_target
    arranged: _Graph = arcs.arranged[c, size]
    return arranged


def _sorted_by(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """The stable order of numbers from 0 to below 2^32, by their lower and then by their upper 16 bits."""
    order = np.argsort(keys.astype(np.uint16), kind="stable")  # numpy sorts 16 bits by counting
    upper = (keys >> 16).astype(np.uint16)
    return order[np.argsort(upper[order], kind="stable")] if upper.any() else order


def _slices(
    near: NDArray[np.int64], far: NDArray[np.int64], order: NDArray[np.int64], c: int, size: int
) -> tuple[Any, tuple[NDArray[Any], ...]]:
    """Slices of `size` rows of arcs by their state `near`, and the arrays they point to; `order` sorts the arcs."""
    degree = np.bincount(near, minlength=c)
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
    states, ends = np.zeros(count * size, np.int32), np.zeros(start[-1] * size, np.int32)
    states[: len(state)] = state[by_length]
    arcs = np.full(start[-1] * size, -1, np.int32)
    # arcs of a row are neighbors in `order`, and a whole vector apart in a slice
    first_slot = start[place // size] * size + place % size
    slot = np.repeat(first_slot - (np.cumsum(length) - length) * size, length) + np.arange(len(order)) * size
    ends[slot], arcs[slot] = far[order], order
    arrays = start, states, ends, arcs
    pointers = (array.ctypes.data for array in arrays)
    return _Slices(count, -(-int(several.sum()) // size), *pointers), arrays
