"""What everybody computes: chains and stacks of matrices drawn from a size, parts of them, and the true answers."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from logchain import reference

ONE, STEP, EACH, FULL = "one matrix", "shared bulk", "bulk per sequence", "full product"


class Workload(NamedTuple):
    """A dense chain: `matrices` is one for all steps, one for each step, one for each step of each sequence.

    Or, as a full product, the product of v matrices for each of n stacks.
    """

    n: int
    v: int
    c: int
    matrices: str

    def __str__(self) -> str:
        """As the results files name it."""
        return f"n={self.n} v={self.v} c={self.c}, {self.matrices}"


class Chain(NamedTuple):
    """x [n, v, c], bulk [n or 1, v-1 or 1, c, c] and p0 [c] in float32."""

    x: Tensor
    bulk: Tensor
    p0: Tensor

    def part(self, n: int, v: int) -> "Chain":
        """The first sequences and steps."""
        bulk = self.bulk[: n if len(self.bulk) > 1 else 1, : max(v - 1, 1)]
        return Chain(self.x[:n, :v].contiguous(), bulk.contiguous(), self.p0)


class Stack(NamedTuple):
    """Logarithms of matrices [n, v, c, c] in float32."""

    x: Tensor

    def part(self, n: int, v: int) -> "Stack":
        """The first stacks, and matrices of each."""
        return Stack(self.x[:n, :v].contiguous())


Case = Chain | Stack

WORKLOADS = [
    Workload(1, 10_000, 16, ONE),
    Workload(1, 10_000, 16, STEP),
    Workload(1, 100_000, 4, ONE),
    Workload(1, 100_000, 4, STEP),
    Workload(10, 6, 40, ONE),
    Workload(10, 6, 40, STEP),
    Workload(32, 512, 64, ONE),
    Workload(32, 512, 64, STEP),
    Workload(8, 128, 64, EACH),
    Workload(500, 40, 200, STEP),
    Workload(256, 784, 64, STEP),
    Workload(1, 10_000, 100, ONE),
    Workload(32, 25, 20, EACH),
    Workload(8, 256, 64, FULL),
    Workload(32, 25, 20, FULL),
    Workload(1, 10_000, 100, FULL),
]


def draw(workload: Workload) -> Case:
    """The same numbers for everybody; rows of bulk and p0 sum to 1."""
    n, v, c, matrices = workload
    generator = torch.Generator().manual_seed(v)
    if matrices == FULL:
        return Stack(torch.randn(n, v, c, c, generator=generator))
    x = torch.randn(n, v, c, generator=generator)
    sets, steps = (n if matrices == EACH else 1), (1 if matrices == ONE else v - 1)
    bulk = torch.rand(sets, steps, c, c, generator=generator).add_(0.01)
    p0 = torch.rand(c, generator=generator)
    return Chain(x, bulk / bulk.sum(-1, keepdim=True), p0 / p0.sum())


def truth(workload: object, case: Case, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Values and their gradients for x in float64, computed once for all providers."""
    n, v = case.x.shape[:2]
    file = folder / f"{workload}, {n} {v}.npz"
    if not file.exists():
        values, gradients = posteriors(case) if isinstance(case, Chain) else product(case)
        np.savez(file, values=values, gradients=gradients)
    found = np.load(file)
    return found["values"], found["gradients"]


def posteriors(chain: Chain) -> tuple[np.ndarray, np.ndarray]:
    """Log-partitions [n] and posteriors [n, v, c] by the reference."""
    forward, backward, log_norm = reference.forward_backward(*chain)
    norm = np.where(np.isneginf(log_norm), 0.0, log_norm)[:, None, None]
    return log_norm, np.exp(forward + backward - norm)


def product(stack: Stack) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of products [n, c, c] and the gradients of their sum [n, v, c, c], of dense matrices.

    Linear weights in float64, divided by their largest one after each step, and torch's autograd: entries of such
    products lie within a few nats of each other.
    """
    leaf = stack.x.double().requires_grad_()
    weights, total = leaf[:, 0].exp(), torch.zeros(len(leaf), 1, 1, dtype=torch.float64)
    for i in range(1, leaf.shape[1]):
        weights = weights @ leaf[:, i].exp()
        top = weights.amax((-2, -1), keepdim=True)
        weights, total = weights / top, total + top.log()
    values = weights.log() + total
    (gradient,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach().numpy(), gradient.numpy()
