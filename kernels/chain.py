"""A batch of chains in the layout of the recursions: steps first, then batch axes, then states.

Sequences that share their transition matrices are a set. The batch is g sets of m sequences each, so that one step of a
recursion is one batched product [g, m, c] x [g, c, c] for c states. All tensors are views of what the caller passed.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

# multiply-adds for which a CPU wakes another thread, and states of a message that its loops keep in registers
WORTH_A_THREAD, FEW_STATES = 2**20, 16


@dataclass(frozen=True)
class Chain:
    """The operands of a batch of chains, or of a stretch of longer chains that an earlier stretch's message enters.

    Attributes:
        x: log-potentials (v, *lead, c) for v steps, batch axes `lead` and c states.
        bulk: transition matrices (s, *own, c, c), [from, to]; s = v - 1, or 1 for one matrix at all steps. `own` are
            the first axes of `lead`. In a stretch that a message enters, s = v or 1: the first leads into step 0.
        p0: initial weights (*lead or ones, c); not read in a stretch that a message enters.
        ends: the number of steps of each sequence (g, m, 1), 0 only in such a stretch; None: all have v.
        log_params: whether `bulk` and `p0` are logarithms.
        dtype: the dtype of the arithmetic.
        by_log: whether gradients are with respect to the logarithms of `bulk` and `p0` even if these are linear.
        starts: on a CPU, the first row (n) of each of n packed sequences. Then x, its gradient and the messages are
            (rows, c), and `bulk` is (rows, c, c), where each matrix leads into its row, or (1, c, c).
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
        """Steps of the longest sequence."""
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
        """The batch axes, those of `bulk` first."""
        return self.x.shape[1:-1] if self.starts is None else self.starts.shape

    @cached_property
    def g(self) -> int:
        """Sets of transition matrices."""
        if self.starts is not None:
            return len(self.starts) if len(self.bulk) > 1 else 1
        return math.prod(self.bulk.shape[1:-2])

    @cached_property
    def m(self) -> int:
        """Sequences of each set."""
        if self.starts is not None:
            return len(self.starts) // self.g
        return math.prod(self.lead[self.bulk.dim() - 3 :])

    @property
    def zero(self) -> float:
        """The entry of `bulk` and `p0` of weight 0."""
        return -math.inf if self.log_params else 0.0

    def new(self, *shape: int) -> Tensor:
        """An uninitialised tensor of the dtype of the arithmetic."""
        return self.x.new_empty(shape, dtype=self.dtype)

    def matrix(self, index: int) -> Tensor:
        """The transition matrices (g, c, c) at an index, or the only ones."""
        return self.bulk[index if len(self.bulk) > 1 else 0].reshape(self.g, self.c, self.c)

    def part(self, start: int, stop: int) -> "Chain":
        """The chain of steps `start` to before `stop`, which a message enters unless `start` is 0; views."""
        bulk = self.bulk if len(self.bulk) == 1 else self.bulk[max(0, start - 1) : stop - 1]
        ends = None if self.ends is None else (self.ends - start).clamp(0, stop - start)
        return replace(self, x=self.x[start:stop], bulk=bulk, ends=ends)

    @cached_property
    def ended(self) -> Tensor | None:
        """Whether a sequence has ended before a step (v, g, m, 1); None where all have v steps."""
        return None if self.ends is None else self.ends <= torch.arange(self.v, device=self.x.device).view(-1, 1, 1, 1)


def has_idle_threads(threads: int, sequences: int, v: int, c: int) -> bool:
    """Whether at least as many threads as are worth waking have no sequence as have one."""
    return min(threads, sequences * v * c**2 // WORTH_A_THREAD) >= 2 * sequences


def is_view(values: Tensor, rest: int) -> bool:
    """Whether all axes but the last `rest` can be flattened into one without a copy."""
    axes = list(zip(values.shape, values.stride(), strict=True))[:-rest]
    axes = [(size, stride) for size, stride in axes if size != 1]
    return all(stride == size * inner for (_, stride), (size, inner) in zip(axes, axes[1:], strict=False))
