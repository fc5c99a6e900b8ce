"""What everybody computes: chains and stacks of matrices drawn from a size, parts of them, and the true answers."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

ONE, STEP, EACH, FULL = "one matrix", "shared bulk", "bulk per sequence", "full product"


class Workload(NamedTuple):
    """A dense chain: `matrices` is one for all steps, one for each step, one for each step of each sequence.

    Or, as a full product, the product of v matrices for each of n stacks. Log-potentials x are `sharpness` times
    standard normal numbers: real ones, of a few Gaussian features, are 10 to 30 times.
    """

    n: int
    v: int
    c: int
    matrices: str
    sharpness: int = 1

    def __str__(self) -> str:
        """As the results files name it."""
        sharp = "" if self.sharpness == 1 else f", x ~ {self.sharpness} N(0, 1)"
        return f"n={self.n} v={self.v} c={self.c}, {self.matrices}{sharp}"


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

# the most telling ones first, for a machine that is lent for minutes
WORKLOADS = [
    Workload(500, 40, 200, STEP),
    Workload(32, 512, 64, STEP),
    Workload(32, 512, 64, ONE),
    Workload(8, 128, 64, EACH),
    Workload(8, 256, 64, FULL),
    Workload(1, 10_000, 16, STEP),
    Workload(1, 10_000, 16, ONE),
    Workload(256, 784, 64, STEP),
    Workload(10, 6, 40, STEP),
    Workload(10, 6, 40, ONE),
    Workload(1, 100_000, 4, STEP),
    Workload(1, 100_000, 4, ONE),
    Workload(32, 25, 20, EACH),
    Workload(32, 25, 20, FULL),
    Workload(1, 10_000, 100, ONE),
    Workload(1, 10_000, 100, FULL),
]
SHARP = 30
WORKLOADS += [workload._replace(sharpness=SHARP) for workload in WORKLOADS if workload.matrices != FULL]


def draw(workload: Workload) -> Case:
    """The same numbers for everybody; rows of bulk and p0 sum to 1."""
    n, v, c, matrices, sharpness = workload
    generator = torch.Generator().manual_seed(v)
    if matrices == FULL:
        return Stack(torch.randn(n, v, c, c, generator=generator))
    x = torch.randn(n, v, c, generator=generator).mul_(sharpness)
    sets, steps = (n if matrices == EACH else 1), (1 if matrices == ONE else v - 1)
    bulk = torch.rand(sets, steps, c, c, generator=generator).add_(0.01)
    p0 = torch.rand(c, generator=generator)
    return Chain(x, bulk / bulk.sum(-1, keepdim=True), p0 / p0.sum())


Truth = tuple[np.ndarray, np.ndarray]


def dense(case: Case) -> Truth:
    """Values and their gradients for x in float64, of numbers that lie within a few hundred nats of each other."""
    return posteriors(case) if isinstance(case, Chain) else product(case)


def truth(workload: object, case: Case, folder: Path, compute: Callable[[Case], Truth] = dense) -> Truth:
    """The same, computed by the first provider that asks and kept for the others."""
    n, v = case.x.shape[:2]
    file = folder / f"{workload}, {n} {v}.npz"
    if not file.exists():
        values, gradients = compute(case)
        unfinished = folder / "unfinished.npz"  # a process may be ended while it writes
        np.savez(unfinished, values=values, gradients=gradients)
        unfinished.replace(file)
    found = np.load(file)
    return found["values"], found["gradients"]


def posteriors(chain: Chain) -> Truth:
    """Log-partitions [n] and posteriors [n, v, c]: linear messages in float64, scaled step by step."""
    x, bulk, p0 = (tensor.double().cpu().numpy() for tensor in chain)
    v, last = x.shape[1], bulk.shape[1] - 1
    top = x.max(-1, keepdims=True)
    weights = np.exp(x - top)
    forward, backward = np.empty_like(x), np.ones_like(x)
    message, total = p0 * weights[:, 0], top[:, 0].copy()
    for i in range(v):
        if i:
            message = (message[:, None] @ bulk[:, min(i - 1, last)])[:, 0] * weights[:, i]
            total += top[:, i]
        scale = message.sum(-1, keepdims=True)
        message, total = message / scale, total + np.log(scale)
        forward[:, i] = message
    for i in range(v - 1, 0, -1):
        behind = (bulk[:, min(i - 1, last)] @ (backward[:, i] * weights[:, i])[..., None])[..., 0]
        backward[:, i - 1] = behind / behind.sum(-1, keepdims=True)
    joint = forward * backward
    return total[:, 0], joint / joint.sum(-1, keepdims=True)


def product(stack: Stack) -> Truth:
    """Logarithms of products [n, c, c] and the gradients of their sum [n, v, c, c].

    Linear weights in float64, divided by their largest one after each step, and torch's autograd.
    """
    leaf = stack.x.double().cpu().requires_grad_()
    first, *others = leaf.unbind(1)
    weights, total = first.exp(), torch.zeros(len(leaf), 1, 1, dtype=torch.float64)
    for matrix in others:
        weights = weights @ matrix.exp()
        top = weights.amax((-2, -1), keepdim=True)
        weights, total = weights / top, total + top.log()
    values = weights.log() + total
    (gradient,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach().numpy(), gradient.numpy()
