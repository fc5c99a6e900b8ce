"""Pieces of an operand on the device that computes, and the gradient of an operand from its pieces.

Pieces of an operand on that device are views. Those of an operand on the host are copied through pinned memory on a
separate CUDA stream, while the device computes the piece before; pieces of the gradient return likewise.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

# pieces that are copied or worked on at a time
SLOTS = 2

Ranges = Sequence[tuple[int, int]]


def apart(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor lies on another device."""
    return tensor.device != device


class Side:
    """A CUDA stream for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def pinned(self, like: Tensor) -> Tensor:
        """Pinned memory on the host, which torch does not use again before its copies are done."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def computed(self) -> Any:
        """An event after all work that is queued on the computing stream."""
        return torch.cuda.current_stream(self._device).record_event()

    def copy(self, into: Tensor, source: Tensor, *, after: Any) -> Any:
        """An event after the copy, which is queued now and waits for the event `after`."""
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def compute_after(self, event: Any) -> None:
        """Make work that is queued from now on wait for an event."""
        torch.cuda.current_stream(self._device).wait_event(event)


def pieces(tensor: Tensor, ranges: Ranges, device: torch.device) -> Iterator[Tensor]:
    """The piece of each range of the first axis, on the device; valid until the next one is taken.

    Queue all work on a piece before taking the next.
    """
    views = [tensor[start:stop] for start, stop in ranges]
    if not apart(tensor, device):
        yield from views
        return
    side, entries = Side(device), max((view.numel() for view in views), default=0)
    buffers = [torch.empty(entries, dtype=tensor.dtype, device=device) for _ in views[:SLOTS]]
    used = [side.computed()] * SLOTS
    for i, view in enumerate(views):
        used[i % SLOTS].synchronize()
        piece = buffers[i % SLOTS][: view.numel()].view(view.shape)
        side.compute_after(side.copy(piece, side.pinned(view).copy_(view), after=used[i % SLOTS]))
        yield piece
        used[i % SLOTS] = side.computed()


class Gradient:
    """The gradient of an operand, if there is one, written a range of the first axis of its `view` at a time.

    Pieces are of `dtype` on `device`. The gradient of a matrix that all steps share is the sum of pieces, added up in
    float64 and rounded once.
    """

    def __init__(
        self, operand: Tensor | None, view: Callable[[Tensor], Tensor], ranges: Ranges, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._ranges, self._dtype, self._device, self._whole = ranges, dtype, device, None
        self._under_way: deque[tuple[Any, Tensor, Tensor, Tensor]] = deque()
        if operand is not None:
            self._whole = torch.zeros_like(operand, memory_format=torch.contiguous_format)
            self._view = view(self._whole)
            self._side = Side(device) if apart(operand, device) else None
            self._sum = self._view.to(device, torch.float64, copy=True) if len(self._view) == 1 else None

    def piece(self, i: int) -> Tensor | None:
        """Memory for the gradient of a range, uninitialized or 0."""
        if self._whole is None:
            return None
        self._into = self._view if self._sum is not None else self._view[slice(*self._ranges[i])]
        in_place = self._sum is None and self._side is None and self._into.dtype == self._dtype
        self._piece = self._into if in_place else torch.empty(self._into.shape, dtype=self._dtype, device=self._device)
        return self._piece

    def put(self) -> None:
        """Write the last piece into its range; a copy to another device may end later."""
        if self._whole is None or self._piece is self._into:
            return
        if self._sum is not None:
            self._sum += self._piece
        elif self._side is None:
            self._into.copy_(self._piece)
        else:
            self._land(SLOTS - 1)
            piece = self._piece.to(self._into.dtype).contiguous()
            host = self._side.pinned(piece)
            # a reference to the piece keeps its memory from being used again before it is copied
            copied = self._side.copy(host, piece, after=self._side.computed())
            self._under_way.append((copied, piece, host, self._into))

    def whole(self) -> Tensor | None:
        """The gradient, when all pieces have been written."""
        self._land(0)
        if self._whole is not None and self._sum is not None:
            self._view.copy_(self._sum)
        return self._whole

    def _land(self, most: int) -> None:
        """Wait for copies until at most `most` are under way."""
        while len(self._under_way) > most:
            copied, _, host, into = self._under_way.popleft()
            copied.synchronize()
            into.copy_(host)
