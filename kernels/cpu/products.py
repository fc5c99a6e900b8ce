"""Chains whose matrices are products of factors, as `kernels.plain.products`, with the steps between products in C."""

import ctypes
from functools import partial

from torch import Tensor

from ..plain import products, scaled
from ..structured import places
from . import team
from .arguments import Pointing, copies, fields, function, shared


class Arguments(ctypes.Structure):
    """`Weigh` of c/weigh.h, field by field."""

    _fields_ = [
        *fields("first last shares step count rows states slots slot sets blocks before *sums *x *x_at x_step *ends"),
        *((name, ctypes.c_double) for name in ("limit", "floor", "scale", "least")),
        *fields("spread *state *tops *factors *flagged *live *weight *inverse *source *grad *grad_at"),
    ]


class Steps(scaled.Steps, Pointing):
    """`kernels.plain.scaled.Steps` in C, on several threads."""

    def __init__(self, scan: scaled.Scan, state: Tensor) -> None:
        super().__init__(scan, state)
        chain, n, c = scan.chain, scan.n, scan.chain.c
        x = chain.x.to(chain.dtype).resolve_neg()
        x = x if x.stride(-1) == 1 or c == 1 else x.contiguous()
        self.arguments, self._held = Arguments(rows=n, states=c, slots=len(state), slot=state.stride(0)), {}
        self.arguments.sets = scan.layout.grid[0]
        self.arguments.floor, self.arguments.spread = self.floor, self.spread
        self.arguments.scale, self.arguments.least = self.scale, self.least
        self.point(x=x, x_at=places(x, chain.batch)[scan.order].contiguous(), state=state, ends=scan.ends)
        self.point(tops=scan.tops, factors=scan.factors, flagged=scan.flagged, inverse=scan.inverse)
        self.point(grad_at=scan.order * (chain.v * c))
        if hasattr(scan, "live"):
            self.point(live=scan.live, weight=scan.weight)
        spans = shared(n, 16 * n * c)
        self.arguments.x_step, self.arguments.shares = x.stride(-2), len(spans)
        self._calls = copies(self.arguments, [(share, share + 1) for share in range(len(spans))])

    def forward(self, step: int, count: int, sums: Tensor, blocks: int, limit: float) -> None:
        """As `kernels.plain.scaled.Steps.forward`."""
        self._call(step=step, count=count, sums=sums.data_ptr(), blocks=blocks, limit=limit)

    def backward(
        self, step: int, count: int, sums: Tensor, before: int, blocks: int, source: Tensor, grad_x: Tensor | None
    ) -> None:
        """As `kernels.plain.scaled.Steps.backward`."""
        grad = None if grad_x is None else grad_x.data_ptr()
        places = {"sums": sums.data_ptr(), "source": source.data_ptr(), "grad": grad}
        self._call(step=step, count=count, before=before, blocks=blocks, **places)

    def _call(self, **values: float | None) -> None:
        for arguments in self._calls:
            for name, value in values.items():
                setattr(arguments, name, value)
        loop, calls = function("weigh", self.scan.chain.dtype), self._calls
        _ = loop(calls) if len(calls) == 1 else team.calls(loop, calls)


forward = partial(products.forward, steps_of=Steps)
backward = partial(products.backward, steps_of=Steps)
