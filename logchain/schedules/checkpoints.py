r"""The log-partition of a chain in pieces, of which only the messages between them are kept.

A piece is a stretch of so many transitions. Forward, one after the other maps the message that enters it to the one
that leaves it. Backward, the last piece comes first: its messages are found again from the one that entered it, and its
backward message follows the piece before.

All is computed where p0 lies. Of operands that lie on the host a piece at a time is moved there, and their gradients
are moved back.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import repeat

import torch
from torch import Tensor

from .. import kernels
from ..arguments import check_lengths
from ..kernels.chain import Chain
from ..kernels.message import Message
from ..layout import Layout
from ..operands import Operands, arithmetic_dtype
from ..progress import bar
from ..rescues import report_chains
from .transfers import Returns, apart, pieces

# what is needed of x, bulk and p0
Needs = tuple[bool, ...]


class Checkpoints:
    """A chain in pieces of `every` transitions each, the last one of as many as are left."""

    def __init__(self, operands: Operands, every: int, progress: bool = False) -> None:
        x, bulk, p0, lengths, _ = operands
        self._operands, self._every, self._progress = operands, every, progress
        self._layout, self._room, v = Layout.of(x, bulk), kernels.chain_kernels(p0), x.shape[-2]
        self._dtype, self._ends = arithmetic_dtype(x, bulk, p0), None
        if lengths is not None:
            self._ends = self._layout.sequences(lengths)[..., None]
            if not kernels.on_gpu(p0):
                check_lengths(lengths, v)
                v = int(lengths.max())
        self._v = v
        # the variables and the transitions of each piece: the first one's first variable has none
        stops = [*range(every, v - 1, every), max(0, v - 1)]
        self._variables = [(0 if i == 0 else stops[i - 1] + 1, stop + 1) for i, stop in enumerate(stops)]
        self._transitions = [(0 if i == 0 else stops[i - 1], stop) for i, stop in enumerate(stops)]

    def forward(self, keep: bool) -> tuple[Tensor, Tensor]:
        """The log-partition [*B] in float64, and the values of the messages between pieces, if they are to be kept."""
        (g, m), c, last = self._layout.grid, self._operands.x.shape[-1], len(self._variables) - 1
        checkpoints = self._operands.p0.new_empty((last if keep else 0, g, m, c), dtype=torch.float64)
        message: Message | None = None
        redone: Tensor | None = None
        for i, x, bulk in self._walk(range(last + 1), "forward"):
            residuals, message = self._room.forward(self._stretch(i, x, bulk), message, leave=True)
            redone = residuals.redone if redone is None else redone + residuals.redone
            if keep and i < last:
                checkpoints[i] = message.values
        assert message is not None and redone is not None
        report_chains(redone)
        log_norm = message.log_norm
        if self._ends is not None:  # those of a GPU have not been looked at
            ends = self._ends[..., 0]
            log_norm = log_norm.masked_fill((ends < 1) | (ends > self._v), math.nan)
        return self._layout.batched(log_norm), checkpoints

    def backward(
        self, grad: Tensor, log_norm: Tensor, values: Tensor, needs: Needs
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of `sum(grad * log_norm)`, of those that are needed."""
        (x, bulk, p0), layout, dtype = self._operands[:3], self._layout, self._dtype
        weight, norms, (g, m) = layout.sequences(grad), layout.sequences(log_norm), layout.grid
        into_x = _Gradient(x, -2, self._every + 1, p0.device, x.dtype) if needs[0] else None
        into_bulk = _Gradient(bulk, -3, self._every, p0.device, dtype) if needs[1] else None
        messages = p0.new_empty(min(self._every, self._v) + 1, g, m, x.shape[-1], dtype=dtype)
        scale, following = torch.zeros(2, g, m, dtype=torch.float64, device=p0.device), None
        for i, potentials, matrices in self._walk(range(len(self._variables))[::-1], "backward"):
            chain = self._stretch(i, potentials, matrices)
            entering, followed = Message(values[i - 1], scale) if i > 0 else None, following is not None
            residuals, _ = self._room.forward(chain, entering, keep=messages, leave=followed)
            piece_x = None if into_x is None else layout.steps_first(into_x.piece(*self._variables[i]))
            piece_bulk = None
            if into_bulk is not None and len(chain.bulk) > 0:
                piece_bulk = layout.matrices(into_bulk.piece(*self._transitions[i]))
            residuals = residuals._replace(log_norm=norms)
            following = self._room.backward(chain, residuals, weight, following, piece_x, piece_bulk)
            if into_x is not None:
                into_x.put(self._variables[i][0])
            if into_bulk is not None and piece_bulk is not None:
                into_bulk.put(self._transitions[i][0])
        assert following is not None
        start = layout.states(following).sum_to_size(p0.shape).to(p0.dtype) if needs[2] else None
        return None if into_x is None else into_x.whole(), None if into_bulk is None else into_bulk.whole(), start

    def _walk(self, order: Sequence[int], title: str) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The numbers of pieces, their log-potentials and their matrices; valid until the next is asked for."""
        x, bulk, p0, *_ = self._operands
        potentials = pieces(x, -2, [self._variables[i] for i in order], p0.device)
        if bulk.shape[-3] == 1:
            matrices: Iterator[Tensor] = repeat(bulk.to(p0.device))
        else:
            matrices = pieces(bulk, -3, [self._transitions[i] for i in order], p0.device)
        return zip(bar(order, title, self._progress), potentials, matrices, strict=False)

    def _stretch(self, i: int, x: Tensor, bulk: Tensor) -> Chain:
        start, stop = self._variables[i]
        ends = None if self._ends is None else (self._ends - start).clamp(0 if i > 0 else 1, stop - start)
        layout, p0, log_params = self._layout, self._operands.p0, self._operands.log_params
        bulk = layout.matrices(bulk)[: stop - 1] if i == 0 else layout.matrices(bulk)
        return Chain(layout.steps_first(x), bulk, layout.weights(p0), ends, log_params, self._dtype)


class _Gradient:
    """The gradient of an operand, written a piece along an axis at a time; it lies where the operand does.

    A piece is written in place where that is possible, and by way of memory of its own where the gradient lies on
    another device or has another dtype than `dtype`. What all pieces add to is summed in float64, and rounded once.
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
        """Memory for the entries from `start` to before `stop`, uninitialised or 0."""
        shape = self._into.shape if self._sum is not None else self._into.narrow(self._axis, start, stop - start).shape
        if self._in_place:
            return self._into.narrow(self._axis, start, stop - start)
        self._piece = torch.empty(shape, dtype=self._dtype, device=self._device)
        return self._piece

    def put(self, start: int) -> None:
        """Put the last piece where it belongs, from `start` on; a copy to another device may end later."""
        if self._sum is not None:
            self._sum += self._piece
        elif self._returns is not None:
            self._returns.put(start, self._piece)

    def whole(self) -> Tensor:
        """All of it, when it has been written."""
        if self._sum is not None and self._returns is not None:
            self._returns.put(0, self._sum)
        if self._returns is not None:
            self._returns.finish()
        return self._into
