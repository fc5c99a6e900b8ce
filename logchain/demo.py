"""The demonstration of `python -m logchain`: a chain checked against scipy, and timed beside what else computes it."""

import statistics
import sys
import timeit
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import reference
from .memory import peak_bytes
from .product import product
from .progress import bar

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
# `forward` or `forward_backward`
Mode = Callable[..., list[Tensor]]

# numbers of sequences that the slow ones compute: scipy in float64, and torch without logchain
SLICE, FEW = 4, 20


class Chain(NamedTuple):
    """The arguments of `product`: x [n, 1, v, c], bulk [1, 1, v-1, c, c] and p0 [1, 1, c]."""

    x: Tensor
    bulk: Tensor
    p0: Tensor


def dense_chain(n: int, v: int, c: int, *, scale: float = 1.0) -> Chain:
    """A dense float32 chain: normal log-potentials times `scale`, random normalised transitions shared by all."""
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


class Check(NamedTuple):
    """A quantity beside scipy's: the first number of each, and the largest error of all beside the promised one."""

    name: str
    ours: float
    theirs: float
    error: float
    promised: float


class Cost(NamedTuple):
    """What a way to compute a chain costs all sequences: seconds, and bytes beyond inputs, result and gradients."""

    name: str
    seconds: float
    memory: int | None = None

    @property
    def time(self) -> str:
        """The seconds in words."""
        return f"{self.seconds:.3g} s" if self.seconds >= 1 else f"{self.seconds * 1e3:.3g} ms"

    @property
    def size(self) -> str:
        """The bytes in words, or nothing where they were not measured."""
        return "" if self.memory is None else _bytes(self.memory)


class Demonstration(NamedTuple):
    """What was found for n sequences of v variables with c states; `str()` is the text, 79 columns wide."""

    n: int
    v: int
    c: int
    checks: list[Check]
    # each begins with logchain's, and then has that of the matrix products alone
    forward: list[Cost]
    gradients: list[Cost]
    message: int  # bytes of x, the size of one tensor of messages

    def __str__(self) -> str:
        n, v, c, few = self.n, self.v, self.c, min(self.n, SLICE)
        checks = [
            (row.name, f"{row.ours:.6g}", f"{row.theirs:.6g}", f"{row.error:.1e}", f"{row.promised:.1e}")
            for row in self.checks
        ]
        costs = [*_costs("log-partitions", self.forward), *_costs("log-partitions and gradients", self.gradients)]
        message = ("x itself, for comparison", "", "", _bytes(self.message))
        return f"""\
A hidden Markov model: {n} sequences of {v} steps with {c} states, in float32.
The {v - 1} transition matrices are the same for all sequences.
torch {torch.__version__}, one thread, {torch.backends.cpu.get_cpu_capability()}

Is it right? Beside scipy in float64, on the first {few} of {n} sequences:

{_table(("", "logchain", "scipy", "error", "promised"), checks)}

  log-partition       log of the sum over all {c}^{v} paths; a loss is minus that
  gradient by x       the probability of each state at each step
  bulk * gradient     how often each transition is expected to be taken
  p0 * gradient       how often each state is expected to come first
  logchain, scipy     the first number of each
  error, promised     the largest difference anywhere; the most there may be

Is it fast? One call for all {n} sequences:

{_table(("", "time", "x products", "memory"), [*costs, message])}

  matrix products     torch.mm on the same sizes, nothing else: the arithmetic
                      that cannot be avoided. "x products": how often as long
  torch.logsumexp     what one writes without logchain, with torch's gradients
  about               measured on {min(n, FEW)} sequences (scipy: {few}), scaled to all {n}
  memory              the most at any time, beyond inputs, result and gradients

Times depend on the machine, and their ratios do, too."""


def _costs(title: str, costs: Sequence[Cost]) -> list[tuple[str, ...]]:
    floor = costs[1].seconds
    rows: list[tuple[str, ...]] = [(title, "", "", "")]
    return rows + [(f"  {cost.name}", cost.time, _ratio(cost.seconds / floor), cost.size) for cost in costs]


def _ratio(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"


def _bytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


def demonstrate(n: int = 500, v: int = 40, c: int = 200, *, progress: bool = False) -> Demonstration:
    """What is found, computed on one thread, since threads of a busy machine wait for each other.

    Args:
        n: number of sequences.
        v: number of variables (time steps) of each, at least 2.
        c: number of hidden states.
        progress: whether stderr shows what is computed: a bar of tqdm if it is installed, otherwise lines.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        chain = dense_chain(n, v, c)
        few, some = (Chain(chain.x[:count], chain.bulk, chain.p0) for count in (SLICE, FEW))
        slow = {
            "scipy": lambda: _by_scipy(reference.product, few, n),
            "scipy, posteriors": lambda: _by_scipy(reference.marginals, few, n),
            "torch.logsumexp": lambda: _by_torch(forward, some, n),
            "torch.logsumexp, gradients": lambda: _by_torch(forward_backward, some, n),
        }
        scipy, posteriors, scan, scan_gradients = (slow[name]() for name in _shown(list(slow), progress))
        checks = _checks(chain, few)
        ours = [*_ours(forward, chain, 1), scan, scipy]
        gradients = [*_ours(forward_backward, chain, 3), scan_gradients, posteriors]
        return Demonstration(n, v, c, checks, ours, gradients, chain.x.nbytes)
    finally:
        torch.set_num_threads(threads)


def _shown(names: list[str], shown: bool) -> Iterator[str]:
    """The names of what is slow, and while each is computed, a bar or a line on stderr."""
    if shown and find_spec("tqdm"):
        yield from bar(names, "slow ones", True, "computed")
        return
    for i, name in enumerate(names):
        if shown:
            print(f"computing by {name} ({i + 1} of {len(names)})", file=sys.stderr)
        yield name


def logsumexp_scan(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    """The log-partitions as one writes them in torch, one step after the other: [n, 1, c, c] numbers in each."""
    logs, message = bulk.log(), p0.log() + x[..., 0, :]
    for i in range(x.shape[-2] - 1):
        message = torch.logsumexp(message[..., :, None] + logs[..., i, :, :], -2) + x[..., i + 1, :]  # [n, 1, c]
    return message.logsumexp(-1)


def _by_scipy(call: Callable[..., object], few: Chain, n: int) -> Cost:
    """What `call` costs n sequences, from one run with a few."""
    return Cost("scipy in float64, about", timeit.timeit(lambda: call(*few), number=1) * n / len(few.x))


def _by_torch(call: Mode, some: Chain, n: int) -> Cost:
    """What `logsumexp_scan` costs n sequences, from runs with some."""
    run = partial(call, some, logsumexp_scan)
    seconds, memory = _seconds(run, repeat=1), peak_bytes(run)
    return Cost("torch.logsumexp, about", seconds * n / len(some.x), memory * n // len(some.x))


def _ours(call: Mode, chain: Chain, products: int) -> list[Cost]:
    """What logchain costs, and the matrix products alone: so many for each step."""
    count = products * (chain.x.shape[-2] - 1)
    ours = Cost("logchain", _seconds(lambda: call(chain)), peak_bytes(lambda: call(chain)))
    return [ours, Cost(f"{count} matrix products alone", _seconds(gemms(chain, backward=products > 1)))]


def _checks(chain: Chain, few: Chain) -> list[Check]:
    """The errors on the first sequences.

    Values and gradients of x are computed with the whole batch; gradients of bulk and p0 are sums over sequences, and
    are computed with the first ones alone.
    """
    truth, n, (v, c) = reference.marginals(*few), len(few.x), few.x.shape[-2:]
    value, states, _, _ = forward_backward(chain)
    _, _, bulk, p0 = forward_backward(few)
    counts, starts = bulk.double() * few.bulk.double(), p0.double() * few.p0.double()
    steps = v * (c + 8 + 2 * _depth(few, truth.states)) * 2**-24
    value_bound = float(np.spacing(np.float32(np.abs(truth.log_norm).max()))) + steps
    bound = 2 * steps + c * 2**-26
    comparisons = [
        ("log-partition, nats", value[:n], truth.log_norm, value_bound),
        ("gradient by x", states[:n], truth.states, bound),
        ("bulk * gradient", counts, truth.transitions.sum(0, keepdims=True), n * bound),
        ("p0 * gradient", starts, truth.states[..., 0, :].sum(0, keepdims=True), n * bound),
    ]
    return [
        Check(name, ours.flatten()[0].item(), theirs.flat[0], np.abs(ours.double().numpy() - theirs).max(), promised)
        for name, ours, theirs, promised in comparisons
    ]


def _depth(chain: Chain, states: reference.Array) -> float:
    """The most nats that a state with posterior above 1e-3 lies below the largest entry of its messages or of x."""
    messages, matters = reference.forward_backward(*chain), states > 1e-3
    below = (array.max(-1, keepdims=True) - array for array in (messages.forward, messages.backward, chain.x.numpy()))
    return max(float(part[matters].max()) for part in below)


def _seconds(call: Callable[[], object], repeat: int = 5) -> float:
    call()
    return statistics.median(timeit.repeat(call, number=1, repeat=repeat))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in (header, *rows)]
    return "\n".join("  " + line.rstrip() for line in lines)
