"""What is measured on a GPU: sizes, the fewest bytes and multiply-adds that the answer takes, and how to run it.

A floor counts every input read once and every output written once, and no arithmetic but the products. The model of
`predictions` counts what the kernels really move.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import logchain
from logchain import demo
from logchain.demo import Chain, Product
from tests.benchmarks import forum
from tests.benchmarks.results import FORWARD, GRADIENTS

FLOAT = 4  # bytes


@dataclass(frozen=True)
class Work:
    """One public function at one size: `run(device, seed)` gives a call that computes it on new inputs."""

    name: str
    mode: str
    make: Callable[[str, int], Callable[[], Sequence[Tensor]]]
    floor_bytes: int
    moved_bytes: int  # by the kernels, as they are planned
    multiply_adds: int
    steps: int  # that wait for each other
    launches: int
    provider: str = "logchain"


def chain_work(n: int, v: int, c: int, mode: str, *, own: bool = False, provider: str = "logchain") -> Work:
    """`product` of n chains of v variables and c states; each has its `own` matrices, or all share them."""
    x, matrix = n * v * c * FLOAT, (v - 1) * (n if own else 1) * c * c * FLOAT
    macs = (v - 1) * n * c * c
    if mode == FORWARD:
        # the sequence's own scratch messages, and column maxima of shared matrices
        floor, moved = x + matrix, 2 * x + matrix * (1 if own else 2)
    else:
        # forward: x, messages; backward: x, messages, r, gradient; transitions: messages twice, r
        floor, moved, macs = 2 * x + 2 * matrix, 9 * x + matrix * (4 if own else 6), 3 * macs
    shapes = (n, 1, v, c), (n if own else 1, 1, v - 1, c, c), (1, 1, c)
    planned = logchain.plan(*shapes, gradients=mode != FORWARD, device="cuda")
    kind = "own bulk" if own else "shared bulk"
    products: dict[str, Product] = {"logchain": logchain.product, "forum": forum.product}
    if provider == "forum":
        macs = (v - 1) * n * c**3 * (1 if mode == FORWARD else 3)
    make = partial(_make_chain, n, v, c, mode, own, products[provider])
    name = f"product n={n} v={v} c={c}, {kind}"
    return Work(name, mode, make, floor, moved, macs, planned.steps, planned.launches, provider)


def _make_chain(
    n: int, v: int, c: int, mode: str, own: bool, product: Product, device: str, seed: int
) -> Callable[[], Sequence[Tensor]]:
    chain = random_chain(n, v, c, own, device, seed)
    return partial(demo.forward if mode == FORWARD else demo.forward_backward, chain, product)


def random_chain(n: int, v: int, c: int, own: bool, device: str, seed: int) -> Chain:
    """Normal log-potentials [n, 1, v, c] and normalised transitions."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(n, 1, v, c, generator=generator, device=device)
    bulk = torch.rand(n if own else 1, 1, v - 1, c, c, generator=generator, device=device).add_(0.01)
    p0 = torch.rand(1, 1, c, generator=generator, device=device)
    return Chain(x, bulk.div_(bulk.sum(-1, keepdim=True)), p0 / p0.sum())


def stack_work(n: int, v: int, c: int, *, prefixes: bool = False) -> Work:
    """The product of v matrices, or all prefixes of it, for each of n stacks."""
    stack = n * v * c * c * FLOAT
    macs = n * (v - 1) * c**3 * (2 if prefixes else 1)
    levels = max(1, (v - 1).bit_length()) * (2 if prefixes else 1)
    # every level but the first is as large as all those above it; small matrices are multiplied in segments
    moved = 5 * stack if prefixes else stack + (0 if c <= 64 else 2 * stack)
    name = f"{'prefix_products' if prefixes else 'matrix_product'} n={n} v={v} c={c}"
    function = logchain.prefix_products if prefixes else logchain.matrix_product
    floor = stack + (stack if prefixes else n * c * c * FLOAT)
    return Work(name, FORWARD, partial(_make_stack, n, v, c, function), floor, moved, macs, levels, 2 * levels)


def _make_stack(
    n: int, v: int, c: int, function: Callable[[Tensor], Tensor], device: str, seed: int
) -> Callable[[], Sequence[Tensor]]:
    generator = torch.Generator(device).manual_seed(seed)
    stack = torch.randn(n, v, c, c, generator=generator, device=device)
    return lambda: [function(stack)]


def matmul_work(batch: int, m: int, k: int, n: int, mode: str = FORWARD) -> Work:
    """The log-semiring product of a batch of matrices."""
    size = batch * (m * k + k * n + m * n) * FLOAT
    macs = batch * m * k * n
    backward = mode == GRADIENTS
    make = partial(_make_matmul, batch, m, k, n, mode)
    name = f"matmul {batch} x ({m}, {k}) ({k}, {n})"
    factor = 3 if backward else 1
    return Work(name, mode, make, size * (2 if backward else 1), size * 3 * factor, macs * factor, 1, 1 + 4 * backward)


def _make_matmul(
    batch: int, m: int, k: int, n: int, mode: str, device: str, seed: int
) -> Callable[[], Sequence[Tensor]]:
    generator = torch.Generator(device).manual_seed(seed)
    a = torch.randn(batch, m, k, generator=generator, device=device)
    b = torch.randn(batch, k, n, generator=generator, device=device)
    if mode == FORWARD:
        return lambda: [logchain.matmul(a, b)]

    def run() -> Sequence[Tensor]:
        leaves = [a.detach().requires_grad_(), b.detach().requires_grad_()]
        return torch.autograd.grad(logchain.matmul(*leaves).sum(), leaves)

    return run


def groups(*, tiny: bool = False) -> dict[str, list[Work]]:
    """The figures that are asked for, the most wanted first; `tiny`: the same on sizes for an interpreter."""

    def sizes(n: int, v: int, c: int) -> tuple[int, int, int]:
        return (min(n, 3), min(v, 4), min(c, 7 if c > 256 else 5)) if tiny else (n, v, c)

    def both(n: int, v: int, c: int, *, own: bool = False, provider: str = "logchain") -> list[Work]:
        return [chain_work(*sizes(n, v, c), mode, own=own, provider=provider) for mode in (FORWARD, GRADIENTS)]

    square, large = (6, 8) if tiny else (512, 4096)
    return {
        "main job": both(500, 40, 200),
        "log_matmul": [
            matmul_work(*shape, mode)
            for shape in ((2 if tiny else 8, square, square, square), (1, large, square, square))
            for mode in (FORWARD, GRADIENTS)
        ],
        "own matrices": both(500, 40, 200, own=True),
        "one long chain": both(1, 100_000, 16, own=True),
        "wide": both(500, 40, 512),
        "others": [
            *both(32, 512, 64),
            *both(8, 128, 64, own=True),
            stack_work(*sizes(8, 256, 64)),
            stack_work(*sizes(4, 512, 256)),
            stack_work(*sizes(8, 256, 64), prefixes=True),
            *both(500, 40, 200, provider="forum"),
        ],
    }
