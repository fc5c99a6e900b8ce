"""The arguments of the C library: one struct of sizes, strides and addresses of a chain, and the sequences of a thread.

Operands are copied only to change their dtype, to resolve torch's negative bit, or where the library does not take the
strides of x or p0.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..chain import WORTH_A_THREAD, Chain
from . import team
from .library import in_large_pages, library

_SIZES = "steps sets members states first last one_matrix logarithms"
_OPERANDS = (
    "*x x_step x_set x_member *x_at *bulk bulk_step bulk_set bulk_from bulk_to *bulk_at *p0 p0_set p0_member p0_state"
    " *following"
)
_PLACES = "*ends *order *messages *log_norm *lossy *uncounted *room"
_GRADIENTS = (
    "*weight *grad_x grad_step grad_set grad_member *grad_at *grad_bulk count_step count_set *count_at *counts *grad_p0"
    " *means *second"
)
_MESSAGES = "*value *grad_p0_real grad_p0_set grad_p0_member *log_forward *log_backward by_log"
_STRETCH = "*starts *leaving *entering *entering_log_norm *entering_error *entering_double *log_norm_error *filtered"
_PATHS = "*paths path_steps path_rank path_sequence ranks"


def fields(names: str) -> list[tuple[str, Any]]:
    """The fields of a struct of integers and, with a star before their names, of pointers."""
    return [(name.lstrip("*"), ctypes.c_void_p if name.startswith("*") else ctypes.c_int64) for name in names.split()]


class Arguments(ctypes.Structure):
    """`Chain` of c/chain.h, field by field."""

    _fields_ = fields(f"{_SIZES} {_OPERANDS} {_PLACES} {_GRADIENTS} {_MESSAGES} {_STRETCH} {_PATHS}")


@cache
def function(name: str, dtype: torch.dtype) -> Any:
    """A function of the library: an integer of `Arguments`; the bytes of scratch that it needs where `room` is null."""
    loop = getattr(library(), f"logchain_{name}{64 if dtype == torch.float64 else 32}")
    loop.restype = ctypes.c_int64
    return loop


def scratch(v: int, g: int, m: int, c: int, dtype: torch.dtype, one_matrix: bool) -> tuple[int, int]:
    """The number of threads for g sets of m sequences, and the bytes of scratch of each, forward and backward."""
    arguments = Arguments(members=m, states=c, one_matrix=one_matrix)
    names = "forward", "redo_forward", "backward", "redo_backward"
    sizes = (int(function(name, dtype)(ctypes.byref(arguments))) for name in names)
    return len(shared(g * m, v * g * m * c**2)), max(sizes) + 128


class Pointing:
    """The arguments of a call, with the tensors that they point to."""

    arguments: Any
    _held: dict[str, Any]

    def point(self, **tensors: Tensor | None) -> None:
        """Set pointers to tensors; None is a null pointer."""
        for name, tensor in tensors.items():
            setattr(self.arguments, name, None if tensor is None else tensor.data_ptr())
        self._held.update(tensors)

    def set(self, **numbers: int) -> None:
        """Set fields that are numbers."""
        for name, number in numbers.items():
            setattr(self.arguments, name, number)


class Call(Pointing):
    """The arguments of a chain, with the tensors that they point to.

    A message that enters is treated as the x of an extra step 0, whose initial weights are all 1. `ends` (g, m) are the
    numbers of steps, and `order` (g, m) the members of each set, the longest first; None where all have v steps.
    """

    def __init__(self, chain: Chain, *, entered: bool = False) -> None:
        g, m, c, dtype = chain.g, chain.m, chain.c, chain.dtype
        # the memory of a negative view holds other numbers
        x, bulk, p0 = (operand.to(dtype).resolve_neg() for operand in (chain.x, chain.bulk, chain.p0))
        x = x if x.stride(-1) == 1 or c == 1 else x.contiguous()
        if entered:
            p0 = chain.new(1).fill_(float(not chain.log_params)).expand(g, m, c)
        else:
            p0 = p0.expand(*chain.lead, c).reshape(g, m, c)
        self.chain, self._held = chain, {"bulk": bulk, "p0": p0}
        self.arguments = a = Arguments(steps=chain.v + entered, sets=g, members=m, states=c)
        a.one_matrix, a.logarithms, a.by_log = len(bulk) == 1, chain.log_params, chain.by_log
        a.bulk, a.p0 = bulk.data_ptr(), p0.data_ptr()
        self.rows("x", x)
        self.matrices("bulk", bulk)
        a.bulk_from, a.bulk_to = bulk.stride()[-2:]
        a.p0_set, a.p0_member, a.p0_state = p0.stride()
        self.ends: Tensor | None = None
        self.order: Tensor | None = None
        if chain.ends is not None:
            self.ends = (chain.ends.reshape(g, m) + int(entered)).contiguous()
            self.order = torch.argsort(self.ends, dim=1, descending=True, stable=True)
            self.point(ends=self.ends, order=self.order)

    def rows(self, name: str, tensor: Tensor) -> None:
        """Point `x` or `grad_x` to rows (v, *lead, c), each of which is contiguous; `name` is "x" or "grad"."""
        chain = self.chain
        pointer = name if name == "x" else f"{name}_x"
        if chain.starts is not None:
            self.point(**{pointer: tensor, "starts": chain.starts})
            self.set(**{f"{name}_step": tensor.stride(0)})
            return
        try:
            tensor = tensor.view(chain.v, chain.g, chain.m, chain.c)
        except RuntimeError:
            self.point(**{f"{name}_at": _places(tensor.shape[1:-1], tensor.stride()[1:-1])})
        else:
            self.set(**dict(zip((f"{name}_set", f"{name}_member"), tensor.stride()[1:], strict=False)))
        self.point(**{pointer: tensor})
        self.set(**{f"{name}_step": tensor.stride(0)})

    def matrices(self, name: str, tensor: Tensor) -> None:
        """Set the strides of `bulk`, or of its gradient `count`, to those of matrices (s, *own, c, c)."""
        chain = self.chain
        self.set(**{f"{name}_step": tensor.stride(0)})
        if chain.starts is not None:  # matrix i leads into row i of x
            if len(tensor) > 1:
                self.point(**{f"{name}_at": (chain.starts + 1) * tensor.stride(0)})
            return
        try:
            self.set(**{f"{name}_set": tensor.view(len(tensor), chain.g, *tensor.shape[-2:]).stride(1)})
        except RuntimeError:
            self.point(**{f"{name}_at": _places(tensor.shape[1:-2], tensor.stride()[1:-2])})

    def spans(self, *, whole_sets: bool = False, most: int | None = None) -> list[tuple[int, int]]:
        """The first sequence of each thread and the one after its last, at most `most` threads, or of whole sets."""
        g, m = self.chain.g, self.chain.m
        parts, size = (g, m) if whole_sets else (g * m, 1)
        spans = shared(parts, self.chain.v * g * m * self.chain.c**2, most)
        return [(first * size, last * size) for first, last in spans]

    def run(self, name: str, spans: Sequence[tuple[int, int]], each: Sequence[dict[str, Tensor]] = ()) -> int:
        """The sum of what a function of the library returns for spans of sequences, each on a thread of its own.

        `each`: for every thread the tensors, by the name of a field, to which only its arguments point.
        """
        return run(self.arguments, self.chain.dtype, name, spans, each)


def _places(sizes: Sequence[int], strides: Sequence[int]) -> Tensor:
    """The offsets of all entries of axes that cannot be flattened without a copy, in order."""
    places = torch.zeros((), dtype=torch.int64, device="cpu")
    for size, stride in zip(sizes, strides, strict=True):
        places = places[..., None] + torch.arange(size, device="cpu") * stride
    return places.contiguous()


def shared(parts: int, work: int, most: int | None = None) -> list[tuple[int, int]]:
    """Ranges of parts for as many threads as `work`, the multiply-adds of all parts, is worth waking."""
    worth = min(torch.get_num_threads(), work // WORTH_A_THREAD)
    count = max(1, min(worth, parts, *(() if most is None else (most,))))
    ends = [parts * i // count for i in range(count + 1)]
    return list(zip(ends, ends[1:], strict=False))


def run(
    arguments: Any,
    dtype: torch.dtype,
    name: str,
    spans: Sequence[tuple[int, int]],
    each: Sequence[dict[str, Tensor]] = (),
) -> int:
    """The sum of what a function of the library returns, see `Call.run`."""
    return sum(run_each(copies(arguments, spans, each), dtype, name))


def copies(arguments: Any, spans: Sequence[tuple[int, int]], each: Sequence[dict[str, Tensor]] = ()) -> Any:
    """An array of the arguments for spans of sequences, see `Call.run`."""
    array = (type(arguments) * len(spans))(*[arguments] * len(spans))
    for index, (copy, span) in enumerate(zip(array, spans, strict=True)):
        copy.first, copy.last = span
        for field, tensor in each[index].items() if each else ():
            setattr(copy, field, tensor.data_ptr())
    return array


def run_each(calls: "ctypes.Array[Any]", dtype: torch.dtype, name: str) -> Sequence[int]:
    """The integers that a function of the library returns for an array of arguments, each on a separate thread."""
    loop = function(name, dtype)
    sizes = [loop(ctypes.byref(arguments)) + 63 & ~63 for arguments in calls]
    scratch = in_large_pages(torch.empty(sum(sizes) + 64, dtype=torch.uint8, device="cpu"))
    begin = scratch.data_ptr() + 63 & ~63
    for arguments, size in zip(calls, sizes, strict=True):
        arguments.room, begin = begin, begin + size
    return [int(loop(ctypes.byref(calls)))] if len(calls) == 1 else team.calls(loop, calls)
