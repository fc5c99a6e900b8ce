"""Arguments of the C library that are filled in once for all operands of the same shapes, strides and dtypes.

A chain of a few dozen steps is computed in less time than it takes to check its tensors and to fill in arguments. A
`Template` has all of these but the addresses, and `cached` holds templates. Several threads may use both at once.
"""

import ctypes
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..chain import Chain
from .arguments import Arguments, Call, function, run
from .library import in_large_pages

_Made = TypeVar("_Made")

# by all that templates depend on
_templates: dict[Any, Any] = {}
_MOST = 1024
_MISSING = object()

# scratch that calls use again: a call takes one from the list, so that no other thread has it, and puts it back; calls
# that need more bytes have other scratch
_rooms: list[Tensor] = []
_ROOM = 2**20


def cached(key: Any, make: Callable[[], _Made]) -> _Made:
    """What `make` has returned for this key, which says all that it depends on."""
    made = _templates.get(key, _MISSING)
    if made is _MISSING:
        made = make()
        if len(_templates) >= _MOST:
            _templates.clear()
        _templates[key] = made
    return made  # type: ignore[no-any-return]


class Template:
    """The arguments of a chain except for addresses.

    Attributes:
        arguments: the arguments; addresses are those of a chain that may be gone.
        dtype: the dtype of the arithmetic.
        on_one_thread: whether a single thread computes the chain.
    """

    def __init__(self, chain: Chain, *, entered: bool = False) -> None:
        call = Call(chain, entered=entered)
        self.arguments, self.dtype, self._spans, self._held = call.arguments, chain.dtype, call.spans(), call.constants
        self.arguments.last, self.on_one_thread = chain.g * chain.m, len(self._spans) == 1
        self._calls: dict[str, tuple[Any, int]] = {}

    def of(self, x: Tensor, bulk: Tensor, p0: Tensor | None = None) -> Arguments:
        """The arguments for operands; a chain that a message enters has no `p0`."""
        a = Arguments.from_buffer_copy(self.arguments)
        a.x.data, a.bulk.data = x.data_ptr(), bulk.data_ptr()
        if p0 is not None:
            a.p0.data = p0.data_ptr()
        return a

    def run(self, name: str, arguments: Arguments) -> int:
        """What a function of the library returns, summed over threads."""
        if not self.on_one_thread:
            return run(arguments, self.dtype, name, self._spans)
        call, size = self._calls.get(name) or self._prepare(name)
        room = None
        if size <= _ROOM:
            try:
                room = _rooms.pop()
            except IndexError:
                size = _ROOM
        if room is None:
            room = in_large_pages(torch.empty(size, dtype=torch.uint8, device="cpu"))
        arguments.room = (room.data_ptr() + 63) // 64 * 64
        result: int = call(ctypes.byref(arguments))
        if room.numel() == _ROOM:
            _rooms.append(room)
        return result

    def _prepare(self, name: str) -> tuple[Any, int]:
        """A function of the library, and the bytes of scratch that it needs."""
        call = function(name, self.dtype)
        self._calls[name] = prepared = call, int(call(ctypes.byref(self.arguments))) + 64
        return prepared
