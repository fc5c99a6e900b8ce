"""How an operator becomes one of torch's own: known to `torch.compile`, `torch.export`, autograd and `torch.func`.

An operator is registered with a schema, an implementation for all devices, one on shapes alone, its derivative and its
batching rule; the last two are those of an `autograd.Function`. Calls go through that Function, since `torch.func` does
not differentiate registered operators, and to the operator itself where a graph is traced, which Functions that call
each other are not.
"""

from collections.abc import Callable
from typing import Any

import torch

from ._device import arithmetic_on

_library = torch.library.Library("logchain", "DEF")

# what each operator does, by its name
IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}


def operator(schema: str, implementation: Callable[..., Any], shapes: Callable[..., Any]) -> Callable[..., Any]:
    """Register `logchain::name(...)`; autocast does not reach into it."""
    name = schema[: schema.index("(")]

    def fake(*args: Any) -> Any:
        # torch gives a registered operator's result no forward derivative, and says nothing
        if torch.autograd.forward_ad._current_level >= 0:
            raise NotImplementedError("logchain: expected no forward derivative inside torch.compile, take it outside")
        return shapes(*args)

    def run(*args: Any) -> Any:
        with arithmetic_on(next(arg for arg in args if isinstance(arg, torch.Tensor))):
            return implementation(*args)

    IMPLEMENTATIONS[name] = run
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"logchain::{name}", fake, lib=_library)
    found: Callable[..., Any] = getattr(torch.ops.logchain, name).default
    return found


def apply(function: Any, registered: Callable[..., Any], *args: Any) -> Any:
    """Call an operator."""
    return registered(*args) if torch.compiler.is_compiling() else function.apply(*args)


def transform(name: str, function: Any) -> None:
    """Give the operator the derivative and the batching rule of an `autograd.Function` that has its signature."""
    torch.library.register_autograd(
        f"logchain::{name}",
        function.backward,
        setup_context=lambda ctx, inputs, output: function.setup_context(ctx, inputs, output),
        lib=_library,
    )
    torch.library.register_vmap(f"logchain::{name}", function.vmap, lib=_library)
