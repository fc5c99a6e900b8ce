"""The log-partition of chains of bands and its gradients, as `kernels.plain.bands` defines them, by the C library."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..plain import bands as plain
from ..structured import Gradients, Structured, Walk
from .arguments import run_each, shared
from .library import in_large_pages

_FIELDS = (
    "steps states bands first last one_matrix logarithms by_log *offsets *x *x_at x_step *values *values_at values_step"
    " values_band values_state *p0 *p0_at p0_state *ends *order *mantissas *exponents *totals *log_norm *state *weight"
    " *grad_x *grad_values *counts *grad_at *grad_p0 *room"
)

# UNKNOWN of c/bands.h, and the multiply-adds of a dense chain that take as long as one state of one band
_UNKNOWN, _COST = 3, 16


class Arguments(ctypes.Structure):
    """`Bands` of c/bands.h, field by field."""

    _fields_ = [
        (name.lstrip("*"), ctypes.c_void_p if name.startswith("*") else ctypes.c_int64) for name in _FIELDS.split()
    ]


def forward(chain: Structured, keep: bool) -> Walk:
    """The log-partitions; kept are mantissas and exponents of the forward messages, and what tells what these lack."""
    call = _Call(chain)
    n, v, c = call.n, chain.v, chain.c
    log_norm = torch.empty(n, dtype=torch.float64, device="cpu")
    state = torch.empty(n, dtype=torch.uint8, device="cpu")
    kept: tuple[Tensor, ...] = ()
    if keep:
        whole = torch.int64 if chain.dtype == torch.float64 else torch.int32
        mantissas = in_large_pages(torch.empty(n, v, c, dtype=chain.dtype, device="cpu"))
        exponents = in_large_pages(torch.empty(n, v, c, dtype=whole, device="cpu"))
        kept = mantissas, exponents, torch.empty(n, v, dtype=torch.int64, device="cpu"), state
        call.point(mantissas=mantissas, exponents=exponents, totals=kept[2])
    call.point(log_norm=log_norm, state=state)
    call.run("bands_forward", shared(n, call.work))
    unknown = (state == _UNKNOWN).view(chain.batch)
    log_norm = log_norm.view(chain.batch)
    if unknown.any():
        log_norm = torch.where(unknown, plain.forward(chain, False).log_norm, log_norm)
    return Walk(log_norm, kept, unknown)


def backward(chain: Structured, walk: Walk, weight: Tensor, needs: tuple[bool, bool, bool]) -> Gradients:
    """The gradients of the log-partitions times `weight`."""
    call = _Call(chain)
    n, c, dtype = call.n, chain.c, chain.dtype
    mantissas, exponents, totals, state = walk.kept
    state, (values,) = state.clone(), chain.parameters
    weight = weight.double()
    call.point(mantissas=mantissas, exponents=exponents, totals=totals, state=state)
    call.point(log_norm=walk.log_norm.contiguous(), weight=weight.expand(chain.batch).contiguous().resolve_neg())
    grad_x = in_large_pages(torch.empty(chain.x.shape, dtype=dtype, device="cpu")) if needs[0] else None
    grad_p0 = torch.empty(*chain.batch, c, dtype=torch.float64, device="cpu") if needs[2] else None
    call.point(grad_x=grad_x, grad_p0=grad_p0)
    spans, copies = call.spans(most=max(1, n // len(chain.pattern)))
    counts: list[Tensor] = []
    if needs[1]:
        of_one = values.shape[-3] == 1
        kind = torch.float64 if of_one else dtype
        counts = [in_large_pages(torch.empty(values.shape, dtype=kind, device="cpu")).zero_() for _ in range(copies)]
        call.point(grad_at=_places(counts[0], chain.batch))
        call.run("bands_backward", spans, "counts" if of_one else "grad_values", counts)
    else:
        call.run("bands_backward", shared(n, call.work))
    for more in counts[1:]:
        counts[0].add_(more)
    gradients = Gradients(
        grad_x,
        (counts[0].to(dtype),) if counts else None,
        None if grad_p0 is None else grad_p0.sum_to_size(chain.p0.shape).to(dtype),
    )
    unknown = (state == _UNKNOWN).view(chain.batch)
    if unknown.any():
        _add(gradients, plain.backward(chain, plain.forward(chain, True), torch.where(unknown, weight, 0.0), needs))
    return gradients


def _add(to: Gradients, more: Gradients) -> None:
    """Add gradients of other sequences."""
    pairs = zip((to.x, *(to.parameters or [None]), to.p0), (more.x, *(more.parameters or [None]), more.p0), strict=True)
    for gradient, other in pairs:
        if gradient is not None and other is not None:
            gradient += other


def _places(tensor: Tensor, batch: Sequence[int]) -> Tensor:
    """The place in memory of each sequence's part of a tensor [*B or ones, ...], in the order of the batch."""
    places = torch.zeros((), dtype=torch.int64, device="cpu")
    for size, own, stride in zip(batch, tensor.shape, tensor.stride(), strict=False):
        places = places[..., None] + torch.arange(size, device="cpu") * (stride if own > 1 else 0)
    return places.flatten()


class _Call:
    """The arguments of a chain, with the tensors that they point to, and `order` of its n sequences."""

    def __init__(self, chain: Structured) -> None:
        (values,), batch = chain.parameters, chain.batch
        x, values, p0 = (operand.to(chain.dtype).resolve_neg() for operand in (chain.x, values, chain.p0))
        x = x if x.stride(-1) == 1 or chain.c == 1 else x.contiguous()
        self.n, self._dtype, self._held = batch.numel(), chain.dtype, [x, values, p0]
        self.work = self.n * chain.v * chain.c * (len(chain.pattern) + 4) * _COST
        self._arguments = a = Arguments(steps=chain.v, states=chain.c, bands=len(chain.pattern))
        a.one_matrix, a.logarithms, a.by_log = values.shape[-3] == 1, chain.log_params, chain.by_log
        a.x_step, a.p0_state = x.stride(-2), p0.stride(-1)
        a.values_step, a.values_band, a.values_state = values.stride()[-3:]
        self._values_at = _places(values, batch)
        shares = values.shape[: len(batch)].numel() == 1
        self._order = torch.arange(self.n, device="cpu") if shares else self._values_at.argsort(stable=True)
        self.point(x=x, values=values, p0=p0, order=self._order)
        self.point(x_at=_places(x, batch), values_at=self._values_at, p0_at=_places(p0, batch))
        self.point(offsets=torch.tensor(chain.pattern, dtype=torch.int64, device="cpu"))
        self.point(ends=None if chain.ends is None else chain.ends.expand(batch).contiguous())

    def point(self, **tensors: Tensor | None) -> None:
        """Set pointers to tensors; None is a null pointer."""
        for name, tensor in tensors.items():
            setattr(self._arguments, name, None if tensor is None else tensor.data_ptr())
            self._held.append(tensor) if tensor is not None else None

    def spans(self, most: int) -> tuple[list[tuple[int, int]], int]:
        """Spans of `order` for threads that add to gradients of values, and how many copies of these they need.

        A thread has all sequences that share values; if all share them, at most `most` threads have a copy each.
        """
        places = self._values_at[self._order]
        firsts = [0, *(places.diff().nonzero().flatten() + 1).tolist(), self.n]
        if len(firsts) > 2:
            return [(firsts[i], firsts[j]) for i, j in shared(len(firsts) - 1, self.work)], 1
        spans = shared(self.n, self.work, most)
        return spans, len(spans)

    def run(self, name: str, spans: Sequence[tuple[int, int]], field: str = "", copies: Sequence[Tensor] = ()) -> None:
        """Call a function of the library for spans of sequences, each on a thread with its own copy of a field."""
        calls: ctypes.Array[Any] = (Arguments * len(spans))(*[self._arguments] * len(spans))
        for index, (call, span) in enumerate(zip(calls, spans, strict=True)):
            call.first, call.last = span
            if copies:
                setattr(call, field, copies[index % len(copies)].data_ptr())
        run_each(calls, self._dtype, name)
