"""The kernels at the sizes of the public figures, and square products from small to large.

The chains are called through the room's doors, which prepare `p0`; triton is imported when a kernel is asked for.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logchain.kernels.chain import Chain
from tests.benchmarks.workloads import FLOAT


class Kernel(NamedTuple):
    """One launcher at one size, the fewest bytes and multiply-adds of it, and where its tiles come from."""

    name: str
    make: Callable[[str, int], Callable[[], list[Tensor]]]
    floor_bytes: int
    multiply_adds: int
    module: Any
    choose: str  # the module's function that chooses tiles


def kernels(*, tiny: bool) -> list[Kernel]:
    """The most important first; `tiny`: on sizes for an interpreter."""
    from logchain.kernels.gpu import backward_chain, forward_chain, log_matmul, log_matmul_gradient, transitions

    found = []
    chains = [(500, 40, 200, False), (500, 40, 200, True), (32, 512, 64, False)]
    for n, v, c, own in [(9, 3, 5, False), (3, 3, 5, True)] if tiny else chains:
        name = f"n={n} v={v} c={c}, {'own' if own else 'shared'} bulk"
        x, matrix = n * v * c * FLOAT, (v - 1) * (n if own else 1) * c * c * FLOAT
        macs = n * (v - 1) * c * c
        make = _maker(_forward_chain, n, v, c, own)
        found.append(Kernel(f"forward_chain {name}", make, 2 * x + matrix, macs, forward_chain, "tiles"))
        make = _maker(_backward_chain, n, v, c, own)
        found.append(Kernel(f"backward_chain {name}", make, 4 * x + matrix, macs, backward_chain, "tiles"))
        make, choose = _maker(_transitions, n, v, c, own), "few_tiles" if own else "tiles"
        found.append(Kernel(f"transitions {name}", make, 2 * x + 2 * matrix, macs, transitions, choose))
    for c in (4,) if tiny else (256, 64, 200, 512, 128):
        count = 2 if tiny else max(8, 2**25 // c**2)
        size, macs = 3 * count * c * c * FLOAT, count * c**3
        make = _maker(_log_matmul, count, c)
        found.append(Kernel(f"log_matmul {count} x {c}**3", make, size, macs, log_matmul, "tiles"))
        make = _maker(_log_matmul_gradient, count, c)
        name = f"log_matmul_gradient {count} x {c}**3"
        found.append(Kernel(name, make, 2 * size, 2 * macs, log_matmul_gradient, "tiles"))
    segments, length, c = (2, 3, 4) if tiny else (1056, 64, 64)
    make = _maker(_segments, segments, length, c)
    size, macs = segments * length * c * c * FLOAT, segments * length * c**3
    found.append(Kernel(f"segment_product {segments} x {length} of c={c}", make, size, macs, forward_chain, "tiles"))
    return found


def _maker(
    build: Callable[..., Callable[[], list[Tensor]]], *sizes: int
) -> Callable[[str, int], Callable[[], list[Tensor]]]:
    def make(device: str, seed: int) -> Callable[[], list[Tensor]]:
        return build(*sizes, torch.Generator(device).manual_seed(seed), device)

    return make


def _log_matmul(count: int, c: int, generator: torch.Generator, device: str) -> Callable[[], list[Tensor]]:
    from logchain.kernels.gpu import log_matmul

    a, b = (torch.randn(count, 1, c, c, generator=generator, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: [log_matmul.forward(a, b, out)]


def _log_matmul_gradient(count: int, c: int, generator: torch.Generator, device: str) -> Callable[[], list[Tensor]]:
    from logchain.kernels.gpu import log_matmul_gradient

    a, b, weight = (torch.randn(count, 1, c, c, generator=generator, device=device) for _ in range(3))
    grad_a, grad_b = torch.empty_like(a), torch.empty_like(b)

    def run() -> list[Tensor]:
        log_matmul_gradient.backward(weight, a, b, grad_a=grad_a, grad_b=grad_b)
        return [grad_a, grad_b]

    return run


def _chain(n: int, v: int, c: int, own: bool, generator: torch.Generator, device: str) -> Chain:
    """As `logchain.product` makes it: one set of matrices for each sequence, or for all."""
    x = torch.randn(v, n, c, generator=generator, device=device)
    bulk = torch.rand(v - 1, n if own else 1, c, c, generator=generator, device=device).add_(0.01)
    p0 = torch.rand(1, c, generator=generator, device=device)
    bulk = bulk.div_(bulk.sum(-1, keepdim=True))
    return Chain(x, bulk if own else bulk[:, 0], p0, None, False, torch.float32)


def _forward_chain(
    n: int, v: int, c: int, own: bool, generator: torch.Generator, device: str
) -> Callable[[], list[Tensor]]:
    from logchain.kernels.gpu.forward import forward

    chain = _chain(n, v, c, own, generator, device)
    messages = chain.new(v, chain.g, chain.m, c)
    return lambda: list(forward(chain, keep=messages)[0][:2])


def _backward_chain(
    n: int, v: int, c: int, own: bool, generator: torch.Generator, device: str
) -> Callable[[], list[Tensor]]:
    from logchain.kernels.gpu.backward import backward
    from logchain.kernels.gpu.forward import forward

    chain = _chain(n, v, c, own, generator, device)
    kept, _ = forward(chain, keep=chain.new(v, chain.g, chain.m, c))
    weight, grad_x = torch.ones(chain.g, chain.m, device=device), torch.empty_like(chain.x)

    def run() -> list[Tensor]:
        return [backward(chain, kept, weight, None, grad_x, None), grad_x]

    return run


def _transitions(
    n: int, v: int, c: int, own: bool, generator: torch.Generator, device: str
) -> Callable[[], list[Tensor]]:
    from logchain.kernels.gpu import transitions

    chain = _chain(n, v, c, own, generator, device)
    g, m = chain.g, chain.m
    bulk = chain.bulk.view(v - 1, g, c, c)
    out, weight = torch.empty_like(bulk), torch.ones(g, m, device=device)
    messages = (chain.x - chain.x.amax(-1, keepdim=True)).view(v, g, m, c)
    r = torch.randn(v, g, m, c, generator=generator, device=device) - 9.0

    def run() -> list[Tensor]:
        transitions.gradient(messages, r, weight, bulk, out, log_params=False)
        return [out]

    return run


def _segments(
    segments: int, length: int, c: int, generator: torch.Generator, device: str
) -> Callable[[], list[Tensor]]:
    from logchain.kernels.gpu import forward_chain

    bulk = torch.rand(length, 1, segments, c, c, generator=generator, device=device)
    return lambda: list(forward_chain.segment_product(bulk, log_params=False))
