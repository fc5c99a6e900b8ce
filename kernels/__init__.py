"""Arithmetic on plain tensors, chosen by their device: no argument checks, no autograd, nothing of `logchain` imported.

A module is imported when one of its functions is first called.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .choice import OnDevice, is_triton
from .choice import check_forward_choice as check_forward_choice
from .choice import load as load
from .choice import on_cpu as on_cpu
from .choice import use as use
from .message import Message, Residuals
from .structured import Arcs, Durations, Factors

# modules of Triton kernels; modules in C by the type of a pattern; modules of kernels/plain that cpu/dense.py replaces
_ON_GPU = {name: OnDevice(name) for name in ("forward", "backward", "viterbi", "matmul", "product")}
_STRUCTURES = {Factors: "cpu.products", **dict.fromkeys((tuple, Arcs, Durations), "cpu.sparse")}
_DENSE = ("forward", "backward", "viterbi", "sample")

_NO_CONTEXT = nullcontext()


def on_gpu(tensor: Tensor) -> bool:
    """Whether this tensor is on a CUDA or ROCm device, or is treated so, and no value is read on the host."""
    return tensor.is_cuda or (on_cpu() == "triton" and tensor.is_cpu)


def in_triton(tensor: Tensor) -> bool:
    """Whether Triton kernels compute with this tensor, see `use`."""
    return on_gpu(tensor) and is_triton()


def halves(x: Tensor, g: int, m: int, dtype: torch.dtype) -> bool:
    """Whether Triton kernels scan g sets of m sequences x `[*B, v, c]` from both ends, if only gradients are wanted."""
    if not in_triton(x):
        return False
    v, c = x.shape[-2:]
    try:
        return bool(load("gpu.chains").meets(v, g, m, c, dtype, x.device))
    except ImportError:  # reported by the call that follows
        return False


def in_c(tensor: Tensor) -> bool:
    """Whether the C loops compute with this tensor."""
    return tensor.is_cpu and on_cpu() == "auto" and not on_gpu(tensor)


def arithmetic_on(tensor: Tensor) -> AbstractContextManager[None]:
    """A context with the tensor's device as the current one and without autocasting."""
    plain = not tensor.is_cuda and not torch.is_autocast_enabled("cpu" if tensor.is_cpu else tensor.device.type)
    return _NO_CONTEXT if plain else _arithmetic_on(tensor)


@contextmanager
def _arithmetic_on(tensor: Tensor) -> Iterator[None]:
    with torch.cuda.device_of(tensor), torch.autocast(tensor.device.type, enabled=False):
        yield


def module(name: str, tensor: Tensor) -> Any:
    """The module of this name for a tensor's device; `kernels.plain` defines its functions."""
    if on_gpu(tensor) and name in _ON_GPU:
        return _ON_GPU[name]
    if in_c(tensor):
        return load("cpu.dense" if name in _DENSE else f"cpu.{name}")
    return load(f"plain.{name}")


def forward(chain: Any, entering: Message | None = None, **options: Any) -> tuple[Residuals, Any]:
    """The log-partitions and kept messages, and the last forward message; see `kernels.plain.forward`."""
    results: tuple[Residuals, Any] = module("forward", chain.x).forward(chain, entering, **options)
    return results


def backward(chain: Any, residuals: Residuals, *gradients: Tensor | None) -> Tensor:
    """The gradient of p0, or the backward message of the step that entered; see `kernels.plain.backward`."""
    start: Tensor = module("backward", chain.x).backward(chain, residuals, *gradients)
    return start


def messages_of(chain: Any, steps: int) -> Tensor:
    """Uninitialized memory for messages of a chain (steps, g, m, c), or of packed rows (rows, c)."""
    shape = (steps, chain.g, chain.m, chain.c) if chain.starts is None else chain.x.shape
    return in_large_pages(chain.new(*shape))


def in_large_pages(tensor: Tensor) -> Tensor:
    """The same new tensor, backed by large pages on a CPU, whose first touch is faster."""
    return load("cpu.library").in_large_pages(tensor) if in_c(tensor) else tensor


def structured_kernels(x: Tensor, pattern: Any) -> ModuleType | None:
    """The module in C for structures of a pattern; None for others, and on other devices."""
    name = _STRUCTURES.get(type(pattern))
    return load(name) if name and in_c(x) else None
