"""Operators of torch in the namespace `logchain`: for `torch.compile`, `torch.export`, autograd and `torch.func`.

Each operator has a schema, one implementation for all devices, one that makes outputs of the right shapes alone, and
the derivative and the vmap rule of an `autograd.Function`. `apply` calls the registered operator while torch.compile
traces, since it does not trace Functions that call each other, and otherwise the Function, since `torch.func` does not
differentiate registered operators. Where nothing traces or transforms, `call` skips torch's dispatcher, which takes
longer than a small chain.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..kernels import arithmetic_on
from ..kernels.weights import NegativeWeights
from ..operands import differentiated, is_plain, named, weights_of

_library = torch.library.Library("logchain", "DEF")

# by the name of an operator: its implementation, and the function that calls it
IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}
_called: dict[str, Callable[..., Any]] = {}

# by an operator's Function: the implementation
_computed: dict[Any, Callable[..., Any]] = {}

# the number of axes behind the batch axes, by the kind of operand
_OWN = {"grad": 0, "x": 2, "bulk": 3, "p0": 1, "lengths": 0}


class Saving(torch.autograd.Function):
    """A Function that saves its tensors, which come first, for the backward pass; `ctx.options` are the others."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save the arguments."""
        tensors = [value for value in inputs if value is None or isinstance(value, Tensor)]
        ctx.options = inputs[len(tensors) :]
        ctx.save_for_backward(*tensors)


class Final(torch.autograd.Function):
    """A Function whose outputs cannot be differentiated; `refusal` is the message of the error."""

    refusal: str

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save nothing."""

    @classmethod
    def backward(cls, ctx: Any, *_: Any) -> Any:
        """Raise the error."""
        raise RuntimeError(cls.refusal)


def operator(schema: str, implementation: Callable[..., Any], shapes: Callable[..., Any]) -> Callable[..., Any]:
    """The function that calls the operator `logchain::name(Tensor ...)`, now registered; autocast is off inside it.

    `shapes` makes outputs of the right shapes and dtypes, without values, from the same arguments.
    """
    name = schema[: schema.index("(")]
    arguments = re.findall(r"(\w+)[,)]", schema[: schema.index(" -> ")])

    def fake(*args: Any) -> Any:
        # torch gives a registered operator's result no forward derivative, and says nothing
        if torch.autograd.forward_ad._current_level >= 0:
            raise NotImplementedError("logchain: expected no forward derivative inside torch.compile, take it outside")
        return shapes(*args)

    def run(*args: Any) -> Any:
        try:
            with arithmetic_on(args[0]):
                outputs = implementation(*args)
        except NegativeWeights as error:
            raise _named(error, dict(zip(arguments, args, strict=True))) from None
        return tuple(outputs) if isinstance(outputs, tuple) else outputs  # torch maps no named tuples

    IMPLEMENTATIONS[name] = run
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"logchain::{name}", fake, lib=_library)
    registered: Callable[..., Any] = getattr(torch.ops.logchain, name).default
    _called[name] = lambda *args: run(*args) if is_plain(args) else registered(*args)
    return _called[name]


def _named(error: NegativeWeights, args: dict[str, Any]) -> NegativeWeights:
    """The error by the names of an operator's arguments, of one chain or of a second one, too."""
    weights = []
    for prefix in ("", "other_"):
        if f"{prefix}bulk" in args:
            x, bulk, p0 = (args[prefix + name] for name in ("x", "bulk", "p0"))
            weights += weights_of(x, bulk, p0, args.get("lengths"), prefix)
    return named(error, *weights)


def apply(function: Any, registered: Callable[..., Any], *args: Any) -> Any:
    """The outputs of an operator, differentiable by its Function."""
    return registered(*args) if torch.compiler.is_compiling() else call(function, *args)


def call(function: Any, *args: Any) -> Any:
    """The outputs of a Function; tensors that need no gradient skip autograd and torch's dispatcher."""
    if function.setup_context is torch.autograd.Function.setup_context or not is_plain(args):
        return function.apply(*args)
    if differentiated(*args):
        return _eager(function).apply(*args)
    return _computed.get(function, function.forward)(*args)


@cache
def _eager(function: Any) -> Any:
    """The Function with a context in `forward`, for autograd alone.

    torch takes some microseconds more for one with a `setup_context`, whose arguments it binds by their signature.
    """
    compute = _computed.get(function, function.forward)

    def forward(ctx: Any, *args: Any) -> Any:
        output = compute(*args)
        function.setup_context(ctx, args, output)
        return output

    setup_context = staticmethod(torch.autograd.Function.setup_context)
    return type(function.__name__, (function,), {"forward": staticmethod(forward), "setup_context": setup_context})


def transform(name: str, function: Any) -> None:
    """Give an operator the derivative and the vmap rule of a Function, and the Function the operator as `forward`."""
    function.forward, _computed[function] = staticmethod(_called[name]), IMPLEMENTATIONS[name]
    torch.library.register_autograd(
        f"logchain::{name}",
        function.backward,
        setup_context=lambda ctx, inputs, output: function.setup_context(ctx, inputs, output),
        lib=_library,
    )
    torch.library.register_vmap(f"logchain::{name}", function.vmap, lib=_library)


def checked_values(name: str, check: Callable[[Tensor, int], None]) -> Callable[..., Tensor]:
    """The function that calls the operator `logchain::name(values, size)`: a copy of integers that pass `check`.

    `check` raises ValueError. It is an operator since values cannot be read where torch traces or maps a call.
    """

    def copy(values: Tensor, size: int) -> Tensor:
        check(values, size)
        return values.clone()

    def vmap(info: Any, in_dims: tuple[Any, ...], values: Tensor, size: int) -> tuple[Tensor, Any]:
        return checked(values, size), in_dims[0]

    schema = f"{name}(Tensor values, SymInt size) -> Tensor"
    checked = operator(schema, copy, lambda values, size: torch.empty_like(values))
    torch.library.register_vmap(f"logchain::{name}", vmap, lib=_library)
    return checked


def with_batch_first(
    size: int, in_dims: tuple[Any, ...], x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None
) -> list[Any]:
    """The operands with the axis that vmap maps, of this size, as their first; a shared bulk or p0 has size 1 there."""
    return of_each(size, "x bulk p0 lengths", in_dims, (x, bulk, p0, lengths), shared=("bulk", "p0"))


def of_each(
    size: int, kinds: str, in_dims: tuple[Any, ...], args: tuple[Any, ...], *, shared: tuple[str, ...] = ()
) -> list[Any]:
    """The first arguments, which are of these kinds, with the mapped axis first.

    One that all examples share is expanded there, or has size 1 if its kind may stay `shared`.
    """
    names = kinds.split()
    at = names.index("x")
    batch_axes = args[at].dim() - 2 - (in_dims[at] is not None)  # of one example
    return [
        _mapped_first(size, batch_axes, name, operand, dim, expand=name not in shared)
        for name, operand, dim in zip(names, args, in_dims, strict=False)
    ]


def as_one(size: int, gradients: Any, in_dims: tuple[Any, ...], operands: tuple[Any, ...], needs: Any) -> Any:
    """The gradients of operands that `of_each` has expanded, each in the shape of its operand without the mapped axis.

    A gradient that is not needed is empty.
    """
    return tuple(
        gradient.reshape(size, *_shape_of_one(operand, dim)) if need else gradient.expand(size, 0)
        for gradient, operand, dim, need in zip(gradients, operands, in_dims, needs, strict=True)
    )


def stacked(size: int, in_dims: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """The tensors with the mapped axis first; a shared one is expanded, as a view."""
    return [
        tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims, strict=False)
    ]


def _mapped_first(size: int, axes: int, name: str, operand: Any, dim: int | None, *, expand: bool) -> Any:
    """The operand with the mapped axis first and `axes` batch axes behind it, of size 1 where it had none: a view.

    The mapped axis of a shared operand is of size 1, or expanded.
    """
    if operand is None:
        return None
    moved = operand.unsqueeze(0) if dim is None else operand.movedim(dim, 0)
    missing = axes - (moved.dim() - 1 - _OWN[name])
    moved = moved[(slice(None), *(None,) * missing)]
    return moved.expand(size, *moved.shape[1:]) if expand else moved


def _shape_of_one(operand: Tensor, dim: int | None) -> list[int]:
    """The operand's shape without the mapped axis."""
    return [size for axis, size in enumerate(operand.shape) if dim is None or axis != dim % operand.dim()]
