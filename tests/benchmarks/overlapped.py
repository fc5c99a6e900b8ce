"""One long sequence by each schedule, and by the one that is taken, beside its matrix products alone.

All times of a case are taken in turns in one process: CPU time on one thread, wall time on two. A schedule whose work
is many times the sequential one's is left out. Chains that do not forget are walked by "sequential" and "auto" alone.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

import logchain
from logchain.demo import Chain
from logchain.plan import Plan
from tests.benchmarks import results
from tests.benchmarks.cases import ONE, Workload, draw
from tests.benchmarks.cpu import call
from tests.benchmarks.results import GRADIENTS, MODES, STRATEGIES, Scheduled, machine
from tests.benchmarks.timing import on_threads, seconds_in_turns

SIZES = (20_000, 16), (1_000_000, 16), (20_000, 64), (4000, 256), (400, 1024)

# the most work, over the sequential one's, of a schedule that is measured
MOST_WORK = 20

# the most rows of the product that is the floor
ROWS = 4096


def dense(v: int, c: int) -> Chain:
    """One sequence with one random matrix for all steps."""
    chain = draw(Workload(1, v, c, ONE))
    return Chain(chain.x[:, None], chain.bulk[:, None], chain.p0.view(1, 1, c))


def stubborn(v: int, c: int) -> dict[str, Chain]:
    """Chains that do not forget how they began: weak evidence or none that helps."""
    chain = dense(v, c)
    order = torch.randperm(c, generator=torch.Generator().manual_seed(c))
    upper = chain.bulk.triu()
    stay = torch.full((c, c), 0.001 / (c - 1)).fill_diagonal_(0.999)
    return {
        "stays with 0.999, evidence x0.01": chain._replace(x=chain.x * 0.01, bulk=stay.view(1, 1, 1, c, c)),
        "permutation": chain._replace(bulk=torch.eye(c)[order].view(1, 1, 1, c, c)),
        "left-to-right": chain._replace(bulk=upper / upper.sum(-1, keepdim=True)),
    }


def planned(chain: Chain, mode: str, strategy: str) -> Plan:
    """What a strategy stands for."""
    return logchain.plan(*(operand.shape for operand in chain), gradients=mode == GRADIENTS, strategy=strategy)


def products(chain: Chain, mode: str) -> tuple[Callable[[], object], float]:
    """A product of many rows and the matrix, and how many of them are as much work as the sequence."""
    v, c = chain.x.shape[-2:]
    rows, matrix = torch.rand(min(v, ROWS), c), chain.bulk[0, 0, 0]
    out = torch.empty_like(rows)
    return lambda: torch.mm(rows, matrix, out=out), (3 if mode == GRADIENTS else 1) * v / len(rows)


def check(chain: Chain, calls: Mapping[str, Callable[[], Sequence[torch.Tensor]]]) -> None:
    """Raise if a strategy has another log-partition than float64, by the contract of accuracy."""
    v, c = chain.x.shape[-2:]
    exact = logchain.product(*(operand.double() for operand in chain), strategy="sequential").item()
    for strategy, run in calls.items():
        off = abs(run()[0].item() - exact)
        assert off <= v * (c + 8) * 2**-24 + abs(exact) * 2**-23, f"{strategy} is off by {off}"


def case(name: str, chain: Chain, mode: str, threads: int, strategies: Sequence[str], rounds: int) -> list[Scheduled]:
    """The times of all strategies."""
    with on_threads(threads):
        plans = {strategy: planned(chain, mode, strategy) for strategy in strategies}
        most = MOST_WORK * plans["sequential"].multiply_adds
        calls = {
            strategy: call(lambda *chain, by=strategy: logchain.product(*chain, strategy=by), chain, mode)
            for strategy, plan in plans.items()
            if plan.multiply_adds <= most
        }
        check(chain, calls)
        floor, times_more = products(chain, mode)
        clock = time.thread_time if threads == 1 else time.perf_counter
        seconds = seconds_in_turns({**calls, "products": floor}, rounds, clock)
    quartiles = {strategy: statistics.quantiles(found, n=4) for strategy, found in seconds.items()}
    alone = quartiles.pop("products")[1] * times_more * 1e3
    medians = {strategy: found[1] * 1e3 for strategy, found in quartiles.items()}
    rows = []
    for strategy, (lower, median, upper) in quartiles.items():
        others = [value for one, value in medians.items() if one not in (strategy, "auto")]
        times = median * 1e3, lower * 1e3, upper * 1e3, min(others, default=median * 1e3)
        rows.append(Scheduled(name, str(threads), mode, strategy, plans[strategy].schedule, *times, alone))
    return rows


def main(sizes: Sequence[tuple[int, int]] = SIZES, hard: tuple[int, int] = (20_000, 64), rounds: int = 7) -> None:
    """Measure, and write the results file; some minutes."""
    cases = [(f"v={v} c={c}", dense(v, c), STRATEGIES) for v, c in sizes]
    v, c = hard
    cases += [(f"v={v} c={c}, {name}", chain, ("sequential", "auto")) for name, chain in stubborn(v, c).items()]
    rows = []
    for name, chain, strategies in cases:
        print(f"measuring: {name}", flush=True)
        for threads in (1, 2):
            for mode in MODES:
                rows += case(name, chain, mode, threads, strategies, rounds)
    results.write([row._replace(**machine()) for row in rows], results.OVERLAPPED)
