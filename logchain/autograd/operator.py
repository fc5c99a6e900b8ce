"""Operators of torch in the namespace `logchain`: for `torch.compile`, `torch.export`, autograd and `torch.func`.

Each operator has a schema, one implementation for all devices, one that makes outputs of the right shapes alone, and
the derivatives and the vmap rule of an `autograd.Function`. Transforms and tracers meet the registered operator, whose
derivatives are the Function's at each level of `torch.func`, which torch's own `register_autograd` does not give. Where
nothing traces or transforms, `call` skips torch's dispatcher, which takes longer than a small chain.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..internals import SingleLevelFunction, below_autograd, enable_single_level_autograd_function, may_be_compiled
from ..kernels import arithmetic_on
from ..operands import differentiated, is_plain

_library = torch.library.Library("logchain", "DEF")

# by the name of an operator: its implementation, and the function that calls it
IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}
_called: dict[str, Callable[..., Any]] = {}

# by an operator's Function: the implementation, and the registered operator
_computed: dict[Any, Callable[..., Any]] = {}
_registered: dict[Any, Callable[..., Any]] = {}

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

    def run(*args: Any) -> Any:
        if args[0].is_meta:  # without values a result is its shape
            outputs = shapes(*args)
            return tuple(outputs) if isinstance(outputs, tuple) else outputs
        with arithmetic_on(args[0]):
            outputs = implementation(*args)
        return tuple(outputs) if isinstance(outputs, tuple) else outputs  # torch maps no named tuples

    IMPLEMENTATIONS[name] = run
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"logchain::{name}", shapes, lib=_library)
    registered: Callable[..., Any] = getattr(torch.ops.logchain, name).default
    _called[name] = lambda *args: run(*args) if is_plain(args) else registered(*args)
    return _called[name]


def apply(function: Any, registered: Callable[..., Any], *args: Any) -> Any:
    """The outputs of an operator, differentiable by its Function."""
    return registered(*args) if torch.compiler.is_compiling() else call(function, *args)


def call(function: Any, *args: Any) -> Any:
    """The outputs of a Function; tensors that need no gradient skip autograd and torch's dispatcher."""
    if function.setup_context is torch.autograd.Function.setup_context:
        loaded = not torch.compiler.is_compiling() and may_be_compiled()
        return (_untraced(function) if loaded else function).apply(*args)
    if not is_plain(args):
        return _registered.get(function, function.apply)(*args)
    if differentiated(*args):
        eager = _eager(function)
        return (_untraced(eager) if may_be_compiled() else eager).apply(*args)
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


@cache
def _untraced(function: Any) -> Any:
    """The Function with a `backward` that torch.compile does not trace where a compiled function calls it."""
    backward = staticmethod(torch.compiler.disable(function.backward))
    return type(function.__name__, (function,), {"backward": backward})


def transform(name: str, function: Any) -> None:
    """Give an operator the derivative and the vmap rule of a Function, and the Function the operator as `forward`."""
    function.forward, _computed[function] = staticmethod(_called[name]), IMPLEMENTATIONS[name]
    _registered[function] = registered = getattr(torch.ops.logchain, name).default
    one_level = _one_level(function, registered)

    def differentiable(keyset: Any, *args: Any) -> Any:
        with enable_single_level_autograd_function():
            return one_level.apply(*args, keyset)

    _library.impl(name, differentiable, "Autograd", with_keyset=True)
    torch.library.register_vmap(f"logchain::{name}", function.vmap, lib=_library)


def _one_level(function: Any, registered: Any) -> Any:
    """The Function whose forward is the operator below autograd, for one level of `torch.func`, or for none.

    Its last argument is the operator's dispatch keys, which the derivatives do not see.
    """

    def forward(ctx: Any, *args: Any) -> Any:
        *inputs, keyset = args
        output = below_autograd(registered, keyset, *inputs)
        function.setup_context(ctx, tuple(inputs), output)
        return output

    def backward(ctx: Any, *grads: Any) -> Any:
        needs = ctx.needs_input_grad
        ctx.needs_input_grad = needs[:-1]
        try:
            gradients = function.backward(ctx, *grads)
        finally:
            ctx.needs_input_grad = needs
        return (*gradients, None) if isinstance(gradients, tuple) else (gradients, None)

    def jvp(ctx: Any, *tangents: Any) -> Any:
        return function.jvp(ctx, *tangents[:-1])

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward), "jvp": staticmethod(jvp)}
    return type(function.__name__, (SingleLevelFunction,), members)


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


def if_needed(gradients: Any, needs: Any) -> tuple[Any, ...]:
    """The gradients, with None for one that is not needed."""
    return tuple(value if need else None for value, need in zip(gradients, needs, strict=True))


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
