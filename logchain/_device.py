"""The one place that looks at the device: which kernels compute for a tensor."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

_NOTHING = nullcontext()


def on_gpu(tensor: Tensor) -> bool:
    """Whether the Triton kernels compute for it."""
    return tensor.is_cuda


def native(tensor: Tensor) -> bool:
    """Whether loops that numba compiles may compute for it."""
    return tensor.is_cpu and not on_gpu(tensor) and _numba()


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


def chain_kernels(tensor: Tensor) -> ModuleType:
    """`forward` and `backward` of a chain, see `kernels.sum_product`."""
    if on_gpu(tensor):
        from .kernels.gpu import sum_product as gpu

        return gpu
    if tensor.is_cpu:
        from .kernels.cpu import sum_product as cpu

        return cpu
    from .kernels import sum_product

    return sum_product


@cache
def short_calls() -> ModuleType:
    """`short_of` operands on a CPU, see `kernels.cpu.short`."""
    from .kernels.cpu import short

    return short


def messages_in_c(tensor: Tensor) -> Callable[..., Tensor] | None:
    """`messages` of a chain, see `kernels.cpu.messages`; None where no loop in C computes."""
    if on_gpu(tensor) or not tensor.is_cpu:
        return None
    from .kernels.cpu.messages import messages

    return messages


def chunked_kernels(tensor: Tensor) -> ModuleType:
    """`forward` and `backward` of a chain cut into segments, see `kernels.chunked`."""
    if on_gpu(tensor):
        from .kernels.gpu import chunked as gpu

        return gpu
    from .kernels import chunked

    return chunked


def path_kernels(tensor: Tensor) -> ModuleType:
    """`paths` of a chain, see `kernels.max_product`."""
    if on_gpu(tensor):
        from .kernels.gpu import max_product as gpu

        return gpu
    if native(tensor):
        from .kernels import native_max_product

        return native_max_product
    from .kernels import max_product

    return max_product


def draw_kernels(tensor: Tensor) -> ModuleType:
    """`draw_block` of a chain, see `kernels.sampling`."""
    if native(tensor):
        from .kernels import native_sampling

        return native_sampling
    from .kernels import sampling

    return sampling


def log_matmul_kernels(tensor: Tensor) -> ModuleType:
    """`forward` and `backward` of a log-semiring matrix product, see `kernels.log_matmul`."""
    if on_gpu(tensor):
        from .kernels.gpu import matmul as gpu

        return gpu
    from .kernels import log_matmul

    return log_matmul


def tree_kernels(tensor: Tensor) -> ModuleType:
    """`Nodes` of a product tree and their `Arithmetic`, see `kernels.tree`."""
    if on_gpu(tensor):
        from .kernels.gpu import tree as gpu

        return gpu
    if native(tensor):
        from .kernels import native_tree

        return native_tree
    from .kernels import tree

    return tree


def fold_kernels(whole: Tensor) -> ModuleType | None:
    """`product` and `gradient` of stacks (g, s, c, c) of small matrices, see `kernels.native_product`, if there are."""
    if native(whole):
        from .kernels import native_product

        return native_product if native_product.folds(whole) else None
    return None
