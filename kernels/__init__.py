"""Arithmetic on plain tensors, chosen by their device: no argument checks, no autograd, nothing of `logchain` imported.

A module is imported when one of its functions is first asked for.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .choice import check_forward_choice as check_forward_choice
from .choice import is_triton, on_device
from .choice import load as load
from .choice import on_cpu as on_cpu
from .choice import use as use
from .structured import Arcs, Factors

# the module for tensors on a GPU, on a CPU, and elsewhere
_MODULES = {
    "forward": ("gpu.forward", "cpu.forward", "plain.forward"),
    "backward": ("gpu.backward", "cpu.backward", "plain.backward"),
    "path": ("gpu.viterbi", "cpu.viterbi", "plain.viterbi"),
    "paths": ("plain.topk_paths", "cpu.topk_paths", "plain.topk_paths"),
    "draw": ("plain.sample", "cpu.sample", "plain.sample"),
    "log_matmul": ("gpu.matmul", "cpu.matmul", "plain.matmul"),
    "stack": ("gpu.product", "cpu.product", "plain.product"),
    "factors": ("plain.products", "cpu.products", "plain.products"),
}

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


def _module(question: str, tensor: Tensor) -> ModuleType:
    gpu, cpu, elsewhere = _MODULES[question]
    if on_gpu(tensor) and gpu != elsewhere:
        return on_device(gpu, elsewhere)
    return load(cpu if in_c(tensor) else elsewhere)


class Room(NamedTuple):
    """`forward` and `backward` of a chain for one kind of device, see `kernels.plain`."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def chain_kernels(tensor: Tensor) -> Room:
    """`forward` and `backward` of a chain for a tensor's device."""
    return Room(_module("forward", tensor).forward, _module("backward", tensor).backward)


def short_calls() -> ModuleType:
    """The module of short chains on a CPU, `kernels.cpu.short`."""
    return load("cpu.short")


def new_messages(chain: Any, steps: int) -> Tensor:
    """Memory for the messages of `steps` steps of a chain (steps, g, m, c), zeros where the chain is shorter."""
    messages = messages_of(chain, steps)
    return messages if chain.v == steps else messages.zero_()


def messages_of(chain: Any, steps: int) -> Tensor:
    """Uninitialised memory for so many messages of a chain (steps, g, m, c), or for those of packed rows (rows, c)."""
    messages: Tensor = chain.room(steps)
    return in_large_pages(messages)


def in_large_pages(tensor: Tensor) -> Tensor:
    """The same new tensor, whose first touch is faster on a CPU."""
    if in_c(tensor):
        from .cpu.library import in_large_pages as advised

        advised(tensor)
    return tensor


def scratch_of_loops(v: int, g: int, m: int, c: int, item: int, one_matrix: bool) -> tuple[int, int]:
    """The number of threads that compute a chain of `item`-byte floats on a CPU, and the bytes of scratch of each."""
    from .cpu.arguments import scratch

    return scratch(v, g, m, c, torch.float64 if item == 8 else torch.float32, one_matrix)


def stretches() -> ModuleType:
    """The module of `Stretch`, a part of a longer chain on a CPU, `kernels.cpu.stretch`."""
    return load("cpu.stretch")


def cached(key: Any, make: Callable[[], Any]) -> Any:
    """What `make` has returned for a key, see `kernels.cpu.template`."""
    return load("cpu.template").cached(key, make)


def path_kernels(tensor: Tensor) -> ModuleType:
    """The module of `paths`, the best path of a chain, see `kernels.plain.viterbi`."""
    return _module("path", tensor)


def path_messages(tensor: Tensor) -> Callable[..., Any]:
    """The class `Messages`, of the messages of best paths, see `kernels.plain.viterbi`."""
    messages: Callable[..., Any] = load("cpu.viterbi" if in_c(tensor) else "plain.viterbi").Messages
    return messages


def topk_kernels(tensor: Tensor) -> ModuleType:
    """The module of `paths`, the k best paths of a chain, see `kernels.plain.topk_paths`."""
    return _module("paths", tensor)


def draw_kernels(tensor: Tensor) -> ModuleType:
    """The module of `draw`, paths drawn from a chain, see `kernels.plain.sample`."""
    return _module("draw", tensor)


def log_matmul_kernels(tensor: Tensor) -> ModuleType:
    """The module of `forward` and `backward` of a log-semiring matrix product, see `kernels.plain.matmul`."""
    return _module("log_matmul", tensor)


def stack_kernels(tensor: Tensor) -> ModuleType:
    """The module of products of stacks of matrices, their prefixes and gradients, see `kernels.tree`."""
    return _module("stack", tensor)


def structured_kernels(x: Tensor, pattern: Any) -> ModuleType | None:
    """The module of `forward` and `backward` of factors, and in C of bands and arcs; None for all others."""
    return _module("factors", x) if isinstance(pattern, Factors) else exact_kernels(x, pattern)


def exact_kernels(x: Tensor, pattern: Any) -> ModuleType | None:
    """The module of the exact scan of bands and arcs in C; None for others, and on other devices."""
    return load("cpu.sparse") if in_c(x) and type(pattern) in (tuple, Arcs) else None
