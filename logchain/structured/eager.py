"""Functions that torch.compile leaves out of its graphs."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def between_graphs(
    function: _Function, reason: str = "a chain of structures is computed between graphs; bulk.to_dense() has one"
) -> _Function:
    """The function, which breaks the graph where torch.compile meets it, and is computed as it is."""
    disabled = None

    @wraps(function)
    def call(*args: Any) -> Any:
        nonlocal disabled
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(msg=reason)
        if "torch._dynamo" not in sys.modules:  # nothing is compiled, and to load it takes longer than many chains
            return function(*args)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args)

    return call  # type: ignore[return-value]
