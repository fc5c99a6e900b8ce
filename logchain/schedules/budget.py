"""The distance between checkpoints for which messages take no more than a number of bytes."""

import math
from dataclasses import dataclass

from torch import Tensor

from .. import kernels
from ..layout import Layout
from ..operands import arithmetic_dtype
from .transfers import SLOTS, apart

# bytes of the float64 in which segments are computed
_WIDE = 8

# values by state, and beside the states, that a step of a segment holds: potentials, messages and gradients; scales.
# On a GPU also the sums behind each transition, and a copy of potentials whose batch axes do not fold
_STATES, _GPU_STATES, _SCALES = 3, 5, 9

# programs of a GPU each sum the counts of as many products: products of each, and entries of all sums at most
_COUNTED, _COUNTS = 2**8, 2**18

# entries of x that a CPU takes at a time, in linear space and in log space, and of matrices there
_LINEAR_BLOCK, _LOG_BLOCK, _HELD = 2**18, 2**15, 2**18

# values by step and sequence that are held where no messages are kept: scales, and their sums
_STEP = 10

# values by segment and sequence that its scales take, and the sum of those
_SUMS = 8

# steps and bytes of a segment beyond which nothing is gained: its fixed cost is hidden, and that of moving a piece
_LONG, _MOVED = 2**10, 2**24


def every_within(budget: int, x: Tensor, bulk: Tensor, p0: Tensor, keep: bool = True) -> int | None:
    """The number of steps between two checkpoints; None for no segments, where all messages fit.

    `keep`: for a backward pass. Raises ValueError, with the smallest budget, where nothing fits.
    """
    size = Sizes.of(x, bulk, p0, keep)
    if not size.apart and budget >= size.whole:
        return None
    root = math.isqrt(size.v) + 1
    most = max(1, size.v - 1)
    choices = {min(k, most) for k in (*range(1, root + 1), _LONG)} | {-(-most // k) for k in range(1, root + 1)}
    bytes_of = {spacing: size.checkpointed(spacing) for spacing in choices}
    fitting = [spacing for spacing, needed in bytes_of.items() if needed <= budget]
    if not fitting:
        least = min(bytes_of.values())
        least = least if size.apart else min(least, size.whole)
        raise ValueError(
            f"memory_budget: expected at least {least} bytes to go with x {list(x.shape)} and bulk "
            f"{list(bulk.shape)}, got {budget}"
        )
    long = max(_LONG, _MOVED // size.moved) if size.moved else _LONG
    within = [spacing for spacing in fitting if spacing <= long]
    return max(within) if within else min(fitting)


@dataclass(frozen=True)
class Sizes:
    """The sizes that decide how many bytes messages take: `g` times `m` sequences of v steps and c states.

    `own`: each step has matrices of its own; `counts`: bytes of an entry of their gradients. `apart`: operands lie on
    the host; `moved`: bytes of a step under way from and to the host; `fixed`: bytes of operands that all steps share.
    """

    v: int
    g: int
    m: int
    c: int
    item: int
    own: bool
    counts: int
    keep: bool
    gpu: bool
    apart: bool
    moved: int
    fixed: int

    @classmethod
    def of(cls, x: Tensor, bulk: Tensor, p0: Tensor, keep: bool = True) -> "Sizes":
        """The sizes of operands."""
        g, m = Layout.of(x, bulk).grid
        v, c = x.shape[-2:]
        own = bulk.shape[-3] > 1
        # gradients of one step's matrices before they are rounded to bulk's dtype, and those in it
        counts = _WIDE + bulk.element_size() if own and bulk.requires_grad and keep else 0
        moved, fixed = 0, 0
        host = [operand for operand in (x, bulk) if apart(operand, p0.device)]
        for operand in host:
            if operand is x or own:
                steps = operand.shape[-2 if operand is x else -3]
                moved += operand.nbytes // steps * SLOTS * (2 if keep and operand.requires_grad else 1)
            else:
                fixed += operand.nbytes
        gpu, item = kernels.on_gpu(p0), arithmetic_dtype(x, bulk, p0).itemsize
        return cls(v, g, m, c, item, own, counts, keep, gpu, bool(host), moved, fixed)

    @property
    def all_messages(self) -> int:
        """Bytes of the messages and scales of all steps."""
        return self.v * self.g * self.m * (self.c + 1) * self.item

    @property
    def whole(self) -> int:
        """Bytes without segments; without gradients, the scales of the steps may take less than messages."""
        if self.keep:
            return self.all_messages
        sequences = self.g * self.m
        return min(self.all_messages, _WIDE * (_STEP * self.v * sequences + self._block(self.v)))

    def checkpointed(self, spacing: int) -> int:
        """Bytes of the checkpoints, and at most of one segment with all that is computed from it."""
        sequences, steps = self.g * self.m, spacing + 1
        segments = max(1, -(-(self.v - 1) // spacing))
        kept = segments * sequences * (self.c + 3)
        if not self.keep:
            kept = min(kept, sequences * (2 * self.c + _SUMS * segments))
        segment = steps * sequences * ((_GPU_STATES if self.gpu else _STATES) * self.c + _SCALES)
        around = steps * (self.g * self.c**2 * self.counts + self.moved) + self.fixed
        return _WIDE * (kept + segment + self._block(steps)) + around

    def _block(self, steps: int) -> int:
        """Numbers that the kernels hold while they compute a number of steps."""
        step, matrix = self.g * self.m * self.c, self.g * self.c**2
        if self.gpu:
            return 8 * (step + matrix) + min(_COUNTS, steps * self.m // _COUNTED * matrix)
        entries, few = steps * step, 4 + self.c // 64  # transitions from a state, in log space
        linear = 3 * min(entries, max(_LINEAR_BLOCK, step))
        logs = (8 + (8 if self.own else 4) * few) * min(entries, max(_LOG_BLOCK, step))
        return max(linear, logs) + 4 * matrix + 6 * min(matrix, max(_HELD, self.c**2))
