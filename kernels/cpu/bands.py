"""The log-partition of chains of bands and its gradients, as `kernels.plain.bands` defines them, by the C library."""

import ctypes

import torch
from torch import Tensor

from ..plain import bands as plain
from ..structured import Gradients, Structured, Walk, places
from .arguments import fields
from .library import in_large_pages
from .sparse import SparseCall

# UNKNOWN of c/bands.h, and the multiply-adds of a dense chain that take as long as one state of one band
_UNKNOWN, _COST = 3, 16


class Arguments(ctypes.Structure):
    """`Bands` of c/bands.h, field by field."""

    _fields_ = fields(
        "steps states bands first last one_matrix logarithms by_log *offsets *x *x_at x_step *values *values_at"
        " values_step values_band values_state *p0 *p0_at p0_state *ends *order *mantissas *exponents *totals *log_norm"
        " *state *weight *grad_x *grad_values *counts *grad_at *grad_p0 *room"
    )


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
    call.run("bands_forward", call.spans(call.work))
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
    state = state.clone()
    weight = weight.double()
    call.point(mantissas=mantissas, exponents=exponents, totals=totals, state=state)
    call.point(log_norm=walk.log_norm.contiguous(), weight=weight.expand(chain.batch).contiguous().resolve_neg())
    grad_x = in_large_pages(torch.empty(chain.x.shape, dtype=dtype, device="cpu")) if needs[0] else None
    grad_p0 = torch.empty(n, c, dtype=torch.float64, device="cpu") if needs[2] else None
    call.point(grad_x=grad_x, grad_p0=grad_p0)
    spans = call.spans(call.work, whole_sets=needs[1], most=max(1, n // len(chain.pattern)))
    counts = call.sums(len(spans)) if needs[1] else []
    if counts:
        call.point(grad_at=places(counts[0], chain.batch))
    call.run("bands_backward", spans, "counts" if call.one else "grad_values", counts)
    gradients = Gradients(
        grad_x,
        (counts[0].to(dtype),) if counts else None,
        None if grad_p0 is None else grad_p0.view(*chain.batch, c).sum_to_size(chain.p0.shape).to(dtype),
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


class _Call(SparseCall):
    """The arguments of a chain of bands, with the tensors that they point to."""

    def __init__(self, chain: Structured) -> None:
        super().__init__(Arguments(bands=len(chain.pattern)), chain)
        values = self.parameter
        self.work = self.n * chain.v * chain.c * (len(chain.pattern) + 4) * _COST
        self.point(values=values, values_at=places(values, chain.batch))
        self.point(offsets=torch.tensor(chain.pattern, dtype=torch.int64, device="cpu"))
        step, band, state = values.stride()[-3:]
        self.set(values_step=step, values_band=band, values_state=state)
