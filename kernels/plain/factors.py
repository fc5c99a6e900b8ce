"""Rows of states times factors: parameters that are linear, of the arithmetic's dtype, near 1, and 0 or normal.

Products are torch's, from memory into memory. With sets g and m rows in each, a row that enters a factor without blocks
holds (before, entering, after) entries. Rows that enter the first factor with blocks are (g, m, blocks, entering), and
those that leave the last one are (g, blocks, m, leaving). Between two of these they are (g, entering, blocks, m), which
is what leaves a product of transposed matrices: nothing is permuted in memory.
"""

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from .. import on_gpu
from ..layout import Layout
from ..structured import Factor, Structured

# as in c/scale.h: the largest message, the least emission, and how far below a sum its raised terms have to be, in bits
TOP, DEEPEST, GUARD = ({torch.float32: a, torch.float64: b} for a, b in ((100, 900), (108, 960), (26, 55)))

# how far a message of 2^TOP and all weights of a path may be raised without a product that is not normal, and a weight
_BITS, _LEAST, _SPARE = ({torch.float32: a, torch.float64: b} for a, b in ((226, 1922), (90, 900), (90, 64)))

# parameters are read in place if their largest entries are within powers of two
_NEAR = 8.0


class PreparedFactors:
    """The parameters of a chain, prepared step by step: what `at` returns is overwritten by the next call.

    Attributes:
        values: the parameters (s, sets, *own).
        scales: the logarithm of what each is divided by (s, sets), to base 2 where they are linear.
        one_step: whether all steps have the same parameters.
        depth: messages are raised to 2^-depth of their largest entry.
        limit: sums below may be inexact, of messages of at most 2^TOP.
        spare: sums of posteriors are 2^spare in the backward scan, whose counts do not overflow.
        least_source: what is negligible there, compared with sums of messages of at most 2^TOP.
    """

    _ready: tuple[list[Tensor], Tensor | None]

    def __init__(self, chain: Structured, layout: Layout) -> None:
        self.chain, self.factors, dtype = chain, chain.pattern.factors, chain.dtype
        self.values = [layout.parameter(parameter.resolve_neg()) for parameter in chain.parameters]
        self.one_step = all(len(values) <= 1 for values in self.values)
        highs, lows = zip(*map(self._range, self.values), strict=True)
        self.scales = self._scales(list(highs))
        self._scaled = any(bool(scale.any()) for scale in self.scales)
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._index = -1
        unit = math.log(2.0) if chain.log_params else 1.0
        depths = [
            float(((top - low) / unit).amax()) if low.numel() else 0.0
            for top, low in zip(self.scales, lows, strict=True)
        ]
        count, budget = len(self.factors), _BITS[dtype]
        least = min(_LEAST[dtype], budget // (count + 1))

        def used() -> float:
            return max(sum(max(depth, 0.0) for depth in depths[:count]), *depths[count:], 0.0)

        self._raised = used() > budget - least or max(depths) > _LEAST[dtype]
        if self._raised:
            depths = [min(depth, least) for depth in depths]
        self._floor = 2.0**-least
        self.depth = min(DEEPEST[dtype], int(budget - used()))
        raised = min(self.depth, least) if self._raised else self.depth
        bound, entering = self._bound(list(highs)), sum(factor.entering for factor in self.factors)
        self.limit = 2.0 ** (TOP[dtype] - raised + GUARD[dtype]) * bound
        self.spare = min(_SPARE[dtype], int(TOP[dtype] - max(*depths, 0.0)))
        self.least_source = 2.0 ** (self.spare - GUARD[dtype] - 8 - TOP[dtype]) / (bound * entering)

    def _range(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithms of the largest and of the least positive entries (s, sets), as of `scales`; 0 if there is none."""
        zero = -math.inf if self.chain.log_params else 0.0
        high, low = (values.new_zeros(values.shape[:2], dtype=torch.float64) for _ in range(2))
        for step, entries in enumerate(values.flatten(2)):  # no copy of all steps
            high[step], low[step] = entries.amax(-1), entries.amin(-1)
            if on_gpu(entries) or not bool((low[step] > zero).all()):
                low[step] = torch.where(entries > zero, entries, math.inf).amin(-1)
        if not self.chain.log_params:
            high = torch.where(high > 0, torch.frexp(high).exponent.double(), high.masked_fill(high <= 0, -math.inf))
            low = low.log2()
        high = high.masked_fill(high.isnan() | (high == math.inf), 0.0)
        return high, torch.where(low.isfinite(), low, high.masked_fill(high == -math.inf, 0.0))

    def _scales(self, highs: list[Tensor]) -> list[Tensor]:
        count, log = len(self.factors), self.chain.log_params
        if not log and all(bool(((high == -math.inf) | (high.abs() <= _NEAR)).all()) for high in highs):
            return [torch.zeros_like(high) for high in highs]
        diagonal = self.chain.pattern.diagonal
        if diagonal and len({high.shape for high in highs}) > 1:
            # the diagonal is divided by what its own sets and steps have in common
            highs = [high.amax().view(1, 1) if high.numel() else high.new_zeros(1, 1) for high in highs]
        scales = [high.masked_fill(high == -math.inf, 0.0) for high in highs]
        if diagonal:  # by all that the factors are; the first one by more, if the diagonal is larger than their product
            scales[0] = scales[0] + (highs[-1] - reduce(torch.add, scales[:count])).clamp(min=0)
            scales[-1] = reduce(torch.add, scales[:count])
        return scales

    def _bound(self, highs: list[Tensor]) -> float:
        """The largest sum of a message of ones times the product, over the number of terms in a path."""
        entering = [factor.entering for factor in self.factors]
        terms: float = max(1.0, math.prod(entering) / sum(entering))
        if self._scaled or self.chain.log_params:
            return terms
        tops: list[float] = [float(high.amax().exp2()) if high.numel() else 1.0 for high in highs]
        count = len(self.factors)
        bound: float = max(math.prod(tops[:count]) * terms, *tops[count:], 0.0)
        return bound or 1.0

    def shifts(self, steps: int, sets: int) -> Tensor:
        """The logarithms (steps, sets) of what the product of each step is divided by, as of `scales`."""
        parts = (scale[:steps].expand(steps, sets) for scale in self.scales[: len(self.factors)])
        return sum(parts, torch.zeros((), dtype=torch.float64, device=self.chain.x.device))

    def at(self, step: int) -> tuple[list[Tensor], Tensor | None]:
        """The matrices (sets, (blocks,) in, out) into a step, and the diagonal (sets, c)."""
        index = 0 if self.one_step else step - 1
        if index != self._index:
            ready = [self._prepared(place, index) for place in range(len(self.values))]
            factors = zip(ready, self.factors, strict=False)
            matrices = [matrix.mT if factor.transposed else matrix for matrix, factor in factors]
            self._index, self._ready = index, (matrices, ready[-1] if self.chain.pattern.diagonal else None)
        return self._ready

    def _prepared(self, place: int, index: int) -> Tensor:
        """A parameter of a step (sets, *own), in place or in a buffer."""
        entries, scale = _at(self.values[place], index), _at(self.scales[place], index)
        log, dtype = self.chain.log_params, self.chain.dtype
        strides, changed = entries.stride(), log or self._scaled or self._raised or entries.dtype != dtype
        if not changed and 0 not in strides[1:] and (entries.dim() < 3 or 1 in strides[-2:]):
            return entries
        if place not in self._buffers:  # powers of two are exact in the dtype, logarithms in float64
            exact = torch.float64 if log else torch.promote_types(entries.dtype, dtype)
            wide = torch.empty(entries.shape, dtype=exact, device=entries.device)
            self._buffers[place] = wide, wide if wide.dtype == dtype else wide.to(dtype)
        wide, ready = self._buffers[place]
        shape = -1, *(1 for _ in entries.shape[1:])
        if log:
            torch.sub(entries, scale.view(shape), out=wide).exp_()
        else:
            first, second = (part.to(wide.dtype).view(shape) for part in halves(scale))
            torch.mul(entries, first, out=wide).mul_(second)
        if self._raised:
            wide.masked_fill_((entries > (-math.inf if log else 0.0)) & (wide < self._floor), self._floor)
        return ready if ready is wide else ready.copy_(wide)

    def gradient(self, place: int, step: int, counts: Tensor, factor: float) -> Tensor:
        """Counts (sets, *own) times `factor`, by a parameter as it was passed in, or by its logarithm, in float64.

        Counts are sums of products of what enters a prepared factor and what leaves it.
        """
        chain, entries, scale = self.chain, _at(self.values[place], step - 1), _at(self.scales[place], step - 1)
        if chain.log_params or chain.by_log:
            matrices, diagonal = self.at(step)
            ready = [*matrices, diagonal][place]
            assert ready is not None
            turned = place < len(self.factors) and self.factors[place].transposed
            result = counts.double().mul_(ready.mT if turned else ready).mul_(factor)
        else:
            result = counts.double().mul_(factor)
            for part in halves(scale):
                result.mul_(part.view(-1, *(1 for _ in entries.shape[1:])))
        # a parameter that no sequence uses may be NaN
        zero = (entries == (-math.inf if chain.log_params else 0.0)) | (counts == 0)
        return result.masked_fill_(zero, 0.0)


def _at(values: Tensor, index: int) -> Tensor:
    return values[index if len(values) > 1 else 0]


def halves(scale: Tensor) -> tuple[Tensor, Tensor]:
    """2^-scale as a product of two numbers, each in the range of float64."""
    first = (scale / 2).floor()
    return torch.exp2(-first), torch.exp2(first - scale)


def multiply(
    factors: Sequence[Factor],
    rows: Tensor,
    matrices: Sequence[Tensor],
    middles: Sequence[Tensor],
    out: Tensor | None,
    sets: int,
) -> None:
    """Write rows (rows, size) times matrices (sets or 1, (blocks,) in, out), after each factor but the last to middles.

    `out`: memory for what leaves the last one, or None, if only the middles are wanted.
    """
    for place, (factor, matrix) in enumerate(zip(factors, matrices, strict=True)):
        last = place + 1 == len(factors)
        into = out if last else middles[place]
        if into is None:
            return
        into = into.view(-1)[: len(rows) * factor.size]
        if factor.blocks and len(rows) == len(matrix):  # the rows of a set are one: blocks of all sets are alike
            front = in_blocks(factor, rows, sets, place > 0).flatten(0, 1)
            torch.bmm(front, matrix.flatten(0, 1), out=into.view(-1, 1, factor.leaving))
        elif factor.blocks:
            front, matrix = in_blocks(factor, rows, sets, place > 0), matrix.expand(sets, -1, -1, -1)
            left, right = (front, matrix) if last else (matrix.mT, front.mT)
            for a, b, result in zip(left, right, into.view(*left.shape[:3], right.shape[-1]), strict=True):
                torch.bmm(a, b, out=result)
        elif factor.after > 1:
            front, result = _grid(factor, rows, len(matrix)), _grid(factor.reverse, into, len(matrix))
            for a, b, part in zip(matrix.mT, front, result, strict=True):
                torch.bmm(a.expand(len(b), -1, -1), b, out=part)
        elif len(matrix) == 1:
            torch.mm(rows.view(-1, factor.entering), matrix[0], out=into.view(-1, factor.leaving))
        else:
            front = rows.view(len(matrix), -1, factor.entering)
            torch.bmm(front, matrix, out=into.view(len(matrix), -1, factor.leaving))
        rows = into.view(len(rows), -1)


def in_blocks(factor: Factor, rows: Tensor, sets: int, between: bool) -> Tensor:
    """Rows that enter a factor, which another one leaves if `between`, as (sets, blocks, rows of a set, in)."""
    if between:
        return rows.view(sets, factor.entering, factor.blocks, -1).permute(0, 2, 3, 1)
    return rows.view(sets, -1, factor.blocks, factor.entering).transpose(1, 2)


def operand(factor: Factor, rows: Tensor, sets: int, steps: int, between: bool) -> Tensor:
    """Rows of some steps that enter a factor as (sets, blocks, rows of a set, in), or without blocks (rows, size)."""
    if not factor.blocks:
        return rows.reshape(-1, factor.others * factor.entering)
    grid = in_blocks(factor, rows.reshape(-1), sets * steps, between)
    grid = grid.view(sets, steps, *grid.shape[1:]).transpose(1, 2).flatten(2, 3)
    return grid.contiguous() if grid.shape[2] == 1 else grid  # torch multiplies strange strides one by one


def _grid(factor: Factor, rows: Tensor, sets: int) -> Tensor:
    return rows.view(sets, -1, factor.entering, factor.after)


def add_counts(factor: Factor, rows: Tensor, following: Tensor, counts: Tensor) -> None:
    """Add products of rows that enter a factor and rows that leave it to counts (sets, *own).

    Both are (sets, blocks, rows of a set, size), or without blocks (rows, size).
    """
    if factor.transposed:
        rows, following, factor = following, rows, factor.reverse
    sets = len(counts)
    if factor.blocks:
        for place, (front, back) in enumerate(zip(rows, following, strict=True)):
            counts[place % sets].baddbmm_(front.mT, back)
    elif factor.after > 1:
        grids = _grid(factor, rows, sets), _grid(factor.reverse, following, sets)
        for front, back, total in zip(*grids, counts, strict=True):
            if factor.after >= max(factor.entering, factor.leaving):  # sums of small matrices are slow, one by one
                total.add_(torch.bmm(front, back.mT).sum(0))
            else:
                total.addbmm_(front, back.mT)
    elif sets == 1:
        counts[0].addmm_(rows.reshape(-1, factor.entering).mT, following.reshape(-1, factor.leaving))
    else:
        counts.baddbmm_(rows.reshape(sets, -1, factor.entering).mT, following.reshape(sets, -1, factor.leaving))
