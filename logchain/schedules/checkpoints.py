"""The log-partition of a chain in pieces, which keeps the forward messages between pieces alone: the checkpoints.

Forward, each piece maps the message that enters it to the one that leaves it. Backward, from the last piece to the
first, the forward messages of a piece are computed again from its checkpoint, and the backward message that leaves the
piece goes on to the one before.

The device of p0 computes. Operands that lie on the host are moved there a piece at a time, and their gradients back.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import repeat

import torch
from torch import Tensor

from .. import kernels
from ..arguments import check_lengths
from ..kernels.chain import Chain
from ..kernels.layout import Layout
from ..kernels.message import Message
from ..operands import Operands, arithmetic_dtype
from ..progress import bar
from ..rescues import report_chains
from .transfers import Gradient, pieces


class Checkpoints:
    """A chain in pieces of `every` transitions, of which the last has what is left."""

    def __init__(self, operands: Operands, every: int, progress: bool = False) -> None:
        x, bulk, p0, lengths, _ = operands
        self._operands, self._every, self._progress = operands, every, progress
        self._layout, self._kernels, v = Layout.of(x, bulk), kernels.chain_kernels(p0), x.shape[-2]
        self._dtype, self._ends = arithmetic_dtype(x, bulk, p0), None
        if lengths is not None:
            self._ends = self._layout.grouped(lengths)[..., None]
            if not kernels.on_gpu(p0):
                check_lengths(lengths, v)
                v = int(lengths.max())
        self._v = v
        # ranges of transitions and of variables of each piece; no transition leads into the first variable of all
        stops = [*range(every, v - 1, every), max(0, v - 1)]
        self._transitions = list(zip([0, *stops], stops, strict=False))
        self._variables = [(start and start + 1, stop + 1) for start, stop in self._transitions]

    def forward(self, keep: bool) -> tuple[Tensor, Tensor]:
        """The log-partition [*B] in float64, and the checkpoints (pieces - 1, g, m, c), none unless to be kept."""
        p0, grid, last = self._operands.p0, self._layout.grid, len(self._variables) - 1
        checkpoints = p0.new_empty((last if keep else 0, *grid, p0.shape[-1]), dtype=torch.float64)
        recomputed = torch.zeros(grid, dtype=torch.bool, device=p0.device)
        message: Message | None = None
        for i, chain in self._chains(range(last + 1), "forward"):
            residuals, message = self._kernels.forward(chain, message, leave=True)
            recomputed |= residuals.redone
            if keep and i < last:
                checkpoints[i] = message.values
        assert message is not None
        report_chains(recomputed)
        log_norm = message.log_norm
        if self._ends is not None:  # on a GPU lengths have not been checked
            ends = self._ends[..., 0]
            log_norm = log_norm.masked_fill((ends < 1) | (ends > self._v), math.nan)
        return self._layout.batched(log_norm), checkpoints

    def backward(
        self, grad: Tensor, log_norm: Tensor, checkpoints: Tensor, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of x, bulk and p0 of `sum(grad * log_norm)`, None for one that is not needed."""
        (x, bulk, p0), layout, dtype = self._operands[:3], self._layout, self._dtype
        weight, norms, grid = layout.grouped(grad), layout.grouped(log_norm), layout.grid
        into_x = Gradient(x, -2, x.dtype, self._variables, layout.steps_first, p0.device) if needs[0] else None
        into_bulk = Gradient(bulk, -3, dtype, self._transitions, layout.matrices, p0.device) if needs[1] else None
        messages = p0.new_empty(min(self._every, self._v) + 1, *grid, p0.shape[-1], dtype=dtype)
        scale, following = torch.zeros(2, *grid, dtype=torch.float64, device=p0.device), None
        for i, chain in self._chains(range(len(self._variables))[::-1], "backward"):
            entering = Message(checkpoints[i - 1], scale) if i > 0 else None
            residuals, _ = self._kernels.forward(chain, entering, keep=messages, leave=following is not None)
            residuals = residuals._replace(log_norm=norms)
            into = (None if gradient is None else gradient.piece(i) for gradient in (into_x, into_bulk))
            following = self._kernels.backward(chain, residuals, weight, following, *into)
            for gradient in (into_x, into_bulk):
                if gradient is not None:
                    gradient.put(i)
        assert following is not None
        grad_x, grad_bulk = (None if gradient is None else gradient.whole() for gradient in (into_x, into_bulk))
        return grad_x, grad_bulk, layout.states(following).sum_to_size(p0.shape).to(p0.dtype) if needs[2] else None

    def _chains(self, order: Sequence[int], title: str) -> Iterator[tuple[int, Chain]]:
        """The number and the chain of each piece, in this order; valid until the next is asked for."""
        x, bulk, p0, _, log_params = self._operands
        potentials = pieces(x, -2, [self._variables[i] for i in order], p0.device)
        if bulk.shape[-3] == 1:
            matrices: Iterator[Tensor] = repeat(bulk.to(p0.device))
        else:
            matrices = pieces(bulk, -3, [self._transitions[i] for i in order], p0.device)
        for i, x, bulk in zip(bar(order, title, self._progress), potentials, matrices, strict=False):
            start, stop = self._variables[i]
            ends = None if self._ends is None else (self._ends - start).clamp(0 if i > 0 else 1, stop - start)
            steps, bulk = self._layout.steps_first(x), self._layout.matrices(bulk)
            yield i, Chain(steps, bulk, self._layout.weights(p0), ends, log_params, self._dtype)
