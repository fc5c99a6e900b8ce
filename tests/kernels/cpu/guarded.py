"""Chains of all sizes whose operands end where the memory does: the process dies where a loop reads on.

Linux only: the page behind each operand is one that nobody may touch.
"""

import ctypes
import mmap

import torch

import logchain


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, up to the last byte before a protected page."""
    size = tensor.numel() * tensor.element_size()
    before = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, before + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + before), mmap.PAGESIZE, 0):
        raise OSError("mprotect")
    if not tensor.numel():
        return tensor
    return torch.frombuffer(pages, dtype=tensor.dtype, count=tensor.numel(), offset=before - size).view(tensor.shape)


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        for c in (*range(1, 18), 33):
            for own, steps, deep in ((1, 1, 1), (1, 3, 60), (3, 3, 1), (3, 1, 60)):
                for log in (False, True):
                    x = -deep * torch.rand(3, 4, c, generator=generator, dtype=dtype)
                    bulk = torch.rand(own, steps, c, c, generator=generator, dtype=dtype)
                    bulk = bulk * (bulk < 0.5) if deep > 1 else bulk
                    p0 = torch.rand(3, c, generator=generator, dtype=dtype)
                    bulk, p0 = (bulk.log(), p0.log()) if log else (bulk, p0)
                    leaves = [guarded(tensor).requires_grad_() for tensor in (x, bulk, p0)]
                    weight = guarded(torch.ones(3, dtype=dtype))
                    out = logchain.product(*leaves, log_params=log, strategy="sequential")
                    out.backward(weight)
                    logchain.forward_backward(*(leaf.detach() for leaf in leaves), log_params=log)
            for shapes in (((3, 4, c), (3, c, 5)), ((3, c, 4), (3, 4, c))):
                a, b = (guarded(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes)
                for pair in ((a, b), (b.mT, a.mT)):
                    leaves = [operand.detach().requires_grad_() for operand in pair]
                    out = logchain.matmul(*leaves)
                    out.backward(guarded(torch.ones(out.shape, dtype=dtype)))
