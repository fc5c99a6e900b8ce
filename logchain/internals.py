"""All uses of torch's private interfaces, which another release of torch may change."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch._functorch.utils import enable_single_level_autograd_function as enable_single_level_autograd_function
from torch._subclasses import FakeTensor
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._pytree import tree_leaves as tree_leaves

SingleLevelFunction = _SingleLevelFunction

_Function = TypeVar("_Function", bound=Callable[..., Any])

# the dispatch key of the vmap within `torch.autograd.grad(..., is_grads_batched=True)`
_OLD_VMAP = torch._C._dispatch_key_parse("VmapMode")


def is_intercepted() -> bool:
    """Whether a dispatch mode or a transform would see the calls of operators."""
    return (
        torch._C._len_torch_dispatch_stack() != 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or takes_forward_derivatives()
        or torch._C._dispatch_tls_is_dispatch_key_included(_OLD_VMAP)
    )


def is_transformed() -> bool:
    """Whether a transform of `torch.func`, or a forward derivative, is being taken."""
    return torch._C._are_functorch_transforms_active() or takes_forward_derivatives()


def takes_forward_derivatives() -> bool:
    """Whether a forward derivative is being taken."""
    return torch.autograd.forward_ad._current_level >= 0


def is_mapped() -> bool:
    """Whether `torch.vmap`, or a batch of gradients, maps the operations."""
    if torch._C._dispatch_tls_is_dispatch_key_included(_OLD_VMAP):
        return True
    return any(transform.key() == TransformType.Vmap for transform in retrieve_all_functorch_interpreters())


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and a device, but no values, as while torch.compile traces."""
    return isinstance(tensor, FakeTensor)


def is_jit_traced() -> bool:
    """Whether torch.jit.trace records operators."""
    return torch._C._get_tracing_state() is not None


def is_exported() -> bool:
    """Whether torch.export or make_fx records operators."""
    return get_proxy_mode() is not None


def may_be_compiled() -> bool:
    """Whether torch.compile has been imported, without which nothing is compiled; the import takes seconds."""
    return "torch._dynamo" in sys.modules


def is_static(size: int) -> bool:
    """Whether torch.compile knows a size as a number while it traces."""
    from torch.fx.experimental.symbolic_shapes import has_static_value  # takes long to import

    return bool(has_static_value(size))


def constant_in_graphs(function: _Function) -> _Function:
    """As `torch.compiler.assume_constant_result`, whose import takes seconds."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def between_graphs(
    function: _Function, reason: str = "a chain of structures is computed between graphs; bulk.to_dense() has one"
) -> _Function:
    """The function, at which torch.compile breaks its graph, and which it does not trace."""
    disabled = None

    @wraps(function)
    def call(*args: Any) -> Any:
        nonlocal disabled
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(msg=reason)
        if not may_be_compiled():
            return function(*args)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args)

    return call  # type: ignore[return-value]


@contextmanager
def autograd_in_operators() -> Iterator[None]:
    """A context in which torch records graphs, also where an operator is computed below torch's autograd."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield


def below_autograd(registered: Any, keyset: Any, *args: Any) -> Any:
    """The outputs of an operator by the levels of `torch.func` below this one, each of which takes derivatives."""
    # a Function turns derivatives off
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad(), _set_fwd_grad_enabled(True):
        return registered.redispatch(keyset & torch._C._after_autograd_keyset, *args)
