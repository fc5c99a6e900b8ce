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

from .kernels import arithmetic_on, on_gpu

_library = torch.library.Library("logchain", "DEF")

# what each operator does, by its name
IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}


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
    return lambda *args: run(*args) if is_plain(args) else registered(*args)


def apply(function: Any, registered: Callable[..., Any], *args: Any) -> Any:
    """Call an operator."""
    return registered(*args) if torch.compiler.is_compiling() else call(function, *args)


def call(function: Any, *args: Any) -> Any:
    """Apply an `autograd.Function`, or do what an operator's does where nothing is to be differentiated."""
    if function.setup_context is torch.autograd.Function.setup_context or not is_plain(args):
        return function.apply(*args)
    return _eager(function).apply(*args) if differentiated(*args) else function.forward(*args)


def differentiated(*args: Any) -> bool:
    """Whether a gradient may be asked for."""
    return torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)


def is_plain(args: tuple[Any, ...]) -> bool:
    """Whether tensors are torch's own, and no mode, no transform and no compiler looks at what is done with them."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch.autograd.forward_ad._current_level < 0
        and not torch._C._dispatch_tls_is_dispatch_key_included(_OLD_VMAP)
        and _PLAIN.issuperset(map(type, args))
    )


def at_hand(tensor: Tensor) -> bool:
    """Whether values can be looked at without waiting for a device, tracing or mapping."""
    return is_plain((tensor,)) and not on_gpu(tensor)


# the mode in which `torch.autograd.grad(..., is_grads_batched=True)` maps
_OLD_VMAP = torch._C._dispatch_key_parse("VmapMode")

_PLAIN = {torch.Tensor, torch.nn.Parameter, bool, int, type(None)}


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
    """Give the operator the derivative and the batching rule of an `autograd.Function` that has its signature."""
    torch.library.register_autograd(
        f"logchain::{name}",
        function.backward,
        setup_context=lambda ctx, inputs, output: function.setup_context(ctx, inputs, output),
        lib=_library,
    )
    torch.library.register_vmap(f"logchain::{name}", function.vmap, lib=_library)
