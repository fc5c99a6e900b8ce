"""The one place that looks at the device: which kernels compute for a tensor."""

from types import ModuleType

from torch import Tensor


def on_gpu(tensor: Tensor) -> bool:
    """Whether the Triton kernels compute for it."""
    return tensor.device.type == "cuda"


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
