"""Time against the sharpness of emissions: the same chain with x so many times as large, over x ~ N(0, 1).

Medians of one thread's CPU time, in turns in one process.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

import logchain
from logchain import demo
from logchain.demo import Chain
from tests.benchmarks import results
from tests.benchmarks.cases import EACH, ONE, STEP, Workload, draw
from tests.benchmarks.results import FORWARD, GRADIENTS, Row, machine
from tests.benchmarks.timing import median_seconds, on_threads

SHARPNESS = 10, 30, 100, 1000
WORKLOADS = {
    Workload(200, 40, 200, STEP): torch.float32,
    Workload(32, 256, 64, ONE): torch.float32,
    Workload(8, 128, 64, EACH): torch.float32,
    Workload(1, 5000, 8, ONE): torch.float32,
    Workload(1, 5000, 8, STEP): torch.float32,
    Workload(50, 40, 100, STEP): torch.float64,
}
QUERIES: dict[str, Callable[[Chain], object]] = {
    FORWARD: demo.forward,
    GRADIENTS: demo.forward_backward,
    "marginals and counts": lambda chain: logchain.marginals(*chain, transitions="sum"),
    "messages": lambda chain: logchain.forward_backward(*chain),
}


def rows_of(workload: Workload, dtype: torch.dtype) -> list[Row]:
    """The times of every query at each sharpness."""
    plain = Chain(*(operand.to(dtype) for operand in draw(workload)))
    chains = [plain, *(plain._replace(x=sharpness * plain.x) for sharpness in SHARPNESS)]
    rows = []
    for mode, query in QUERIES.items():
        calls = {str(i): partial(query, chain) for i, chain in enumerate(chains)}
        base, *others = median_seconds(calls, rounds=15, clock=time.thread_time).values()
        name = f"{workload}, {str(dtype).removeprefix('torch.')}"
        rows += [
            Row(name, "logchain", mode, str(sharpness), seconds / base, "x", "<= 1.3")
            for sharpness, seconds in zip(SHARPNESS, others, strict=True)
        ]
    return rows


def main() -> None:
    """Measure, and write the results file; a minute on one core."""
    with on_threads(1):
        rows = [row for workload, dtype in WORKLOADS.items() for row in rows_of(workload, dtype)]
    place = machine()
    results.write([row._replace(**place) for row in rows], results.SHARPNESS)
