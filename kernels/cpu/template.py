"""Arguments of the C library that are filled in once for all operands of the same shapes, strides and dtypes.

A chain of a few dozen steps is computed in less time than it takes to check its tensors and to fill in arguments. A
`Template` has all of these except addresses, and `cached` holds templates. Several threads may use both at once.
`Short` computes whole chains by one call of the library for each public function, `Stretch` pieces of longer chains.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..chain import Chain
from ..weights import Weights, check_weights
from .arguments import Arguments, Call, function, offsets, run, set_field
from .library import in_large_pages

_Value = TypeVar("_Value")

# the log-partition, the forward messages, and which of them are logarithms; see `kernels.message.Residuals`
Residuals = tuple[Tensor, Tensor, Tensor]

# the logarithm of a message [*B, c] with sum 1, the log-partition [*B, 1], and its rounding error [*B, 1]
Carried = tuple[Tensor, Tensor, Tensor]

# by everything that templates depend on
_templates: dict[Any, Any] = {}
_MOST = 1024
_MISSING = object()

# the fields that point to the gradients of x, bulk and p0
_GRADIENTS = "grad_x", "grad_bulk", "grad_p0_real"

# scratch that calls reuse: a call takes one from the list, so that no other thread has it, and puts it back; calls
# that need more bytes allocate their scratch
_free_scratch: list[Tensor] = []
_SCRATCH = 2**20


def cached(key: Any, make: Callable[[], _Value]) -> _Value:
    """The result of `make` for this key, which holds everything that it depends on."""
    value = _templates.get(key, _MISSING)
    if value is _MISSING:
        value = make()
        if len(_templates) >= _MOST:
            _templates.clear()
        _templates[key] = value
    return value  # type: ignore[no-any-return]


class Template:
    """The arguments of a chain except for addresses.

    Attributes:
        arguments: the arguments; addresses are those of a chain that may be gone.
        dtype: the dtype of the arithmetic.
        on_one_thread: whether a single thread computes the chain.
    """

    def __init__(self, chain: Chain, *, entered: bool = False) -> None:
        call = Call(chain, entered=entered)
        # what is written for each state is contiguous [*B, v, c]
        places = offsets((chain.g * chain.m,), (chain.v * chain.c,))
        call.arguments.out.step, call.arguments.out.at = chain.c, places.data_ptr()
        self.arguments, self.dtype, self._held = call.arguments, chain.dtype, (call.constants, places)
        self._spans, self.arguments.last = call.spans(), chain.g * chain.m
        self.on_one_thread = len(self._spans) == 1
        self._calls: dict[str, tuple[Any, int]] = {}

    def of(self, x: Tensor, bulk: Tensor, p0: Tensor | None = None) -> Arguments:
        """The arguments for operands; a chain that a message enters has no `p0`."""
        a = Arguments.from_buffer_copy(self.arguments)
        a.x.data, a.bulk.data = x.data_ptr(), bulk.data_ptr()
        if p0 is not None:
            a.p0.data = p0.data_ptr()
        return a

    def run(self, name: str, arguments: Arguments) -> int:
        """The result of a function of the library, summed over threads."""
        if not self.on_one_thread:
            return run(arguments, self.dtype, name, self._spans)
        prepared, scratch = self._calls.get(name), None
        if prepared is None:
            call = function(name, self.dtype)
            self._calls[name] = prepared = call, int(call(ctypes.byref(self.arguments))) + 64
        call, size = prepared
        if size <= _SCRATCH:
            try:
                scratch = _free_scratch.pop()
            except IndexError:
                size = _SCRATCH
        if scratch is None:
            scratch = in_large_pages(torch.empty(size, dtype=torch.uint8, device="cpu"))
        arguments.scratch = (scratch.data_ptr() + 63) // 64 * 64
        result: int = call(ctypes.byref(arguments))
        if scratch.numel() == _SCRATCH:
            _free_scratch.append(scratch)
        return result

    def _new(self, shape: Sequence[int]) -> Tensor:
        return in_large_pages(torch.empty(shape, dtype=self.dtype, device="cpu"))


def short_of(x: Tensor, bulk: Tensor, p0: Tensor, log_params: bool, wanted: Callable[..., bool]) -> "Short | None":
    """The `Short` of operands; None for chains of several threads, or if `wanted`, which checks them, returns False."""
    if x.is_neg() or bulk.is_neg() or p0.is_neg():  # the library does not see torch's negative bit
        return None
    places = x.shape, bulk.shape, p0.shape, x.stride(), bulk.stride(), p0.stride()
    key = places, x.dtype, bulk.dtype, p0.dtype, log_params, torch.get_num_threads()

    def make() -> Short | None:
        if not wanted(x, bulk, p0) or not x.numel():
            return None
        chain = Chain.of(x, bulk, p0, None, log_params)
        a, b, c = (torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in (x, bulk, p0))
        dense = Chain.of(a, b, c, None, log_params)
        in_order = chain.layout.set_axes == tuple(range(len(chain.layout.set_axes)))
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
        v, g, m, c = self._shape = chain.v, chain.g, chain.m, chain.c
        # messages, log-partitions and flags in one tensor of bytes
        self._sizes = -(-v * g * m * c * chain.dtype.itemsize // 64) * 64, g * m * 8, g * m
        self._strides, self._gradients_call = strides, Call(dense)
        self.arguments.grad_bulk = self._gradients_call.arguments.bulk
        self.arguments.grad_p0_real = self._gradients_call.arguments.p0
        self._has_negative = None if chain.log_params else function("has_negative", chain.dtype)

    def residuals(self, x: Tensor, keep: bool) -> Residuals:
        """Memory for what `gradients` needs: a log-partition [*B] in float64, messages if `keep`, and flags (g, m)."""
        log_norm = torch.empty(x.shape[:-2], dtype=torch.float64, device="cpu")
        messages = self._new(self._shape if keep else (0,))
        return log_norm, messages, torch.empty(self._shape[1:3], dtype=torch.bool, device="cpu")

    def joint_residuals(self) -> Tensor:
        """The same memory as one tensor, which is faster to save."""
        return in_large_pages(torch.empty(sum(self._sizes), dtype=torch.uint8, device="cpu"))

    def value(
        self, x: Tensor, bulk: Tensor, p0: Tensor, residuals: Residuals | Tensor | None = None, *, check: bool = True
    ) -> tuple[Tensor, int]:
        """The log-partition [*B] in the operands' dtype, and the count of recomputed sequences."""
        log_norm = torch.empty(x.shape[:-2], dtype=self.dtype, device="cpu")
        a = self._checked(x, bulk, p0) if check else self.of(x, bulk, p0)
        a.value = log_norm.data_ptr()
        if residuals is not None:
            self._point(a, residuals)
        return log_norm, self.run("value", a)

    def gradients(
        self, x: Tensor, bulk: Tensor, p0: Tensor, residuals: Residuals | Tensor, weight: Tensor,
        needs: tuple[bool, ...], *, by_log: bool = False,
    ) -> list[Tensor | None]:  # fmt: skip
        """The gradients of x, bulk and p0 that are needed; operands may have other strides than those of `value`."""
        if self._strides != (x.stride(), bulk.stride(), p0.stride()):  # by hooks of saved tensors
            x, bulk, p0 = (operand.contiguous() for operand in (x, bulk, p0))
            dense = self._gradients_call.chain
            short = Short((x.stride(), bulk.stride(), p0.stride()), dense, dense)
            return short.gradients(x, bulk, p0, residuals, weight, needs, by_log=by_log)
        a, weight = self.of(x, bulk, p0), weight.double().resolve_neg().contiguous()
        a.weight, a.by_log = weight.data_ptr(), by_log
        self._point(a, residuals)
        gradients = self._gradients(a, (x, bulk, p0), needs)
        self.run("gradients", a)
        return gradients

    def posteriors(self, x: Tensor, bulk: Tensor, p0: Tensor, counts: bool) -> tuple[Tensor, list[Tensor | None], int]:
        """The log-partition [*B], gradients of x and, if `counts`, log bulk, and how many sequences were recomputed."""
        log_norm, a = torch.empty(x.shape[:-2], dtype=self.dtype, device="cpu"), self._checked(x, bulk, p0)
        a.value, a.by_log = log_norm.data_ptr(), True
        gradients = self._gradients(a, (x, bulk), (True, counts))
        return log_norm, gradients, self.run("posteriors", a)

    def messages(self, x: Tensor, bulk: Tensor, p0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Forward and backward messages [*B, v, c] and the log-partition [*B]."""
        forward, backward = self._new(x.shape), self._new(x.shape)
        log_norm, a = torch.empty(x.shape[:-2], dtype=self.dtype, device="cpu"), self._checked(x, bulk, p0)
        a.value, a.log_forward, a.log_backward = log_norm.data_ptr(), forward.data_ptr(), backward.data_ptr()
        self.run("messages", a)
        return forward, backward, log_norm

    def _checked(self, x: Tensor, bulk: Tensor, p0: Tensor) -> Arguments:
        """The arguments; raises for a negative weight in p0, or in a matrix that serves all steps."""
        a = self.of(x, bulk, p0)
        if self._has_negative is not None and self._has_negative(ctypes.byref(a)):
            check_weights(Weights("bulk", bulk), Weights("p0", p0))
        return a

    def _point(self, a: Arguments, residuals: Residuals | Tensor) -> None:
        if isinstance(residuals, Tensor):
            a.messages.data = at = residuals.data_ptr()
            a.log_norm, a.flagged = at + self._sizes[0], at + self._sizes[0] + self._sizes[1]
        else:
            a.log_norm, a.messages.data, a.flagged = (part.data_ptr() for part in residuals)

    def _gradients(self, a: Arguments, operands: tuple[Tensor, ...], needs: tuple[bool, ...]) -> list[Tensor | None]:
        """Memory for the gradients that are needed; the arguments point to it then."""
        gradients: list[Tensor | None] = [None] * len(operands)
        for i, operand in enumerate(operands):
            if needs[i]:
                gradients[i] = gradient = in_large_pages(torch.empty(operand.shape, dtype=self.dtype, device="cpu"))
                set_field(a, _GRADIENTS[i], gradient)
        return gradients


class Stretch(Template):
    """The arguments of stretches of longer chains; only shapes and strides of `chain` are read.

    A forward message with its scale enters, and another one leaves. If the stretch is `entered`, the first of the
    matrices, as many as steps or one, leads from the message that enters into the first step; otherwise it begins
    with p0.
    """

    def __init__(self, chain: Chain, *, entered: bool) -> None:
        super().__init__(chain, entered=entered)
        self._name = "stretch" if entered else "value"

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
        a = self.of(x, bulk, p0)
        before = a.boundary
        before.entering_double, before.entering_log_norm = message.data_ptr(), total.data_ptr()
        before.entering_error, before.leaving = error.data_ptr(), leaving[0].data_ptr()
        a.log_norm, before.log_norm_error = leaving[1].data_ptr(), leaving[2].data_ptr()
        if shares is not None:
            a.filtered = in_large_pages(shares).data_ptr()
        if value is not None:
            a.value = value.data_ptr()
        if messages is not None and recomputed is not None:
            a.messages.data, a.flagged = messages.data_ptr(), recomputed.data_ptr()
        if ends is not None:
            order = torch.argsort(ends, dim=1, descending=True, stable=True)
            a.ends, a.order = ends.data_ptr(), order.data_ptr()
        return leaving, self.run(self._name, a)
