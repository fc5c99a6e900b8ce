"""Chains whose matrices are products of factors, as `kernels.plain.products`, with the step between products in C."""

import ctypes

import torch
from torch import Tensor

from ..chain import WORTH_A_THREAD
from ..plain import products, scaled
from ..plain.products import backward
from ..structured import Structured, Walk, places
from . import team
from .arguments import Pointing, fields, function

__all__ = ["backward", "forward"]


class Arguments(ctypes.Structure):
    """`Weigh` of c/weigh.h, field by field."""

    _fields_ = [
        *fields("first last step rows states *sums blocks *x *x_at x_step *ends"),
        *((name, ctypes.c_double) for name in ("limit", "floor")),
        *fields("spread *state *tops *factors *flagged *rough *scratch"),
    ]


class Weigh(scaled.Weigh, Pointing):
    """`kernels.plain.scaled.Weigh` in C."""

    by_blocks = True

    def __init__(self, scan: scaled.Scan) -> None:
        super().__init__(scan)
        chain, c = scan.chain, scan.chain.c
        x = chain.x.to(chain.dtype).resolve_neg()
        x = x if x.stride(-1) == 1 or c == 1 else x.contiguous()
        self.arguments, self._held = Arguments(rows=scan.n, states=c, x_step=x.stride(-2), spread=self.spread), {}
        self.arguments.floor = self.floor
        self.point(x=x, x_at=places(x, chain.batch)[scan.order].contiguous(), flagged=scan.flagged)
        self.point(ends=None if scan.ends is None else scan.ends.contiguous())
        self._threads = max(1, min(torch.get_num_threads(), scan.n, 16 * scan.n * c // WORTH_A_THREAD))
        self._scratch, self._function = scan.new(self._threads, c), function("weigh", chain.dtype)

    def __call__(self, step: int, sums: Tensor, blocks: int, limit: float, out: Tensor) -> None:
        """As `kernels.plain.scaled.Weigh`, on several threads."""
        a, scan, count = self.arguments, self.scan, self._threads
        a.step, a.blocks, a.limit, a.sums, a.state = step, blocks, limit, sums.data_ptr(), out.data_ptr()
        a.tops, a.factors, a.rough = (table[step].data_ptr() for table in (scan.tops, scan.factors, scan.rough))
        copies = (Arguments * count)(*[a] * count)
        for i, share in enumerate(copies):
            share.first, share.last, share.scratch = (
                scan.n * i // count,
                scan.n * (i + 1) // count,
                self._scratch[i].data_ptr(),
            )
        if count == 1:
            self._function(copies)
        else:
            team.calls(self._function, copies)


def forward(chain: Structured, keep: bool) -> Walk:
    """The log-partitions, and what `backward` reads."""
    return products.forward(chain, keep, Weigh)
