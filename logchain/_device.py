"""The one place that looks at the device: which kernels compute for a tensor."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType

import torch
from torch import Tensor


def on_gpu(tensor: Tensor) -> bool:
    """Whether the Triton kernels compute for it."""
    return tensor.device.type == "cuda"


def arithmetic_on(tensor: Tensor) -> AbstractContextManager[None]:
    """Where an operator computes: on the tensor's own device, whichever is current, and in the dtypes it asks for."""
    plain = tensor.device.type != "cuda" and not torch.is_autocast_enabled(tensor.device.type)
    return nullcontext() if plain else _arithmetic_on(tensor)


@contextmanager
def _arithmetic_on(tensor: Tensor) -> Iterator[None]:
    with torch.cuda.device_of(tensor), torch.autocast(tensor.device.type, enabled=False):
        yield


def chain_kernels(tensor: Tensor) -> ModuleType:
    """`forward` and `backward` of a chain, see `kernels.sum_product`."""
    if on_gpu(tensor):
        from .kernels.gpu import sum_product as gpu

        return gpu
    from .kernels import sum_product

    return sum_product


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
    from .kernels import tree

    return tree
