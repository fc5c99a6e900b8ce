"""Arguments of the C library that are filled in once for all operands of the same shapes, strides and dtypes.

A chain of a few dozen steps is computed in less time than it takes to check its tensors and to fill in arguments. A
`Template` has all of these but the addresses, and `cached` holds templates. Several threads may use both at once.
`Short` computes whole chains by one call of the library for each public function, `Stretch` pieces of longer chains.
"""

import ctypes
from array import array
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..chain import Chain
from ..weights import Weights, check_weights
from .arguments import Arguments, Call, function, offsets, run
from .library import in_large_pages

_Made = TypeVar("_Made")

# the log-partition, the forward messages, and which of them are logarithms; see `kernels.message.Kept`
Residuals = tuple[Tensor, Tensor, Tensor]

# the logarithm of a message [*B, c] with sum 1, the log-partition [*B, 1], and its rounding error [*B, 1]
Carried = tuple[Tensor, Tensor, Tensor]

# by all that templates depend on
_templates: dict[Any, Any] = {}
_MOST = 1024
_MISSING = object()

# scratch that calls use again: a call takes one from the list, so that no other thread has it, and puts it back; calls
# that need more bytes have other scratch
_rooms: list[Tensor] = []
_ROOM = 2**20

# the index of each field among the 64-bit words of the arguments; of an array with strides that of its address
_WORD = {name: field.offset // 8 for name in dir(Arguments) if hasattr(field := getattr(Arguments, name), "offset")}


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
        self.arguments, self.dtype, self._held = call.arguments, chain.dtype, [call.constants]
        self._spans, self.arguments.last = call.spans(), chain.g * chain.m
        self.on_one_thread = len(self._spans) == 1
        self._calls: dict[str, tuple[Any, int]] = {}

    @cached_property
    def _words(self) -> "array[int]":
        return array("q", bytes(self.arguments))

    def words(self, *operands: Tensor, **fields: Tensor | int | None) -> "array[int]":
        """The words of the arguments for x, bulk and p0, if there is one, with numbers and tensors as fields."""
        words = self._words[:]
        for name, operand in zip(("x", "bulk", "p0"), operands, strict=False):
            words[_WORD[name]] = operand.data_ptr()
        for name, value in fields.items():
            if value is not None:
                words[_WORD[name]] = value.data_ptr() if isinstance(value, Tensor) else value
        return words

    def run(self, name: str, words: "array[int]") -> int:
        """What a function of the library returns, summed over threads."""
        if not self.on_one_thread:
            return run(Arguments.from_buffer(words), self.dtype, name, self._spans)
        if name not in self._calls:
            call = function(name, self.dtype)
            self._calls[name] = call, int(call(ctypes.byref(self.arguments))) + 64
        (call, size), room = self._calls[name], None
        if size <= _ROOM:
            try:
                room = _rooms.pop()
            except IndexError:
                size = _ROOM
        if room is None:
            room = self._new(size, dtype=torch.uint8)
        words[_WORD["room"]] = (room.data_ptr() + 63) // 64 * 64
        result: int = call(ctypes.c_void_p(words.buffer_info()[0]))
        if room.numel() == _ROOM:
            _rooms.append(room)
        return result

    def _new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return in_large_pages(torch.empty(shape, dtype=dtype or self.dtype, device="cpu"))


def short_of(
    x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool, wanted: Callable[..., bool], chain_of: Any
) -> "Short | None":
    """The `Short` of operands; None for chains of several threads, or if `wanted` says no.

    `wanted` checks the operands, once for all of the same shapes and strides; `chain_of` gives their layout and chain.
    """
    if x.is_neg() or bulk.is_neg() or p0.is_neg():  # the library does not see torch's negative bit
        return None
    places = x.shape, bulk.shape, p0.shape, x.stride(), bulk.stride(), p0.stride()
    key = places, x.dtype, bulk.dtype, p0.dtype, log_params, wanted, torch.get_num_threads()

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
    """The arguments of a chain that one thread computes. Gradients are written in the shapes of the operands.

    `strides` are those of its operands; `dense` is a chain of contiguous operands, which have the gradients' strides.
    """

    def __init__(self, strides: tuple[tuple[int, ...], ...], chain: Chain, dense: Chain) -> None:
        super().__init__(chain)
        self._strides, self._grid, self._steps, a = strides, (chain.g, chain.m), chain.v, self.arguments
        gradients = Call(dense)
        a.grad_bulk, a.grad_p0_real = gradients.arguments.bulk, gradients.arguments.p0
        a.out.step, a.out.at = gradients.arguments.x.step, gradients.arguments.x.at
        self._held.append(gradients.constants)
        self._has_negative = None if chain.log_params else function("has_negative", chain.dtype)

    def fits(self, x: Tensor, bulk: Tensor, p0: Tensor) -> bool:
        """Whether operands have the strides that the arguments were prepared for."""
        return self._strides == (x.stride(), bulk.stride(), p0.stride())

    def residuals(self, x: Tensor, keep: bool = True) -> Residuals:
        """Memory for what `gradients` needs: a log-partition [*B] in float64, messages if `keep`, and flags (g, m)."""
        messages = self._new(self._steps, *self._grid, x.shape[-1]) if keep else self._new(0)
        log_norm = torch.empty(x.shape[:-2], dtype=torch.float64, device="cpu")
        return log_norm, messages, torch.empty(self._grid, dtype=torch.bool, device="cpu")

    def value(
        self, x: Tensor, bulk: Tensor, p0: Tensor, residuals: Residuals | None = None, *, check: bool = True
    ) -> tuple[Tensor, int]:
        """The log-partition [*B] in the operands' dtype, and the count of recomputed sequences."""
        log_norm = self._new(*x.shape[:-2])
        total, messages, lossy = residuals or (None, None, None)
        words = self.words(x, bulk, p0, value=log_norm, log_norm=total, messages=messages, lossy=lossy)
        if check:
            self._check(words, bulk, p0)
        return log_norm, self.run("value", words)

    def gradients(
        self, x: Tensor, bulk: Tensor, p0: Tensor, residuals: Residuals, weight: Tensor, needs: tuple[bool, ...],
        *, by_log: bool = False,
    ) -> list[Tensor | None]:  # fmt: skip
        """The gradients of x, bulk and p0 that are needed."""
        total, messages, lossy = residuals
        weight, gradients = weight.double().resolve_neg().contiguous(), self._gradients((x, bulk, p0), needs)
        words = self.words(
            x, bulk, p0, log_norm=total, messages=messages, lossy=lossy, weight=weight, by_log=by_log, **gradients
        )
        self.run("gradients", words)
        return list(gradients.values())

    def posteriors(self, x: Tensor, bulk: Tensor, p0: Tensor, counts: bool) -> tuple[Tensor, list[Tensor | None], int]:
        """The log-partition [*B], gradients of x and, if `counts`, log bulk, and how many sequences were recomputed."""
        log_norm, gradients = self._new(*x.shape[:-2]), self._gradients((x, bulk), (True, counts))
        words = self.words(x, bulk, p0, value=log_norm, by_log=True, **gradients)
        self._check(words, bulk, p0)
        return log_norm, list(gradients.values()), self.run("posteriors", words)

    def messages(self, x: Tensor, bulk: Tensor, p0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Forward and backward messages [*B, v, c] and the log-partition [*B]."""
        forward, backward, log_norm = self._new(*x.shape), self._new(*x.shape), self._new(*x.shape[:-2])
        words = self.words(x, bulk, p0, value=log_norm, log_forward=forward, log_backward=backward)
        self._check(words, bulk, p0)
        self.run("messages", words)
        return forward, backward, log_norm

    def _check(self, words: "array[int]", bulk: Tensor, p0: Tensor) -> None:
        """Raise for a negative weight in p0, or in a matrix that serves all steps."""
        if self._has_negative is not None and self._has_negative(ctypes.c_void_p(words.buffer_info()[0])):
            check_weights(Weights("bulk", bulk), Weights("p0", p0))

    def _gradients(self, operands: tuple[Tensor, ...], needs: tuple[bool, ...]) -> dict[str, Tensor | None]:
        """Memory for the gradients that are needed, by the fields that point to it."""
        of_each = zip(("grad_x", "grad_bulk", "grad_p0_real"), operands, needs, strict=False)
        return {name: self._new(*operand.shape) if need else None for name, operand, need in of_each}


class Stretch(Template):
    """The arguments of stretches of longer chains; only shapes and strides of `chain` are read.

    A forward message with its scale enters, and another one leaves. If the stretch is `entered`, the first of the
    matrices, as many as steps or one, leads from the message that enters into the first step; otherwise it begins
    with p0.
    """

    def __init__(self, chain: Chain, *, entered: bool) -> None:
        super().__init__(chain, entered=entered)
        places = offsets((chain.g * chain.m,), (chain.v * chain.c,))
        self._name, out = "stretch" if entered else "value", self.arguments.out
        out.step, out.at = chain.c, places.data_ptr()
        self._held.append({"out.at": places})

    def forward(
        self,
        x: Tensor,
        bulk: Tensor,
        carried: Carried,
        *,
        p0: Tensor | None = None,
        ends: Tensor | None = None,
        messages: Tensor | None = None,
        recomputed: Tensor | None = None,
        shares: Tensor | None = None,
        value: Tensor | None = None,
    ) -> tuple[Carried, int]:
        """The message that leaves, and the number of sequences that were computed exactly.

        Without a message that enters there is a p0. `ends` int64 (g, m) are numbers of steps, that message counted as
        one. Where there is memory, messages are written to `messages` (v, g, m, c), the entering one first, and which
        of them are logarithms to `recomputed` (g, m); those with sum 1 to `shares` [*B, v, c], contiguous, and
        log-partitions to `value`.
        """
        message, total, error = (part.contiguous() for part in carried)
        leaving = torch.empty_like(message), torch.empty_like(total), torch.empty_like(error)
        order = None if ends is None else torch.argsort(ends, dim=1, descending=True, stable=True)
        if shares is not None:
            in_large_pages(shares)
        words = self.words(
            x, bulk, p0=p0, ends=ends, order=order, messages=messages, lossy=recomputed, filtered=shares, value=value,
            entering_double=message, entering_log_norm=total, entering_error=error,
            leaving=leaving[0], log_norm=leaving[1], log_norm_error=leaving[2],
        )  # fmt: skip
        return leaving, self.run(self._name, words)
