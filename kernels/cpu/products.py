"""Chains whose matrices are products of factors, as `kernels.plain.products`, with the steps between products in C."""

import ctypes
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from ..plain import products
from ..structured import Structured, places
from . import team
from .arguments import Pointing, copies, fields, function, shared


class Arguments(ctypes.Structure):
    """`Weigh` of c/weigh.h, field by field."""

    _fields_ = [
        *fields("first last shares step count rows states slots slot *sums *x *x_at x_step *ends"),
        *((name, ctypes.c_double) for name in ("limit", "floor", "scale", "least")),
        *fields("*state *tops *powers *flagged *live *weight *inverse *source *grad *grad_at"),
    ]


class Scan(products.Scan, Pointing):
    """`kernels.plain.products.Scan` with its steps in C, on several threads."""

    def __init__(self, chain: Structured, kept: Sequence[Tensor] | None = None, *, keep: bool = True) -> None:
        super().__init__(chain, kept, keep=keep)
        n, c, state = self.n, chain.c, self.state
        x = chain.x.to(chain.dtype).resolve_neg()
        x = x if x.stride(-1) == 1 or c == 1 else x.contiguous()
        self.arguments, self._held = Arguments(rows=n, states=c, slots=len(state), slot=state.stride(0)), {}
        self.arguments.floor, self.arguments.scale = self.floor, self.scale
        self.arguments.least, self.arguments.x_step = self.weights.least_source, x.stride(-2)
        self.point(x=x, x_at=places(x, chain.batch)[self.order].contiguous(), grad_at=self.order * (chain.v * c))
        names = "state", "ends", "tops", "powers", "flagged", "live", "weight", "inverse"
        self.point(**{name: getattr(self, name) for name in names})
        spans = shared(n, 16 * n * c)
        self.arguments.shares = len(spans)
        self._calls = copies(self.arguments, [(share, share + 1) for share in range(len(spans))])

    def forward_step(self, step: int, count: int, sums: Tensor, limit: float) -> None:
        """As `kernels.plain.products.Scan.forward_step`."""
        self._call(step=step, count=count, sums=sums.data_ptr(), limit=limit)

    def backward_step(self, step: int, count: int, sums: Tensor | None, source: Tensor, grad_x: Tensor | None) -> None:
        """As `kernels.plain.products.Scan.backward_step`."""
        before, source_at, grad = (None if one is None else one.data_ptr() for one in (sums, source, grad_x))
        self._call(step=step, count=count, sums=before, source=source_at, grad=grad)

    def _call(self, **values: float | None) -> None:
        for arguments in self._calls:
            for name, value in values.items():
                setattr(arguments, name, value)
        loop, calls = function("weigh", self.chain.dtype), self._calls
        _ = loop(calls) if len(calls) == 1 else team.calls(loop, calls)


forward = partial(products.forward, scan_of=Scan)
backward = partial(products.backward, scan_of=Scan)
