"""The choice between Triton kernels and torch operations on a GPU, and the fallback from the former to the latter."""

import subprocess
import warnings
from functools import cache, partial
from importlib import import_module
from threading import Lock
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

# modules of Triton's errors, and texts of its RuntimeErrors, that come before a launch: no result has been written
_ERRORS = ("triton.compiler.errors", "triton.runtime.errors")
_TEXTS = ("PassManager::run failed", "Failed to find C compiler", "0 active drivers", "Cannot find ptxas")


class _State(NamedTuple):
    cuda: str = "auto"
    cpu: str = "auto"
    failure: str = ""  # why "auto" computes with torch operations on a GPU; "" while it computes with Triton


_state, _lock = _State(), Lock()


class use:
    """Chooses what computes on a CUDA or ROCm device, or on a CPU: the library's kernels or torch operations.

    A call sets the choice at once; in a `with` statement, the exit restores the former choice. The choice holds for the
    whole process, because autograd runs backward passes in other threads. Any other device computes with torch
    operations. A gradient on a GPU may be computed under another choice than its forward pass. On a CPU that raises;
    compiled functions cannot tell, and have to be called and differentiated under one choice.

    With "auto", a missing Triton, one older than 3.5, or a kernel that does not compile leads to one RuntimeWarning
    with the kernel's name and the reason, and to torch operations from then on, until the next call of `use`. If that
    kernel works in place, its operand may be overwritten: then the call raises a RuntimeError. Errors of the device,
    which come after a launch, are raised unchanged.

    Args:
        choice: "auto", the default, for Triton kernels with that fallback; "triton" for Triton kernels without it, so
            that such errors are raised; "plain" for torch operations.
        device: "cuda" chooses for CUDA and ROCm devices, "cpu" for tensors on a CPU. There "auto" means the loops in C,
            and "triton" Triton's interpreter, which is slow: for tests, with `TRITON_INTERPRET=1` in the environment.

    Raises:
        ValueError: if `choice` or `device` is anything else.
        RuntimeError: in a backward pass on a CPU, which reads messages, under another choice than its forward pass.

    >>> import torch, logchain
    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> logs = torch.zeros(2, 2, device=device)
    >>> with logchain.kernels.use("plain"):
    ...     product = logchain.matmul(logs, logs)
    >>> product.exp().tolist()
    [[2.0, 2.0], [2.0, 2.0]]
    """

    def __init__(self, choice: str, device: str = "cuda") -> None:
        if choice not in ("auto", "triton", "plain"):
            raise ValueError(f'choice: expected "auto", "triton" or "plain", got {choice!r}; pass one of these')
        if device not in ("cuda", "cpu"):
            raise ValueError(f'device: expected "cuda" or "cpu", got {device!r}; pass one of these')
        self._former = _state
        self._chosen = _State(choice, _state.cpu) if device == "cuda" else _state._replace(cpu=choice)
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
    return _state.cuda != "plain" and not _state.failure


def on_cpu() -> str:
    """What computes with tensors on a CPU: "auto", "triton" or "plain", see `use`."""
    return _state.cpu


def check_forward_choice(former: str, grad: Tensor) -> None:
    """Raise if a backward pass on a CPU would read what another backend kept.

    `former`: what `on_cpu` returned in its forward pass.
    """
    if former != _state.cpu and grad.is_cpu:
        expected = f"expected kernels.use({former!r}, device='cpu') as in the forward pass"
        raise RuntimeError(f"backward: {expected}, got {_state.cpu!r}; call both inside the same context")


@cache
def load(name: str) -> ModuleType:
    """A module of this package, imported on first use."""
    return import_module(f"{__package__}.{name}")


class OnDevice:
    """The functions of a Triton module, each with the fallback to that of the plain module of this name."""

    def __init__(self, name: str) -> None:
        self._module = name

    def __getattr__(self, function: str) -> Any:
        return partial(_call, self._module, function)


def _call(module: str, function: str, *args: Any, **options: Any) -> Any:
    if is_triton():
        try:
            return getattr(load(f"gpu.{module}"), function)(*args, **options)
        except Exception as error:
            if _state.cuda == "triton" or not _precedes_launch(error):
                raise
            _warn_once(error)
            if options.get("inplace") and not isinstance(error, ImportError):
                expected = f"kernels that compile before the operand is overwritten, got {_reason(error)}"
                raise RuntimeError(f"inplace: expected {expected}; call again with new operands") from error
    return getattr(load(f"plain.{module}"), function)(*args, **options)


def _precedes_launch(error: Exception) -> bool:
    """Whether Triton is missing or too old, or a kernel does not compile or does not fit the device."""
    if isinstance(error, ImportError):  # of Triton, not of a part of this library
        return str(error.name).partition(".")[0] != __name__.partition(".")[0]
    if {base.__module__ for base in type(error).__mro__}.intersection(_ERRORS):
        return type(error).__name__ != "InterpreterError"
    # a C compiler that lacks Python.h, for example
    return isinstance(error, subprocess.CalledProcessError) or any(text in str(error) for text in _TEXTS)


def _warn_once(error: Exception) -> None:
    """With "auto", compute with torch operations from now on, and warn if that is new."""
    with _lock:
        if _state.cuda != "auto" or _state.failure:
            return
        state = _state._replace(failure=_reason(error))
        _set(state)
    remedy = "install Triton 3.5 or later, then call" if isinstance(error, ImportError) else "to try again, call"
    effect = "torch operations compute on the GPU from now on"
    advice = f'{remedy} logchain.kernels.use("auto"); use("plain") avoids this warning'
    warnings.warn(f"{state.failure}: {effect}; {advice}", RuntimeWarning, stacklevel=2)


def _reason(error: Exception) -> str:
    kernel, trace = "Triton", error.__traceback__
    while trace is not None and kernel == "Triton":
        launched: Any = trace.tb_frame.f_locals.get("self")
        if type(launched).__module__.startswith("triton.") and hasattr(getattr(launched, "fn", None), "__name__"):
            kernel = f"kernel {launched.fn.__name__}"
        trace = trace.tb_next
    return f"{kernel} ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
