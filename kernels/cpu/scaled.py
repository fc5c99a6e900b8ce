"""The parameters of a product of factors as linear weights near 1, which are 0 only where the parameters are 0.

Linear parameters are divided by powers of two, and from logarithms the largest is subtracted. Weights that are too
small to be multiplied by a small message are raised. Sums of messages that raised numbers may change in any digit are
below `limit`.
"""

import math

import torch
from torch import Tensor

from ..chain import Layout
from ..structured import Structured

# as in c/scale.h: the largest message, the least emission, and how far below a sum its raised terms have to be, in bits
TOP, DEEPEST, GUARD = ({torch.float32: a, torch.float64: b} for a, b in ((100, 900), (108, 960), (26, 55)))

# the bits that products of a message of 2^TOP and weights may lose without being denormal; the most of them in one
# parameter; and the bits of posteriors in the backward scan
_BITS, _MOST, _SPARE = ({torch.float32: a, torch.float64: b} for a, b in ((226, 1922), (90, 900), (90, 64)))

# parameters are read in place if their largest entries are within 2^-_NEAR to 2^_NEAR
_NEAR = 8.0


class Weights:
    """The parameters of a chain as weights of the dtype of the arithmetic.

    Attributes:
        values: the parameters (s, sets, *sizes).
        scales: the logarithms of what each is divided by (s, sets), to base 2 for linear parameters.
        one_step: whether all steps have the same parameters.
        depth: messages are raised to at least 2^-depth of their largest entry.
        limit: the least sum that is exact, for messages of at most 2^TOP.
        spare: sums of posteriors are 2^spare in the backward scan, whose counts do not overflow.
        least_source: the least number that is not negligible there, next to sums of messages of at most 2^TOP.
    """

    def __init__(self, chain: Structured, layout: Layout) -> None:
        self.chain, self.dtype, self.pattern = chain, chain.dtype, chain.transition.pattern
        dtype = self.dtype
        self.values = [layout.parameter(parameter.resolve_neg()) for parameter in chain.parameters]
        self.one_step = all(len(values) <= 1 for values in self.values)
        self._index, self._ready = -1, list[Tensor]()
        tops, lows = zip(*map(self._range, self.values), strict=True)
        self.scales = self._scales(tops)
        self._scaled = chain.log_params or any(bool(scale.any()) for scale in self.scales)
        factors, count = self.pattern.factors, len(self.pattern.factors)
        highs = [self._bits(top - scale, -math.inf) for top, scale in zip(tops, self.scales, strict=True)]
        depths = [self._bits(scale - low, 0.0) for scale, low in zip(self.scales, lows, strict=True)]
        used, least = max(sum(depths[:count]), *depths[count:], 0.0), min(_MOST[dtype], _BITS[dtype] // (count + 1))
        raised = used > _BITS[dtype] - DEEPEST[dtype] or max(depths) > _MOST[dtype]
        self._floor, self.depth = (2.0**-least, least) if raised else (0.0, DEEPEST[dtype])
        # the largest sum of a message of ones times the product, over the number of terms in a path
        entering = [factor.entering for factor in factors]
        terms = max(1.0, math.prod(entering) / sum(entering))
        bound = max(terms * 2.0 ** sum(highs[:count]), *(2.0**high for high in highs[count:]), 0.0) or 1.0
        self.limit = 2.0 ** (TOP[dtype] - self.depth + GUARD[dtype]) * bound
        self.spare = min(_SPARE[dtype], int(TOP[dtype] - (min(max(depths), least) if raised else max(depths))))
        self.least_source = 2.0 ** (self.spare - GUARD[dtype] - 8 - TOP[dtype]) / (bound * sum(entering))

    def _bits(self, logs: Tensor, least: float) -> float:
        """The largest of logarithms, as of `scales`, to base 2; at least `least`."""
        return max(float(logs.amax()) / (math.log(2.0) if self.chain.log_params else 1.0), least) if len(logs) else 0.0

    def _range(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithms of the largest and of the least positive weights (s, sets), as of `scales`.

        Without positive weights the largest is -inf and the least 0.
        """
        log, zero = self.chain.log_params, -math.inf if self.chain.log_params else 0.0
        high, low = (values.new_zeros(values.shape[:2], dtype=torch.float64) for _ in range(2))
        for step, entries in enumerate(values.flatten(2)):  # no copy of all steps
            high[step], low[step] = entries.amax(-1), entries.amin(-1)
            if not bool((low[step] > zero).all()):
                low[step] = torch.where(entries > zero, entries, math.inf).amin(-1)
        return exponent(high, log=log), (low if log else low.log2()).nan_to_num(0.0, 0.0, 0.0)

    def _scales(self, tops: tuple[Tensor, ...]) -> list[Tensor]:
        if not self.chain.log_params and all(bool(((t == -math.inf) | (t.abs() <= _NEAR)).all()) for t in tops):
            return [torch.zeros_like(top) for top in tops]
        if not self.pattern.diagonal:
            return [top.masked_fill(top == -math.inf, 0.0) for top in tops]
        # the same for all sets and steps: the diagonal is divided by what the product is, at least its largest weight
        *highs, last = (top.amax().view(1, 1) if top.numel() else top.new_zeros(1, 1) for top in tops)
        scales = [high.masked_fill(high == -math.inf, 0.0) for high in highs]
        scales[0] = scales[0] + (last - torch.stack(scales).sum(0)).clamp(min=0)
        return [*scales, torch.stack(scales).sum(0)]

    def shifts(self, steps: int, sets: int) -> Tensor:
        """The logarithms (steps, sets) of what the product of each step is divided by, as of `scales`."""
        scales = self.scales[: len(self.pattern.factors)]
        return torch.stack([scale[:steps].expand(steps, sets) for scale in scales]).sum(0)

    def at(self, step: int) -> list[Tensor]:
        """The weights (sets, *sizes) of all parameters into a step."""
        index = 0 if self.one_step else step - 1
        if index != self._index:
            weights = [self._linear(place, index) for place in range(len(self.values))]
            self._index, self._ready = index, weights
        return self._ready

    def _linear(self, place: int, index: int) -> Tensor:
        entries, scale = _at(self.values[place], index), _at(self.scales[place], index)
        if self._scaled or self._floor:
            weights = linear(entries, scale, log=self.chain.log_params)
            positive = entries > (-math.inf if self.chain.log_params else 0.0)
            entries = weights.masked_fill_(positive & (weights < self._floor), self._floor)
        entries = entries.to(self.dtype)
        return entries.contiguous() if self.one_step else entries

    def gradient(self, place: int, step: int, counts: Tensor, factor: float, *, by_log: bool) -> Tensor:
        """Counts (sets, *sizes) times `factor`, by a parameter as it was passed in, or by its logarithm, in float64.

        Counts are sums of products of what enters a weight and what leaves it.
        """
        chain, entries, scale = self.chain, _at(self.values[place], step - 1), _at(self.scales[place], step - 1)
        result = counts.double() * factor
        if chain.log_params or by_log:
            result *= self.at(step)[place]
        else:
            result = linear(result, scale, log=False)
        # a parameter that no sequence uses may be NaN
        zero = (entries == (-math.inf if chain.log_params else 0.0)) | (counts == 0)
        return result.masked_fill_(zero, 0.0)


def exponent(top: Tensor, *, log: bool) -> Tensor:
    """The logarithm of a largest weight, to base 2 and rounded up of linear ones: -inf for 0, and 0 for NaN and inf."""
    if log:
        return torch.where(top < math.inf, top, 0.0)
    top = torch.where(top < math.inf, top, 0.5)
    return torch.where(top > 0, torch.frexp(top).exponent.double(), -math.inf)


def linear(values: Tensor, scale: Tensor, *, log: bool) -> Tensor:
    """Weights `exp(values - scale)`, or linear ones times 2^-scale, in float64; scales are those of the first axes."""
    scale = scale.view(*scale.shape, *(1 for _ in values.shape[scale.dim() :]))
    if log:
        return (values.double() - scale).exp()
    half = (scale / 2).floor()  # a power of two may be out of range
    return values.double() * torch.exp2(-half) * torch.exp2(half - scale)


def _at(values: Tensor, index: int) -> Tensor:
    return values[index if len(values) > 1 else 0]
