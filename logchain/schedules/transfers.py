"""How pieces of a tensor on the host come to the device that computes, and how those of a gradient return.

A piece goes through one of two pinned buffers into one of two on the device, by a stream of its own. It is asked for
when the work on the piece before has been queued, so it travels while that is done. What comes back does so likewise.
Where there is one device only, pieces are views.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

# pieces under way at a time
SLOTS = 2


def apart(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor lies elsewhere."""
    return tensor.device != device


class Side:
    """A stream of copies beside the one that computes: all that needs a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def pinned(self, entries: int, dtype: torch.dtype) -> Tensor:
        """Room on the host from where the device copies by itself."""
        return torch.empty(entries, dtype=dtype, pin_memory=True)

    def buffer(self, entries: int, dtype: torch.dtype) -> Tensor:
        """Room on the device; given back, it is not used again before the copies queued here are done."""
        room = torch.empty(entries, dtype=dtype, device=self._device)
        room.record_stream(self._stream)
        return room

    def computed(self) -> Any:
        """A mark behind all work that has been queued to be computed."""
        return torch.cuda.current_stream(self._device).record_event()

    def copy(self, into: Tensor, source: Tensor, *, after: Any) -> Any:
        """Queue a copy that waits for a mark, and return the mark behind it."""
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def compute_after(self, mark: Any) -> None:
        """Have what will be queued to be computed wait for a mark."""
        torch.cuda.current_stream(self._device).wait_event(mark)


def pieces(tensor: Tensor, axis: int, ranges: Sequence[tuple[int, int]], device: torch.device) -> Iterator[Tensor]:
    """The piece of each range along an axis, on the device; valid until the next one is asked for.

    Work on a piece is to be queued before the next one is asked for.
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
        host, piece = (room[: view.numel()].view(view.shape) for room in slots[slot])
        if copied[slot] is not None:
            copied[slot].synchronize()
        host.copy_(view)
        copied[slot] = side.copy(piece, host, after=used[slot])
        side.compute_after(copied[slot])
        yield piece
        used[slot] = side.computed()


class Returns:
    """Puts pieces of what is computed on a device into a tensor that may lie on the host; `finish` waits for all.

    They have at most so many steps along the axis, each.
    """

    def __init__(self, into: Tensor, axis: int, steps: int, device: torch.device) -> None:
        self._into, self._axis, self._rooms = into, axis, list[Tensor]()
        self._side = Side(device) if apart(into, device) else None
        if self._side is not None:
            entries = into.numel() // max(1, into.shape[axis]) * steps
            self._rooms = [self._side.pinned(entries, into.dtype) for _ in range(SLOTS)]
        self._under_way: deque[tuple[Any, Tensor, Tensor, Tensor, Tensor]] = deque()

    def put(self, start: int, piece: Tensor) -> None:
        """Write a piece from `start` on, later on if it has to travel."""
        into = self._into.narrow(self._axis, start, piece.shape[self._axis])
        if self._side is None:
            into.copy_(piece)
            return
        if not self._rooms:
            self._land()
        piece, room = piece.to(into.dtype).contiguous(), self._rooms.pop()
        host = room[: piece.numel()].view(piece.shape)
        mark = self._side.copy(host, piece, after=self._side.computed())
        # the piece is held, or its memory would be computed in before it is copied
        self._under_way.append((mark, piece, room, host, into))

    def finish(self) -> None:
        """Have all of them written."""
        while self._under_way:
            self._land()

    def _land(self) -> None:
        mark, _, room, host, into = self._under_way.popleft()
        mark.synchronize()
        into.copy_(host)
        self._rooms.append(room)
