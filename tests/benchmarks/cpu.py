"""What the library costs on the CPU, beside the GEMMs alone, the forum's code and dense chains.

All ratios are of medians taken in turns in one process, of one thread's CPU time, so that other work on the machine
adds little.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

import logchain
from logchain import demo, reference
from logchain.demo import Chain, Product, dense_chain
from logchain.memory import peak_bytes
from tests.benchmarks import forum, peers_floors, results, streams
from tests.benchmarks.cases import EACH, ONE, STEP, Workload, draw
from tests.benchmarks.peers_formula import loop
from tests.benchmarks.results import FORWARD, GRADIENTS, MODES, Row, machine
from tests.benchmarks.timing import median_seconds, on_threads
from tests.families import FAMILIES

MAIN = "n=500 v=40 c=200, shared bulk"
SWEEP = (8, 32, 128, 512)


def call(product: Product, chain: Chain, mode: str) -> Callable[[], Sequence[Tensor]]:
    """One run of any provider's product, without or with the gradients of x, bulk and p0."""
    return partial(demo.forward if mode == FORWARD else demo.forward_backward, chain, product)


def ratio(workload: str, mode: str, metric: str, bar: str, calls: dict[str, Callable], rounds: int = 21) -> Row:
    """The first call's time over the second's."""
    first, second = median_seconds(calls, rounds=rounds, clock=time.thread_time).values()
    return Row(workload, "logchain", mode, metric, first / second, "x", bar)


# the most that a pass over dense chains should take of its GEMMs: forward, and with gradients
DENSE = {
    Workload(500, 40, 200, STEP): (1.3, 1.7),
    Workload(32, 512, 64, STEP): (1.0, 1.4),
    Workload(32, 512, 64, ONE): (1.0, 1.2),
    Workload(8, 128, 64, EACH): (0.9, 1.0),
    Workload(256, 784, 64, STEP): (1.6, 2.2),
}
# nanoseconds a step
FEW = {
    Workload(1, 10_000, 16, STEP): (60, 250),
    Workload(1, 10_000, 16, ONE): (45, 110),
    Workload(1, 100_000, 4, STEP): (14, 50),
    Workload(1, 100_000, 4, ONE): (13, 45),
}
# numbers of pairs and states: the most that `matmul` should take of its GEMMs
PAIRS = {(1000, 16): (5, 6), (64, 64): (2.5, 3.2), (8, 200): (1.5, 1.8), (1, 1000): (1.5, 1.8)}


def main_case() -> list[Row]:
    """The forum's case: memory, and time beside the forum's code."""
    chain = dense_chain(500, 40, 200)
    rows = []
    for mode in MODES:
        used, limit = peak_bytes(call(logchain.product, chain, mode)) / 1e6, 2 * chain.x.nbytes / 1e6 + 10
        rows.append(Row(MAIN, "logchain", mode, "memory", used, "MB", f"<= {limit:g}"))
    # once: it takes 8 GB and most of a minute
    calls = {
        name: call(product, chain, FORWARD)
        for name, product in (("forum", forum.product), ("logchain", logchain.product))
    }
    return [*rows, ratio(MAIN, FORWARD, "forum's time over logchain's", ">= 1000", calls, rounds=1)]


def dense_chains() -> list[Row]:
    """Dense chains over their matrix products alone."""
    rows = []
    for workload, bars in DENSE.items():
        chain = draw(workload)
        for mode, bar in zip(MODES, bars, strict=True):
            calls = {"logchain": call(logchain.product, chain, mode), "GEMMs": peers_floors.gemms(chain, mode)}
            rows.append(ratio(str(workload), mode, "time over the GEMMs", f"<= {bar}", calls))
    return rows


def few_states() -> list[Row]:
    """One long sequence of few states: each step waits for the one before."""
    rows = []
    for workload, bars in FEW.items():
        chain = draw(workload)
        for mode, bar in zip(MODES, bars, strict=True):
            calls = {"logchain": call(logchain.product, chain, mode)}
            (seconds,) = median_seconds(calls, rounds=21, clock=time.thread_time).values()
            value = seconds / workload.v * 1e9
            rows.append(Row(str(workload), "logchain", mode, "time of a step", value, "ns", f"<= {bar}"))
    return rows


class _Empty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bulk, p0):
        ctx.save_for_backward(x, bulk, p0)
        return x.new_empty(len(x))

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.empty_like(operand) for operand in ctx.saved_tensors)


def short_calls() -> list[Row]:
    """Calls that take less than torch's autograd takes to do nothing."""
    workload = Workload(10, 6, 40, STEP)
    chain = draw(workload)
    calls = {
        (FORWARD, "product"): (0.63, call(logchain.product, chain, FORWARD)),
        (GRADIENTS, "product"): (2.7, call(logchain.product, chain, GRADIENTS)),
        ("posteriors", "marginals"): (0.73, lambda: logchain.marginals(*chain)),
        ("messages", "forward_backward"): (0.73, lambda: logchain.forward_backward(*chain)),
    }
    rows = []
    for (mode, name), (bar, ours) in calls.items():
        in_turns = {name: _often(ours), "nothing": _often(call(_Empty.apply, chain, GRADIENTS))}
        rows.append(
            ratio(str(workload), mode, f"{name}'s time over an empty autograd Function's", f"<= {bar}", in_turns)
        )
    return rows


def _often(run: Callable[[], object], times: int = 100) -> Callable[[], None]:
    def runs() -> None:
        for _ in range(times):
            run()

    return runs


def start() -> list[Row]:
    """What a fresh process waits for after `import torch`, of modules that have been compiled as pip does."""
    code = (
        "import sys, time, torch; sys.dont_write_bytecode = False; begin = time.perf_counter(); import logchain;"
        "x = torch.zeros(10, 6, 40).requires_grad_();"
        "logchain.product(x, torch.rand(1, 5, 40, 40), torch.rand(40)).sum().backward();"
        "print(time.perf_counter() - begin)"
    )
    command = [sys.executable, "-c", code]
    _first, *seconds = (float(subprocess.check_output(command, cwd=results.ROOT)) for _ in range(6))
    return [Row("a fresh process", "logchain", GRADIENTS, "import and first call", sorted(seconds)[2], "s", "<= 0.3")]


def matrix_products() -> list[Row]:
    """The product of whole stacks, over the batched products of all levels of the tree alone."""
    stack = torch.randn(8, 256, 64, 64, generator=torch.Generator().manual_seed(2))
    levels = [torch.rand(8 * 128 >> level, 2, 64, 64) for level in range(8)]
    out = [torch.empty(len(level), 64, 64) for level in levels]

    def floor() -> Sequence[Tensor]:
        for level, into in zip(levels, out, strict=True):
            torch.bmm(level[:, 0], level[:, 1], out=into)
        return out

    calls = {"logchain": lambda: [logchain.matrix_product(stack)], "GEMMs": floor}
    return [ratio("full product n=8 v=256 c=64", FORWARD, "time over the GEMMs", "<= 1.5", calls)]


def pairs() -> list[Row]:
    """Log-semiring products of two matrices over the same products of probabilities alone, and two for gradients."""
    draw = torch.Generator().manual_seed(3)
    rows = []
    for (g, c), bars in PAIRS.items():
        a, b, weight = (torch.randn(g, c, c, generator=draw) for _ in range(3))
        leaves = [operand.clone().requires_grad_() for operand in (a, b)]
        calls = {
            FORWARD: (partial(logchain.matmul, a, b), partial(torch.bmm, a, b)),
            GRADIENTS: (
                lambda: torch.autograd.grad(logchain.matmul(*leaves), leaves, weight),  # noqa: B023
                lambda: (torch.bmm(a, b), torch.bmm(weight, b.mT), torch.bmm(a.mT, weight)),  # noqa: B023
            ),
        }
        for (mode, (ours, floor)), bar in zip(calls.items(), bars, strict=True):
            in_turns = {"logchain": _often(ours, 5), "GEMMs": _often(floor, 5)}
            rows.append(ratio(f"matmul n={g} c={c}", mode, "time over the GEMMs", f"<= {bar}", in_turns))
    return rows


def hard_cases() -> list[Row]:
    """Chains that leave float32's linear range, over the time of a dense one of the same size."""

    def family(name: str, n: int, v: int, c: int) -> Chain:
        return Chain(*FAMILIES[name](dtype=torch.float32, n=n, t=1, v=v, c=c)[:3])

    plain, long_plain = dense_chain(500, 40, 200), family("dense", 64, 200, 12)
    hard, some = (
        plain._replace(x=plain.x * 20),
        torch.rand(plain.bulk.shape, generator=torch.Generator().manual_seed(1)),
    )
    left_to_right, banded = family("left_to_right", 64, 200, 12), family("banded", 500, 40, 200)
    cases = [
        ("dense n=500 v=40 c=200, emissions x20", hard, plain, (1.2, 1.2)),
        ("dense n=500 v=40 c=200, emissions x300", plain._replace(x=plain.x * 300), plain, (1.2, 1.2)),
        ("left-to-right n=64 v=200 c=12, emissions x20", left_to_right, long_plain, (4, 4)),
        ("3 superdiagonals n=500 v=40 c=200, emissions x20", banded, plain, (2, 2.5)),
        ("triangular n=500 v=40 c=200, emissions x20", hard._replace(bulk=plain.bulk.triu()), plain, (4, 5)),
        ("70 % zeros n=500 v=40 c=200, emissions x20", hard._replace(bulk=plain.bulk * (some < 0.3)), plain, (3, 4)),
    ]
    rows = []
    for workload, chain, dense, bars in cases:
        for mode, bar in zip(MODES, bars, strict=True):
            calls = {"hard": call(logchain.product, chain, mode), "dense": call(logchain.product, dense, mode)}
            rows.append(ratio(workload, mode, "time over a dense chain's", f"<= {bar}", calls, rounds=9))
    return rows


def accuracy() -> list[Row]:
    """Posteriors of a very long chain, and the forum's two wrong values."""
    v = 16384
    long = dense_chain(1, v, 8)
    long = long._replace(x=long.x + 500_000 / v)
    posteriors = demo.forward_backward(long)[1]
    truth = reference.marginals(*long)
    error = np.abs(posteriors.double().numpy() - truth.states).max()
    workload = f"n=1 v={v} c=8, log Z = {truth.log_norm.item():.0f}"
    rows = [Row(workload, "logchain", GRADIENTS, "largest error of a posterior", error, "", "<= 1e-5")]

    # State 0 is where the first matrix leads, state 1 where the evidence is: the only path pays log(1e-30) once.
    x = torch.tensor([[0.0, 0.0], [-200.0, 0.0], [0.0, 0.0]])
    bulk = torch.tensor([[[1.0, 1e-30], [1.0, 1e-30]], [[0.5, 0.5], [0.5, 0.5]]])
    peaks = Chain(x[None, None], bulk[None, None], torch.tensor([[[0.5, 0.5]]]))
    for name, chain in (("n=10 v=6 c=40, shared bulk", dense_chain(10, 6, 40)), ("two peaks, v=3 c=2", peaks)):
        values = {
            "scipy float64": reference.product(*chain).flat[0],
            "logchain": logchain.product(*chain).flatten()[0].item(),
            "forum": forum.product(*chain).flatten()[0].item(),
        }
        rows += [Row(name, provider, FORWARD, "value", value, "nats") for provider, value in values.items()]
    return rows


def sweep() -> list[Row]:
    """Time and memory against v, for the plot."""
    rows = []
    for v in SWEEP:
        chain = dense_chain(32, v, 64)
        calls = {
            name: call(product, chain, GRADIENTS)
            for name, product in (("logchain", logchain.product), ("torch loop", loop), ("forum", forum.product))
        }
        seconds = median_seconds(calls, rounds=3, clock=time.thread_time)
        for name, run in calls.items():
            rows.append(Row(f"sweep n=32 v={v} c=64", name, GRADIENTS, "time", seconds[name] * 1e3, "ms"))
            rows.append(Row(f"sweep n=32 v={v} c=64", name, GRADIENTS, "memory", peak_bytes(run) / 1e6, "MB"))
    return rows


def main() -> None:
    """Measure, and write the results file; a few minutes on one core."""
    rows = []
    groups = main_case, dense_chains, few_states, short_calls, start, matrix_products, pairs, hard_cases, accuracy
    for group in (*groups, streams.stream_rows, sweep):
        print(f"measuring: {group.__name__}", flush=True)
        with on_threads(1):
            rows += group()
    place = machine()
    results.write([row._replace(**place) for row in rows], results.PRODUCT)
