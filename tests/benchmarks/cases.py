"""What is measured: chains with exact values in float64, and calls of the library with the calls compared with them."""

import copy
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import logchain
from logchain import nn, reference
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
        return Chain(self.x[:n, :v].contiguous(), self.bulk[:n, : v - 1].contiguous(), self.p0)


class Stack(NamedTuple):
    """Logarithms of matrices [n, v, c, c]."""

    x: Tensor

    def part(self, n: int, v: int) -> "Stack":
        """The first stacks, and the first matrices of each."""
        return Stack(self.x[:n, :v].contiguous())


Case = Chain | Stack
Truth = tuple[np.ndarray, np.ndarray]

SIZES = {
    (500, 40, 200): [STEP], (32, 512, 64): [STEP, ONE], (8, 128, 64): [EACH], (8, 256, 64): [FULL],
    (1, 10_000, 16): [STEP, ONE], (256, 784, 64): [STEP], (10, 6, 40): [STEP, ONE], (1, 100_000, 4): [STEP, ONE],
    (32, 25, 20): [EACH, FULL], (1, 10_000, 100): [ONE, FULL],
}  # fmt: skip
WORKLOADS = [Workload(*size, matrices) for size, kinds in SIZES.items() for matrices in kinds]
MEMORY = [Workload(500, 40, 200, STEP), Workload(32, 512, 64, STEP), Workload(8, 128, 64, EACH)]
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


def stacked(x: Tensor, bulk: Tensor, p0: Tensor) -> Tensor:
    """Logarithms of matrices [n, v-1, c, c], the first variable in the first of them."""
    logs = bulk.log() + x[:, 1:, None, :]
    first = (p0.log() + x[:, 0])[:, None, :, None]
    return torch.cat([logs[:, :1] + first, logs[:, 1:]], 1)


def truth(case: Case) -> Truth:
    """Values and their gradients for x by a linear recursion in float64; numbers may span a few hundred nats."""
    x = case.x.double().requires_grad_()  # (n, v, c) or (n, v, c, c)
    top = x.detach().amax(tuple(range(2, x.dim())), keepdim=True)
    first, *factors = (x - top).exp().unbind(1)
    weights = (case.p0 * first)[:, None] if isinstance(case, Chain) else first  # (n, 1 or c, c)
    total = top.flatten(1).sum(1)[:, None, None]
    for i, factor in enumerate(factors):
        if isinstance(case, Chain):
            weights = weights @ case.bulk[:, min(i, case.bulk.shape[1] - 1)].double() * factor[:, None]
        else:
            weights = weights @ factor
        scale = weights.amax((1, 2), keepdim=True)
        weights, total = weights / scale, total + scale.log()
    values = (weights.sum((1, 2)).log() + total[:, 0, 0]) if isinstance(case, Chain) else weights.log() + total
    (gradient,) = torch.autograd.grad(values.sum(), x)
    return values.detach().numpy(), gradient.numpy()


def reference_truth(chain: Chain) -> Truth:
    """Log-partitions [n] and posteriors [n, v, c] of any chain, by the reference."""
    forward, backward, log_norm = reference.forward_backward(*chain)
    norm = np.where(np.isneginf(log_norm), 0.0, log_norm)[:, None, None]
    return log_norm, np.exp(forward + backward - norm)


@cache
def accuracy() -> dict[str, Chain]:
    """Families of chains with one matrix for all steps, by name: an ordinary one, and those where float32 fails."""
    long = draw(Workload(1, 4096, 8, ONE))
    stays = draw(Workload(1, 10_000, 16, ONE))
    matrix = (1 - 1e-6) * torch.eye(16) + 1e-6 / 16
    return {
        "dense": draw(Workload(4, 64, 16, ONE)),
        "evidence jumps, Bakis": family("bakis_jump", n=4),
        "log Z near 500,000": long._replace(x=long.x + 500_000 / 4096),
        "states that stay, 10,000 steps": stays._replace(x=stays.x / 100, bulk=matrix[None, None]),
    }


def family(name: str, n: int) -> Chain:
    """A family of the tests, with its first matrix for all steps; p0 sums to 1, as some packages require."""
    x, bulk, p0, _ = families.FAMILIES[name](torch.float32, n=n, t=1)
    return Chain(x[:, 0].contiguous(), bulk[:1, 0, :1].contiguous(), p0[0, 0] / p0[0, 0].sum())


Call = Callable[[], object]


class Part(NamedTuple):
    """A call that does a share of the work."""

    call: Call
    share: float


class Comparison(NamedTuple):
    """Calls by provider, `logchain` first."""

    case: str
    calls: dict[str, Call | Part]


def threads() -> str:
    count = torch.get_num_threads()
    return f"{count} thread{'s' * (count > 1)}"


def agree(ours: object, theirs: object, rtol: float = 1e-5) -> None:
    """Raises unless values are equal: their times are not compared otherwise."""
    ours, theirs = (torch.as_tensor(values).double() for values in (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol)


def with_gradients(function: Callable[..., Tensor], *operands: Tensor) -> Call:
    """A function of operands, and the gradients of all of them."""
    leaves = [operand.detach().clone().requires_grad_() for operand in operands]
    return lambda: torch.autograd.grad(function(*leaves).sum(), leaves)


def crf(n: int = 32, v: int = 128, c: int = 20) -> Iterator[Comparison]:
    import torchcrf

    generator = torch.Generator().manual_seed(0)
    layer, peer = nn.LinearChainCRF(c, batch_first=True), torchcrf.CRF(c, batch_first=True)
    peer.load_state_dict(layer.state_dict())
    emissions = torch.randn(n, v, c, generator=generator).requires_grad_()
    tags = torch.randint(c, (n, v), generator=generator)
    ragged = torch.arange(v) < torch.randint(v // 4, v + 1, (n, 1), generator=generator)

    def loss(model: torch.nn.Module, mask: Tensor) -> None:
        model(emissions, tags, mask, reduction="mean").neg().backward()

    def decode(model: torch.nn.Module, mask: Tensor) -> object:
        return model.decode(emissions.detach(), mask)

    for name, mask in {"full mask": torch.ones_like(ragged), "ragged mask": ragged}.items():
        agree(layer(emissions, tags, mask, "none"), peer(emissions, tags, mask, "none"))
        for mode, call in (f"loss, {GRADIENTS}", loss), ("decode", decode):
            calls = {"logchain": partial(call, layer, mask), "pytorch-crf": partial(call, peer, mask)}
            yield Comparison(f"layers/CRF n={n} v={v} c={c}, {name}, {threads()}/{mode}", calls)


# many sequences of many states, and one series of two
FITTED = (200, 50, 50), (1, 100, 2)


def hmm(n: int, v: int, c: int, iterations: int = 50) -> Iterator[Comparison]:
    """Expectation maximization of Gaussian emissions, from equal parameters and without priors."""
    from hmmlearn.hmm import GaussianHMM
    from pomegranate.distributions import Normal
    from pomegranate.hmm import DenseHMM

    generator = torch.Generator().manual_seed(0)
    data = nn.HMM(c, "gaussian", generator=generator).sample(n, v, generator=generator).data
    start = nn.HMM(c, "gaussian", generator=generator)
    start.initialize(data, generator=generator)
    with torch.no_grad():
        weights = [part.double().softmax(-1).numpy() for part in (start.initial(), start.transition()[0])]
        moments = [part.double()[:, None].numpy() for part in (start.emission.means, start.emission.variances)]

    def ours(iterations: int = iterations) -> float:
        fit = copy.deepcopy(start).fit(data, restarts=0, max_iterations=iterations, tolerance=-math.inf)
        return fit.history[-2]

    def hmmlearn() -> float:
        options = {"covars_prior": 0, "covars_weight": 1, "min_covar": 0, "init_params": ""}
        model = GaussianHMM(c, n_iter=iterations, implementation="scaling", **options)
        model.startprob_, model.transmat_ = weights
        model.means_, model.covars_ = moments
        model.monitor_.n_iter, model.monitor_.tol = iterations, -math.inf
        model.fit(data.double().view(-1, 1).numpy(), [v] * n)
        return model.monitor_.history[-1]

    @torch.no_grad()
    def pomegranate() -> DenseHMM:
        """It has probabilities of ending, which are 1 at first."""
        moments = zip(start.emission.means[:, None], start.emission.variances[:, None], strict=True)
        states = [Normal(means, variances, covariance_type="diag") for means, variances in moments]
        starts, edges = start.initial().exp(), start.transition()[0].exp()
        model = DenseHMM(states, edges=edges, starts=starts, ends=torch.ones(c))
        model.max_iter, model.tol = iterations, -math.inf
        return model

    agree(ours(), hmmlearn())
    agree(start.log_prob(data), pomegranate().log_probability(data[..., None]), rtol=1e-4)
    fit = lambda: pomegranate().fit(data[..., None])  # noqa: E731
    case = f"layers/HMM n={n} v={v} c={c}, Gaussian, {threads()}/EM"
    yield Comparison(f"{case}, {iterations} iterations", {"logchain": ours, "hmmlearn": hmmlearn, "pomegranate": fit})
    product = with_gradients(partial(logchain.product, log_params=True), *start.arguments(data)[:3])
    calls = {"logchain": partial(ours, 1), "product alone": product}
    yield Comparison(f"{case}, 1 iteration and the last log-likelihood", calls)


def circuits(n: int = 500, v: int = 40, c: int = 200, units: int = 64) -> Iterator[Comparison]:
    """The loss of a circuit compared with the product that it calls; a layer with its matrix products."""
    generator = torch.Generator().manual_seed(0)
    for categories in (2, 17):
        data = torch.randint(categories, (n, v), generator=generator)
        emission = nn.Categorical((1, v, c), categories, generator=generator)
        circuit = nn.ChainCircuit(v, c, emission=emission, generator=generator)

        def loss(circuit: nn.ChainCircuit = circuit, data: Tensor = data) -> None:
            circuit.zero_grad(set_to_none=True)
            circuit.log_prob(data).mean().neg().backward()

        operands = circuit.emission(data[:, None]), circuit.transition().exp(), circuit.initial().exp()
        calls = {"logchain": loss, "product alone": with_gradients(logchain.product, *operands)}
        case = f"layers/ChainCircuit n={n} v={v} c={c}, {categories} categories, {threads()}"
        yield Comparison(f"{case}/loss, {GRADIENTS}", calls)
    layer = nn.SumLayer(units, units, (v,), generator=generator)
    x = torch.randn(n, v, units, generator=generator).requires_grad_()
    left, right = x.detach().transpose(0, 1).contiguous(), layer.weights().detach()
    calls = {
        "logchain": lambda: torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()]),
        "GEMMs alone": lambda: (out := left @ right, left.mT @ out, out @ right.mT),
    }
    yield Comparison(f"layers/SumLayer n={n} f={v} c={units}, {threads()}/{GRADIENTS}", calls)


DECODED = (32, 512, 16), (32, 512, 64), (1, 10_000, 16)
SHARP = [
    (Workload(200, 40, 200, STEP), torch.float32),
    (Workload(32, 256, 64, ONE), torch.float32),
    (Workload(8, 128, 64, EACH), torch.float32),
    (Workload(1, 5000, 8, ONE), torch.float32),
    (Workload(1, 5000, 8, STEP), torch.float32),
    (Workload(50, 40, 100, STEP), torch.float64),
]


def viterbi(n: int, v: int, c: int) -> Iterator[Comparison]:
    """hmmlearn's compiled decoder is called itself; torch-struct decodes two sequences."""
    from hmmlearn import _hmmc
    from torch_struct import LinearChainCRF

    chain, few = draw(Workload(n, v, c, ONE)), min(n, 2)
    x, bulk, p0 = (operand.double().numpy() for operand in chain)
    edges = stacked(chain.x[:few], chain.bulk.expand(-1, v - 1, -1, -1), chain.p0).mT.contiguous()
    ours, hmmlearn = partial(logchain.viterbi, *chain), lambda: [_hmmc.viterbi(p0, bulk[0, 0], frames) for frames in x]
    agree(ours()[1], [score for score, _ in hmmlearn()])
    agree(ours()[1][:few], LinearChainCRF(edges).max)
    torch_struct = Part(lambda: LinearChainCRF(edges).argmax, few / n)
    calls = {"logchain": ours, "hmmlearn": hmmlearn, "torch-struct": torch_struct}
    yield Comparison(f"paths/n={n} v={v} c={c}, {ONE}/viterbi", calls)


def sharpness(workload: Workload, dtype: torch.dtype) -> Iterator[Comparison]:
    """The same chain with x that is so many times as large, compared with standard normal x."""
    x, bulk, p0 = (operand.to(dtype) for operand in draw(workload))
    chains = {"logchain": (x, bulk, p0)}
    chains |= {f"x ~ {sharp} N(0, 1)": (sharp * x, bulk, p0) for sharp in (10, 30, 100, 1000)}
    modes: dict[str, Callable[..., Call]] = {
        FORWARD: partial(partial, logchain.product),
        GRADIENTS: partial(with_gradients, logchain.product),
        "marginals": partial(partial, logchain.marginals, transitions="sum"),
    }
    for mode, make in modes.items():
        case = f"sharpness/{workload}{', float64' if dtype == torch.float64 else ''}/{mode}"
        yield Comparison(case, {name: make(*chain) for name, chain in chains.items()})


# threads, and sizes of one sequence from which `strategy="auto"` cuts it into segments
CUT = [
    (2, Workload(1, 98_304, 16, ONE)), (2, Workload(1, 12_288, 64, ONE)), (1, Workload(1, 3_686, 128, ONE)),
    (1, Workload(1, 1_024, 256, ONE)), (1, Workload(1, 96, 1_024, ONE)), (2, Workload(1, 24_576, 16, STEP)),
    (2, Workload(1, 3_072, 64, STEP)),
]  # fmt: skip


def schedules(workload: Workload) -> Iterator[Comparison]:
    """One scan compared with segments, for half and twice the steps from which these are chosen."""
    for v in (workload.v // 2, 2 * workload.v):
        chain = draw(workload._replace(v=v))
        names = {"logchain": "sequential", **{name: name for name in ("segments", "segments:4", "segments:16")}}
        for mode, make in (FORWARD, partial), (GRADIENTS, with_gradients):
            calls = {key: make(partial(logchain.product, strategy=name), *chain) for key, name in names.items()}
            yield Comparison(f"schedules/{workload._replace(v=v)}, {threads()}/{mode}", calls)
