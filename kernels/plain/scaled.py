"""Chains whose matrices are products of factors, by scaled linear messages on any device but a GPU.

    U_t = S_{t-1} P_t        S_t = U_t E_t f_t        E_t = exp(x_t - max x_t)        log Z = log(sum S_{v-1}) - ...

f_t are powers of two that keep the largest of S near 2^TOP. Emissions, weights and messages that are too small to be
multiplied are raised: a sum is 0 only where no path leads. A sequence with a sum so small that raised numbers may be in
its digits is recomputed in logarithms. Backward, with B = 1 at the end:

    posterior = S B / sum S B        T_t = B_t E_t f_t / sum S B        B_{t-1} = P_t T_t        counts = S_{t-1} T_t
"""

import math
from functools import cached_property

import torch
from torch import Tensor

from .. import in_large_pages, on_gpu
from ..numbers import exact_sum
from ..sets import Sets
from ..stages import transposed
from ..structured import Structured
from .factors import DEEPEST, GUARD, TOP, PreparedFactors, halves
from .links import Link, Products, links

# log 2 as two numbers; products of the first with exponents are exact
_LN2_HIGH, _LN2_LOW = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")


class Scan:
    """The sequences of a chain as n rows, and what a forward and a backward scan share.

    Attributes:
        order: the sequence of each row (n), as an index of the flattened batch.
        ends: the number of steps of each row (n), or None.
        tops, factors, rough: (v, n), max x and f of each step, and whether S has an entry that is 0 or raised.
        flagged: (n), whether a sequence has to be recomputed.
    """

    def __init__(self, chain: Structured, forward: tuple[Link, ...], backward: tuple[Link, ...]) -> None:
        self.chain, self.sets, self.links, self.back_links = chain, Sets.of(chain), forward, backward
        self.factors_of, self.n = PreparedFactors(chain, self.sets), self.sets.g * self.sets.m
        self.order = self.rows(torch.arange(self.n, device=chain.x.device).view(chain.batch))
        self.ends = None if chain.ends is None else self.rows(chain.ends)
        self.tops, self.factors = self.new(2, chain.v, self.n)
        self.rough = torch.zeros(chain.v, self.n, dtype=torch.bool, device=chain.x.device)
        self.flagged = torch.zeros(self.n, dtype=torch.bool, device=chain.x.device)

    @classmethod
    def of(cls, chain: Structured) -> "Scan | None":
        """The scan of a chain; None on a GPU, where no flag is read on the host, and for stages that permute rows."""
        if on_gpu(chain.x):
            return None
        shapes = [torch.empty(p.shape[len(chain.batch) + 1 :], device="meta") for p in chain.parameters]
        pattern, parameters = transposed(chain.pattern, shapes)
        forward, backward = links(chain.pattern.stages, shapes), links(pattern.stages, parameters)
        return None if forward is None or backward is None else cls(chain, forward, backward)

    @cached_property
    def last_steps(self) -> list[int]:
        """The numbers of steps that nonzero sequence has, in order."""
        return [self.chain.v] if self.ends is None else sorted(set(self.ends.tolist()))

    def new(self, *shape: int) -> Tensor:
        """Uninitialized memory of the dtype of the arithmetic."""
        return in_large_pages(self.chain.x.new_empty(shape, dtype=self.chain.dtype))

    def rows(self, values: Tensor) -> Tensor:
        """Values [*B or ones, *rest] of sequences as (n, *rest)."""
        return self.sets.grouped(values).flatten(0, 1)

    def in_batch(self, rows: Tensor) -> Tensor:
        """Values (n, *rest) of rows as a view [*B, *rest]."""
        return self.sets.batched(rows.view(self.sets.g, self.sets.m, *rows.shape[1:]))

    def x(self, step: int) -> Tensor:
        """The log-potentials of a step (n, c)."""
        return self.rows(self.chain.x[..., step, :])

    def inside(self, step: int) -> Tensor | None:
        """Whether a sequence has a step (n); None: all have."""
        return None if self.ends is None else self.ends > step

    def add_diagonal(self, sums: Tensor, rows: Tensor, diagonal: Tensor | None) -> None:
        """Add what the diagonal (sets, c) adds to the sums of rows."""
        if diagonal is not None:
            shape = len(diagonal), -1, rows.shape[1]
            sums.view(shape).addcmul_(rows.view(shape), diagonal[:, None])

    def start(self) -> tuple[Tensor, Tensor]:
        """p0 (n, c) with a largest entry of 2^(TOP - 1) to 2^TOP, and the logarithm of what it was divided by (n)."""
        values, dtype, log = self.chain.p0.double(), self.chain.dtype, self.chain.log_params
        top = values.amax(-1, keepdim=True)
        scale = torch.where(top.isfinite(), top, 0.0)
        if log:
            weights = (values - scale).exp()
        else:
            scale = torch.frexp(scale).exponent.double()
            first, second = halves(scale)
            weights = values * first * second
        weights = weights * 2.0 ** TOP[dtype]
        least = 2.0 ** (TOP[dtype] - self.factors_of.depth - 1)  # flagged, but not 0
        weights.masked_fill_((values > (-math.inf if log else 0.0)) & (weights < least), least)
        return self.rows(weights.to(dtype)).contiguous(), self.rows(scale)[:, 0]


class Weigh:
    """The step between products of matrices: writes S, and the row of a step of the tables of a scan."""

    by_blocks = False

    def __init__(self, scan: Scan) -> None:
        self.scan, dtype = scan, scan.chain.dtype
        depth = scan.factors_of.depth
        self.floor, self.spread = 2.0 ** (TOP[dtype] - depth), DEEPEST[dtype] - depth

    def __call__(self, step: int, sums: Tensor, blocks: int, limit: float, out: Tensor) -> None:
        """Write S (n, c) of a step, from sums U, (blocks, n, c / blocks)."""
        scan, dtype = self.scan, self.scan.chain.dtype
        x, inside = scan.x(step), scan.inside(step)
        top = x.amax(-1, keepdim=True).to(dtype)
        top.masked_fill_(top == -math.inf, 0.0)
        torch.sub(x, top, out=out).clamp_(min=-DEEPEST[dtype] * math.log(2.0)).exp_()
        out.masked_fill_(x == -math.inf, 0.0).mul_(sums)
        high, most = out.amax(-1), sums.amax(-1)
        flagged = ((sums < limit) & (sums != 0)).any(-1) | ~(high.isfinite() & most.isfinite())
        scan.flagged |= flagged if inside is None else flagged & inside
        dead = scan.flagged if inside is None else scan.flagged | ~inside
        least = torch.finfo(dtype).tiny
        power = TOP[dtype] - torch.frexp(high).exponent
        power = torch.minimum(power, TOP[dtype] - torch.frexp(most).exponent + self.spread)
        power = power.clamp(int(math.log2(least)), -int(math.log2(least))).masked_fill(dead | (high == 0), 0)
        torch.exp2(power.to(dtype), out=scan.factors[step])
        scan.tops[step] = top[:, 0].masked_fill(dead, 0.0)
        out.mul_(scan.factors[step][:, None])
        small = out <= self.floor
        out.masked_fill_(small & (out > 0), self.floor).masked_fill_(dead[:, None], 0.0)
        scan.rough[step] = small.any(-1) & ~dead


def run(scan: Scan, keep: bool, weigh: Weigh) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The log-partitions (n), wrong where flagged; S (v, n, c); rows between stages (v - 1, n, size), or none."""
    chain, n, weights = scan.chain, scan.n, scan.factors_of
    state, sums = scan.new(chain.v if keep else 2, n, chain.c), scan.new(n, chain.c)
    keep_middles = keep and sum(link.size for link in scan.links[:-1]) <= chain.c
    middles = [scan.new(chain.v - 1 if keep_middles else 1, n, link.size) for link in scan.links[:-1]]
    products, stops = Products(scan.links, n, sums), set(scan.last_steps)
    total = torch.zeros(n, dtype=torch.float64, device=state.device)
    start, start_shift = scan.start()
    weigh(0, start, 1, weigh.floor, state[0])
    for step in range(max(stops)):
        after = state[step % len(state)]
        if step > 0:
            before, (matrices, diagonal) = state[(step - 1) % len(state)], weights.at(step)
            between = [tensor[step - 1 if keep_middles else 0] for tensor in middles]
            by_blocks = weigh.by_blocks and diagonal is None
            blocks = products.run(before, matrices, between, sums, by_blocks)
            scan.add_diagonal(sums, before, diagonal)
            weigh(step, sums, blocks, weights.limit, after)
        if step + 1 in stops:
            sum_here = after.sum(-1, dtype=torch.float64)
            total = sum_here if scan.ends is None else torch.where(scan.ends == step + 1, sum_here, total)
    uncertain = (total != 0) & ~(total >= 2.0 ** (TOP[chain.dtype] + GUARD[chain.dtype] - weights.depth))
    scan.flagged |= uncertain | ~total.isfinite()
    return _log_norm(scan, max(stops), start_shift, total), state, middles if keep_middles else []


def _log_norm(scan: Scan, steps: int, start: Tensor, total: Tensor) -> Tensor:
    """The log-partitions (n) of sums of the last messages."""
    sets, log = scan.sets, scan.chain.log_params
    shifts = scan.factors_of.shifts(steps - 1, sets.g)[..., None].expand(-1, -1, sets.m).flatten(1)
    if scan.ends is not None:
        shifts = shifts.masked_fill(scan.ends <= torch.arange(1, steps, device=start.device)[:, None], 0.0)
    shifts = torch.cat([shifts, start[None]])
    rest, exponents = torch.frexp(total)
    exponents = exponents.double() + steps - torch.frexp(scan.factors[:steps]).exponent.sum(0) - TOP[scan.chain.dtype]
    if not log:
        exponents, shifts = exponents + shifts.sum(0), shifts[:0]
    parts = torch.stack([exponents * _LN2_HIGH, exponents * _LN2_LOW, rest.log()])
    return torch.stack(exact_sum(torch.cat([scan.tops[:steps].double(), shifts, parts]))).sum(0)
