"""Arithmetic on plain tensors: no argument checks, no autograd, nothing of `logchain` imported.

This is the one place that looks at a device. A module is imported when it is first asked for.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

# who computes on a GPU, on a CPU, and elsewhere; what is native is there where numba is
_MODULES = {
    "forward": ("gpu.forward", "cpu.forward", "plain.forward"),
    "backward": ("gpu.backward", "cpu.backward", "plain.backward"),
    "messages": ("plain.messages", "cpu.messages", "plain.messages"),
    "path": ("gpu.viterbi", "cpu.viterbi", "plain.viterbi"),
    "paths": ("plain.topk_paths", "cpu.topk_paths", "plain.topk_paths"),
    "draw": ("plain.sample", "cpu.sample", "plain.sample"),
    "log_matmul": ("gpu.matmul", "plain.matmul", "plain.matmul"),
    "tree": ("gpu.product", "native_tree", "plain.product"),
}

_NOTHING = nullcontext()


def on_gpu(tensor: Tensor) -> bool:
    """Whether the Triton kernels compute for it."""
    return tensor.is_cuda


def in_c(tensor: Tensor) -> bool:
    """Whether the loops in C compute for it."""
    return tensor.is_cpu and not on_gpu(tensor)


def in_numba(tensor: Tensor) -> bool:
    """Whether loops that numba compiles may compute for it."""
    return in_c(tensor) and _numba()


@cache
def _numba() -> bool:
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


def arithmetic_on(tensor: Tensor) -> AbstractContextManager[None]:
    """Where an operator computes: on the tensor's own device, whichever is current, and in the dtypes it asks for."""
    plain = not tensor.is_cuda and not torch.is_autocast_enabled("cpu" if tensor.is_cpu else tensor.device.type)
    return _NOTHING if plain else _arithmetic_on(tensor)


@contextmanager
def _arithmetic_on(tensor: Tensor) -> Iterator[None]:
    with torch.cuda.device_of(tensor), torch.autocast(tensor.device.type, enabled=False):
        yield


def _module(question: str, tensor: Tensor) -> ModuleType:
    gpu, cpu, other = _MODULES[question]
    name = gpu if on_gpu(tensor) else cpu if in_c(tensor) else other
    if name.startswith("native") and not in_numba(tensor):
        name = other
    return import_module(f"{__name__}.{name}")


class Room(NamedTuple):
    """`forward` and `backward` of a chain, see `kernels.plain`."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def chain_kernels(tensor: Tensor) -> Room:
    """The room that walks a chain."""
    return Room(_module("forward", tensor).forward, _module("backward", tensor).backward)


@cache
def short_calls() -> ModuleType:
    """`short_of` operands on a CPU, see `kernels.cpu.short`."""
    return import_module(f"{__name__}.cpu.short")


def new_messages(chain: Any, steps: int) -> Tensor:
    """Memory for the messages of so many steps of a chain, (steps, g, m, c)."""
    messages: Tensor = chain.new(steps, chain.g, chain.m, chain.c)
    if in_c(chain.x):
        from .cpu.library import in_large_pages

        in_large_pages(messages)
    return messages if chain.v == steps else messages.zero_()


def message_kernels(tensor: Tensor) -> ModuleType:
    """`messages` of a chain, forward and backward, see `kernels.plain.messages`."""
    return _module("messages", tensor)


def stretches() -> ModuleType:
    """`Stretch` of a longer chain on a CPU, see `kernels.cpu.stretch`."""
    return import_module(f"{__name__}.cpu.stretch")


def chunked_kernels(tensor: Tensor) -> ModuleType | None:
    """`forward` and `backward` of a chain cut into segments, if a room has its own, see `kernels.gpu.chunked`."""
    return import_module(f"{__name__}.gpu.chunked") if on_gpu(tensor) else None


def path_kernels(tensor: Tensor) -> ModuleType:
    """`paths` of a chain, see `kernels.plain.viterbi`."""
    return _module("path", tensor)


def topk_kernels(tensor: Tensor) -> ModuleType:
    """`paths` of a chain, see `kernels.plain.topk_paths`."""
    return _module("paths", tensor)


def draw_kernels(tensor: Tensor) -> ModuleType:
    """`draw` from a chain, see `kernels.plain.sample`."""
    return _module("draw", tensor)


def log_matmul_kernels(tensor: Tensor) -> ModuleType:
    """`forward` and `backward` of a log-semiring matrix product, see `kernels.plain.matmul`."""
    return _module("log_matmul", tensor)


def tree_kernels(tensor: Tensor) -> ModuleType:
    """`Nodes` of a product tree and their `Arithmetic`, see `kernels.plain.product`."""
    return _module("tree", tensor)


def fold_kernels(whole: Tensor) -> ModuleType | None:
    """`product` and `gradient` of stacks (g, s, c, c) of small matrices, see `kernels.native_product`, if there are."""
    if in_numba(whole):
        from . import native_product

        return native_product if native_product.folds(whole) else None
    return None
