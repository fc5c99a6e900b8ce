"""Chains of one process, and the parts of them that ranks hold."""

from typing import NamedTuple

import torch
from torch import Tensor

import logchain
from tests.layouts import relaid

F64 = torch.float64

# the axis of variables, counted from the end, of results that have one
_OF_VARIABLES = {"gradient of x": -2, "change of x": -2, "posteriors": -2, "states": -1}
_OF_STEPS = "gradient of bulk", "change of bulk", "counts"


class Case(NamedTuple):
    """A chain as one process has it, the numbers of variables of ranks, and the layout of their parts, if any."""

    x: Tensor
    bulk: Tensor
    p0: Tensor
    lengths: Tensor | None
    log_params: bool
    sizes: tuple[int, ...]
    layout: str | None = None

    @property
    def options(self) -> dict:
        return {"log_params": self.log_params, "lengths": self.lengths}

    @property
    def paths(self) -> Tensor:
        """The best path, and one that may be impossible [2, *B, v]; past a sequence's end is no state at all."""
        best = logchain.viterbi(*self[:3], **self.options).states
        ends = best.shape[-1] if self.lengths is None else self.lengths[..., None]
        inside, paths = torch.arange(best.shape[-1]) < ends, torch.stack([best, best.roll(1, -1).clamp(min=0)], -1)
        return torch.where(inside[..., None], paths, -100).movedim(-1, 0)  # of strange strides

    def of(self, rank: int) -> tuple[Tensor, ...]:
        """x, `bulk` and p0 of a rank."""
        parts = self.part(rank, "gradient of x", self.x), self.part(rank, "gradient of bulk", self.bulk), self.p0
        return tuple(part.clone() if self.layout is None else relaid(part, self.layout) for part in parts)

    def part(self, rank: int, name: str, result: Tensor) -> Tensor:
        """A rank's part of a result, by its name: that of its variables, or of the steps that lead into them."""
        start, stop = sum(self.sizes[:rank]), sum(self.sizes[: rank + 1])
        if name in _OF_VARIABLES:
            return result.narrow(_OF_VARIABLES[name], start, stop - start)
        if name == "transitions" or (name in _OF_STEPS and self.bulk.shape[-3] > 1):
            return result[..., max(0, start - 1) : max(0, stop - 1), :, :]
        return result


def chain(
    sizes, c, *, batch=(), own=(), one_matrix=True, log_params=False, dtype=F64, lengths=False, zeros=0.2, scale=2.0,
    change=lambda x: x, layout=None,
) -> Case:  # fmt: skip
    """A random chain with zeros among its weights; `own` are the batch axes of `bulk`, and `change` is made to x."""
    generator = torch.Generator().manual_seed(sum(sizes) + c)
    v = sum(sizes)
    x = scale * torch.randn(*batch, v, c, generator=generator, dtype=F64)
    bulk = torch.rand(*own, 1 if one_matrix else v - 1, c, c, generator=generator, dtype=F64)
    bulk = bulk * (torch.rand(bulk.shape, generator=generator) > zeros)
    p0 = torch.rand(c, generator=generator, dtype=F64)
    bulk, p0 = (bulk.log(), p0.log()) if log_params else (bulk, p0)
    p0 = p0 if layout is None else p0.expand(*batch, -1)
    ends = torch.randint(1, v + 1, batch, generator=generator) if lengths else None
    return Case(change(x).to(dtype), bulk.to(dtype), p0.to(dtype), ends, log_params, tuple(sizes), layout)
