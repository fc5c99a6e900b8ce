"""Transfers: pieces of a tensor on the host to the device that computes, and pieces of its gradient back.

A piece goes through one of two pinned buffers into one of two buffers on the device, on a CUDA stream for copies. It is
asked for when work on the piece before has been queued, so that copies and work overlap. Gradients go back likewise.
Pieces of a tensor that already lies on the device are views.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

# pieces that are copied or worked on at a time
SLOTS = 2


def apart(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor lies on another device."""
    return tensor.device != device


class Side:
    """A CUDA stream for copies beside the one that computes, and its buffers; all that needs a GPU is here."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def pinned(self, entries: int, dtype: torch.dtype) -> Tensor:
        """A pinned buffer on the host."""
        return torch.empty(entries, dtype=dtype, pin_memory=True)

    def buffer(self, entries: int, dtype: torch.dtype) -> Tensor:
        """A buffer on the device, whose memory torch does not use again before the copies queued here are done."""
        buffer = torch.empty(entries, dtype=dtype, device=self._device)
        buffer.record_stream(self._stream)
        return buffer

    def computed(self) -> Any:
        """An event behind all work that is queued on the computing stream."""
        return torch.cuda.current_stream(self._device).record_event()

    def copy(self, into: Tensor, source: Tensor, *, after: Any) -> Any:
        """An event behind the copy, which is queued now and waits for the event `after`."""
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def compute_after(self, event: Any) -> None:
        """Make work that is queued from now on wait for an event."""
        torch.cuda.current_stream(self._device).wait_event(event)


def pieces(tensor: Tensor, axis: int, ranges: Sequence[tuple[int, int]], device: torch.device) -> Iterator[Tensor]:
    """The piece of each range along an axis, on the device; valid until the next one is asked for.

    Queue all work on a piece before asking for the next.
    """
    views = (tensor.narrow(axis, start, stop - start) for start, stop in ranges)
    if not apart(tensor, device):
        yield from views
        return
    side = Side(device)
    step_entries = tensor.numel() // max(1, tensor.shape[axis])
    entries = step_entries * max((stop - start for start, stop in ranges), default=0)
    count = min(SLOTS, len(ranges))
    slots = [(side.pinned(entries, tensor.dtype), side.buffer(entries, tensor.dtype)) for _ in range(count)]
    used = [side.computed()] * count
    copied: list[Any] = [None] * count
    for i, view in enumerate(views):
        slot = i % count
        host, piece = (buffer[: view.numel()].view(view.shape) for buffer in slots[slot])
        if copied[slot] is not None:
            copied[slot].synchronize()
        host.copy_(view)
        copied[slot] = side.copy(piece, host, after=used[slot])
        side.compute_after(copied[slot])
        yield piece
        used[slot] = side.computed()


class Returns:
    """Copies of pieces from the device that computes into a tensor that may lie on the host; `finish` waits for all.

    A piece has at most `steps` entries along the axis.
    """

    def __init__(self, into: Tensor, axis: int, steps: int, device: torch.device) -> None:
        self._into, self._axis, self._free = into, axis, list[Tensor]()
        self._side = Side(device) if apart(into, device) else None
        if self._side is not None:
            entries = into.numel() // max(1, into.shape[axis]) * steps
            self._free = [self._side.pinned(entries, into.dtype) for _ in range(SLOTS)]
        self._under_way: deque[tuple[Any, Tensor, Tensor, Tensor, Tensor]] = deque()

    def put(self, start: int, piece: Tensor) -> None:
        """Write a piece from `start` on, or queue its copy to the host."""
        into = self._into.narrow(self._axis, start, piece.shape[self._axis])
        if self._side is None:
            into.copy_(piece)
            return
        if not self._free:
            self._land()
        piece, buffer = piece.to(into.dtype).contiguous(), self._free.pop()
        host = buffer[: piece.numel()].view(piece.shape)
        event = self._side.copy(host, piece, after=self._side.computed())
        # a reference to the piece keeps its memory from being used again before it is copied
        self._under_way.append((event, piece, buffer, host, into))

    def finish(self) -> None:
        """Wait until all pieces have been written."""
        while self._under_way:
            self._land()

    def _land(self) -> None:
        """Wait for the oldest copy, and write its piece."""
        event, _, buffer, host, into = self._under_way.popleft()
        event.synchronize()
        into.copy_(host)
        self._free.append(buffer)
