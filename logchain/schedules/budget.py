"""The number of steps between checkpoints for which messages fit into a number of bytes: a `memory_budget`."""

import math

import torch
from torch import Tensor

from .. import kernels
from ..kernels.chain import Layout, arithmetic_dtype
from .transfers import SLOTS, apart

# bytes of a float64, the dtype of checkpoints and of all that enters or leaves a piece
_WIDE = 8

# float64 numbers that a sequence takes for a piece of any length: for each state, and without states
_STATES, _FIXED = 5, 24

# bytes that a sequence takes for each step on a GPU beyond messages: levels of x, and what each is rounded up to
_GPU_STEP = 16

# expected transitions on a GPU: products of messages that one program sums, and entries of all sums at most
_COUNTED, _COUNTS = 2**8, 2**18

# steps, and bytes moved from the host, from which on a longer piece is not faster
_LONG, _MOVED = 2**10, 2**24


def every_within(budget: int, x: Tensor, bulk: Tensor, p0: Tensor, keep: bool = True) -> int | None:
    """The number of steps between two checkpoints; None if all messages fit into the budget without any.

    `keep`: whether a backward pass follows. Raises ValueError, with the smallest budget, if no number fits.
    """
    size = Sizes(x, bulk, p0, keep)
    if not size.apart and budget >= size.whole:
        return None
    root, most = math.isqrt(size.v) + 1, max(1, size.v - 1)
    choices = {min(k, most) for k in (*range(1, root + 1), _LONG)} | {-(-most // k) for k in range(1, root + 1)}
    bytes_of = {spacing: size.checkpointed(spacing) for spacing in choices}
    fitting = [spacing for spacing, needed in bytes_of.items() if needed <= budget]
    if not fitting:
        least = min([*bytes_of.values(), *([] if size.apart else [size.whole])])
        sizes = f"x {list(x.shape)} and bulk {list(bulk.shape)}"
        raise ValueError(f"memory_budget: expected at least {least} bytes to go with {sizes}, got {budget}")
    longest = max(_LONG, _MOVED // size.moved) if size.moved else _LONG
    return max((spacing for spacing in fitting if spacing <= longest), default=min(fitting))


class Sizes:
    """The sizes of operands, and the bytes that their messages take; `keep`: whether a backward pass follows."""

    def __init__(self, x: Tensor, bulk: Tensor, p0: Tensor, keep: bool = True) -> None:
        (self.g, self.m), (self.v, self.c) = Layout.of(x, bulk).grid, x.shape[-2:]
        dtype, self.keep, self.gpu = arithmetic_dtype(x, bulk, p0), keep, kernels.on_gpu(p0)
        self.item, self.one_matrix, away = dtype.itemsize, bulk.shape[-3] == 1, apart(bulk, p0.device)
        # bytes for each step of operands and gradients that are converted, and of those on the way from and to the host
        self.copied = self.moved = 0
        for operand, entries in ((x, self.g * self.m * self.c), (bulk, 0 if self.one_matrix else self.g * self.c**2)):
            entries *= 1 + (keep and operand.requires_grad)
            if operand.dtype != dtype or operand.stride(-1) != 1:
                self.copied += entries * dtype.itemsize
            if apart(operand, p0.device):
                self.moved += entries * operand.itemsize * SLOTS
        self.fixed, self.apart = bulk.nbytes if self.one_matrix and away else 0, away or apart(x, p0.device)

    @property
    def whole(self) -> int:
        """Bytes that a chain takes without checkpoints: its messages, or less if they are not stored."""
        if self.gpu:
            return self.checkpointed(self.v - 1)
        messages = self.v * self.g * self.m * (self.c + 1) * self.item
        return messages if self.keep else min(messages, self._scratch(self.v) + self.copied * self.v)

    def checkpointed(self, spacing: int) -> int:
        """Bytes of the checkpoints, and at most of all that one piece of `spacing` steps takes."""
        steps, states = spacing + 1, self.g * self.m * self.c
        checkpoints = max(0, -(-(self.v - 1) // max(1, spacing)) - 1) * _WIDE * states * self.keep
        step = states * self.item * self.keep
        if self.gpu:  # the backward pass has a second number for each message, from which counts are computed
            step = 2 * step + _GPU_STEP * self.g * self.m
        return checkpoints + steps * (step + self.copied + self.moved) + self.fixed + self._scratch(steps)

    def _scratch(self, steps: int) -> int:
        """Bytes that the kernels take beyond messages while they compute `steps` steps."""
        g, m, c = self.g, self.m, self.c
        values, matrices = g * m * (_STATES * c + _FIXED), g * c**2
        if self.gpu:
            sums = min(_COUNTS, steps * m // _COUNTED * matrices)
            return _WIDE * (values + 9 * (g * m * c + matrices) + sums)
        dtype = torch.float64 if self.item == 8 else torch.float32
        threads, scratch = map(int, kernels.load("cpu.arguments").scratch(steps, g, m, c, dtype, self.one_matrix))
        # threads that share a set of matrices each sum separate expected transitions
        sharing = threads if g == 1 else 1
        counts = _WIDE * matrices * (sharing + 2 if self.one_matrix else 1)
        if not self.one_matrix:
            counts += (min(sharing, max(1, m // c)) - 1) * steps * matrices * self.item
        return _WIDE * values + threads * scratch + counts * self.keep
