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


def is_view(values: Tensor, kept: int) -> bool:
    """Whether all axes but the last `kept` can be one without a copy."""
    axes = list(zip(values.shape, values.stride(), strict=True))[:-kept]
    axes = [(size, stride) for size, stride in axes if size != 1]
    return all(stride == size * inner for (_, stride), (size, inner) in zip(axes, axes[1:], strict=False))
