"""The demonstration of `python -m logchain`: a chain checked against scipy and timed beside its matrix products."""

import statistics
import timeit
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import reference
from .memory import peak_bytes
from .product import product

Product = Callable[[Tensor, Tensor, Tensor], Tensor]

# number of sequences that the slow float64 reference computes
SLICE = 4


class Chain(NamedTuple):
    """The arguments of `product`: x [n, 1, v, c], bulk [1, 1, v-1, c, c] and p0 [1, 1, c]."""

    x: Tensor
    bulk: Tensor
    p0: Tensor


def dense_chain(n: int, v: int, c: int, *, seed: int = 0, scale: float = 1.0) -> Chain:
    """A dense float32 chain: normal log-potentials times `scale`, random normalised transitions shared by all."""
    generator = torch.Generator().manual_seed(seed)
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


def gemms(chain: Chain, *, backward: bool = False) -> Callable[[], Sequence[Tensor]]:
    """The matrix products alone, a floor for the time: one [n, c] x [c, c] a step, two more for the backward pass."""
    n, _, v, c = chain.x.shape
    message, adjoint = chain.x[:, 0, 0].softmax(-1), chain.x[:, 0, -1].softmax(-1)
    matrices = chain.bulk[0, 0]
    step, counts = torch.empty(n, c), torch.empty(c, c)

    def run() -> Sequence[Tensor]:
        for i in range(v - 1):
            torch.mm(message, matrices[i], out=step)
            if backward:
                torch.mm(adjoint, matrices[i].mT, out=step)
                torch.mm(message.mT, adjoint, out=counts)
        return step, counts

    return run


def demonstrate(n: int = 500, v: int = 40, c: int = 200) -> str:
    """The demonstration as text, computed on one thread, since threads of a busy machine wait for each other.

    Args:
        n: number of sequences.
        v: number of variables (time steps) of each, at least 2.
        c: number of hidden states.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        chain = dense_chain(n, v, c)
        lines = [
            f"{n} sequences of {v} variables with {c} states, float32, {v - 1} transition matrices for all",
            f"torch {torch.__version__}, one thread, {torch.backends.cpu.get_cpu_capability()}",
            "",
            f"Largest error against scipy in float64, on the first {min(n, SLICE)} of {n} sequences",
            _table(("", "logchain", "scipy", "error", "promised"), _accuracy(chain)),
            "",
            "Cost, median of 5, beside the matrix products of the chain; ratios differ between",
            "machines. Memory is the peak beyond inputs, result and gradients",
            _table(("", "time", "of the GEMMs", "memory"), _cost(chain)),
        ]
        return "\n".join(lines)
    finally:
        torch.set_num_threads(threads)


def _accuracy(chain: Chain) -> list[tuple[str, ...]]:
    """Rows of the table of errors, on the first sequences.

    Values and gradients of x are computed with the whole batch; gradients of bulk and p0 are sums over sequences, and
    are computed with the first ones alone.
    """
    few = Chain(chain.x[:SLICE], chain.bulk, chain.p0)
    truth, n, (v, c) = reference.marginals(*few), len(few.x), few.x.shape[-2:]
    value, states, _, _ = forward_backward(chain)
    _, _, bulk, p0 = forward_backward(few)
    counts, starts = bulk.double() * few.bulk.double(), p0.double() * few.p0.double()
    steps = v * (c + 8 + 2 * _depth(few, truth.states)) * 2**-24
    value_bound = float(np.spacing(np.float32(np.abs(truth.log_norm).max()))) + steps
    bound = 2 * steps + c * 2**-26
    comparisons = [
        ("log-partition (nats)", value[:n], truth.log_norm, value_bound),
        ("d/dx: state posteriors", states[:n], truth.states, bound),
        ("d/dlog bulk: transition counts", counts, truth.transitions.sum(0, keepdims=True), n * bound),
        ("d/dlog p0: first posteriors", starts, truth.states[..., 0, :].sum(0, keepdims=True), n * bound),
    ]
    rows: list[tuple[str, ...]] = []
    for name, ours, theirs, promised in comparisons:
        first, error = ours.flatten()[0].item(), np.abs(ours.double().numpy() - theirs).max()
        rows.append((name, f"{first:.6g}", f"{theirs.flat[0]:.6g}", f"{error:.1e}", f"{promised:.1e}"))
    return rows


def _depth(chain: Chain, states: reference.Array) -> float:
    """The most nats that a state with posterior above 1e-3 lies below the largest entry of its messages or of x."""
    messages, matters = reference.forward_backward(*chain), states > 1e-3
    below = (array.max(-1, keepdims=True) - array for array in (messages.forward, messages.backward, chain.x.numpy()))
    return max(float(part[matters].max()) for part in below)


def _cost(chain: Chain) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, call, products in (("forward", forward, 1), ("forward and backward", forward_backward, 3)):
        seconds, floor = (_seconds(run) for run in (lambda call=call: call(chain), gemms(chain, backward=products > 1)))
        memory = _megabytes(peak_bytes(lambda call=call: call(chain)))  # type: ignore[misc]
        rows.append((name, f"{seconds * 1e3:.2f} ms", f"{seconds / floor:.2f} x", memory))
        rows.append((f"{products * (chain.x.shape[-2] - 1)} GEMMs", f"{floor * 1e3:.2f} ms", "1.00 x", ""))
    return [*rows, ("one message tensor [n, 1, v, c]", "", "", _megabytes(chain.x.nbytes))]


def _seconds(call: Callable[[], object]) -> float:
    call()
    return statistics.median(timeit.repeat(call, number=1, repeat=5))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in (header, *rows)]
    return "\n".join("  " + line.rstrip() for line in lines)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.2f} MB"
