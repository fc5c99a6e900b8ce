"""Chains of one process, and the parts of them that ranks hold."""

from typing import NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    """A chain as one process has it: x `[*B, v, c]`, `bulk`, p0, lengths, and the numbers of variables of ranks."""

    x: Tensor
    bulk: Tensor
    p0: Tensor
    lengths: Tensor | None
    log_params: bool
    sizes: tuple[int, ...]

    @property
    def options(self) -> dict:
        """The options of any question."""
        return {"log_params": self.log_params, "lengths": self.lengths}

    def variables(self, rank: int) -> slice:
        """The variables that a rank holds."""
        start = sum(self.sizes[:rank])
        return slice(start, start + self.sizes[rank])

    def matrices(self, rank: int) -> slice:
        """The matrices that a rank holds: of all if there is one for every step."""
        if self.bulk.shape[-3] == 1:
            return slice(0, 1)
        start, stop = max(0, self.variables(rank).start - 1), self.variables(rank).stop - 1
        return slice(start, max(start, stop))

    def of(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, `bulk` and p0 of a rank, in memory of their own."""
        x, bulk = self.x[..., self.variables(rank), :], self.bulk[..., self.matrices(rank), :, :]
        return x.clone(), bulk.clone(), self.p0.clone()


def chain(
    sizes,
    c: int,
    *,
    batch=(),
    own=(),
    one_matrix=True,
    log_params=False,
    dtype=torch.float64,
    lengths=False,
    zeros=0.2,
    scale=2.0,
    seed=0,
) -> Case:
    """A random chain with zeros among its weights; `own` are the batch axes of `bulk`, `scale` that of x."""
    generator = torch.Generator().manual_seed(1000 * seed + sum(sizes) + c)
    v = sum(sizes)
    x = scale * torch.randn(*batch, v, c, generator=generator, dtype=torch.float64)
    bulk = torch.rand(*own, 1 if one_matrix else v - 1, c, c, generator=generator, dtype=torch.float64)
    bulk = bulk * (torch.rand(bulk.shape, generator=generator) > zeros)
    p0 = torch.rand(c, generator=generator, dtype=torch.float64)
    bulk, p0 = (bulk.log(), p0.log()) if log_params else (bulk, p0)
    ends = torch.randint(1, v + 1, batch, generator=generator) if lengths else None
    return Case(x.to(dtype), bulk.to(dtype), p0.to(dtype), ends, log_params, tuple(sizes))
