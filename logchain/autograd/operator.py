"""How an operator becomes one of torch's own: known to `torch.compile`, `torch.export`, autograd and `torch.func`.

An operator is registered with a schema, an implementation for all devices, one on shapes alone, its derivative and its
batching rule; the last two are those of an `autograd.Function`. Calls go through that Function, since `torch.func` does
not differentiate registered operators, and to the operator itself where a graph is traced, which Functions that call
each other are not. Where nothing traces, maps or watches, a call does without the dispatch, which takes longer than a
small chain.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..kernels import arithmetic_on
from ..operands import differentiated, is_plain

_library = torch.library.Library("logchain", "DEF")

# what each operator does, and how it is called, by its name
IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}
_called: dict[str, Callable[..., Any]] = {}

# the axes that are an operand's own, behind those of the batch
_OWN = {"grad": 0, "x": 2, "bulk": 3, "p0": 1, "lengths": 0}


def operator(schema: str, implementation: Callable[..., Any], shapes: Callable[..., Any]) -> Callable[..., Any]:
    """Register `logchain::name(Tensor ...)`; autocast does not reach into it."""
    name = schema[: schema.index("(")]

    def fake(*args: Any) -> Any:
        # torch gives a registered operator's result no forward derivative, and says nothing
        if torch.autograd.forward_ad._current_level >= 0:
            raise NotImplementedError("logchain: expected no forward derivative inside torch.compile, take it outside")
        return shapes(*args)

    def run(*args: Any) -> Any:
        with arithmetic_on(args[0]):
            return implementation(*args)

    IMPLEMENTATIONS[name] = run
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"logchain::{name}", fake, lib=_library)
    registered: Callable[..., Any] = getattr(torch.ops.logchain, name).default
    _called[name] = lambda *args: run(*args) if is_plain(args) else registered(*args)
    return _called[name]


def apply(function: Any, registered: Callable[..., Any], *args: Any) -> Any:
    """Call an operator."""
    return registered(*args) if torch.compiler.is_compiling() else call(function, *args)


def call(function: Any, *args: Any) -> Any:
    """Apply an `autograd.Function`, or do what an operator's does where nothing is to be differentiated."""
    if function.setup_context is torch.autograd.Function.setup_context or not is_plain(args):
        return function.apply(*args)
    return _eager(function).apply(*args) if differentiated(*args) else function.forward(*args)


@cache
def _eager(function: Any) -> Any:
    """The same Function, for autograd alone: torch binds the arguments of one that can be mapped by their signature."""

    def forward(ctx: Any, *args: Any) -> Any:
        output = function.forward(*args)
        function.setup_context(ctx, args, output)
        return output

    setup_context = staticmethod(torch.autograd.Function.setup_context)
    return type(function.__name__, (function,), {"forward": staticmethod(forward), "setup_context": setup_context})


def transform(name: str, function: Any) -> None:
    """Give the operator the derivative and the batching rule of an `autograd.Function` of its signature.

    The Function's `forward` is the operator, unless it has one of its own.
    """

    def forward(*args: Any) -> Any:
        outputs = _called[name](*args)
        return tuple(outputs) if isinstance(outputs, tuple) else outputs  # torch maps no named tuples

    if "forward" not in vars(function):
        function.forward = staticmethod(forward)
    torch.library.register_autograd(
        f"logchain::{name}",
        function.backward,
        setup_context=lambda ctx, inputs, output: function.setup_context(ctx, inputs, output),
        lib=_library,
    )
    torch.library.register_vmap(f"logchain::{name}", function.vmap, lib=_library)


def with_batch_first(
    size: int, in_dims: tuple[Any, ...], x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Operands of `size` chains at once; parameters that are not mapped stay shared."""
    axes = _batch_axes(x, in_dims[0])
    return (
        _mapped_first(size, axes, "x", x, in_dims[0], expand=True),
        _mapped_first(size, axes, "bulk", bulk, in_dims[1], expand=False),
        _mapped_first(size, axes, "p0", p0, in_dims[2], expand=False),
        _mapped_first(size, axes, "lengths", lengths, in_dims[3], expand=True),
    )


def of_each(size: int, kinds: str, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> list[Any]:
    """The first arguments, of these kinds, each expanded to one of its own for every example."""
    names = kinds.split()
    axes = _batch_axes(args[names.index("x")], in_dims[names.index("x")])
    return [
        _mapped_first(size, axes, name, operand, dim, expand=True)
        for name, operand, dim in zip(names, args, in_dims, strict=False)
    ]


def as_one(size: int, gradients: Any, in_dims: tuple[Any, ...], operands: tuple[Any, ...], needs: Any) -> Any:
    """Gradients of operands `of_each`, in the shape that one example of the operand has; empty where not needed."""
    return tuple(
        gradient.reshape(size, *_shape_of_one(operand, dim)) if need else gradient.expand(size, 0)
        for gradient, operand, dim, need in zip(gradients, operands, in_dims, needs, strict=True)
    )


def stacked(size: int, in_dims: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Tensors with the mapped axis first; one that is not mapped is expanded, as a view."""
    return [
        tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims, strict=False)
    ]


def _batch_axes(x: Tensor, dim: int | None) -> int:
    """How many batch axes one example has."""
    return x.dim() - 2 - (dim is not None)


def _mapped_first(size: int, axes: int, name: str, operand: Any, dim: int | None, *, expand: bool) -> Any:
    """The operand with the mapped axis first, and after it room for all `axes` of one example's batch.

    One that is not mapped gets size 1 there, or is expanded: as a view.
    """
    if operand is None:
        return None
    moved = operand.unsqueeze(0) if dim is None else operand.movedim(dim, 0)
    missing = axes - (moved.dim() - 1 - _OWN[name])
    moved = moved[(slice(None), *(None,) * missing)]
    return moved.expand(size, *moved.shape[1:]) if expand else moved


def _shape_of_one(operand: Tensor, dim: int | None) -> list[int]:
    """The shape of one example."""
    return [size for axis, size in enumerate(operand.shape) if dim is None or axis != dim % operand.dim()]
