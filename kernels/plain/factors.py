"""The parameters of a product as they are multiplied: linear, of the arithmetic's dtype, near 1, and 0 or normal."""

import math
from functools import reduce

import torch
from torch import Tensor

from .. import on_gpu
from ..layout import Layout
from ..structured import Structured

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
        limit: sums below may be wrong, of messages of at most 2^TOP.
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
