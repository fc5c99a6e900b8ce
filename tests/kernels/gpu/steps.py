"""Small calls of the public functions on any device, and a guard that nothing in them waits for the device."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

import logchain
from tests.families import F32, FAMILIES, dense


def run(function: Callable, operands: list[Tensor], **options) -> list[Tensor]:
    """The results, and the gradients of a single one."""
    out = function(*operands, **options)
    if isinstance(out, tuple):
        return [value.detach() for value in out]
    return [out, *(torch.autograd.grad(out.sum(), operands) if out.requires_grad else ())]


def call_chain(
    function: Callable, n: int, v: int, c: int, dtype: torch.dtype = F32, *, separate: bool = False, **options
) -> None:
    """A call for chains with a matrix for each step, and the gradients of a single result."""
    shapes = (n, v, c), (n, v - 1, c, c) if separate else (v - 1, c, c), (c,)
    run(function, [torch.rand(shape, dtype=dtype).requires_grad_() for shape in shapes], **options)


def call_matrices(function: Callable, *shape: int, dtype: torch.dtype = F32) -> None:
    """The same of a product of matrices."""
    stack = torch.rand(shape, dtype=dtype).requires_grad_()
    run(function, [stack] * (2 if function is logchain.matmul else 1))


def _matrices(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(*shape, generator=torch.Generator().manual_seed(0)) for shape in shapes]


# name: a function, and what makes its operands
STEPS: dict[str, tuple[Callable, Callable[[], list[Tensor]]]] = {
    "shared": (logchain.product, lambda: dense(F32, n=40, t=1, v=9, c=70)[:3]),
    "many": (logchain.product, lambda: dense(F32, n=1100, t=1, v=9, c=20)[:3]),
    "separate": (logchain.product, lambda: dense(F32, each=True, v=9, c=33)[:3]),
    "wide": (logchain.product, lambda: dense(F32, n=5, t=1, v=5, c=300)[:3]),
    "flagged": (logchain.product, lambda: FAMILIES["left_to_right"](F32)[:3]),
    "segments": (partial(logchain.product, strategy="segments"), lambda: dense(F32, v=60, c=16)[:3]),
    "values": (torch.no_grad()(logchain.product), lambda: dense(F32, n=40, t=1, v=9, c=70)[:3]),
    "marginals": (partial(logchain.marginals, transitions="sum"), lambda: dense(F32, v=9, c=70)[:3]),
    "viterbi": (logchain.viterbi, lambda: dense(F32, n=40, t=1, v=9, c=70)[:3]),
    "matmul": (logchain.matmul, lambda: _matrices((5, 1, 33, 65), (4, 65, 17))),
    "matrix_product": (logchain.matrix_product, lambda: _matrices((2, 9, 33, 33))),
    "large": (logchain.matrix_product, lambda: _matrices((2, 5, 130, 130))),
    "prefixes": (logchain.prefix_products, lambda: _matrices((2, 9, 33, 33))),
}


@contextmanager
def waiting_raises() -> Iterator[None]:
    """Whatever waits for the device in the body raises, and nothing after it does."""
    with warnings.catch_warnings():
        # the first use in a process says that it is a prototype: as an error that left the mode on
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
