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
from .transfers import Returns, apart, pieces

# what is needed of x, bulk and p0
Needs = tuple[bool, ...]


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
        # ranges of variables and of transitions of each piece; no transition leads into the first variable of all
        stops = [*range(every, v - 1, every), max(0, v - 1)]
        self._variables = [(0 if i == 0 else stops[i - 1] + 1, stop + 1) for i, stop in enumerate(stops)]
        self._transitions = [(0 if i == 0 else stops[i - 1], stop) for i, stop in enumerate(stops)]

    def forward(self, keep: bool) -> tuple[Tensor, Tensor]:
        """The log-partition [*B] in float64, and the checkpoints (pieces - 1, g, m, c), none unless to be kept."""
        (g, m), c, last = self._layout.grid, self._operands.x.shape[-1], len(self._variables) - 1
        checkpoints = self._operands.p0.new_empty((last if keep else 0, g, m, c), dtype=torch.float64)
        message: Message | None = None
        redone: Tensor | None = None
        for i, x, bulk in self._walk(range(last + 1), "forward"):
            residuals, message = self._kernels.forward(self._stretch(i, x, bulk), message, leave=True)
            redone = residuals.redone if redone is None else redone + residuals.redone
            if keep and i < last:
                checkpoints[i] = message.values
        assert message is not None and redone is not None
        report_chains(redone)
        log_norm = message.log_norm
        if self._ends is not None:  # on a GPU lengths have not been checked
            ends = self._ends[..., 0]
            log_norm = log_norm.masked_fill((ends < 1) | (ends > self._v), math.nan)
        return self._layout.batched(log_norm), checkpoints

    def backward(
        self, grad: Tensor, log_norm: Tensor, values: Tensor, needs: Needs
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of `sum(grad * log_norm)`, None for one that is not needed; `values` are the checkpoints."""
        (x, bulk, p0), layout, dtype = self._operands[:3], self._layout, self._dtype
        weight, norms, (g, m) = layout.grouped(grad), layout.grouped(log_norm), layout.grid
        into_x = _Gradient(x, -2, self._every + 1, p0.device, x.dtype) if needs[0] else None
        into_bulk = _Gradient(bulk, -3, self._every, p0.device, dtype) if needs[1] else None
        messages = p0.new_empty(min(self._every, self._v) + 1, g, m, x.shape[-1], dtype=dtype)
        scale, following = torch.zeros(2, g, m, dtype=torch.float64, device=p0.device), None
        for i, potentials, matrices in self._walk(range(len(self._variables))[::-1], "backward"):
            chain = self._stretch(i, potentials, matrices)
            entering, followed = Message(values[i - 1], scale) if i > 0 else None, following is not None
            residuals, _ = self._kernels.forward(chain, entering, keep=messages, leave=followed)
            piece_x = None if into_x is None else layout.steps_first(into_x.piece(*self._variables[i]))
            piece_bulk = None
            if into_bulk is not None and len(chain.bulk) > 0:
                piece_bulk = layout.matrices(into_bulk.piece(*self._transitions[i]))
            residuals = residuals._replace(log_norm=norms)
            following = self._kernels.backward(chain, residuals, weight, following, piece_x, piece_bulk)
            if into_x is not None:
                into_x.put(self._variables[i][0])
            if into_bulk is not None and piece_bulk is not None:
                into_bulk.put(self._transitions[i][0])
        assert following is not None
        grad_x, grad_bulk = (None if into is None else into.whole() for into in (into_x, into_bulk))
        return grad_x, grad_bulk, layout.states(following).sum_to_size(p0.shape).to(p0.dtype) if needs[2] else None

    def _walk(self, order: Sequence[int], title: str) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The number, log-potentials and matrices of each piece, in this order; valid until the next is asked for."""
        x, bulk, p0, *_ = self._operands
        potentials = pieces(x, -2, [self._variables[i] for i in order], p0.device)
        if bulk.shape[-3] == 1:
            matrices: Iterator[Tensor] = repeat(bulk.to(p0.device))
        else:
            matrices = pieces(bulk, -3, [self._transitions[i] for i in order], p0.device)
        return zip(bar(order, title, self._progress), potentials, matrices, strict=False)

    def _stretch(self, i: int, x: Tensor, bulk: Tensor) -> Chain:
        """The chain of a piece; a message enters it unless it is the first."""
        start, stop = self._variables[i]
        ends = None if self._ends is None else (self._ends - start).clamp(0 if i > 0 else 1, stop - start)
        layout, p0, log_params = self._layout, self._operands.p0, self._operands.log_params
        bulk = layout.matrices(bulk)[: stop - 1] if i == 0 else layout.matrices(bulk)
        return Chain(layout.steps_first(x), bulk, layout.weights(p0), ends, log_params, self._dtype)


class _Gradient:
    """The gradient of an operand, written a piece along an axis at a time, on the operand's device.

    Pieces of `dtype` on `device` are views of a gradient of that kind, and otherwise are copied into it. The gradient
    of a matrix that all steps share is the sum of pieces, added up in float64 and rounded once.
    """

    def __init__(self, operand: Tensor, axis: int, steps: int, device: torch.device, dtype: torch.dtype) -> None:
        self._into = torch.zeros_like(operand, memory_format=torch.contiguous_format)
        self._axis, self._device, self._dtype = axis, device, dtype
        shared = axis == -3 and operand.shape[axis] == 1
        self._sum = torch.zeros(operand.shape, dtype=torch.float64, device=device) if shared else None
        self._in_place = not shared and not apart(operand, device) and operand.dtype == dtype
        self._returns = None if self._in_place else Returns(self._into, axis, steps, device)
        self._piece = self._into

    def piece(self, start: int, stop: int) -> Tensor:
        """Memory for the gradient from step `start` to before `stop`, uninitialised or 0."""
        view = self._into if self._sum is not None else self._into.narrow(self._axis, start, stop - start)
        self._piece = view if self._in_place else torch.empty(view.shape, dtype=self._dtype, device=self._device)
        return self._piece

    def put(self, start: int) -> None:
        """Write the last piece into the gradient, from step `start` on; a copy to another device may end later."""
        if self._sum is not None:
            self._sum += self._piece
        elif self._returns is not None:
            self._returns.put(start, self._piece)

    def whole(self) -> Tensor:
        """The gradient, when all pieces have been written."""
        if self._returns is not None:
            if self._sum is not None:
                self._returns.put(0, self._sum)
            self._returns.finish()
        return self._into
