"""Chains whose matrices are products of factors, by scaled linear messages on any device but a GPU.

    U_t = S_{t-1} P_t        S_t = U_t E_t f_t        E_t = exp(x_t - max x_t)        log Z = log(sum S_{v-1}) - ...

f_t are powers of two that keep the largest of S near 2^TOP. Emissions, weights and messages that are too small to be
multiplied are raised: a sum is 0 only where no path leads. A sequence with a sum so small that raised numbers may be in
its digits is recomputed in logarithms. Backward, with B = 1 at the end:

    posterior = S B / sum S B        T_t = B_t E_t f_t / sum S B        B_{t-1} = P_t T_t        counts = S_{t-1} T_t
"""

import math

import torch
from torch import Tensor

from .. import in_large_pages
from ..layout import Layout
from ..numbers import exact_sum
from ..structured import Structured
from .factors import DEEPEST, GUARD, TOP, PreparedFactors, halves, multiply

# log 2 as two numbers; products of the first with exponents are exact
_LN2_HIGH, _LN2_LOW = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")


class Scan:
    """The sequences of a chain as n rows, and what a forward and a backward scan share.

    Rows are in the order of sets; those of a single set in that of their lengths, the longest first.

    Attributes:
        order: the sequence of each row (n), as an index of the flattened batch.
        ends: the number of steps of each row (n).
        active: for each step, how many of the first rows it takes: those that have it, or of several sets all.
        tops, factors: (v, n), max x and f of each step.
        flagged: (n), whether a sequence has to be recomputed.
        live, weight, inverse: (n), backward: which rows are computed, their weights, and 1 / sum S B of the last step.
    """

    live: Tensor
    weight: Tensor

    def __init__(self, chain: Structured) -> None:
        self.chain, self.product, device = chain, chain.pattern.factors, chain.x.device
        self.layout = Layout.of_parameters(chain.batch, chain.parameters)
        self.prepared, self.n = PreparedFactors(chain, self.layout), math.prod(self.layout.grid)
        order = self.layout.grouped(torch.arange(self.n, device=device).view(chain.batch)).flatten()
        ends = torch.full_like(order, chain.v) if chain.ends is None else chain.ends.reshape(-1)[order]
        if self.layout.grid[0] == 1:
            ends, index = ends.sort(descending=True, stable=True)
            order = order[index]
        self.order, self.ends = order, ends.contiguous()
        having = (self.n - torch.bincount(ends, minlength=chain.v + 1).cumsum(0)).tolist()
        self.stops = set(ends.tolist())
        self.active = [count if self.layout.grid[0] == 1 else self.n for count in having if count]
        self.tops, self.factors = self.new(chain.v, self.n).zero_(), self.new(chain.v, self.n).fill_(1.0)
        self.flagged = torch.zeros(self.n, dtype=torch.bool, device=device)
        self.inverse = torch.zeros(self.n, dtype=torch.float64, device=device)

    def new(self, *shape: int) -> Tensor:
        """Uninitialized memory of the dtype of the arithmetic."""
        return in_large_pages(self.chain.x.new_empty(shape, dtype=self.chain.dtype))

    def slots(self, count: int, size: int) -> Tensor:
        """Uninitialized memory (count, size), aligned to 64 bytes each: products then do not depend on which it is."""
        lanes = 64 // self.chain.dtype.itemsize
        return self.new(count, -(-size // lanes) * lanes)[:, :size]

    def rows(self, values: Tensor) -> Tensor:
        """Values [*B or ones, *rest] of sequences as (n, *rest)."""
        rest = values.shape[len(self.chain.batch) :]
        return values.expand((*self.chain.batch, *rest)).reshape(self.n, *rest)[self.order]

    def in_batch(self, rows: Tensor) -> Tensor:
        """Values (n, *rest) of rows as [*B, *rest]."""
        return torch.empty_like(rows).index_copy_(0, self.order, rows).view((*self.chain.batch, *rows.shape[1:]))

    def x(self, step: int, count: int) -> Tensor:
        """The log-potentials of a step (count, c)."""
        return self.chain.x[..., step, :].reshape(self.n, self.chain.c)[self.order[:count]]

    def leaving(self, sums: Tensor, count: int, blocks: int) -> Tensor:
        """The rows (count, c) that leave a product, from the memory that it was written to."""
        c = self.chain.c
        grid = sums.view(-1)[: count * c].view(self.layout.grid[0], blocks, count // self.layout.grid[0], c // blocks)
        return grid.transpose(1, 2).reshape(count, c)

    def add_diagonal(self, sums: Tensor, rows: Tensor, diagonal: Tensor | None) -> None:
        """Add what the diagonal (sets, c) adds to the sums of rows."""
        if diagonal is not None:
            shape = len(diagonal), -1, rows.shape[1]
            sums[: len(rows)].view(shape).addcmul_(rows.view(shape), diagonal[:, None])

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
        least = 2.0 ** (TOP[dtype] - self.prepared.depth - 1)  # flagged, but not 0
        weights.masked_fill_((values > (-math.inf if log else 0.0)) & (weights < least), least)
        return self.rows(weights.to(dtype)).contiguous(), self.rows(scale)[:, 0]


class Steps:
    """The steps between products of matrices, of messages S (v or 2, n, c)."""

    def __init__(self, scan: Scan, state: Tensor) -> None:
        self.scan, self.state, dtype, depth = scan, state, scan.chain.dtype, scan.prepared.depth
        self.floor, self.spread = 2.0 ** (TOP[dtype] - depth), DEEPEST[dtype] - depth
        self.scale, self.least = 2.0**scan.prepared.spare, scan.prepared.least_source

    def _emissions(self, step: int, count: int, top: Tensor) -> Tensor:
        x = self.scan.x(step, count)
        least = -DEEPEST[self.scan.chain.dtype] * math.log(2.0)
        return (x - top[:, None]).clamp(min=least).exp().masked_fill(x == -math.inf, 0.0)

    def forward(self, step: int, count: int, sums: Tensor, blocks: int, limit: float) -> None:
        """Write S of the first rows, and their entries of the tables, from the memory of sums U."""
        scan, dtype = self.scan, self.scan.chain.dtype
        sums, inside, flags = scan.leaving(sums, count, blocks), scan.ends[:count] > step, scan.flagged[:count]
        top = scan.x(step, count).amax(-1).to(dtype)
        top = top.masked_fill(top == -math.inf, 0.0)
        out = self._emissions(step, count, top).to(dtype) * sums
        high, most = out.amax(-1), sums.amax(-1)
        flagged = ((sums < limit) & (sums != 0)).any(-1) | ~(high.isfinite() & most.isfinite())
        flags |= flagged & inside
        dead, least = flags | ~inside, int(math.log2(torch.finfo(dtype).tiny))
        power = TOP[dtype] - torch.frexp(high).exponent
        power = torch.minimum(power, TOP[dtype] - torch.frexp(most).exponent + self.spread)
        factor = torch.exp2(power.clamp(least, -least).masked_fill(dead | (high == 0), 0).to(dtype))
        scan.tops[step, :count], scan.factors[step, :count] = top.masked_fill(dead, 0.0), factor
        out.mul_(factor[:, None])
        out.masked_fill_((out > 0) & (out < self.floor), self.floor).masked_fill_(dead[:, None], 0.0)
        self.state[step % len(self.state), :count] = out

    def backward(
        self, step: int, count: int, sums: Tensor, before: int, blocks: int, source: Tensor, grad_x: Tensor | None
    ) -> None:
        """Write T of the first rows, at step 0 S B, 1 / sum S B and the gradient of x (n, v, c), from the memory of B.

        `before`: how many rows are in that memory; B of others is 1.
        """
        scan, dtype, rows = self.scan, self.scan.chain.dtype, slice(count)
        live = scan.live[rows] & (scan.ends[rows] > step)
        b = torch.ones_like(source)
        b[:before] = scan.leaving(sums, before, blocks)
        b.masked_fill_((scan.ends[rows] == step + 1)[:, None], 1.0).masked_fill_(~live[:, None], 0.0)
        state = self.state[step, rows]
        posterior = state * b
        inverse = posterior.sum(-1).double().reciprocal().masked_fill(~live, 0.0)
        scan.inverse[rows] = inverse
        if grad_x is not None:  # by two factors: weights may be large or small
            grad_x[scan.order[rows], step] = posterior * inverse.to(dtype)[:, None] * scan.weight[rows, None].to(dtype)
        scale = (inverse * scan.factors[step, rows] * self.scale).to(dtype)
        out = self._emissions(step, count, scan.tops[step, rows]).to(dtype) * b * scale[:, None]
        if step == 0:
            source.copy_(posterior)
            return
        # no weight where no path leads
        source.copy_(torch.threshold(out, self.least, 0.0).masked_fill(~live[:, None] | (state == 0), 0.0))


def run(scan: Scan, keep: bool, steps_of: type[Steps]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The log-partitions (n), undefined where flagged; S (v, n, c); rows between factors (v - 1, n size), or none."""
    chain, n, prepared = scan.chain, scan.n, scan.prepared
    state = scan.slots(chain.v if keep else 2, n * chain.c).unflatten(1, (n, chain.c))
    sums = scan.new(n, chain.c)
    keep_middles = keep and sum(factor.size for factor in scan.product[:-1]) <= chain.c
    middles = [scan.slots(chain.v - 1 if keep_middles else 1, n * factor.size) for factor in scan.product[:-1]]
    steps, total = steps_of(scan, state), torch.zeros(n, dtype=torch.float64, device=state.device)
    start, start_shift = scan.start()
    for step, count in enumerate(scan.active):
        if step == 0:
            steps.forward(0, count, start, 1, steps.floor)
        else:
            before, (matrices, diagonal) = state[(step - 1) % len(state), :count], prepared.at(step)
            between = [tensor[step - 1 if keep_middles else 0] for tensor in middles]
            multiply(scan.product, before, matrices, between, sums, scan.layout.grid[0])
            scan.add_diagonal(sums, before, diagonal)
            steps.forward(step, count, sums, scan.product[-1].blocks or 1, prepared.limit)
        if step + 1 in scan.stops:
            ended = scan.ends == step + 1
            total[ended] = state[step % len(state)][ended].sum(-1, dtype=torch.float64)
    uncertain = (total != 0) & ~(total >= 2.0 ** (TOP[chain.dtype] + GUARD[chain.dtype] - prepared.depth))
    scan.flagged |= uncertain | ~total.isfinite()
    return _log_norm(scan, start_shift, total), state, middles if keep_middles else []


def _log_norm(scan: Scan, start: Tensor, total: Tensor) -> Tensor:
    """The log-partitions (n) of sums of the last messages."""
    (sets, members), log, steps = scan.layout.grid, scan.chain.log_params, max(1, len(scan.active))
    shifts = scan.prepared.shifts(steps - 1, sets)[..., None].expand(-1, -1, members).flatten(1)
    shifts = shifts.masked_fill(scan.ends <= torch.arange(1, steps, device=start.device)[:, None], 0.0)
    shifts = torch.cat([shifts, start[None]])
    rest, exponents = torch.frexp(total)
    exponents = exponents.double() + steps - torch.frexp(scan.factors[:steps]).exponent.sum(0) - TOP[scan.chain.dtype]
    if not log:
        exponents, shifts = exponents + shifts.sum(0), shifts[:0]
    parts = torch.stack([exponents * _LN2_HIGH, exponents * _LN2_LOW, rest.log()])
    return torch.stack(exact_sum(torch.cat([scan.tops[:steps].double(), shifts, parts]))).sum(0)
