"""Operators of torch in the namespace `logchain`, for `torch.compile`, `torch.export`, autograd and `torch.func`.

An operator has a schema, one implementation for all devices, one for the shapes of outputs, the derivatives of an
`autograd.Function` and a rule for vmap. Transforms and tracers see the registered operator, which has the Function's
derivatives at each level of `torch.func`; torch's `register_autograd` does not give these. Where nothing traces or
transforms, a call skips torch's dispatcher, which takes longer than a small chain.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from ..internals import SingleLevelFunction, below_autograd, enable_single_level_autograd_function, may_be_compiled
from ..kernels import arithmetic_on
from ..tensors import differentiated, is_plain

_library = torch.library.Library("logchain", "DEF")

# by the name of an operator
IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}

# operands whose batch axes may be of size 1: vmap adds such an axis to one that is not mapped
_BROADCAST = {"bulk", "p0", "other_bulk", "other_p0", "a", "b"}


class Saving(torch.autograd.Function):
    """A Function that saves its tensors, which come first, for the backward pass; `ctx.options` are the rest."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save the arguments."""
        tensors = [value for value in inputs if value is None or isinstance(value, Tensor)]
        ctx.options = inputs[len(tensors) :]
        ctx.save_for_backward(*tensors)


class Final(torch.autograd.Function):
    """A Function whose outputs cannot be differentiated; `refusal` is the message of the error."""

    refusal = "logchain: expected at most two derivatives, got a third"

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save nothing."""

    @classmethod
    def backward(cls, ctx: Any, *_: Any) -> Any:
        """Raise the error."""
        raise RuntimeError(cls.refusal)


def operator(
    schema: str,
    implementation: Callable[..., Any],
    shapes: Callable[..., Any],
    function: Any = None,
    *,
    gradients: bool = False,
    batched: int | None = None,
    vmap: Callable[..., Any] | None = None,
    tags: Sequence[torch.Tag] = (),
) -> Callable[..., Any]:
    """Registers the operator `logchain::name(Tensor ...)`, and returns a function that calls it, without autocast.

    `shapes` maps the same arguments to outputs of the right shapes and dtypes, without values. `function` has the
    derivatives, if there are any. `gradients`: outputs are gradients of operands, which are empty if not needed.
    `batched`: the number of outputs that have batch axes, None for all. `vmap`: a rule for other outputs.
    """
    name = schema[: schema.index("(")]

    def run(*args: Any) -> Any:
        if args[0].is_meta:  # without values a result is its shape
            outputs = shapes(*args)
        else:
            with arithmetic_on(args[0]):
                outputs = implementation(*args)
        return tuple(outputs) if isinstance(outputs, tuple) else outputs  # torch maps no named tuples

    IMPLEMENTATIONS[name] = run
    _library.define(schema, tags=tags)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"logchain::{name}", shapes, lib=_library)
    registered: Callable[..., Any] = getattr(torch.ops.logchain, name).default
    torch.library.register_vmap(
        f"logchain::{name}", vmap or _by_batch_axes(schema, registered, gradients, batched), lib=_library
    )
    eager = None
    if function is not None:
        eager, one_level = _eager(function, run), _one_level(function, registered)

        def differentiable(keyset: Any, *args: Any) -> Any:
            with enable_single_level_autograd_function():
                return one_level.apply(*args, keyset)

        _library.impl(name, differentiable, "Autograd", with_keyset=True)

    def call(*args: Any) -> Any:
        if not is_plain(args):
            return registered(*args)
        return run(*args) if eager is None or not differentiated(*args) else apply(eager, *args)

    return call


def apply(function: Any, *args: Any) -> Any:
    """The outputs of a Function whose backward pass torch.compile does not trace where it runs outside of a graph."""
    traced = torch.compiler.is_compiling() or not may_be_compiled()
    return (function if traced else _untraced(function)).apply(*args)


@cache
def _untraced(function: Any) -> Any:
    backward = staticmethod(torch.compiler.disable(function.backward))
    return type(function.__name__, (function,), {"backward": backward})


def _eager(function: Any, compute: Callable[..., Any]) -> Any:
    """The Function with a context in `forward`, for autograd alone.

    torch takes some microseconds more for one with a `setup_context`, whose arguments it binds by their signature.
    """

    def forward(ctx: Any, *args: Any) -> Any:
        output = compute(*args)
        function.setup_context(ctx, args, output)
        return output

    setup_context = staticmethod(torch.autograd.Function.setup_context)
    return type(function.__name__, (function,), {"forward": staticmethod(forward), "setup_context": setup_context})


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


def _by_batch_axes(
    schema: str, registered: Callable[..., Any], gradients: bool, batched: int | None
) -> Callable[..., Any]:
    """The rule for vmap of an operator that takes any batch axes: the mapped axis is the first of them."""
    names = re.findall(r"Tensor\S* (\w+)", schema[: schema.index("->")])
    broadcast = [not gradients and name in _BROADCAST for name in names]

    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        count = len(names)
        tensors = mapped_first(info.batch_size, in_dims, args[:count], broadcast)
        outputs = registered(*tensors, *args[count:])
        return outputs, 0 if isinstance(outputs, Tensor) else mapped_axes(outputs, batched)

    return vmap


def mapped_first(
    size: int, in_dims: Sequence[Any], tensors: Sequence[Tensor | None], broadcast: Sequence[bool] | None = None
) -> list[Tensor | None]:
    """The tensors with the mapped axis first, of size 1 for one that is not mapped if `broadcast`, else expanded."""

    def moved(tensor: Tensor, dim: int | None, shared: bool) -> Tensor:
        return tensor.expand(1 if shared else size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)

    rows = zip(tensors, in_dims, broadcast or repeat(False), strict=False)
    return [None if tensor is None else moved(tensor, dim, shared) for tensor, dim, shared in rows]


def mapped_axes(outputs: Sequence[Tensor], batched: int | None = None) -> tuple[int | None, ...]:
    """The mapped axis of outputs, None for those that are empty since they are not needed, or not `batched`."""
    batched = len(outputs) if batched is None else batched
    return tuple(0 if i < batched and output.shape != (0,) else None for i, output in enumerate(outputs))


def if_needed(gradients: Any, needs: Any) -> tuple[Any, ...]:
    """The gradients, with None for one that is not needed."""
    return tuple(value if need else None for value, need in zip(gradients, needs, strict=True))
