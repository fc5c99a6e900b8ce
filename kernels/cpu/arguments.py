"""The arguments of the C library: one struct of sizes, strides and addresses of a chain, and the sequences of a thread.

Operands are copied only to change their dtype, to resolve torch's negative bit, or where the library does not take the
strides of x or p0.
"""

import ctypes
import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from ..chain import WORTH_A_THREAD, Chain
from . import team
from .library import fields, in_large_pages, library, struct

# the most sequences whose offsets are cached
_FEW = 1024

# those of c/chain.h; `from_` and `to` are the strides of the two states of matrices
Rows = struct("*data step *at")
Matrices = struct("*data step from_ to *at")
Paths = struct("*data rank ranks steps *at")
Outputs = struct("*grad_x *log_forward *log_backward *filtered step *at")
Boundary = struct("*entering *entering_double *entering_log_norm *entering_error *leaving *log_norm_error *following")
Means = struct("*data *second")


class Arguments(ctypes.Structure):
    """`Chain` of c/chain.h, field by field; those of `out` and `boundary` are also those of the whole."""

    _anonymous_ = ("out", "boundary")
    _fields_ = [
        *fields("steps sets members states first last one_matrix logarithms by_log packed"),
        ("x", Rows),
        ("bulk", Matrices),
        ("p0", Rows),
        *fields("*ends *order"),
        ("boundary", Boundary),
        ("messages", Rows),
        *fields("*log_norm *value *flagged *uncounted *scratch *weight"),
        ("out", Outputs),
        ("grad_bulk", Matrices),
        *fields("*counts *grad_p0"),
        ("grad_p0_real", Rows),
        ("means", Means),
        ("paths", Paths),
    ]


@cache
def function(name: str, dtype: torch.dtype) -> Any:
    """A function of the library: an integer of `Arguments`; the bytes of scratch that it needs if `scratch` is null."""
    loop = getattr(library(), f"logchain_{name}{64 if dtype == torch.float64 else 32}")
    loop.restype = ctypes.c_int64
    return loop


def scratch(v: int, g: int, m: int, c: int, dtype: torch.dtype, one_matrix: bool) -> tuple[int, int]:
    """The number of threads for g sets of m sequences, and the bytes of scratch of each, forward and backward."""
    arguments = Arguments(members=m, states=c, one_matrix=one_matrix)
    names = "forward", "recompute_forward", "backward", "recompute_backward"
    sizes = (int(function(name, dtype)(ctypes.byref(arguments))) for name in names)
    return len(thread_spans(g * m, v * g * m * c**2)), max(sizes) + 128


class Pointing:
    """The arguments of a call, with the tensors that they point to."""

    arguments: Any
    _held: dict[str, Any]

    def set(self, **values: Tensor | float | None) -> None:
        """Set fields, see `set_field`."""
        for name, value in values.items():
            set_field(self.arguments, name, value)
        self._held.update(values)


def set_field(arguments: Any, name: str, value: Tensor | float | None) -> None:
    """Set a number, or a pointer, or the data of an array with strides, to a tensor; None is a null pointer."""
    field = getattr(arguments, name)
    target, name = (field, "data") if isinstance(field, ctypes.Structure) else (arguments, name)
    setattr(target, name, value.data_ptr() if isinstance(value, Tensor) else value)


class Call(Pointing):
    """The arguments of a chain, with the tensors that they point to.

    A message that enters is treated as the x of an extra step 0, whose initial weights are all 1. `ends` (g, m) are the
    numbers of steps, and `order` (g, m) the members of each set, the longest first; None where all have v steps.
    `constants` are what the arguments point to whatever values the operands have.
    """

    def __init__(self, chain: Chain, *, entered: bool = False) -> None:
        g, m, c, dtype = chain.g, chain.m, chain.c, chain.dtype
        # the memory of a negative view holds other numbers
        x, bulk, p0 = (operand.to(dtype).resolve_neg() for operand in (chain.x, chain.bulk, chain.p0))
        x = x if x.stride(-1) == 1 or c == 1 else x.contiguous()
        self.chain, self._held, self.constants = chain, {}, dict[str, Tensor]()
        self.arguments = a = Arguments(steps=chain.v + entered, sets=g, members=m, states=c)
        a.one_matrix, a.logarithms, a.by_log = len(bulk) == 1, chain.log_params, chain.by_log
        a.packed = chain.starts is not None
        self.rows("x", x)
        self.set(x=x)
        self.matrices("bulk", bulk)
        if entered:  # one row for all, without offsets
            self.constants["p0"] = chain.new(1).fill_(float(not chain.log_params))
            self.set(p0=self.constants["p0"])
        else:
            self.set(p0=p0)
            a.p0.step = p0.stride(-1)
            self._at("p0", offsets(chain.lead, p0.expand(*chain.lead, c).stride()[:-1]))
        a.messages.step = c if a.packed else g * m * c
        self._at("messages", offsets((g * m,), (c,)) if chain.starts is None else chain.starts * c)
        self.ends: Tensor | None = None
        self.order: Tensor | None = None
        if chain.ends is not None:
            self.ends = (chain.ends.reshape(g, m) + int(entered)).contiguous()
            self.order = torch.argsort(self.ends, dim=1, descending=True, stable=True)
            self.set(ends=self.ends, order=self.order)

    def rows(self, name: str, tensor: Tensor) -> None:
        """Set the strides of `x` or `out` to those of rows (v, *lead, c), each contiguous."""
        starts, step = self.chain.starts, tensor.stride(0)
        getattr(self.arguments, name).step = step
        self._at(name, offsets(tensor.shape[1:-1], tensor.stride()[1:-1]) if starts is None else starts * step)

    def matrices(self, name: str, tensor: Tensor) -> None:
        """Set `bulk`, or its gradient `grad_bulk`, to matrices (s, *sets, c, c)."""
        starts, field, shared = self.chain.starts, getattr(self.arguments, name), len(tensor) == 1
        field.step, (field.from_, field.to) = 0 if shared else tensor.stride(0), tensor.stride()[-2:]
        if starts is None or shared:
            self._at(name, offsets(tensor.shape[1:-2], tensor.stride()[1:-2]))
        else:  # matrix i leads into row i of x
            self._at(name, (starts + 1) * tensor.stride(0))
        self.set(**{name: tensor})

    def paths(self, states: Tensor, ranks: int, steps: int, *, rank: int, sequence: int) -> None:
        """Set `paths` to states of so many paths and steps; `rank` and `sequence` are strides."""
        starts, field = self.chain.starts, self.arguments.paths
        field.ranks, field.rank, field.steps = ranks, rank, steps
        self._at("paths", offsets((self.chain.g * self.chain.m,), (sequence,)) if starts is None else starts)
        self.set(paths=states)

    def _at(self, name: str, at: Tensor) -> None:
        getattr(self.arguments, name).at = at.data_ptr()
        self.constants[f"{name}.at"] = at

    def spans(self, *, whole_sets: bool = False, most: int | None = None) -> list[tuple[int, int]]:
        """The first sequence of each thread and the one after its last, at most `most` threads, or of whole sets."""
        g, m = self.chain.g, self.chain.m
        parts, size = (g, m) if whole_sets else (g * m, 1)
        spans = thread_spans(parts, self.chain.v * g * m * self.chain.c**2, most)
        return [(first * size, last * size) for first, last in spans]

    def run(self, name: str, spans: Sequence[tuple[int, int]], by_thread: Sequence[dict[str, Tensor]] = ()) -> int:
        """The sum of what a function of the library returns for spans of sequences, see `run`."""
        return run(self.arguments, self.chain.dtype, name, spans, by_thread)


def offsets(sizes: Sequence[int], strides: Sequence[int]) -> Tensor:
    """The offsets of all entries of some axes, in order, int64; to be read only."""
    make = _offsets if math.prod(sizes) <= _FEW else _offsets.__wrapped__
    return make(tuple(sizes), tuple(strides))


def places(tensor: Tensor, batch: torch.Size) -> Tensor:
    """The offset of each sequence's part of a tensor [*B or ones, ...], int64 (n); to be read only."""
    axes = zip(batch, tensor.shape, tensor.stride(), strict=False)
    return offsets(batch, [stride if size > 1 else 0 for _, size, stride in axes]).flatten()


@lru_cache(maxsize=1024)
def _offsets(sizes: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    places = torch.zeros((), dtype=torch.int64, device="cpu")
    for size, stride in zip(sizes, strides, strict=True):
        places = places[..., None] + torch.arange(size, device="cpu") * stride
    return places.contiguous()


def thread_spans(parts: int, work: int, most: int | None = None) -> list[tuple[int, int]]:
    """Spans of parts for as many threads as `work`, the multiply-adds of all parts, is worth waking; at most `most`."""
    worth = min(torch.get_num_threads(), work // WORTH_A_THREAD)
    count = max(1, min(worth, parts, *(() if most is None else (most,))))
    ends = [parts * i // count for i in range(count + 1)]
    return list(zip(ends, ends[1:], strict=False))


def copies(arguments: Any, spans: Sequence[tuple[int, int]], by_thread: Sequence[dict[str, Tensor]] = ()) -> Any:
    """An array of the arguments for spans of sequences, see `run`."""
    array = (type(arguments) * len(spans))(*[arguments] * len(spans))
    for index, (copy, span) in enumerate(zip(array, spans, strict=True)):
        copy.first, copy.last = span
        for field, tensor in by_thread[index].items() if by_thread else ():
            set_field(copy, field, tensor)
    return array


def run(
    arguments: Any,
    dtype: torch.dtype,
    name: str,
    spans: Sequence[tuple[int, int]],
    by_thread: Sequence[dict[str, Tensor]] = (),
) -> int:
    """The sum of what a function of the library returns for spans of sequences or rows, each on a separate thread.

    `by_thread`: for every thread the tensors, by the name of a field, to which only its arguments point.
    """
    loop, calls = function(name, dtype), copies(arguments, spans, by_thread)
    sizes = [loop(ctypes.byref(arguments)) + 63 & ~63 for arguments in calls]
    scratch = in_large_pages(torch.empty(sum(sizes) + 64, dtype=torch.uint8, device="cpu"))
    begin = scratch.data_ptr() + 63 & ~63
    for arguments, size in zip(calls, sizes, strict=True):
        arguments.scratch, begin = begin, begin + size
    return int(loop(ctypes.byref(calls))) if len(calls) == 1 else sum(team.calls(loop, calls))
