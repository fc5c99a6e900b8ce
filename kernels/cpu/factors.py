"""The factors of a step as the C passes and torch's products take them: linear, of the arithmetic's dtype, near 1.

Linear parameters whose largest entries are neither huge nor tiny are read in place. Others are copied, one step at a
time, divided by powers of two so that the largest entry is in [1/2, 1). Logarithms are copied, less the largest, and
their exponentials are raised to the least one that products do not lose, see c/passes.h. If there is a diagonal, it
is divided by all that the factors are, and the first factor by more, if the diagonal is larger than their product.
"""

import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from ..sets import Sets
from ..structured import Structured
from .passes import Passes

# parameters are read in place if their largest entries are within powers of two: each factor, the product, the diagonal
_LEAST, _MOST, _LEAST_PRODUCT, _MOST_DIAGONAL = -20, 8, -24, 8


class Weights(NamedTuple):
    """The factors of one step.

    Attributes:
        matrices: each (sets, (blocks,) in, out) for g sets or 1.
        diagonal: (sets, c) or None.
        bounds: (g), the largest sum of a message of ones times the product, over the number of terms in a path.
        shifts: (g), logarithm of what the product of factors has to be multiplied by.
        exponents: (g), and the power of two.
    """

    matrices: list[Tensor]
    diagonal: Tensor | None
    bounds: Tensor
    shifts: Tensor
    exponents: Tensor


class Scaled:
    """The parameters of a chain, prepared step by step: what `at` returns is overwritten by the next call.

    Attributes:
        values: the parameters (s, sets, *own).
        scales: the logarithm of what each is divided by (s, sets), to base 2 where they are linear.
        one: whether all steps have the same factors.
    """

    def __init__(self, chain: Structured, sets: Sets) -> None:
        self.chain, self._stages = chain, chain.pattern.stages
        self.values = [sets.parameter(one.resolve_neg()) for one in chain.parameters]
        self._buffers: list[Tensor | None] = [None] * len(self.values)
        self._at: tuple[int, Weights] | None = None
        levels = [self._level(one) for one in self.values]
        self.scales = self._scales(levels)
        steps = max(len(one) for one in self.values)
        self.one = steps <= 1
        total = torch.stack([one.expand(steps, sets.g) for one in self.scales[: len(self._stages)]]).sum(0)
        self._bounds = self._largest_sums(levels).expand(steps, sets.g).contiguous()
        nothing = torch.zeros(steps, sets.g, dtype=torch.float64)
        self._shifts = total if chain.log_params else nothing
        self._exponents = (nothing if chain.log_params else total).to(torch.int64)

    def _level(self, values: Tensor) -> Tensor:
        """The logarithm of the largest entries (s, sets), to base 2 as an integer above it where parameters are linear.

        -inf where all weights are 0; 0 where the largest is infinite or NaN.
        """
        if not len(values):
            return values.new_zeros(1, values.shape[1], dtype=torch.float64)
        top = values.flatten(2).amax(-1).double()
        if not self.chain.log_params:
            top = torch.where(top > 0, torch.frexp(top).exponent.double(), top.masked_fill(top == 0, -math.inf))
        return top.masked_fill(top.isnan() | (top == math.inf), 0.0)

    def _scales(self, levels: list[Tensor]) -> list[Tensor]:
        """The logarithm of what each parameter is divided by (s, sets), to base 2 where they are linear."""
        count, log = len(self._stages), self.chain.log_params
        if not log and self._near_one(levels):
            return [torch.zeros_like(one) for one in levels]
        if self.chain.pattern.diagonal and len({one.shape for one in levels}) > 1:
            # the diagonal is divided by what its own sets and steps have in common
            levels = [one.amax().view(1, 1) for one in levels]
        scales = [one.masked_fill(one == -math.inf, 0.0) for one in levels]
        if log:  # shifts are exact in the arithmetic's dtype
            scales = [one.to(self.chain.dtype).double() for one in scales]
        if self.chain.pattern.diagonal:
            more = scales[0] + (levels[-1] - reduce(torch.add, scales[:count])).clamp(min=0)
            scales[0] = more.to(self.chain.dtype).double() if log else more
            scales[-1] = reduce(torch.add, scales[:count])
        return scales

    def _near_one(self, levels: list[Tensor]) -> bool:
        def within(level: Tensor, least: float, most: float) -> bool:
            return bool(((level == -math.inf) | (level >= least) & (level <= most)).all())

        count = len(self._stages)
        return (
            all(within(one, _LEAST, _MOST) for one in levels[:count])
            and within(reduce(torch.add, levels[:count]), _LEAST_PRODUCT, math.inf)
            and all(within(one, -math.inf, _MOST_DIAGONAL) for one in levels[count:])
        )

    def _largest_sums(self, levels: list[Tensor]) -> Tensor:
        """The bounds of `Weights` (s or 1, sets or 1)."""
        entering = [stage.axes[stage.contracted] for stage in self._stages]
        terms = max(1.0, math.prod(entering) / sum(entering))
        if self.chain.log_params or any(bool(one.any()) for one in self.scales):
            # entries that are raised, or lost by division, are compared with 1
            return torch.full((1, 1), terms, dtype=torch.float64)
        largest = reduce(torch.add, levels[: len(self._stages)]).exp2() * terms
        return torch.maximum(largest, levels[-1].exp2()) if self.chain.pattern.diagonal else largest

    def at(self, step: int) -> Weights:
        """The factors that lead into a step."""
        index = 0 if self.one else step - 1
        if self._at is None or self._at[0] != index:
            ready = [self._prepared(place, index) for place in range(len(self.values))]
            mapped = [one.mT if stage.transposed else one for one, stage in zip(ready, self._stages, strict=False)]
            diagonal = ready[-1] if self.chain.pattern.diagonal else None
            rest = self._bounds[index], self._shifts[index], self._exponents[index]
            self._at = index, Weights(mapped, diagonal, *rest)
        return self._at[1]

    def _prepared(self, place: int, index: int) -> Tensor:
        """A parameter of a step (sets, *own), in place or in a buffer."""
        values, log, dtype = self.values[place], self.chain.log_params, self.chain.dtype
        own = values[index if len(values) > 1 else 0]
        scale = self.scales[place][index if len(self.scales[place]) > 1 else 0]
        scaled = bool(self.scales[place].any())
        if not log and not scaled and own.dtype == dtype and _taken(own, place == len(self._stages)):
            return own
        buffer = self._buffers[place]
        if buffer is None:
            buffer = self._buffers[place] = torch.empty(own.shape, dtype=dtype)
        buffer.copy_(own)
        if log:
            _exponentiate(buffer, scale, dtype)
        elif scaled:
            for part in _halves(scale, dtype):
                buffer.mul_(part.view(-1, *(1 for _ in own.shape[1:])))
        return buffer

    def supports(self, step: int) -> Weights:
        """The factors that lead into a step, 1 in place of each weight that is not 0."""
        zero = -math.inf if self.chain.log_params else 0.0
        ready = []
        for values in self.values:
            ready.append((values[step - 1 if len(values) > 1 else 0] > zero).to(self.chain.dtype))
        mapped = [one.mT if stage.transposed else one for one, stage in zip(ready, self._stages, strict=False)]
        bounds = self._bounds[0]
        return Weights(mapped, ready[-1] if self.chain.pattern.diagonal else None, bounds, bounds, bounds)

    def gradient(self, place: int, step: int, counts: Tensor, factor: float) -> None:
        """Counts (sets, *own) times `factor`, with respect to a parameter as it was given, or to its logarithms.

        Counts are sums of products of what enters and leaves a prepared factor. In place; 0 where the weight is 0.
        """
        chain, values = self.chain, self.values[place]
        own = values[step - 1 if len(values) > 1 else 0]
        scale = self.scales[place][step - 1 if len(self.scales[place]) > 1 else 0]
        if chain.log_params or chain.by_log:
            weights = self.at(step)
            one = weights.diagonal if place == len(self._stages) else weights.matrices[place]
            assert one is not None
            turned = place < len(self._stages) and self._stages[place].transposed
            counts.mul_(one.mT if turned else one).mul_(factor)
        else:
            counts.mul_(factor)
            for part in _halves(scale, counts.dtype):
                counts.mul_(part.view(-1, *(1 for _ in own.shape[1:])))
        counts.masked_fill_(own == (-math.inf if chain.log_params else 0.0), 0.0)


def _taken(own: Tensor, diagonal: bool) -> bool:
    """Whether products take a parameter in place."""
    last = own.stride()[-2:]
    return own.stride(-1) == 1 if diagonal else 1 in last and 0 not in last


def _halves(scale: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
    """2^-scale (sets) as a product of two numbers, each in the range of the dtype."""
    first = (scale / 2).floor()
    return torch.exp2(-first).to(dtype), torch.exp2(first - scale).to(dtype)


def _exponentiate(buffer: Tensor, shift: Tensor, dtype: torch.dtype) -> None:
    """Replace logarithms (sets, *own) by exponentials of them less a shift (sets)."""
    sets, rows = buffer.shape[:2] if buffer.dim() > 2 else (buffer.shape[0], 1)
    passes = Passes(dtype, sets * rows, buffer.numel() // (sets * rows), rows)
    passes.point(state=buffer, shifts=shift.expand(sets).contiguous())
    passes.run("exponentiate_rows", sets * rows)
