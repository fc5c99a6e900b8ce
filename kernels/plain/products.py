"""Chains whose matrices are products of factors, by scaled linear messages on any device.

    U_t = S_{t-1} P_t        S_t = U_t E_t f_t        E_t = exp(x_t - max x_t)        log Z = log(sum S_{v-1}) - ...

f_t are powers of two that keep the largest of S near 2^TOP. Emissions, weights and messages that are too small to be
multiplied are raised: a sum is 0 only where no path leads. A sequence with a sum so small that raised numbers may be in
its digits is recomputed in logarithms. Backward, with B = 1 at the end:

    posterior = S B / sum S B        T_t = B_t E_t f_t / sum S B        B_{t-1} = P_t T_t        counts = S_{t-1} T_t
"""

import math
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from .. import in_large_pages
from ..numbers import exact_sum
from ..sets import Sets
from ..stages import transposed
from ..structured import Gradients, Structured, Walk, gradient_of_p0
from . import log_products
from .factors import DEEPEST, GUARD, TOP, Factors, halves
from .links import Link, Products, add_counts, links

# log 2 as two numbers; products of the first with exponents are exact
_LN2_HIGH, _LN2_LOW = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")

# rows of products of which counts are made, in at most so many steps; and how many of these are summed in the dtype
_ROWS, _ROWS_OF_BLOCKS, _STEPS, _ADDED = 128, 32, 16, 16


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
        self.factors_of, self.n = Factors(chain, self.sets), self.sets.g * self.sets.m
        self.order = self.rows(torch.arange(self.n, device=chain.x.device).view(chain.batch))
        self.ends = None if chain.ends is None else self.rows(chain.ends)
        self.tops, self.factors = self.new(2, chain.v, self.n)
        self.rough = torch.zeros(chain.v, self.n, dtype=torch.bool, device=chain.x.device)
        self.flagged = torch.zeros(self.n, dtype=torch.bool, device=chain.x.device)

    @classmethod
    def of(cls, chain: Structured) -> "Scan | None":
        """The scan of a chain; None if its stages would have to permute rows between products."""
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


def forward(chain: Structured, keep: bool, weigh: Callable[[Scan], Weigh] = Weigh) -> Walk:
    """The log-partitions, and what `backward` reads: S, tables, logarithms of recomputed sequences, middles."""
    scan = Scan.of(chain)
    if scan is None:
        return log_products.forward(chain, keep)
    log_norm, state, middles = _forward(scan, keep, weigh(scan))
    chosen = scan.order[scan.flagged]
    logs = state.new_empty((chain.v, len(chosen), chain.c if keep else 0), dtype=torch.float64)
    if len(chosen):
        if sum(tensor.numel() for tensor in middles) + logs.numel() * 8 // state.element_size() > state.numel():
            middles = []  # two message tensors in all: they are recomputed
        walk = log_products.forward(_selected(chain, chosen), keep)
        log_norm[scan.flagged] = walk.log_norm
        logs = walk.kept[0].view(logs.shape) if keep else logs
    tensors = (state, scan.tops, scan.factors, scan.rough, logs, *middles) if keep else ()
    return Walk(scan.in_batch(log_norm).contiguous(), tensors, scan.in_batch(scan.flagged).contiguous())


def _forward(scan: Scan, keep: bool, weigh: Weigh) -> tuple[Tensor, Tensor, list[Tensor]]:
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


def backward(chain: Structured, walk: Walk, weight: Tensor, needs: tuple[bool, bool, bool]) -> Gradients:
    """The gradients of `sum(weight * log_norm)`; see `Gradients`."""
    scan = Scan.of(chain)
    if scan is None:
        return log_products.backward(chain, walk, weight, needs)
    state, scan.tops, scan.factors, scan.rough, logs, *middles = walk.kept
    weight, log_norm, scan.flagged = (scan.rows(tensor) for tensor in (weight.double(), walk.log_norm, walk.redone))
    alive = (weight != 0) & (log_norm != -math.inf)
    gradients = _Backward(scan, state, middles, weight, alive & ~scan.flagged, needs).run()
    which = alive & scan.flagged
    chosen = scan.order[which]
    if len(chosen):
        shape = (chain.v, -1, 1, chain.c) if scan.sets.g > 1 else (chain.v, 1, -1, chain.c)
        before = Walk(log_norm[which], (logs[:, which[scan.flagged]].view(shape),), scan.flagged[which])
        _add(chain, gradients, log_products.backward(_selected(chain, chosen), before, weight[which], needs), chosen)
    return gradients


class _Backward:
    """The backward scan of live rows."""

    def __init__(
        self,
        scan: Scan,
        state: Tensor,
        middles: list[Tensor],
        weight: Tensor,
        live: Tensor,
        needs: tuple[bool, bool, bool],
    ) -> None:
        chain, n, dtype = scan.chain, scan.n, scan.chain.dtype
        self.scan, self.state, self.middles, self.live, self.needs = scan, state, middles, live, needs
        self.weight, self.last = weight.masked_fill(~live, 0.0), max(scan.last_steps) - 1
        self.complete = scan.ends is None and bool(live.all())
        rows = _ROWS_OF_BLOCKS if all(link.blocks for link in scan.links) else _ROWS
        together = scan.factors_of.one_step and scan.sets.g == 1 and needs[1]
        self.together = max(1, min(_STEPS, rows // n, self.last)) if together else 1
        self.sources = scan.new(self.together, n, chain.c)
        self.following = [scan.new(self.together, n, link.size) for link in scan.back_links[:-1]]
        self.recomputed = (
            [] if middles or not needs[1] else [scan.new(self.together, n, k.size) for k in scan.links[:-1]]
        )
        self.forward = Products(scan.links, n, self.sources)
        values = scan.factors_of.values
        self.sums = [tensor.new_zeros(tensor.shape[1:], dtype=dtype) for tensor in values]
        self.totals = [torch.zeros_like(tensor, dtype=torch.float64 if len(tensor) < 2 else dtype) for tensor in values]
        self.factor, shares = _factored(self.weight)
        self.shares = None if shares is None else shares.to(dtype)[:, None].repeat(self.together, 1)
        narrow = max(min(k.entering, k.leaving) * k.size // k.leaving for k in scan.links)
        self.scratch = scan.new(0 if shares is None else len(shares) * self.together * narrow)
        self.added = 0

    def run(self) -> Gradients:
        """The gradients."""
        scan, chain, weights = self.scan, self.scan.chain, self.scan.factors_of
        back, b, posterior = Products(scan.back_links, scan.n, self.sources), *scan.new(2, scan.n, chain.c)
        grad_x = scan.new(*chain.batch, chain.v, chain.c) if self.needs[0] else None
        if grad_x is not None:
            grad_x[..., self.last + 1 :, :] = 0.0
        first = last = self.last
        for step in range(self.last, -1, -1):
            inverse = self._meet(step, b, posterior)
            if grad_x is not None:
                factor = (inverse * self.weight)[:, None].to(chain.dtype)
                torch.mul(scan.in_batch(posterior), scan.in_batch(factor), out=grad_x[..., step, :])
            if step == 0:
                break
            if step == last:
                first = max(1, last - self.together + 1)
            slot = step - first
            source, following = self.sources[slot], [tensor[slot] for tensor in self.following]
            self._source(step, b, inverse, posterior, source)
            matrices, diagonal = weights.at(step)
            back.run(source, [tensor.mT for tensor in matrices[::-1]], following, b)
            scan.add_diagonal(b, source, diagonal)
            if self.needs[1]:
                if self.recomputed:
                    self.forward.between(self.state[step - 1], matrices, [tensor[slot] for tensor in self.recomputed])
                if step == first:
                    self._count(first, last)
            last = step - 1 if step == first else last
        counts = (posterior.double() * (inverse * self.weight)[:, None]).masked_fill_(posterior == 0, 0.0)
        return Gradients(
            grad_x,
            self._parameters() if self.needs[1] else None,
            gradient_of_p0(chain, scan.in_batch(counts).contiguous()) if self.needs[2] else None,
        )

    def _meet(self, step: int, b: Tensor, posterior: Tensor) -> Tensor:
        """Write S B, which is 0 in rows that are not live here, and 1 / its sum (n), float64, or 0."""
        scan = self.scan
        if step + 1 in scan.last_steps:  # so that the sum below is 2^spare, as in all steps
            initial = (2.0**scan.factors_of.spare / self.state[step].sum(-1, keepdim=True).double()).to(b.dtype)
            b.copy_(initial if scan.ends is None else torch.where((scan.ends == step + 1)[:, None], initial, b))
        inside = self.live if scan.ends is None else self.live & (scan.ends > step)
        if not self.complete:
            b.masked_fill_(~inside[:, None], 0.0)
        torch.mul(self.state[step], b, out=posterior)
        total = posterior.sum(-1).double()
        return total.reciprocal_().masked_fill_(~inside, 0.0)

    def _source(self, step: int, b: Tensor, inverse: Tensor, scratch: Tensor, out: Tensor) -> None:
        """Write T of a step."""
        scan, dtype = self.scan, self.scan.chain.dtype
        torch.sub(scan.x(step), scan.tops[step][:, None], out=out)
        rough = bool(scan.rough[step].any())
        if rough:
            out.clamp_(min=-DEEPEST[dtype] * math.log(2.0))
        out.exp_().mul_(b)
        if rough:  # no weight where no path leads
            out.mul_(torch.sign(self.state[step], out=scratch))
        out.mul_((inverse * scan.factors[step] * 2.0**scan.factors_of.spare).to(dtype)[:, None])
        if not self.complete:
            out.masked_fill_((inverse == 0)[:, None], 0.0)
        torch.threshold_(out, scan.factors_of.least_source, 0.0)

    def _count(self, first: int, last: int) -> None:
        """Add the counts of the transitions into steps from `first` to `last`."""
        count = last - first + 1
        between = [tensor[first - 1 : last] for tensor in self.middles] or [
            tensor[:count] for tensor in self.recomputed
        ]
        entering = [tensor.flatten(0, 1) for tensor in (self.state[first - 1 : last], *between)]
        leaving = [tensor[:count].flatten(0, 1) for tensor in (*self.following[::-1], self.sources)]
        shares = None if self.shares is None else self.shares[: count * self.scan.n]
        self.added += 1
        stages = zip(self.scan.links, self.scan.chain.pattern.stages, entering, leaving, self.sums, strict=False)
        for place, (link, stage, front, following, sums) in enumerate(stages):
            if shares is not None:
                narrow = front if link.entering <= link.leaving else following
                scaled = torch.mul(narrow, shares, out=self.scratch[: narrow.numel()].view(narrow.shape))
                front, following = (scaled, following) if narrow is front else (front, scaled)
            add_counts(link, stage.transposed, front, following, sums)
            self._flush(place, first, self.added % _ADDED == 0)
        if self.scan.chain.pattern.diagonal:
            terms = entering[0] * leaving[-1] if shares is None else entering[0] * leaving[-1] * shares
            self.sums[-1] += terms.view(len(self.sums[-1]), -1, terms.shape[1]).sum(1)
            self._flush(len(self.sums) - 1, first, True)

    def _flush(self, place: int, step: int, add: bool) -> None:
        """Move sums to the gradient of a step, or add them to that of all, if they are to be added."""
        sums, total = self.sums[place], self.totals[place]
        if len(total) > 1:
            total[step - 1] = self._finished(place, step, sums)
        elif add:
            total[0] += sums
        if len(total) > 1 or add:
            sums.zero_()

    def _finished(self, place: int, step: int, counts: Tensor) -> Tensor:
        factor = self.factor * 2.0**-self.scan.factors_of.spare
        return self.scan.factors_of.gradient(place, step, counts, factor)

    def _parameters(self) -> tuple[Tensor, ...]:
        scan, gradients = self.scan, []
        for place, (total, operand) in enumerate(zip(self.totals, scan.chain.parameters, strict=True)):
            if len(total) == 1:
                total[0] += self.sums[place]
                total[0] = self._finished(place, 1, total[0])
            gradients.append(scan.sets.as_parameter(total, operand.shape).to(scan.chain.dtype))
        return tuple(gradients)


def _factored(weight: Tensor) -> tuple[float, Tensor | None]:
    """Weights (n) of rows that are not 0, as a factor and the rest: None if they are equal, or all at most 1."""
    nonzero = weight[weight != 0]
    if len(nonzero) == 0 or bool((nonzero == nonzero[0]).all()):
        return float(nonzero[0]) if len(nonzero) else 1.0, None
    factor = 2.0 ** int(torch.frexp(nonzero.abs().amax()).exponent)
    return factor, weight / factor


def _index(chain: Structured, tensor: Tensor, chosen: Tensor) -> tuple[Tensor, ...] | None:
    """The indices of chosen sequences along the batch axes of an operand; None if all share it."""
    sizes = tensor.shape[: len(chain.batch)]
    if all(size == 1 for size in sizes):
        return None
    places = torch.unravel_index(chosen, chain.batch)
    return tuple(place if size > 1 else torch.zeros_like(place) for place, size in zip(places, sizes, strict=True))


def _selected(chain: Structured, chosen: Tensor) -> Structured:
    """The chain of the chosen sequences, indices of the flattened batch, with one batch axis."""

    def of(tensor: Tensor) -> Tensor:
        index = _index(chain, tensor, chosen)
        return tensor[index] if index else tensor[(0,) * len(chain.batch)][None]

    return Structured(
        x=of(chain.x).expand(len(chosen), -1, -1),
        parameters=tuple(of(tensor) for tensor in chain.parameters),
        p0=of(chain.p0),
        pattern=chain.pattern,
        ends=None if chain.ends is None else chain.ends.reshape(-1)[chosen],
        log_params=chain.log_params,
        dtype=chain.dtype,
        by_log=chain.by_log,
    )


def _add(chain: Structured, gradients: Gradients, more: Gradients, chosen: Tensor) -> None:
    """Add the gradients of the chosen sequences to those of all."""

    def add(total: Tensor | None, part: Tensor | None, operand: Tensor) -> None:
        if total is None or part is None:
            return
        index = _index(chain, operand, chosen)
        if index:
            total.index_put_(index, part, accumulate=True)
        else:
            total += part.view(total.shape)

    add(gradients.x, more.x, gradients.x if gradients.x is not None else chain.x)
    add(gradients.p0, more.p0, chain.p0)
    for total, part, operand in zip(gradients.parameters or (), more.parameters or (), chain.parameters, strict=False):
        add(total, part, operand)
