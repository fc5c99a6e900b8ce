"""Chains that one thread computes: arguments of the C library, prepared once for all of the same shapes and strides.

A chain of a few dozen steps is computed in less time than it takes to check its tensors and to fill in arguments. A
`Short` has all arguments but the addresses, needs one call of the library for each public function, and writes
gradients in the operands' own shapes.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..chain import Chain
from ..weights import Weights, check_weights
from .arguments import Arguments, Call, function
from .library import in_large_pages

# by shapes, strides, dtypes and options; None for chains that are not short
_known: dict[Any, "Short | None"] = {}
_MOST = 1024

# scratch that calls reuse: a call takes one from the list, so that no other thread has it, and puts it back; calls that
# need more bytes have scratch of their own
_rooms: list[Tensor] = []
_ROOM = 2**20


def short_of(
    x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool, keep: bool, wanted: Callable[..., bool], chain_of: Any
) -> "Short | None":
    """The `Short` of operands; None for chains that are not short, or if `wanted` says no.

    `wanted` checks the operands, once for all of the same shapes and strides; `chain_of` gives their layout and chain.
    """
    if x.is_neg() or bulk.is_neg() or p0.is_neg():  # the library does not see torch's negative bit
        return None
    places = x.shape, bulk.shape, p0.shape, x.stride(), bulk.stride(), p0.stride()
    key = places, x.dtype, bulk.dtype, p0.dtype, log_params, keep, wanted, torch.get_num_threads()
    if key not in _known:
        short = None
        if wanted(x, bulk, p0, log_params) and x.numel():
            layout, chain = chain_of(x, bulk, p0, None, log_params)
            meta = (torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in (x, bulk, p0))
            dense = chain_of(*meta, None, log_params)[1]
            in_order = layout.own == tuple(range(len(layout.own)))
            if in_order and Short.takes(chain) and Short.takes(dense):
                short = Short(places[3:], chain, dense)
        if len(_known) >= _MOST:
            _known.clear()
        _known[key] = short
    return _known[key]


class Short:
    """The arguments of a chain except for addresses.

    `strides` are those of its operands; `dense` is a chain of contiguous operands, which have the gradients' strides.
    """

    def __init__(self, strides: tuple[tuple[int, ...], ...], chain: Chain, dense: Chain) -> None:
        v, g, m, c, dtype = chain.v, chain.g, chain.m, chain.c, chain.dtype
        self._dtype, self._strides = dtype, strides
        call, gradients = Call(chain), Call(dense).arguments
        self._arguments = a = call.arguments
        a.last = g * m
        a.grad_step, a.grad_set, a.grad_member = gradients.x_step, gradients.x_set, gradients.x_member
        a.count_step, a.count_set = gradients.bulk_step, gradients.bulk_set
        a.grad_p0_set, a.grad_p0_member = gradients.p0_set, gradients.p0_member
        self._has_negative = None if chain.log_params else function("has_negative", dtype)
        self._calls = {name: function(name, dtype) for name in ("value", "gradients", "posteriors", "messages")}
        self._scratch = {name: int(call(ctypes.byref(a))) + 64 for name, call in self._calls.items()}
        # the dtypes and shapes of log_norm, messages and redone, which are kept in one tensor, one after the other
        self._kept = ((torch.float64, (g, m)), (dtype, (v, g, m, c)), (torch.bool, (g, m)))
        self._places, self._bytes = [], 0
        for kind, shape in self._kept:
            self._places.append(self._bytes)
            self._bytes += -(-torch.Size(shape).numel() * kind.itemsize // 64) * 64

    @staticmethod
    def takes(chain: Chain) -> bool:
        """Whether a chain is computed on one thread and without a copy of an operand."""
        operands = chain.x, chain.bulk, chain.p0
        plain = all(operand.dtype == chain.dtype for operand in operands) and chain.x.stride(-1) == 1
        if not plain or chain.v == 1 or len(Call(chain).spans()) > 1:
            return False
        try:
            chain.x.view(chain.v, chain.g, chain.m, chain.c)
            chain.bulk.view(len(chain.bulk), chain.g, chain.c, chain.c)
            chain.p0.expand(*chain.lead, chain.c).view(chain.g, chain.m, chain.c)
        except RuntimeError:
            return False
        return True

    def fits(self, x: Tensor, bulk: Tensor, p0: Tensor) -> bool:
        """Whether operands have the strides that the arguments were prepared for."""
        return self._strides == (x.stride(), bulk.stride(), p0.stride())

    def value(self, x: Tensor, bulk: Tensor, p0: Tensor, keep: bool) -> tuple[Tensor, Tensor | None, int]:
        """The log-partition [*B] in the operands' dtype, what gradients need, and the number of redone sequences."""
        log_norm, kept = torch.empty(x.shape[:-2], dtype=self._dtype, device="cpu"), None
        a = self._of(x, bulk, p0)
        a.value = log_norm.data_ptr()
        if keep:
            kept = in_large_pages(torch.empty(self._bytes, dtype=torch.uint8, device="cpu"))
            self._point(a, kept)
        return log_norm, kept, self._run("value", a)

    def parts(self, kept: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The parts of the tensor that `value` kept, in the form in which `apart` returns them."""
        log_norm, messages, redone = (
            kept[place : place + torch.Size(shape).numel() * kind.itemsize].view(kind).view(shape)
            for place, (kind, shape) in zip(self._places, self._kept, strict=True)
        )
        return log_norm.view(x.shape[:-2]), messages, redone

    def apart(self, x: Tensor, bulk: Tensor, p0: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The log-partition [*B] in float64, messages if `keep`, and whether sequences were redone.

        Each is a tensor of its own, as the results of an operator have to be.
        """
        log_norm, messages, redone = (
            in_large_pages(torch.empty(shape if keep or at != 1 else (0,), dtype=kind, device="cpu"))
            for at, (kind, shape) in enumerate(self._kept)
        )
        a = self._of(x, bulk, p0, check=False)
        self._point(a, (log_norm, messages, redone))
        self._run("value", a)
        return log_norm.view(x.shape[:-2]), messages, redone

    def gradients(
        self, x: Tensor, bulk: Tensor, p0: Tensor, kept: Tensor | tuple[Tensor, ...], weight: Tensor,
        needs: tuple[bool, ...], *, by_log: bool = False,
    ) -> list[Tensor | None]:  # fmt: skip
        """The gradients of x, bulk and p0 that are needed; `kept` is one tensor by `value` or its parts by `apart`."""
        weight = weight.to(torch.float64).resolve_neg().contiguous()
        a = self._of(x, bulk, p0, check=False)
        a.weight, a.by_log = weight.data_ptr(), by_log
        self._point(a, kept)
        gradients = self._gradients(a, (x, bulk, p0), needs)
        self._run("gradients", a)
        return gradients

    def posteriors(self, x: Tensor, bulk: Tensor, p0: Tensor, counts: bool) -> tuple[Tensor, list[Tensor | None], int]:
        """The log-partition [*B], the gradients of x and, if `counts`, log bulk, and the number of redone sequences."""
        log_norm = torch.empty(x.shape[:-2], dtype=self._dtype, device="cpu")
        a = self._of(x, bulk, p0)
        a.value, a.by_log = log_norm.data_ptr(), 1
        gradients = self._gradients(a, (x, bulk), (True, counts))
        return log_norm, gradients, self._run("posteriors", a)

    def messages(self, x: Tensor, bulk: Tensor, p0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Forward and backward messages [*B, v, c] and the log-partition [*B]."""
        forward, backward = (in_large_pages(torch.empty(x.shape, dtype=self._dtype, device="cpu")) for _ in range(2))
        log_norm = torch.empty(x.shape[:-2], dtype=self._dtype, device="cpu")
        a = self._of(x, bulk, p0)
        a.value, a.log_forward, a.log_backward = log_norm.data_ptr(), forward.data_ptr(), backward.data_ptr()
        self._run("messages", a)
        return forward, backward, log_norm

    def _of(self, x: Tensor, bulk: Tensor, p0: Tensor, *, check: bool = True) -> Arguments:
        """The arguments; raises for a negative weight in p0, or in a matrix that serves all steps."""
        a = Arguments.from_buffer_copy(self._arguments)
        a.x, a.bulk, a.p0 = x.data_ptr(), bulk.data_ptr(), p0.data_ptr()
        if check and self._has_negative is not None and self._has_negative(ctypes.byref(a)):
            check_weights(Weights("bulk", bulk), Weights("p0", p0))
        return a

    def _point(self, a: Arguments, kept: Tensor | tuple[Tensor, ...]) -> None:
        """Point the arguments to what is kept, one tensor or its parts; an empty part is a null pointer."""
        if isinstance(kept, Tensor):
            at = kept.data_ptr()
            a.log_norm, a.messages, a.lossy = (at + place for place in self._places)
        else:
            a.log_norm, a.messages, a.lossy = (part.data_ptr() for part in kept)

    def _gradients(self, a: Arguments, operands: tuple[Tensor, ...], needs: tuple[bool, ...]) -> list[Tensor | None]:
        """Memory for the gradients that are needed; the arguments point to it then."""
        gradients: list[Tensor | None] = []
        for name, operand, need in zip(("grad_x", "grad_bulk", "grad_p0_real"), operands, needs, strict=False):
            gradient = in_large_pages(torch.empty(operand.shape, dtype=self._dtype, device="cpu")) if need else None
            if gradient is not None:
                setattr(a, name, gradient.data_ptr())
            gradients.append(gradient)
        return gradients

    def _run(self, name: str, arguments: Arguments) -> int:
        size = max(_ROOM, self._scratch[name])
        if _rooms and size == _ROOM:
            room = _rooms.pop()
        else:
            room = in_large_pages(torch.empty(size, dtype=torch.uint8, device="cpu"))
        arguments.room = (room.data_ptr() + 63) // 64 * 64
        redone: int = self._calls[name](ctypes.byref(arguments))
        if size == _ROOM:
            _rooms.append(room)
        return redone
