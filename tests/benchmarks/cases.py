"""Workloads, and their exact values and gradients in float64."""

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from logchain import reference
from tests import families

MODES = FORWARD, GRADIENTS = "forward", "forward and backward"
# one transition matrix, one for each step, one for each step of each sequence; or a product of full matrices
MATRICES = ONE, STEP, EACH, FULL = "one matrix", "shared bulk", "bulk per sequence", "full product"


class Workload(NamedTuple):
    """The sizes of a dense chain, or of n stacks of v matrices; x is standard normal times `sharpness`.

    Log-potentials of a few Gaussian features are 10 to 30 times standard normal ones.
    """

    n: int
    v: int
    c: int
    matrices: str
    sharpness: int = 1

    def __str__(self) -> str:
        sharp = "" if self.sharpness == 1 else f", x ~ {self.sharpness} N(0, 1)"
        return f"n={self.n} v={self.v} c={self.c}, {self.matrices}{sharp}"


class Chain(NamedTuple):
    """x [n, v, c], bulk [n or 1, v-1 or 1, c, c] and p0 [c]."""

    x: Tensor
    bulk: Tensor
    p0: Tensor

    def part(self, n: int, v: int) -> "Chain":
        """The first sequences and steps."""
        bulk = self.bulk[: n if len(self.bulk) > 1 else 1, : max(v - 1, 1)]
        return Chain(self.x[:n, :v].contiguous(), bulk.contiguous(), self.p0)


class Stack(NamedTuple):
    """Logarithms of matrices [n, v, c, c]."""

    x: Tensor

    def part(self, n: int, v: int) -> "Stack":
        """The first stacks, and the first matrices of each."""
        return Stack(self.x[:n, :v].contiguous())


Case = Chain | Stack
Truth = tuple[np.ndarray, np.ndarray]

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
WORKLOADS += [workload._replace(sharpness=30) for workload in WORKLOADS if workload.matrices != FULL]
MEMORY = [WORKLOADS[0], WORKLOADS[1], WORKLOADS[3]]
SCALING = {
    "v": [Workload(1, v, 16, ONE) for v in (10, 100, 1000, 10_000, 100_000, 1_000_000)],
    "c": [Workload(8, 128, c, ONE) for c in (4, 16, 64, 256, 1024)],
}
SCALED = "logchain", "XLA scan", "hmmlearn, scaling", "pyro", "torch loop"


def draw(workload: Workload) -> Case:
    """The same numbers for all packages, in float32; rows of bulk and p0 sum to 1."""
    n, v, c, matrices, sharpness = workload
    generator = torch.Generator().manual_seed(v)
    if matrices == FULL:
        return Stack(torch.randn(n, v, c, c, generator=generator))
    x = torch.randn(n, v, c, generator=generator).mul_(sharpness)
    sets, steps = (n if matrices == EACH else 1), (1 if matrices == ONE else v - 1)
    bulk = torch.rand(sets, steps, c, c, generator=generator).add_(0.01)
    p0 = torch.rand(c, generator=generator)
    return Chain(x, bulk / bulk.sum(-1, keepdim=True), p0 / p0.sum())


def truth(case: Case) -> Truth:
    """Values and their gradients for x by a linear recursion in float64; numbers may span a few hundred nats."""
    x = case.x.double().requires_grad_()  # (n, v, c) or (n, v, c, c)
    top = x.detach().flatten(2).amax(-1)  # (n, v)
    factors = (x - top.view(*top.shape, *[1] * (x.dim() - 2))).exp().unbind(1)
    if isinstance(case, Chain):
        matrices = [case.bulk[:, min(i, case.bulk.shape[1] - 1)].double() for i in range(len(factors) - 1)]
        weights = (case.p0 * factors[0])[:, None]  # (n, 1, c)
    else:
        matrices, weights = list(factors[1:]), factors[0]  # (n, c, c)
    total = top.sum(-1)[:, None, None]
    for factor, matrix in zip(factors[1:], matrices, strict=True):
        weights = weights @ matrix if matrix is factor else (weights @ matrix) * factor[:, None]
        scale = weights.amax((-2, -1), keepdim=True)
        weights, total = weights / scale, total + scale.log()
    values = weights.log() + total if isinstance(case, Stack) else (weights.sum(-1).log() + total[..., 0])[:, 0]
    (gradient,) = torch.autograd.grad(values.sum(), x)
    return values.detach().numpy(), gradient.numpy()


def reference_truth(chain: Chain) -> Truth:
    """Log-partitions [n] and posteriors [n, v, c] of any chain, by the reference."""
    forward, backward, log_norm = reference.forward_backward(*chain)
    norm = np.where(np.isneginf(log_norm), 0.0, log_norm)[:, None, None]
    return log_norm, np.exp(forward + backward - norm)


@functools.cache
def accuracy() -> dict[str, Chain]:
    """Families of chains with one matrix for all steps, by name; easy ones, and those where float32 fails."""
    two = torch.tensor([0.5, 0.5])
    peaks = torch.tensor([[[0.0, 0.0], [-200.0, 0.0], [0.0, 0.0]]])
    apart = torch.tensor([[[0.0, -200.0], [-300.0, 0.0], [0.0, 0.0]]])
    dense = draw(Workload(4, 64, 16, ONE))
    alive = (torch.arange(16) % 5 > 0)[:, None]
    long = draw(Workload(1, 4096, 8, ONE))
    equal = draw(Workload(1, 10_000, 16, ONE))
    stays = (1 - 1e-6) * torch.eye(16) + 1e-6 / 16
    wide = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0)).mul(-60).exp()
    return {
        "dense": dense,
        "misaligned maxima: two peaks": Chain(peaks, torch.tensor([[1.0, 1e-30]] * 2)[None, None], two),
        "misaligned maxima: two peaks, no way between": Chain(apart, torch.eye(2)[None, None], two),
        "evidence jumps, Bakis": family("bakis_jump", n=4),
        "impossible evidence": family("impossible", n=1),
        "dead rows": dense._replace(bulk=dense.bulk * alive),
        "log Z near 500,000": long._replace(x=long.x + 500_000 / 4096),
        "transitions from exp(-60) to 1": dense._replace(bulk=wide),
        "10,000 equal steps": equal._replace(x=torch.zeros_like(equal.x)),
        "states that stay, 10,000 steps": equal._replace(x=equal.x / 100, bulk=stays[None, None]),
    }


def family(name: str, n: int) -> Chain:
    """A family of the tests, with its first matrix for all steps; p0 sums to 1, as some packages require."""
    x, bulk, p0, _ = families.FAMILIES[name](torch.float32, n=n, t=1)
    return Chain(x[:, 0].contiguous(), bulk[:1, 0, :1].contiguous(), p0[0, 0] / p0[0, 0].sum())
