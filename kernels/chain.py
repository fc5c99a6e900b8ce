"""A batch of chains in the layout that the recursions walk.

The steps come first, and batch axes with matrices of their own before the others. The batch is a grid of `g` times `m`
sequences: `g` sets of matrices, and `m` sequences that share each set, so that a step is one product [g, m, c] x [g, c,
c]. Everything here is a view of what the caller passed.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .numbers import exp_shifted, finite

# a matrix whose largest entry lies within these is used as it is
_NEAR_ONE = (2.0**-16, 2.0**16)


@dataclass(frozen=True)
class Chain:
    """`x` (v, *lead, c), `bulk` (s, *own, c, c) with s = v - 1 or 1, `p0` (*lead or ones, c), `ends` (g, m, 1) or None.

    `lead` begins with the axes `own`; `ends` holds the number of steps of each sequence. `dtype` is that of the
    arithmetic. `by_log`: gradients are those of the logarithms of `bulk` and `p0`, though these be linear.

    A stretch that a message enters has no `p0`: it has v matrices, or 1, the first of which leads from that message to
    its first variable, and a sequence may have none of its steps.

    `starts` (n), on a CPU: the rows at which n sequences begin in `x` (rows, c), one behind the other; so lie its
    gradient and what is kept, and so do matrices (rows, c, c), each of which leads into its row, unless there is one.
    """

    x: Tensor
    bulk: Tensor
    p0: Tensor
    ends: Tensor | None
    log_params: bool
    dtype: torch.dtype
    by_log: bool = False
    starts: Tensor | None = None

    @property
    def v(self) -> int:
        """Variables, of the longest sequence."""
        return self.x.shape[0] if self.starts is None else self._longest

    @cached_property
    def _longest(self) -> int:
        assert self.ends is not None
        return int(self.ends.max())

    @property
    def c(self) -> int:
        """States."""
        return self.x.shape[-1]

    @cached_property
    def lead(self) -> torch.Size:
        """The batch axes, own ones first."""
        return self.x.shape[1:-1] if self.starts is None else self.starts.shape

    @cached_property
    def g(self) -> int:
        """Sets of matrices."""
        if self.starts is not None:
            return len(self.starts) if len(self.bulk) > 1 else 1
        return math.prod(self.bulk.shape[1:-2])

    @cached_property
    def m(self) -> int:
        """Sequences that share a set."""
        if self.starts is not None:
            return len(self.starts) // self.g
        return math.prod(self.lead[self.bulk.dim() - 3 :])

    @property
    def zero(self) -> float:
        """How `bulk` and `p0` say zero."""
        return -math.inf if self.log_params else 0.0

    def new(self, *shape: int) -> Tensor:
        """An uninitialised tensor of the dtype of the arithmetic."""
        return self.x.new_empty(shape, dtype=self.dtype)

    def room(self, steps: int) -> Tensor:
        """Memory for the messages of so many steps (steps, g, m, c), or of all rows (rows, c) of packed sequences."""
        return self.new(steps, self.g, self.m, self.c) if self.starts is None else self.new(*self.x.shape)

    @cached_property
    def ended(self) -> Tensor | None:
        """Which sequences have ended before a step (v, g, m, 1); None where all go on to the last."""
        return None if self.ends is None else self.ends <= self._steps

    @cached_property
    def last(self) -> Tensor | None:
        """Which sequences have a step as their last (v, g, m, 1); None where all have the last one."""
        return None if self.ends is None else self.ends == self._steps + 1

    @property
    def _steps(self) -> Tensor:
        return torch.arange(self.v, device=self.x.device).view(-1, 1, 1, 1)


def segments_of(v: int, count: int) -> tuple[int, int]:
    """How many segments a chain is cut into, and of how many steps each; (0, 0) for a chain too short for two."""
    count = min(count, v - 1)
    return (count, (v - 1) // count) if count > 1 else (0, 0)


class Matrices:
    """The linear matrices `P_i` of a chain (g, c, c), one step at a time, scaled so that their entries lie near 1.

    A matrix that needs no change is a view of the caller's; others are written into one buffer, valid until the next
    call.
    """

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._buffer: Tensor | None = None
        self._zeros: Tensor | None = None
        self._held = self._gathered = -1
        self.low = self.high = 1.0  # bounds of the scaled entries
        self._scale = 1.0
        self._shift: Tensor | None = None
        bulk = chain.bulk
        if bulk.numel() == 0:
            return
        self._room = None if is_view(bulk[0], 2) else bulk.new_empty(bulk.shape[1:])
        if chain.log_params:
            top = bulk.amax((-2, -1), keepdim=True).to(chain.dtype)
            self._shift = finite(top)
            bottom = bulk.amin((-2, -1), keepdim=True).to(chain.dtype)
            self.low = math.exp((bottom - self._shift).amin().item())
        else:
            # one pass, but torch.aminmax would copy a permuted tensor
            bounds = torch.aminmax(bulk) if bulk.is_contiguous() else (bulk.amin(), bulk.amax())
            low, high = (bound.item() for bound in bounds)
            if not math.isfinite(high):  # neither NaN nor infinity may hide the size of the others
                high = torch.where(bulk.isfinite(), bulk, 0.0).amax().item()
            if not _NEAR_ONE[0] <= high <= _NEAR_ONE[1] and high > 0:
                limit = math.frexp(torch.finfo(chain.dtype).max)[1] - 2  # the scale itself is to be finite
                self._scale = 2.0 ** max(-limit, min(limit, -math.frexp(high)[1]))
            self.low, self.high = low * self._scale, high * self._scale

    @property
    def homogeneous(self) -> bool:
        """One matrix for every step."""
        return self._chain.bulk.shape[0] == 1

    def log_scale(self, start: int, stop: int) -> Tensor | None:
        """What was taken out of the matrix into each step (k, g or 1, 1), 0 for the first; None for nothing."""
        chain, skip = self._chain, int(start == 0)
        if self._shift is None and self._scale == 1.0:
            return None
        scale = torch.zeros(stop - start, 1, 1, dtype=torch.float64, device=chain.x.device)
        if self._shift is None:
            scale[skip:] = -math.log(self._scale)
            return scale
        scale = scale.repeat(1, chain.g, 1)
        taken = self._shift if self.homogeneous else self._shift[start + skip - 1 : stop - 1]
        scale[skip:] = taken.reshape(-1, chain.g, 1)
        return scale

    def raw(self, step: int) -> Tensor:
        """What the caller passed for the transition into `step` (g, c, c).

        It is valid until another one is asked for where the axes of the batch cannot be one.
        """
        chain, index = self._chain, 0 if self.homogeneous else step - 1
        raw = chain.bulk[index]
        if self._room is not None:
            if self._gathered != index:
                self._room.copy_(raw)
                self._gathered = index
            raw = self._room
        return raw.view(chain.g, chain.c, chain.c)

    def __call__(self, step: int) -> Tensor:
        """The scaled matrix that leads into `step`."""
        chain, index = self._chain, 0 if self.homogeneous else step - 1
        raw = self.raw(step)
        if self._shift is None and self._scale == 1.0 and raw.dtype == chain.dtype:
            return raw
        if self._buffer is None:
            self._buffer = chain.new(chain.g, chain.c, chain.c)
            self._scratch = torch.empty_like(self._buffer)
        if self._held != index:
            self._held = index
            if self._shift is None:
                torch.mul(raw, self._scale, out=self._buffer)
            else:
                exp_shifted(raw, self._shift[index].reshape(chain.g, 1, 1), self._buffer, self._scratch)
        return self._buffer

    def gradient_from_linear(self, step: int, gradient: Tensor) -> None:
        """Make the scaled linear matrix's gradient that of what the caller asks for, in place; exactly 0 at a zero."""
        if self._zeros is None:
            self._zeros = torch.empty_like(gradient, dtype=torch.bool)
        if self._chain.log_params or self._chain.by_log:
            torch.eq(gradient, 0, out=self._zeros)
            gradient.mul_(self(step)).masked_fill_(self._zeros, 0.0)  # what lies behind an end may be NaN
            return
        if self._scale != 1.0:
            gradient.mul_(self._scale)
        if not self.low > 0:
            gradient.masked_fill_(torch.eq(self.raw(step), 0, out=self._zeros), 0.0)


def is_view(values: Tensor, kept: int) -> bool:
    """Whether all axes but the last `kept` can be one without a copy."""
    axes = list(zip(values.shape, values.stride(), strict=True))[:-kept]
    axes = [(size, stride) for size, stride in axes if size != 1]
    return all(stride == size * inner for (_, stride), (size, inner) in zip(axes, axes[1:], strict=False))
