"""The choice between Triton kernels and torch operations on a GPU, and the fallback from the former to the latter."""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .message import Kept, Message, decoded, encoded

if TYPE_CHECKING:  # it imports this package
    from .chain import Chain

_CHOICES = ("auto", "triton", "plain")

# modules of Triton's errors, and texts of its RuntimeErrors, that come before a launch: no result has been written
_ERRORS = ("triton.compiler.errors", "triton.runtime.errors")
_TEXTS = ("PassManager::run failed", "Failed to find C compiler", "0 active drivers", "Cannot find ptxas")


class _State(NamedTuple):
    choice: str
    failure: str  # why "auto" computes with torch operations; "" while it computes with Triton


_state, _lock = _State("auto", ""), Lock()


class use:
    """Chooses what computes on a CUDA or ROCm device: Triton kernels or torch operations.

    A call sets the choice at once; in a `with` statement, the exit restores the former choice. The choice holds for the
    whole process, because autograd runs backward passes in other threads. Tensors on a CPU are not affected, and any
    other device computes with torch operations. A gradient may be computed under another choice than its forward pass.

    With "auto", a missing Triton, one older than 3.5, or a kernel that does not compile leads to one RuntimeWarning
    with the kernel's name and the reason, and to torch operations from then on, until the next call of `use`. If that
    kernel works in place, its operand may be overwritten: then the call raises a RuntimeError. Errors of the device,
    which come after a launch, are raised unchanged.

    Args:
        choice: "auto", the default, for Triton kernels with that fallback; "triton" for Triton kernels without it, so
            that such errors are raised; "plain" for torch operations.

    Raises:
        ValueError: if `choice` is anything else.

    >>> import torch, logchain
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> logs = torch.zeros(2, 2, device=device)
    >>> with logchain.kernels.use("plain"):
    ...     product = logchain.matmul(logs, logs)
    >>> product.exp().tolist()
    [[2.0, 2.0], [2.0, 2.0]]
    """

    def __init__(self, choice: str) -> None:
        if choice not in _CHOICES:
            raise ValueError(f'choice: expected "auto", "triton" or "plain", got {choice!r}; pass one of these')
        self._former, self._chosen = _state, _State(choice, "")
        _set(self._chosen)

    def __enter__(self) -> None:
        _set(self._chosen)

    def __exit__(self, *_: object) -> None:
        _set(self._former)


def _set(state: _State) -> None:
    global _state
    _state = state


def is_triton() -> bool:
    """Whether Triton kernels are chosen, and none has failed to compile."""
    return _state.choice != "plain" and not _state.failure


@cache
def load(name: str) -> ModuleType:
    """A module of this package, imported on first use."""
    return import_module(f"{__package__}.{name}")


class _OnDevice(ModuleType):
    """The functions of a Triton module, each with the fallback to its counterpart in the plain module."""

    def __init__(self, triton: str, plain: str) -> None:
        super().__init__(f"{__package__}.{triton}")
        self._names = triton, plain

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        tree = self._names[0] == "gpu.product" and name == "Kept"
        function = _Tree if tree else partial(_call, *self._names, name)
        setattr(self, name, function)
        return function


on_device = cache(_OnDevice)


def _call(triton: str, plain: str, name: str, *args: Any, **options: Any) -> Any:
    torch_operations = partial(_ADAPTED.get((plain, name)) or getattr(load(plain), name), *args, **options)
    if not is_triton():
        return torch_operations()
    return _attempt(
        lambda: getattr(load(triton), name)(*args, **options), torch_operations, options.get("inplace", False)
    )


def _attempt(kernels: Callable[[], Any], torch_operations: Callable[[], Any], inplace: bool = False) -> Any:
    try:
        return kernels()
    except Exception as error:
        if _state.choice == "triton" or not _precedes_launch(error):
            raise
        _remember(error)
        if inplace and not isinstance(error, ImportError):
            expected = "expected kernels that compile before the operand is overwritten"
            raise RuntimeError(f"inplace: {expected}, got {_reason(error)}; call again with new operands") from error
    return torch_operations()


def _precedes_launch(error: Exception) -> bool:
    """Whether Triton is missing or too old, or a kernel does not compile or does not fit the device."""
    if isinstance(error, ImportError):  # of Triton, not of a part of this library
        return str(error.name).partition(".")[0] != __name__.partition(".")[0]
    if {base.__module__ for base in type(error).__mro__}.intersection(_ERRORS):
        return type(error).__name__ != "InterpreterError"
    # a C compiler that lacks Python.h, for example
    return isinstance(error, subprocess.CalledProcessError) or any(text in str(error) for text in _TEXTS)


def _remember(error: Exception) -> None:
    """With "auto", compute with torch operations from now on, and warn if that is new."""
    with _lock:
        first = _state == _State("auto", "")
        if first:
            _set(_State("auto", _reason(error)))
    if first:
        remedy = "install Triton 3.5 or later, then call" if isinstance(error, ImportError) else "to try again, call"
        effect = "torch operations compute on the GPU from now on"
        advice = f'{remedy} logchain.kernels.use("auto"); use("plain") avoids this warning'
        warnings.warn(f"{_reason(error)}: {effect}; {advice}", RuntimeWarning, stacklevel=2)


def _reason(error: Exception) -> str:
    kernel, trace = "Triton", error.__traceback__
    while trace is not None and kernel == "Triton":
        launched: Any = trace.tb_frame.f_locals.get("self")
        if type(launched).__module__.startswith("triton.") and hasattr(getattr(launched, "fn", None), "__name__"):
            kernel = f"kernel {launched.fn.__name__}"
        trace = trace.tb_next
    return f"{kernel} ({type(error).__name__}: {' '.join(str(error).split())[:300]})"


class _Tree:
    """`Kept` of products of stacks; where a kernel of its gradient does not compile, torch operations repeat it."""

    def __init__(self, stack: Tensor, into: Tensor) -> None:
        self._operands = stack, into
        self._nodes = _call("gpu.product", "plain.product", "Kept", stack, into)

    def root(self) -> Any:
        return self._nodes.root()

    def gradient(self, weight: Tensor) -> None:
        def repeated() -> None:
            load("plain.product").Kept(*self._operands).gradient(weight)

        _attempt(partial(self._nodes.gradient, weight), repeated)


def _forward(
    chain: Chain, entering: Message | None = None, *, halved: bool = False, **options: Any
) -> tuple[Kept, Message | None]:
    """`plain.forward`, with messages that `gpu.backward` can read, and NaN for lengths outside 1..v."""
    residuals: Kept
    residuals, leaving = load("plain.forward").forward(chain, entering, **options)
    keep = options.get("keep")
    if keep is not None:  # finite logarithms for the message that entered, and for sequences that underflow or hold NaN
        messages = keep[: chain.v + residuals.entered]
        in_logs = residuals.redone | messages.isnan().any(0).any(-1)
        for message in messages:
            logs = torch.where(residuals.redone[..., None], message, message.log())
            message.copy_(torch.where(in_logs[..., None], encoded(logs, chain.dtype), message))
        if entering is not None:
            keep[0] = encoded(entering.values, chain.dtype)
        residuals = residuals._replace(redone=in_logs)
    if chain.ends is not None and entering is None:  # lengths on a device are not checked before
        outside = ((chain.ends < 1) | (chain.ends > chain.v))[..., 0]
        residuals.log_norm.masked_fill_(outside, torch.nan)
        if leaving is not None:
            leaving.scale[0].masked_fill_(outside, torch.nan)
    return residuals, leaving


def _backward(
    chain: Chain,
    residuals: Kept,
    weight: Tensor,
    following: Tensor | None,
    grad_x: Tensor | None,
    grad_bulk: Tensor | None,
) -> Tensor:
    """`plain.backward`, after another forward pass if Triton kernels may have written the messages."""
    if residuals.bound is not None or residuals.entered or following is not None:
        entering = None
        if residuals.entered:
            scale = residuals.log_norm.new_zeros(2, *residuals.log_norm.shape)
            entering = Message(decoded(residuals.messages[0]), scale)
        memory = torch.empty_like(residuals.messages)
        repeated, _ = load("plain.forward").forward(chain, entering, keep=memory, leave=following is not None)
        residuals = repeated._replace(log_norm=residuals.log_norm)
    result: Tensor = load("plain.backward").backward(chain, residuals, weight, following, grad_x, grad_bulk)
    return result


def _paths(chain: Chain, steps: int) -> tuple[Tensor, Tensor]:
    """`plain.viterbi.paths`, without states for lengths outside 1..v."""
    states, unknown = load("plain.viterbi").paths(chain, steps)
    if chain.ends is not None:
        states.masked_fill_((chain.ends < 1) | (chain.ends > steps), -1)
    return states, unknown


def _matmul_backward(*args: Any) -> list[Tensor | None]:
    """`plain.matmul.backward`, with contiguous gradients, as its operator declares them."""
    gradients = load("plain.matmul").backward(*args)
    return [None if gradient is None else gradient.contiguous() for gradient in gradients]


_ADAPTED: dict[tuple[str, str], Callable[..., Any]] = {
    ("plain.forward", "forward"): _forward,
    ("plain.backward", "backward"): _backward,
    ("plain.viterbi", "paths"): _paths,
    ("plain.matmul", "backward"): _matmul_backward,
}
