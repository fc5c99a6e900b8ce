"""The demonstration of `python -m logchain`: a chain checked against scipy, and timed against torch operations."""

import statistics
import timeit
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import reference
from .memory import peak_bytes
from .product import product

Product = Callable[[Tensor, Tensor, Tensor], Tensor]

# numbers of sequences that scipy computes in float64, and torch.logsumexp
SLICE, FEW = 4, 20

CHECKS = "", "logchain", "scipy", "error", "promised"
COSTS = "", "forward", "and backward", "memory", ""


class Chain(NamedTuple):
    """The arguments of `product`: x [n, 1, v, c], bulk [1, 1, v-1, c, c] and p0 [1, 1, c]."""

    x: Tensor
    bulk: Tensor
    p0: Tensor

    def first(self, count: int) -> "Chain":
        """The chain of the first sequences."""
        return self._replace(x=self.x[:count])


def dense_chain(n: int, v: int, c: int, *, scale: float = 1.0) -> Chain:
    """A dense float32 chain: normal log-potentials times `scale`, random transitions with row sums 1, shared by all."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 1, v, c, generator=generator) * scale
    bulk = torch.rand(1, 1, v - 1, c, c, generator=generator)
    p0 = torch.rand(1, 1, c, generator=generator)
    return Chain(x, bulk / bulk.sum(-1, keepdim=True), p0 / p0.sum(-1, keepdim=True))


def forward(chain: Chain, product: Product = product) -> list[Tensor]:
    """The log-partitions, without gradients, by any implementation of `product`."""
    with torch.no_grad():
        return [product(*chain)]


def forward_backward(chain: Chain, product: Product = product) -> list[Tensor]:
    """The log-partitions, and the gradients of their sum with respect to x, bulk and p0."""
    leaves = [tensor.detach().requires_grad_() for tensor in chain]
    result = product(*leaves)
    return [result.detach(), *torch.autograd.grad(result.sum(), leaves)]


def logsumexp_scan(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    """The log-partitions by torch.logsumexp, step by step, with [n, 1, c, c] numbers in each step."""
    logs, message = bulk.log(), p0.log() + x[..., 0, :]
    for i in range(x.shape[-2] - 1):
        message = torch.logsumexp(message[..., :, None] + logs[..., i, :, :], -2) + x[..., i + 1, :]  # [n, 1, c]
    return message.logsumexp(-1)


def matrix_products(chain: Chain, *, backward: bool = False) -> list[Tensor]:
    """The matrix products alone: one [n, c] x [c, c] for each step, two more for the backward pass."""
    n, _, _, c = chain.x.shape
    message, adjoint = chain.x[:, 0, 0].softmax(-1), chain.x[:, 0, -1].softmax(-1)
    step, counts = torch.empty(n, c), torch.empty(c, c)
    for matrix in chain.bulk[0, 0]:
        torch.mm(message, matrix, out=step)
        if backward:
            torch.mm(adjoint, matrix.mT, out=step)
            torch.mm(message.mT, adjoint, out=counts)
    return []


def demonstrate(n: int = 500, v: int = 40, c: int = 200) -> str:
    """The demonstration of n sequences of v steps with c states: a table and its explanation, 80 columns wide.

    Everything is computed on one thread, since threads of a busy machine wait for each other.
    """
    threads, few = torch.get_num_threads(), min(n, FEW)
    torch.set_num_threads(1)
    try:
        chain = dense_chain(n, v, c)
        rows = [CHECKS, *_checks(chain.first(SLICE)), COSTS, *_costs(chain)]
    finally:
        torch.set_num_threads(threads)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    table = "\n".join(lines)
    return f"""\
{n} sequences, {v} steps, {c} states, shared matrices; float32, one thread

{table}

Checks on {min(n, SLICE)} sequences: the first number, the largest error, and its bound.
Gradients are probabilities of states (x), and expected transitions and starts.
Times are of one call for all; torch.logsumexp ran on {few}, scaled up.
The matrix products alone, by torch.mm, are arithmetic that cannot be avoided.
Memory is the peak beyond inputs, result and gradients."""


def _checks(chain: Chain) -> list[tuple[str, ...]]:
    """The results of logchain and of scipy in float64, their largest difference, and its bound."""
    truth, n, (v, c) = reference.marginals(*chain), len(chain.x), chain.x.shape[-2:]
    value, states, bulk, p0 = forward_backward(chain)
    steps = v * (c + 8 + 2 * _depth(chain, truth.states)) * 2**-24
    value_bound = float(np.spacing(np.float32(np.abs(truth.log_norm).max()))) + steps
    bound = 2 * steps + c * 2**-26
    comparisons = [
        ("log-partition, nats", value, truth.log_norm, value_bound),
        ("gradient by x", states, truth.states, bound),
        ("bulk * gradient", bulk.double() * chain.bulk, truth.transitions.sum(0, keepdims=True), n * bound),
        ("p0 * gradient", p0.double() * chain.p0, truth.states[..., 0, :].sum(0, keepdims=True), n * bound),
    ]
    rows: list[tuple[str, ...]] = []
    for name, ours, theirs, promised in comparisons:
        error = np.abs(ours.double().numpy() - theirs).max()
        rows.append((name, f"{ours.flatten()[0]:.6g}", f"{theirs.flat[0]:.6g}", f"{error:.1e}", f"{promised:.1e}"))
    return rows


def _depth(chain: Chain, states: reference.Array) -> float:
    """The most nats that a state with posterior above 1e-3 lies below the largest entry of its messages or of x."""
    messages, matters = reference.forward_backward(*chain), states > 1e-3
    below = (array.max(-1, keepdims=True) - array for array in (messages.forward, messages.backward, chain.x.numpy()))
    return max(float(part[matters].max()) for part in below)


def _costs(chain: Chain) -> list[tuple[str, ...]]:
    """The time of each implementation for all sequences, forward and with gradients, and the memory of the latter."""
    part, v = chain.first(FEW), chain.x.shape[-2]
    times = len(chain.x) / len(part.x)
    scans = partial(forward, part, logsumexp_scan), partial(forward_backward, part, logsumexp_scan)
    products = partial(matrix_products, chain), partial(matrix_products, chain, backward=True)
    return [
        _cost("logchain", partial(forward, chain), partial(forward_backward, chain)),
        _cost(f"{v - 1}, {3 * v - 3} matrix products", *products),
        _cost("torch.logsumexp, about", *scans, times=times),
    ]


def _cost(name: str, *calls: Callable[[], list[Tensor]], times: float = 1.0) -> tuple[str, ...]:
    seconds = []
    for call in calls:
        call()
        seconds.append(statistics.median(timeit.repeat(call, number=1, repeat=3)) * times)
    memory = peak_bytes(calls[-1]) * times
    return (name, *(f"{value * 1e3:,.1f} ms" for value in seconds), f"{memory / 1e6:,.1f} MB", "")
