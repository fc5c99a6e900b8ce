"""Chains whose matrices are products of factors, by scaled linear messages: torch's products, and steps in C.

    U_t = S_{t-1} P_t        S_t = U_t E_t f_t        E_t = exp(x_t - max x_t)        log Z = log(sum S_{v-1}) - ...

f_t are powers of two that move the largest of U to 2^TOP. Emissions, weights and messages that are too small to be
multiplied are raised: a sum is 0 only where no path leads. A sequence with a sum so small that raised numbers may be in
its digits is flagged, to be computed in logarithms, forward and backward. Backward, with B = 1 at the end:

    posterior = S B / sum S B        T_t = B_t E_t f_t / sum S B        B_{t-1} = P_t T_t        counts = S_{t-1} T_t
"""

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..chain import Layout
from ..numbers import exact_sum
from ..structured import Gradients, Saved, Structured
from . import team
from .arguments import Pointing, copies, function, places, set_field, thread_spans
from .factors import counts, entering, multiply
from .library import fields, in_large_pages
from .scaled import GUARD, TOP, Weights, exponent, linear

# log 2 as two numbers; products of the first with exponents are exact
_LN2_HIGH, _LN2_LOW = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")

# rows of products of which counts are made at once, in at most so many steps
_ROWS, _STEPS = 128, 16


class Arguments(ctypes.Structure):
    """`Weigh` of c/weigh.h, field by field."""

    _fields_ = [
        *fields("first last shares step count rows states slots slot *sums *x *x_at x_step *ends"),
        *((name, ctypes.c_double) for name in ("limit", "floor", "scale", "least")),
        *fields("*state *tops *powers *flagged *live *weight *inverse *source *grad *grad_at"),
    ]


class Scan(Pointing):
    """The sequences of a chain as n rows, and the steps between products of matrices, in C on several threads.

    Rows are in the order of sets; those of a single set in that of their lengths, the longest first.

    Attributes:
        order: the sequence of each row (n), as an index of the flattened batch.
        ends: the number of steps of each row (n).
        active: for each step, how many of the first rows it takes: those that have it, or of several sets all.
        state: messages S (v or 2, n, c).
        tops, powers: (v, n), max x and f of each step.
        flagged: (n), whether a sequence has to be computed in logarithms.
        live, weight, inverse: (n), backward: which rows are computed, their weights, and 1 / sum S B of the last step.
    """

    def __init__(self, chain: Structured, saved: Sequence[Tensor] | None = None, *, keep: bool = True) -> None:
        self.chain, self.dtype, device = chain, chain.dtype, chain.x.device
        self.layout = Layout.of_parameters(chain.batch, chain.parameters)
        self.weights, self.sets, self.n = Weights(chain, self.layout), self.layout.grid[0], math.prod(self.layout.grid)
        order = self.layout.grouped(torch.arange(self.n, device=device).view(chain.batch)).flatten()
        ends = torch.full_like(order, chain.v) if chain.lengths is None else chain.lengths.reshape(-1)[order]
        if self.sets == 1:
            ends, index = ends.sort(descending=True, stable=True)
            order = order[index]
        self.order, self.ends = order, ends.contiguous()
        having = (self.n - torch.bincount(ends, minlength=chain.v + 1).cumsum(0)).tolist()
        self.active = [count if self.sets == 1 else self.n for count in having if count]
        if saved is None:
            saved = self._slots(chain.v if keep else 2), self.new(chain.v, self.n).zero_(), self.new(chain.v, self.n)
            saved[2].fill_(1.0)
        self.state, self.tops, self.powers = saved
        self.flagged, self.live = (torch.zeros(self.n, dtype=torch.bool, device=device) for _ in range(2))
        self.weight, self.inverse = (torch.zeros(self.n, dtype=torch.float64, device=device) for _ in range(2))
        self.floor, self.scale = 2.0 ** (TOP[self.dtype] - self.weights.depth), 2.0**self.weights.spare
        self._calls = self._arguments()

    def _arguments(self) -> Any:
        """The arguments of each thread."""
        chain, n, c, state = self.chain, self.n, self.chain.c, self.state
        x = chain.x.to(self.dtype).resolve_neg()
        x = x if x.stride(-1) == 1 or c == 1 else x.contiguous()
        self.arguments, self._held = Arguments(rows=n, states=c, slots=len(state), slot=state.stride(0)), {}
        self.set(floor=self.floor, scale=self.scale, least=self.weights.least_source, x_step=x.stride(-2))
        self.set(x=x, x_at=places(x, chain.batch)[self.order].contiguous(), grad_at=self.order * (chain.v * c))
        names = "state", "ends", "tops", "powers", "flagged", "live", "weight", "inverse"
        self.set(**{name: getattr(self, name) for name in names})
        self.arguments.shares = len(thread_spans(n, 16 * n * c))
        return copies(self.arguments, [(share, share + 1) for share in range(self.arguments.shares)])

    def new(self, *shape: int) -> Tensor:
        """Uninitialized memory of the dtype of the arithmetic."""
        return in_large_pages(self.chain.x.new_empty(shape, dtype=self.dtype))

    def _slots(self, count: int) -> Tensor:
        """Memory of messages (count, n, c), aligned to 64 bytes each: products then do not depend on which it is."""
        lanes, size = 64 // self.dtype.itemsize, self.n * self.chain.c
        return self.new(count, -(-size // lanes) * lanes)[:, :size].view(count, self.n, self.chain.c)

    def rows(self, values: Tensor) -> Tensor:
        """Values [*B or ones, *rest] of sequences as (n, *rest)."""
        rest = values.shape[len(self.chain.batch) :]
        return values.expand((*self.chain.batch, *rest)).reshape(self.n, *rest)[self.order]

    def in_batch(self, rows: Tensor) -> Tensor:
        """Values (n, *rest) of rows as [*B, *rest]."""
        return torch.empty_like(rows).index_copy_(0, self.order, rows).view((*self.chain.batch, *rows.shape[1:]))

    def in_sets(self, rows: Tensor) -> Tensor:
        """Rows (count, c) as products take them: with an axis of sets if there are several."""
        return rows if self.sets == 1 else rows.unflatten(0, (self.sets, -1))

    def of_steps(self, values: Tensor) -> Tensor:
        """Rows (steps, count, size) of some steps as products take them."""
        if self.sets == 1:
            return values.flatten(0, 1)
        length, _, size = values.shape
        return values.view(length, self.sets, -1, size).transpose(0, 1).reshape(self.sets, -1, size)

    def matrices(self, step: int) -> tuple[list[Tensor], Tensor | None]:
        """The matrices of the factors into a step, and the diagonal (c) or (sets, 1, c)."""
        weights, pattern = self.weights.at(step), self.weights.pattern
        weights = [weight[0] for weight in weights] if self.sets == 1 else weights
        diagonal = None if not pattern.diagonal else weights[-1] if self.sets == 1 else weights[-1][:, None]
        factors = zip(weights, pattern.factors, strict=False)
        return [weight.mT if factor.transposed else weight for weight, factor in factors], diagonal

    def start(self) -> tuple[Tensor, Tensor]:
        """p0 (n, c) with a largest entry of 2^(TOP - 1) to 2^TOP, and the logarithm of what it was divided by (n)."""
        values, dtype, log = self.chain.p0.double(), self.dtype, self.chain.log_params
        scale = exponent(values.amax(-1), log=log)
        scale = scale.masked_fill(scale == -math.inf, 0.0)
        weights = linear(values, scale, log=log) * 2.0 ** TOP[dtype]
        least = 2.0 ** (TOP[dtype] - self.weights.depth - 1)  # flagged, but not 0
        weights.masked_fill_((values > (-math.inf if log else 0.0)) & (weights < least), least)
        return self.rows(weights.to(dtype)).contiguous(), self.rows(scale)

    def weigh(self, **values: Tensor | float | None) -> None:
        """Compute a step of the first `count` rows in C, on all threads.

        Forward, of sums U (count, c) and a `limit`: S, and entries of the tables. Backward, of the `sums` B of the rows
        of the step after, where B of others is 1: T (count, c) to `source`, at step 0 S B, with 1 / sum S B, and the
        gradient `grad` of x (n, v, c).
        """
        for arguments in self._calls:
            for name, value in values.items():
                set_field(arguments, name, value)
        loop = function("weigh", self.dtype)
        if len(self._calls) == 1:
            loop(self._calls)
        else:
            team.calls(loop, self._calls)

    def log_norm(self, shift: Tensor, total: Tensor) -> Tensor:
        """The log-partitions (n) of sums of the last messages; `shift`: that of p0."""
        steps = max(1, len(self.active))
        shifts = self.weights.shifts(steps - 1, self.sets)[..., None].expand(-1, -1, self.n // self.sets).flatten(1)
        shifts = shifts.masked_fill(self.ends <= torch.arange(1, steps, device=shift.device)[:, None], 0.0)
        shifts = torch.cat([shifts, shift[None]])
        rest, exponents = torch.frexp(total)
        exponents = exponents.double() + steps - torch.frexp(self.powers[:steps]).exponent.sum(0)
        exponents = exponents - TOP[self.dtype]
        if not self.chain.log_params:
            exponents, shifts = exponents + shifts.sum(0), shifts[:0]
        parts = torch.stack([exponents * _LN2_HIGH, exponents * _LN2_LOW, rest.log()])
        return torch.stack(exact_sum(torch.cat([self.tops[:steps].double(), shifts, parts]))).sum(0)


def forward(chain: Structured, keep: bool) -> Saved:
    """The log-partitions, and what `backward` reads: S and the tables."""
    scan = Scan(chain, keep=keep)
    factors, guard = scan.weights.pattern.factors, GUARD[scan.dtype]
    total, stops = torch.zeros_like(scan.inverse), set(scan.ends.tolist())
    sums, shift = scan.start()
    for step, count in enumerate(scan.active):
        if step > 0:
            rows = scan.in_sets(scan.state[(step - 1) % len(scan.state), :count])
            sums, _ = multiply(factors, rows, *scan.matrices(step))
        scan.weigh(step=step, count=count, sums=sums, limit=scan.weights.limit if step > 0 else scan.floor)
        if step + 1 in stops:
            ended = scan.ends == step + 1
            total[ended] = scan.state[step % len(scan.state)][ended].sum(-1, dtype=torch.float64)
    scan.flagged |= (total != 0) & ~((total >= scan.floor * 2.0**guard) & total.isfinite())
    saved = (scan.state, scan.tops, scan.powers) if keep else ()
    return scan.in_batch(scan.log_norm(shift, total)), scan.in_batch(scan.flagged), *saved


def backward(chain: Structured, saved: Saved, weight: Tensor, needs: Sequence[bool], by_log: bool) -> Gradients:
    """The gradients of `sum(weight * log_norm)` over sequences that are not flagged; see `Gradients`.

    `by_log`: of logarithms of parameters and p0 even if these are linear.
    """
    scan = Scan(chain, saved[2:])
    weight, log_norm, flagged = (scan.rows(tensor) for tensor in (weight.double(), *saved[:2]))
    scan.live.copy_((weight != 0) & (log_norm != -math.inf) & ~flagged)
    scan.weight.copy_(weight.masked_fill(~scan.live, 0.0))
    n, c, active, sums = scan.n, chain.c, scan.active, None
    reverse = [factor.reverse for factor in reversed(scan.weights.pattern.factors)]
    grad_x = scan.new(n, chain.v, c) if needs[0] else None
    if grad_x is not None and sum(active) < n * chain.v:
        grad_x.zero_()
    totals = _Counts(scan, by_log=by_log) if any(needs[2:]) else None
    members = max(1, n // max(1, scan.sets))
    together = min(_STEPS, max(1, _ROWS // members)) if totals and scan.weights.one_step else 1
    memory, last = scan.new(together * n * c), len(active) - 1
    while last > 0:  # steps from first to last, whose counts are made together
        count, first = active[last], last
        while first > 1 and last - first + 1 < together and active[first - 1] == count:
            first -= 1
        sources, following = memory[: (last - first + 1) * count * c].view(-1, count, c), []
        for step in range(last, first - 1, -1):
            source = sources[step - first]
            scan.weigh(step=step, count=count, sums=sums, source=source, grad=grad_x)
            matrices, diagonal = scan.matrices(step)
            transposed = [matrix.mT for matrix in reversed(matrices)]
            sums, parts = multiply(reverse, scan.in_sets(source), transposed, diagonal)
            following.append(parts)
        if totals is not None:
            totals.add(first, sources, [list(parts) for parts in zip(*following[::-1], strict=True)][:0:-1])
        last = first - 1
    source = memory[: n * c].view(n, c)
    if active:
        scan.weigh(step=0, count=n, sums=sums, source=source, grad=grad_x)
    grad_x = None if grad_x is None else grad_x.view(*chain.batch, chain.v, c)
    grad_p0 = _gradient_of_p0(scan, source, by_log=by_log) if needs[1] else None
    return grad_x, grad_p0, *(() if totals is None else totals.gradients())


def _gradient_of_p0(scan: Scan, source: Tensor, *, by_log: bool) -> Tensor:
    """The gradient of p0, or of its logarithm, from S B of the first step; exactly 0 at weight 0."""
    chain, products = scan.chain, source.double() * (scan.inverse * scan.weight)[:, None]
    products = scan.in_batch(products.masked_fill_(source == 0, 0.0))
    if not (chain.log_params or by_log):
        products = (products / chain.p0.double()).masked_fill(products == 0, 0.0)
    return products.sum_to_size(chain.p0.shape).to(scan.dtype).contiguous()


class _Counts:
    """The gradients of the parameters: sums over rows of products of what enters and what leaves each factor."""

    def __init__(self, scan: Scan, *, by_log: bool) -> None:
        self.by_log = by_log
        self.scan, dtype, weight = scan, scan.dtype, scan.weight[scan.weight != 0]
        dtypes = [torch.float64 if len(values) < 2 else dtype for values in scan.weights.values]
        self.totals = [
            torch.zeros_like(values, dtype=wide) for values, wide in zip(scan.weights.values, dtypes, strict=True)
        ]
        # the weights of rows as a factor and the rest: None if they are equal, or all at most 1
        equal = bool((weight == weight[:1]).all())
        factor = float(weight[:1].sum()) if equal else 2.0 ** int(torch.frexp(weight.abs().amax()).exponent)
        self.shares = None if equal else (scan.weight / factor).to(dtype)
        self.factor = factor / scan.scale

    def add(self, first: int, sources: Tensor, between: list[list[Tensor]]) -> None:
        """Add those of the steps from `first` on, of T (steps, count, c) and what enters each factor's reverse.

        `between`: for all factors but the last, at each step.
        """
        scan, pattern, (length, count, _) = self.scan, self.scan.weights.pattern, sources.shape
        rows, last = (scan.of_steps(values) for values in (scan.state[first - 1 : first - 1 + length, :count], sources))
        if self.shares is not None:
            rows = rows * scan.of_steps(self.shares[:count, None].repeat(length, 1, 1))
        fronts = entering(pattern.factors, rows, scan.matrices(first)[0])
        axis = -3 if pattern.factors[0].blocks else -2
        following = [parts[0] if length == 1 else torch.cat(parts, axis) for parts in between]
        following += entering([pattern.factors[-1].reverse], last, [])
        sums = [counts(*parts) for parts in zip(pattern.factors, fronts, following, strict=True)]
        if pattern.diagonal:
            sums.append((rows * last).sum(-2))
        for place, (total, part) in enumerate(zip(self.totals, sums, strict=True)):
            part = part[None] if scan.sets == 1 else part if total.shape[1] > 1 else part.sum(0, keepdim=True)
            if len(total) > 1:
                total[first - 1] = scan.weights.gradient(place, first, part, self.factor, by_log=self.by_log)
            else:
                total += part

    def gradients(self) -> tuple[Tensor, ...]:
        """The gradients of the parameters."""
        gradients = []
        for place, (total, parameter) in enumerate(zip(self.totals, self.scan.chain.parameters, strict=True)):
            if len(total) == 1:
                total = self.scan.weights.gradient(place, 1, total[0], self.factor, by_log=self.by_log)[None]
            gradients.append(self.scan.layout.as_parameter(total, parameter.shape).to(self.scan.dtype))
        return tuple(gradients)
