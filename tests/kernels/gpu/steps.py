"""Small calls of the public functions on any device, and a guard that nothing in them waits for the device."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

import logchain
from tests.families import FAMILIES, dense

F32 = torch.float32


def with_gradients(function: Callable[..., Tensor], operands: list[Tensor], **options) -> list[Tensor]:
    out = function(*operands, **options)
    return [out, *torch.autograd.grad(out.sum(), operands)]


def _values(function: Callable[..., Tensor], operands: list[Tensor], **options) -> list[Tensor]:
    with torch.no_grad():
        out = function(*operands, **options)
    return list(out) if isinstance(out, tuple) else [out]


def _random(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


# name: the step, the public function, its options, and what makes its operands
STEPS: dict[str, tuple[Callable, Callable, dict, Callable[[], list[Tensor]]]] = {
    "shared": (with_gradients, logchain.product, {}, lambda: dense(F32, n=40, t=1, v=9, c=70)[:3]),
    "many": (with_gradients, logchain.product, {}, lambda: dense(F32, n=1100, t=1, v=9, c=20)[:3]),
    "separate": (with_gradients, logchain.product, {}, lambda: dense(F32, each=True, v=9, c=33)[:3]),
    "wide": (with_gradients, logchain.product, {}, lambda: dense(F32, n=5, t=1, v=5, c=300)[:3]),
    "flagged": (with_gradients, logchain.product, {}, lambda: FAMILIES["left_to_right"](F32)[:3]),
    "chunked": (with_gradients, logchain.product, {"strategy": "chunked"}, lambda: dense(F32, v=60, c=16)[:3]),
    "values": (_values, logchain.product, {}, lambda: dense(F32, n=40, t=1, v=9, c=70)[:3]),
    "marginals": (_values, logchain.marginals, {"transitions": "sum"}, lambda: dense(F32, v=9, c=70)[:3]),
    "viterbi": (_values, logchain.viterbi, {}, lambda: dense(F32, n=40, t=1, v=9, c=70)[:3]),
    "matmul": (with_gradients, logchain.matmul, {}, lambda: _random((5, 1, 33, 65), (4, 65, 17))),
    "matrix_product": (with_gradients, logchain.matrix_product, {}, lambda: _random((2, 9, 33, 33))),
    "large": (with_gradients, logchain.matrix_product, {}, lambda: _random((2, 5, 130, 130))),
    "prefixes": (with_gradients, logchain.prefix_products, {}, lambda: _random((2, 9, 33, 33))),
}


def case(name: str, device: str = "cuda") -> tuple[Callable[[list[Tensor]], list[Tensor]], list[Tensor]]:
    """A step, and its operands on a device, with gradients."""
    step, function, options, operands = STEPS[name]
    return partial(step, function, **options), [operand.to(device).requires_grad_() for operand in operands()]


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
