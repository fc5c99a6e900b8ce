"""Chains that one thread computes: one call of the library for each public function, by a template of its arguments.

Gradients are written in the shapes of the operands.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..chain import Chain
from ..weights import Weights, check_weights
from .arguments import Arguments, Call, function, point
from .library import in_large_pages
from .template import Template, cached


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

    def make() -> Short | None:
        if not wanted(x, bulk, p0, log_params) or not x.numel():
            return None
        layout, chain = chain_of(x, bulk, p0, None, log_params)
        meta = (torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in (x, bulk, p0))
        dense = chain_of(*meta, None, log_params)[1]
        in_order = layout.own == tuple(range(len(layout.own)))
        plain = all(operand.dtype == chain.dtype for operand in (x, bulk, p0)) and x.stride(-1) == 1
        short = Short(places[3:], chain, dense) if in_order and plain and chain.v > 1 else None
        return short if short and short.on_one_thread else None

    return cached(key, make)


class Short(Template):
    """The arguments of a chain except for addresses.

    `strides` are those of its operands; `dense` is a chain of contiguous operands, which have the gradients' strides.
    """

    def __init__(self, strides: tuple[tuple[int, ...], ...], chain: Chain, dense: Chain) -> None:
        super().__init__(chain)
        v, g, m, c, dtype = chain.v, chain.g, chain.m, chain.c, chain.dtype
        self._strides, a, gradients = strides, self.arguments, Call(dense)
        a.grad_bulk, a.grad_p0_real = gradients.arguments.bulk, gradients.arguments.p0
        a.out.step, a.out.at = gradients.arguments.x.step, gradients.arguments.x.at
        self._gradients_held = gradients.constants
        self._has_negative = None if chain.log_params else function("has_negative", dtype)
        # the dtypes and shapes of log_norm, messages and recomputed, which are kept in one tensor, one after the other
        self._kept = ((torch.float64, (g, m)), (dtype, (v, g, m, c)), (torch.bool, (g, m)))
        self._places, self._bytes = [], 0
        for kind, shape in self._kept:
            self._places.append(self._bytes)
            self._bytes += -(-torch.Size(shape).numel() * kind.itemsize // 64) * 64

    def fits(self, x: Tensor, bulk: Tensor, p0: Tensor) -> bool:
        """Whether operands have the strides that the arguments were prepared for."""
        return self._strides == (x.stride(), bulk.stride(), p0.stride())

    def value(self, x: Tensor, bulk: Tensor, p0: Tensor, keep: bool) -> tuple[Tensor, Tensor | None, int]:
        """The log-partition [*B] in the operands' dtype, what gradients need, and the count of recomputed sequences."""
        log_norm, kept = torch.empty(x.shape[:-2], dtype=self.dtype, device="cpu"), None
        a = self._checked(x, bulk, p0)
        a.value = log_norm.data_ptr()
        if keep:
            kept = in_large_pages(torch.empty(self._bytes, dtype=torch.uint8, device="cpu"))
            self._point(a, kept)
        return log_norm, kept, self.run("value", a)

    def parts(self, kept: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The parts of the tensor that `value` kept, in the form in which `apart` returns them."""
        log_norm, messages, recomputed = (
            kept[place : place + torch.Size(shape).numel() * kind.itemsize].view(kind).view(shape)
            for place, (kind, shape) in zip(self._places, self._kept, strict=True)
        )
        return log_norm.view(x.shape[:-2]), messages, recomputed

    def apart(self, x: Tensor, bulk: Tensor, p0: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The log-partition [*B] in float64, messages if `keep`, and whether sequences were recomputed.

        Each is a separate tensor, as the results of an operator have to be.
        """
        log_norm, messages, recomputed = (
            in_large_pages(torch.empty(shape if keep or at != 1 else (0,), dtype=kind, device="cpu"))
            for at, (kind, shape) in enumerate(self._kept)
        )
        a = self._checked(x, bulk, p0, check=False)
        self._point(a, (log_norm, messages, recomputed))
        self.run("value", a)
        return log_norm.view(x.shape[:-2]), messages, recomputed

    def gradients(
        self, x: Tensor, bulk: Tensor, p0: Tensor, kept: Tensor | tuple[Tensor, ...], weight: Tensor,
        needs: tuple[bool, ...], *, by_log: bool = False,
    ) -> list[Tensor | None]:  # fmt: skip
        """The gradients of x, bulk and p0 that are needed; `kept` is one tensor by `value` or its parts by `apart`."""
        weight = weight.to(torch.float64).resolve_neg().contiguous()
        a = self._checked(x, bulk, p0, check=False)
        a.weight, a.by_log = weight.data_ptr(), by_log
        self._point(a, kept)
        gradients = self._gradients(a, (x, bulk, p0), needs)
        self.run("gradients", a)
        return gradients

    def posteriors(self, x: Tensor, bulk: Tensor, p0: Tensor, counts: bool) -> tuple[Tensor, list[Tensor | None], int]:
        """The log-partition [*B], gradients of x and, if `counts`, log bulk, and how many sequences were recomputed."""
        log_norm = torch.empty(x.shape[:-2], dtype=self.dtype, device="cpu")
        a = self._checked(x, bulk, p0)
        a.value, a.by_log = log_norm.data_ptr(), 1
        gradients = self._gradients(a, (x, bulk), (True, counts))
        return log_norm, gradients, self.run("posteriors", a)

    def messages(self, x: Tensor, bulk: Tensor, p0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Forward and backward messages [*B, v, c] and the log-partition [*B]."""
        forward, backward = (in_large_pages(torch.empty(x.shape, dtype=self.dtype, device="cpu")) for _ in range(2))
        log_norm = torch.empty(x.shape[:-2], dtype=self.dtype, device="cpu")
        a = self._checked(x, bulk, p0)
        a.value, a.log_forward, a.log_backward = log_norm.data_ptr(), forward.data_ptr(), backward.data_ptr()
        self.run("messages", a)
        return forward, backward, log_norm

    def _checked(self, x: Tensor, bulk: Tensor, p0: Tensor, *, check: bool = True) -> Arguments:
        """The arguments; raises for a negative weight in p0, or in a matrix that serves all steps."""
        a = self.of(x, bulk, p0)
        if check and self._has_negative is not None and self._has_negative(ctypes.byref(a)):
            check_weights(Weights("bulk", bulk), Weights("p0", p0))
        return a

    def _point(self, a: Arguments, kept: Tensor | tuple[Tensor, ...]) -> None:
        """Point the arguments to what is kept, one tensor or its parts; an empty part is a null pointer."""
        if isinstance(kept, Tensor):
            at = kept.data_ptr()
            a.log_norm, a.messages.data, a.lossy = (at + place for place in self._places)
        else:
            a.log_norm, a.messages.data, a.lossy = (part.data_ptr() for part in kept)

    def _gradients(self, a: Arguments, operands: tuple[Tensor, ...], needs: tuple[bool, ...]) -> list[Tensor | None]:
        """Memory for the gradients that are needed; the arguments point to it then."""
        gradients: list[Tensor | None] = []
        for name, operand, need in zip(("grad_x", "grad_bulk", "grad_p0_real"), operands, needs, strict=False):
            gradient = in_large_pages(torch.empty(operand.shape, dtype=self.dtype, device="cpu")) if need else None
            if gradient is not None:
                point(a, name, gradient)
            gradients.append(gradient)
        return gradients
