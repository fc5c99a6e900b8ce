"""Short calls: what is worked out once for all chains of the same shapes and strides.

A chain of a few dozen steps is walked in less time than it takes to arrange its tensors. A `Short` knows the arguments
but for the addresses, and writes gradients in the operands' own shapes.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..chain import Chain
from .arguments import ROOMS, Arguments, Call, function

# by shapes, strides, dtypes; None for chains that are not short
_known: dict[Any, "Short | None"] = {}
_MOST = 1024


def short_of(
    x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool, chain_of: Callable[..., tuple[Any, Chain]]
) -> "Short | None":
    """The `Short` of operands; `chain_of` gives the layout and the chain of operands and lengths."""
    places = x.shape, bulk.shape, p0.shape, x.stride(), bulk.stride(), p0.stride()
    key = places, x.dtype, bulk.dtype, p0.dtype, log_params, torch.get_num_threads()
    if key not in _known:
        if len(_known) >= _MOST:
            _known.clear()
        layout, chain = chain_of(x, bulk, p0, None, log_params)
        meta = (torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in (x, bulk, p0))
        dense = chain_of(*meta, None, log_params)
        in_order = layout.own == tuple(range(len(layout.own)))
        _known[key] = Short(chain, dense[1]) if in_order and Short.takes(chain) else None
    return _known[key]


class Short:
    """The arguments of a chain but for addresses; `dense` is one of contiguous operands, as gradients are."""

    def __init__(self, chain: Chain, dense: Chain) -> None:
        v, g, m, c, dtype = chain.v, chain.g, chain.m, chain.c, chain.dtype
        self._shape, self._dtype = (v, g, m, c), dtype
        call, gradients = Call(chain), Call(dense).arguments
        self._arguments = a = call.arguments
        a.last = g * m
        a.grad_step, a.grad_set, a.grad_member = gradients.x_step, gradients.x_set, gradients.x_member
        a.count_step, a.count_set = gradients.bulk_step, gradients.bulk_set
        self._rooms = {name: function(room, dtype)(ctypes.byref(a)) + 64 for name, room in ROOMS.items()}
        self._one = bool(a.one_matrix)

    @staticmethod
    def takes(chain: Chain) -> bool:
        """Whether a chain is walked on one thread, where its operands lie."""
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

    def forward(self, x: Tensor, bulk: Tensor, p0: Tensor, keep: bool, room: Tensor | None) -> tuple[Tensor, ...]:
        """The log-partition [*B], messages, the sums of the last ones (1, g, m, 1), and which were redone (g, m)."""
        v, g, m, c = self._shape
        log_norm = torch.empty(x.shape[:-2], dtype=torch.float64)
        messages = room if room is not None else torch.empty((v, g, m, c) if keep else 0, dtype=self._dtype)
        sums, lossy = torch.empty((1, g, m, 1), dtype=self._dtype), torch.empty((g, m), dtype=torch.bool)
        a = Arguments.from_buffer_copy(self._arguments)
        a.x, a.bulk, a.p0, a.messages = (
            x.data_ptr(),
            bulk.data_ptr(),
            p0.data_ptr(),
            messages.data_ptr() if keep else None,
        )
        a.log_norm, a.sums, a.lossy = log_norm.data_ptr(), sums.data_ptr(), lossy.data_ptr()
        if self._run("forward", a):
            self._run("redo_forward", a)
        return log_norm, messages, sums, lossy

    def backward(
        self, x: Tensor, bulk: Tensor, p0: Tensor, log_norm: Tensor, kept: tuple[Tensor, ...], weight: Tensor,
        by_log: bool, gradients: tuple[Tensor, ...],
    ) -> None:  # fmt: skip
        """Write the gradients of x, bulk and p0 that are not empty."""
        _, g, m, c = self._shape
        messages, sums, redone = kept
        grad_x, grad_bulk, grad_p0 = gradients
        weight, lossy = weight.to(torch.float64).contiguous(), redone.to(torch.uint8)
        a = Arguments.from_buffer_copy(self._arguments)
        a.x, a.bulk, a.p0, a.messages = x.data_ptr(), bulk.data_ptr(), p0.data_ptr(), messages.data_ptr()
        a.log_norm, a.sums, a.lossy = log_norm.data_ptr(), sums[-1].data_ptr(), lossy.data_ptr()
        a.weight, a.by_log, counts, starts = weight.data_ptr(), by_log, None, None
        if grad_x.numel():
            a.grad_x = grad_x.data_ptr()
        if grad_bulk.numel() and self._one:
            counts = torch.zeros((g, c, c), dtype=torch.float64)
            a.counts = counts.data_ptr()
        elif grad_bulk.numel():
            a.grad_bulk = grad_bulk.data_ptr()
        if grad_p0.numel():
            starts = torch.empty((g, m, c), dtype=torch.float64)
            a.grad_p0 = starts.data_ptr()
        if self._run("backward", a):
            self._run("redo_backward", a)
        if counts is not None:
            grad_bulk.copy_(counts.view_as(grad_bulk))
        if starts is not None:
            grad_p0.copy_(starts.view(*x.shape[:-2], c).sum_to_size(p0.shape))

    def messages(self, x: Tensor, bulk: Tensor, p0: Tensor, forward: Tensor, backward: Tensor) -> Tensor:
        """The log-partition [*B]; writes the messages, contiguous as the gradient of x."""
        log_norm = torch.empty(x.shape[:-2], dtype=torch.float64)
        a = Arguments.from_buffer_copy(self._arguments)
        a.x, a.bulk, a.p0, a.log_norm = x.data_ptr(), bulk.data_ptr(), p0.data_ptr(), log_norm.data_ptr()
        a.log_forward, a.log_backward = forward.data_ptr(), backward.data_ptr()
        self._run("messages", a)
        return log_norm

    def _run(self, name: str, arguments: Arguments) -> int:
        room = torch.empty(self._rooms[name], dtype=torch.uint8)
        arguments.room = (room.data_ptr() + 63) // 64 * 64
        found: int = function(name, self._dtype)(ctypes.byref(arguments))
        return found
