"""The number of steps between checkpoints for which messages fit into a number of bytes: a `memory_budget`."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import kernels
from ..kernels.layout import Layout
from ..operands import arithmetic_dtype
from .transfers import SLOTS, apart

# bytes of a float64, in which checkpoints are kept, and all that enters or leaves a segment
_WIDE = 8

# float64 numbers that a sequence takes whatever the segment's length: for each state, and in all besides
_STATES, _BESIDE = 5, 24

# bytes that a sequence takes for each step on a GPU besides messages: levels of x, and what each is rounded up to
_GPU_STEP = 16

# expected transitions on a GPU: products of messages that one program sums, and entries of all sums at most
_COUNTED, _COUNTS = 2**8, 2**18

# steps, and bytes moved from the host, from which on a longer segment is not faster
_LONG, _MOVED = 2**10, 2**24


def every_within(budget: int, x: Tensor, bulk: Tensor, p0: Tensor, keep: bool = True) -> int | None:
    """The number of steps between two checkpoints; None where all messages fit, so that none are needed.

    `keep`: with a backward pass. Raises ValueError, with the smallest budget, where nothing fits.
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
    """The sizes that decide how many bytes messages take: g sets of m sequences with v steps and c states.

    `item`: bytes of a number of the arithmetic. `one_matrix`: whether one serves every step. `keep`: whether there is a
    backward pass. `copied`: bytes for each step of operands that are converted to the arithmetic, and of gradients that
    are converted back. `apart`: whether operands lie on the host, away from p0; then `moved` are bytes for each step on
    the way from and to the host, and `fixed` those of a matrix that all steps share.
    """

    v: int
    g: int
    m: int
    c: int
    item: int
    one_matrix: bool
    copied: int
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
        dtype, one_matrix = arithmetic_dtype(x, bulk, p0), bulk.shape[-3] == 1
        moved = fixed = copied = 0
        for operand, entries, whole in ((x, g * m * c, False), (bulk, g * c**2, one_matrix)):
            gradients = int(keep and operand.requires_grad)
            if not whole and (operand.dtype != dtype or operand.stride(-1) != 1):
                copied += entries * dtype.itemsize * (1 + gradients)
            if apart(operand, p0.device) and whole:
                fixed += operand.nbytes
            elif apart(operand, p0.device):
                moved += operand.nbytes // operand.shape[-2 if operand is x else -3] * SLOTS * (1 + gradients)
        on_host = apart(x, p0.device) or apart(bulk, p0.device)
        return cls(v, g, m, c, dtype.itemsize, one_matrix, copied, keep, kernels.on_gpu(p0), on_host, moved, fixed)

    @property
    def sequences(self) -> int:
        """Number of chains."""
        return self.g * self.m

    @property
    def all_messages(self) -> int:
        """Bytes of the messages and scales of all steps."""
        return self.v * self.sequences * (self.c + 1) * self.item

    @property
    def whole(self) -> int:
        """Bytes that a chain takes without checkpoints: its messages, or less if they are not kept."""
        if self.gpu:
            return self.checkpointed(self.v - 1)
        return self.all_messages if self.keep else min(self.all_messages, self._beside(self.v) + self.copied * self.v)

    def checkpointed(self, spacing: int) -> int:
        """Bytes of the checkpoints, and at most of all that one segment of `spacing` steps takes."""
        steps, states = spacing + 1, self.sequences * self.c
        segments = max(1, -(-(self.v - 1) // max(1, spacing)))
        checkpoints = _WIDE * (segments - 1) * states if self.keep else 0
        step = states * self.item * self.keep
        if self.gpu:  # the backward pass has a second number for each message, from which counts are computed
            step = 2 * step + _GPU_STEP * self.sequences
        return checkpoints + steps * (step + self.copied + self.moved) + self.fixed + self._beside(steps)

    def _beside(self, steps: int) -> int:
        """Bytes that the kernels take besides messages while they compute so many steps."""
        c, matrices = self.c, self.g * self.c**2
        values = self.sequences * (_STATES * c + _BESIDE)
        if self.gpu:
            sums = min(_COUNTS, steps * self.m // _COUNTED * matrices)
            return _WIDE * (values + 9 * (self.sequences * c + matrices) + sums)
        dtype = torch.float64 if self.item == 8 else torch.float32
        loops = kernels.load("cpu.arguments")
        threads, scratch = map(int, loops.scratch(steps, self.g, self.m, c, dtype, self.one_matrix))
        # threads that share a set of matrices each sum expected transitions of their own
        sharing = threads if self.g == 1 else 1
        counts = _WIDE * matrices * (sharing + 2 if self.one_matrix else 1)
        if not self.one_matrix:
            counts += (min(sharing, max(1, self.m // c)) - 1) * steps * matrices * self.item
        return _WIDE * values + threads * scratch + counts * self.keep
