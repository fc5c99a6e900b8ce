"""Calls of the library, and calls of other packages or of torch that do the same or the least, by kind of case."""

import copy
import math
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import logchain
from logchain import nn
from logchain.transitions import Banded, LowRank, Monarch, Sparse, Transition
from tests.benchmarks.cases import EACH, FORWARD, GRADIENTS, MODES, ONE, STEP, Workload, draw
from tests.benchmarks.peers import stacked

Call = Callable[[], object]
# dense products that stand for those of all steps
FEW = 8


class Comparison(NamedTuple):
    """Calls by provider, `logchain` first; `shares`: the part of its work that a provider's call does, if not all."""

    case: str
    calls: dict[str, Call]
    shares: dict[str, float] = {}


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


# layers


def crf(n: int = 32, v: int = 128, c: int = 20) -> Iterator[Comparison]:
    import torchcrf

    generator = torch.Generator().manual_seed(0)
    layer, peer = nn.LinearChainCRF(c, batch_first=True), torchcrf.CRF(c, batch_first=True)
    peer.load_state_dict(layer.state_dict())
    emissions = torch.randn(n, v, c, generator=generator).requires_grad_()
    tags = torch.randint(c, (n, v), generator=generator)
    ragged = torch.arange(v) < torch.randint(v // 4, v + 1, (n, 1), generator=generator)
    for name, mask in {"full mask": torch.ones_like(ragged), "ragged mask": ragged}.items():

        def loss(model: torch.nn.Module, mask: Tensor = mask) -> None:
            model(emissions, tags, mask, reduction="mean").neg().backward()

        def decode(model: torch.nn.Module, mask: Tensor = mask) -> object:
            return model.decode(emissions.detach(), mask)

        agree(layer(emissions, tags, mask, "none"), peer(emissions, tags, mask, "none"))
        for mode, call in (f"loss, {GRADIENTS}", loss), ("decode", decode):
            calls = {"logchain": partial(call, layer), "pytorch-crf": partial(call, peer)}
            yield Comparison(f"layers/CRF n={n} v={v} c={c}, {name}, {threads()}/{mode}", calls)


def hmm(n: int = 200, v: int = 50, c: int = 50, iterations: int = 50) -> Iterator[Comparison]:
    """Expectation maximization of Gaussian emissions, from equal parameters and without priors."""
    from pomegranate.distributions import Normal
    from pomegranate.hmm import DenseHMM

    generator = torch.Generator().manual_seed(0)
    data = nn.HMM(c, "gaussian", generator=generator).sample(n, v, generator=generator).data
    start = nn.HMM(c, "gaussian", generator=generator)
    start.initialise(data, generator=generator)

    def ours(iterations: int) -> float:
        fit = copy.deepcopy(start).fit(data, restarts=0, max_iterations=iterations, tolerance=-math.inf)
        return fit.history[-2]

    def hmmlearn() -> float:
        model = start.to_hmmlearn()
        options = {"covars_prior": 0, "covars_weight": 1, "min_covar": 0, "init_params": ""}
        model.set_params(n_iter=iterations, implementation="scaling", **options)
        model.monitor_.n_iter, model.monitor_.tol = iterations, -math.inf
        model.fit(data.double().view(-1, 1).numpy(), [v] * n)
        return model.monitor_.history[-1]

    @torch.no_grad()
    def pomegranate() -> DenseHMM:
        """It has probabilities of ending, which are 1 at first."""
        moments = zip(start.emission.means[:, None], start.emission.covariance()[:, None], strict=True)
        states = [Normal(means, variances, covariance_type="diag") for means, variances in moments]
        starts, edges = start.initial().exp(), start.transition()[0].exp()
        model = DenseHMM(states, edges=edges, starts=starts, ends=torch.ones(c))
        model.max_iter, model.tol = iterations, -math.inf
        return model

    agree(ours(iterations), hmmlearn())
    agree(start.log_prob(data), pomegranate().log_probability(data[..., None]), rtol=1e-4)
    calls: dict[str, Call] = {
        "logchain": partial(ours, iterations),
        "hmmlearn": hmmlearn,
        "pomegranate": lambda: pomegranate().fit(data[..., None]),
    }
    case = f"layers/HMM n={n} v={v} c={c}, Gaussian, {threads()}"
    yield Comparison(f"{case}/EM, {iterations} iterations", calls)
    product = with_gradients(partial(logchain.product, log_params=True), *start.arguments(data)[:3])
    calls = {"logchain": partial(ours, 1), "product alone": product}
    yield Comparison(f"{case}/EM, 1 iteration and the last log-likelihood", calls)


def circuits(n: int = 500, v: int = 40, c: int = 200, units: int = 64) -> Iterator[Comparison]:
    """The loss of a circuit compared with the product that it calls; a layer with its matrix products."""
    generator = torch.Generator().manual_seed(0)
    for categories in (2, 17):
        data = torch.randint(categories, (n, v), generator=generator)
        circuit = nn.ChainCircuit(v, c, num_categories=categories, generator=generator)

        def loss(circuit: nn.ChainCircuit = circuit, data: Tensor = data) -> None:
            circuit.zero_grad(set_to_none=True)
            circuit.log_prob(data).mean().neg().backward()

        operands = circuit.input(data[:, None]), circuit.bulk().exp(), circuit.p0().exp()
        calls = {"logchain": loss, "product alone": with_gradients(logchain.product, *operands)}
        case = f"layers/ChainCircuit n={n} v={v} c={c}, {categories} categories, {threads()}"
        yield Comparison(f"{case}/loss, {GRADIENTS}", calls)
    layer = nn.SumLayer(units, units, (v,), generator=generator)
    x = torch.randn(n, v, units, generator=generator).requires_grad_()
    left, right = x.detach().transpose(0, 1).contiguous(), layer.weights().detach()

    def gemms() -> None:
        out = left @ right
        _ = left.mT @ out, out @ right.mT

    calls = {"logchain": lambda: torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()]), "GEMMs alone": gemms}
    yield Comparison(f"layers/SumLayer n={n} f={v} c={units}, {threads()}/{GRADIENTS}", calls)


# best paths

DECODED = (32, 512, 16), (32, 512, 64), (1, 10_000, 16)


def viterbi(n: int, v: int, c: int) -> Iterator[Comparison]:
    """hmmlearn's compiled decoder is called itself; torch-struct decodes two sequences."""
    from hmmlearn import _hmmc
    from torch_struct import LinearChainCRF

    chain, few = draw(Workload(n, v, c, ONE)), min(n, 2)
    x, bulk, p0 = (operand.double().numpy() for operand in chain)
    edges = stacked(chain.x[:few], chain.bulk.expand(-1, v - 1, -1, -1), chain.p0).mT.contiguous()

    def hmmlearn() -> list[tuple]:
        return [_hmmc.viterbi(p0, bulk[0, 0], frames) for frames in x]

    agree(logchain.viterbi(*chain)[1], [score for score, _ in hmmlearn()])
    agree(logchain.viterbi(*chain)[1][:few], LinearChainCRF(edges).max)
    calls = {
        "logchain": lambda: logchain.viterbi(*chain),
        "hmmlearn": hmmlearn,
        "torch-struct": lambda: LinearChainCRF(edges).argmax,
    }
    yield Comparison(f"paths/n={n} v={v} c={c}, {ONE}/viterbi", calls, {"torch-struct": few / n})


# sharp emissions

SHARP = [
    (Workload(200, 40, 200, STEP), torch.float32),
    (Workload(32, 256, 64, ONE), torch.float32),
    (Workload(8, 128, 64, EACH), torch.float32),
    (Workload(1, 5000, 8, ONE), torch.float32),
    (Workload(1, 5000, 8, STEP), torch.float32),
    (Workload(50, 40, 100, STEP), torch.float64),
]


def sharpness(workload: Workload, dtype: torch.dtype) -> Iterator[Comparison]:
    """The same chain with x that is so many times as large, compared with standard normal x."""
    x, bulk, p0 = (operand.to(dtype) for operand in draw(workload))
    chains = {"logchain": (x, bulk, p0)}
    chains |= {f"x ~ {sharp} N(0, 1)": (sharp * x, bulk, p0) for sharp in (10, 30, 100, 1000)}
    functions: dict[str, Callable[..., Call]] = {
        FORWARD: lambda *chain: partial(logchain.product, *chain),
        GRADIENTS: partial(with_gradients, logchain.product),
        "marginals": lambda *chain: partial(logchain.marginals, *chain, transitions="sum"),
    }
    for mode, make in functions.items():
        case = f"sharpness/{workload}{', float64' if dtype == torch.float64 else ''}/{mode}"
        yield Comparison(case, {name: make(*chain) for name, chain in chains.items()})


# structures


def structured(
    case: str, x: Tensor, structure: Transition, floors: dict[str, dict[str, Call]], shares: dict[str, float]
) -> Iterator[Comparison]:
    """The product with a structure, compared with floors by mode; a floor's gradients are two more products."""
    p0 = torch.full(x.shape[-1:], 1 / x.shape[-1])

    def product(x: Tensor, p0: Tensor, *parameters: Tensor) -> Tensor:
        return logchain.product(x, structure.with_parameters(*parameters), p0)

    ours = {FORWARD: lambda: logchain.product(x, structure, p0)}
    ours[GRADIENTS] = with_gradients(product, x, p0, *structure.parameters)
    for mode in MODES:
        yield Comparison(f"structures/{case}/{mode}", {"logchain": ours[mode], **floors[mode]}, shares)


def banded(n: int = 8, v: int = 512, c: int = 2048, bands: int = 4) -> Iterator[Comparison]:
    """A left-to-right chain, compared with products of its dense matrices and copies of five tensors like x."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, v, c, generator=generator)
    structure = Banded(torch.rand(bands, c, generator=generator) + 0.1, list(range(bands)))
    rows, dense, copied = torch.rand(n, c), torch.rand(c, c), torch.empty_like(x)
    once = {"dense products": lambda: [rows @ dense for _ in range(FEW)]}
    thrice = {
        "dense products": lambda: [rows @ dense for _ in range(3 * FEW)],
        "copies of five tensors": lambda: copied.copy_(x),
    }
    # a copy reads and writes
    shares = {"dense products": FEW / (v - 1), "copies of five tensors": 1 / 2.5}
    yield from structured(
        f"Banded n={n} v={v} c={c}, {bands} bands", x, structure, {FORWARD: once, GRADIENTS: thrice}, shares
    )


def sparse(v: int = 1000, c: int = 10_000, arcs: int = 10) -> Iterator[Comparison]:
    """A graph, compared with torch's products with the same sparse matrix."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, v, c, generator=generator)
    source = torch.arange(c).repeat_interleave(arcs)
    target = torch.rand(c, c, generator=generator).topk(arcs).indices.flatten()
    structure = Sparse(torch.stack([source, target]), torch.rand(c * arcs, generator=generator) / arcs, c)
    matrix = torch.sparse_coo_tensor(structure.indices.flip(0), structure.values, (c, c)).to_sparse_csr()
    message = torch.rand(c, 1)
    floors = {
        mode: {"torch's sparse products": lambda count=count: [matrix @ message for _ in range(count * FEW)]}
        for mode, count in zip(MODES, (1, 2), strict=True)
    }
    shares = {"torch's sparse products": FEW / (v - 1)}
    yield from structured(f"Sparse n=1 v={v} c={c}, {arcs} arcs a state", x, structure, floors, shares)


def low_rank(n: int = 8, v: int = 100, c: int = 16_384, r: int = 64) -> Iterator[Comparison]:
    """A matrix of low rank with a diagonal, compared with its thin products."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, v, c, generator=generator)
    left, right = (torch.rand(c, r, generator=generator) for _ in range(2))
    structure = LowRank(left / r, right / c, torch.rand(c, generator=generator) / 2)
    rows, transposed, together = torch.rand(n, c), right.mT.contiguous(), 16
    many, middles = torch.rand(together * n, c), torch.rand(together * n, r)

    def products(times: int) -> None:
        for _ in range(times * (v - 1)):
            rows @ left @ transposed
        for _ in range((times - 1) * math.ceil((v - 1) / together)):  # gradients of both factors, steps together
            many.mT @ middles

    floors = {mode: {"its products alone": partial(products, times)} for mode, times in zip(MODES, (1, 3), strict=True)}
    yield from structured(f"LowRank n={n} v={v} c={c} r={r}, with a diagonal", x, structure, floors, {})


def monarch(n: int = 32, v: int = 128, blocks: int = 64) -> Iterator[Comparison]:
    """Two factors of square blocks, compared with their batched products and with those of dense matrices."""
    c, generator = blocks**2, torch.Generator().manual_seed(0)
    x = torch.randn(n, v, c, generator=generator)
    left, right = (torch.rand(blocks, blocks, blocks, generator=generator) / blocks for _ in range(2))
    rows, flat, dense = torch.rand(blocks, n, blocks), torch.rand(n, c), torch.rand(c, c)

    def products(times: int) -> None:
        for _ in range(times * (v - 1)):
            rows @ left @ right
        for _ in range((times - 1) * (v - 1)):
            rows.mT @ rows

    floors = {mode: {"its products alone": partial(products, times)} for mode, times in zip(MODES, (1, 3), strict=True)}
    floors[FORWARD]["dense products"] = lambda: [flat @ dense for _ in range(FEW)]
    shares = {"dense products": FEW / (v - 1)}
    yield from structured(f"Monarch n={n} v={v} c={c}", x, Monarch(left, right), floors, shares)


def ctc(steps: int = 500, labels: int = 100, n: int = 32, classes: int = 80) -> Iterator[Comparison]:
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(steps, n, classes, generator=generator).log_softmax(-1)
    targets = torch.randint(1, classes, (n, labels), generator=generator)
    lengths = torch.full((n,), steps), torch.full((n,), labels)

    def ours(log_probs: Tensor) -> Tensor:
        return -logchain.product(**logchain.adapters.from_ctc(log_probs, targets, *lengths)._asdict()).sum()

    def theirs(log_probs: Tensor) -> Tensor:
        return torch.nn.functional.ctc_loss(log_probs, targets, *lengths, reduction="sum")

    agree(ours(log_probs), theirs(log_probs))
    for mode, make in (FORWARD, partial), (GRADIENTS, with_gradients):
        calls = {"logchain": make(ours, log_probs), "torch's ctc_loss": make(theirs, log_probs)}
        yield Comparison(f"structures/CTC T={steps} U={labels} n={n}, {classes} classes/{mode}", calls)


STRUCTURES = banded, sparse, low_rank, monarch, ctc


# streams


def streams(v: int = 1_000_000, c: int = 8) -> Iterator[Comparison]:
    """A stream in pieces, compared with the product of all steps at once."""
    generator = torch.Generator().manual_seed(0)
    x, bulk = torch.randn(v, c, generator=generator), torch.softmax(torch.randn(1, c, c, generator=generator), -1)
    p0 = torch.full((c,), 1 / c)

    def stream(piece: int, filtered: bool) -> object:
        stream = logchain.Stream(bulk, p0, filtered=filtered)
        return [stream.update(part).log_norm for part in x.split(piece)][-1]

    calls: dict[str, Call] = {"logchain": lambda: logchain.product(x, bulk, p0)}
    for piece in (v // 100, v // 10):
        agree(calls["logchain"](), stream(piece, False))
        calls[f"Stream, pieces of {piece:,}"] = partial(stream, piece, True)
        calls[f"Stream, pieces of {piece:,}, filtered=False"] = partial(stream, piece, False)
    yield Comparison(f"streams/n=1 v={v:,} c={c}, {ONE}/{FORWARD}", calls)


# ranks

# one sequence: v and c
RANKS = (1_000_000, 16), (20_000, 64), (4000, 256), (400, 1024)


def ranks(rank: int, v: int, c: int, mode: str, rounds: int) -> list[list[float]]:
    """Wall and CPU seconds of one process and of this rank's part of the variables, round by round."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    generator = torch.Generator().manual_seed(0)
    x, bulk = torch.randn(v, c, generator=generator), torch.randn(1, c, c, generator=generator).softmax(-1)
    p0 = torch.rand(c, generator=generator)
    whole = [operand.requires_grad_(mode == GRADIENTS) for operand in (x, bulk, p0)]
    part = [x[v * rank // 2 : v * (rank + 1) // 2].detach().clone().requires_grad_(mode == GRADIENTS), bulk, p0]

    def call(function: Callable[..., Tensor], leaves: list[Tensor]) -> Tensor:
        value = function(*leaves)
        if mode == GRADIENTS:
            torch.autograd.grad(value, leaves)
        return value.detach()

    single = partial(call, partial(logchain.product, strategy="sequential"), whole)
    sharded = partial(call, logchain.distributed.product, part)
    agree(single(), sharded())
    seconds = []
    for _ in range(rounds):
        row = []
        for run in (single, sharded):
            dist.barrier()
            wall, used = time.perf_counter(), time.process_time()
            if rank == 0 or run is sharded:
                run()
            row += time.perf_counter() - wall, time.process_time() - used
        seconds.append(row)
    return seconds
