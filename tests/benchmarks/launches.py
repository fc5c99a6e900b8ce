"""How much Python a launch of a GPU kernel takes, without a GPU: `python -m tests.benchmarks gpu-launch`.

The launches of forward, backward and counts of the main job, n=500 v=40 c=200, as `held` makes them and as Triton's
`kernel[grid]` does, in turns, with a driver that launches nothing: the CPU time of this thread, with the driver's empty
call in it. A call is the mean of a batch, and a row the median of batches, and their quartiles.
"""

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.benchmarks import results
from tests.benchmarks.results import Row

BAR = "<= 5"
_BATCH, _ROUNDS = 200, 41


def main() -> None:
    """Measure, print, and write the results file."""
    os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported
    place = results.machine()
    rows = [row._replace(**place) for row in measured()]
    results.write(rows, results.GPU_LAUNCHES)
    for row in rows:
        print(f"{row.workload:50} {row.provider:8} {row.metric:14} {row.text:10} {row.bar}")


def measured(batch: int = _BATCH, rounds: int = _ROUNDS) -> Iterator[Row]:
    """Rows of every kernel: its launch by us and by Triton, in microseconds."""
    from logchain.kernels.gpu import chain_backward, chain_forward, held
    from tests.kernels.gpu import calls
    from tests.kernels.gpu.no_driver import compiled_here
    from tests.kernels.gpu.recorded import on

    with on("sm_90") as launches:
        calls.forward(chain_forward, 40, 500, 200)
        calls.backward(chain_backward, 40, 500, 200)
        calls.counts(40, 500, 200)
    names: set[str] = set()
    for (kernel, grid, *arguments), options in launches:
        module = kernel.fn.__module__.split(".")[-1]
        name = f"{module}.{kernel.fn.__name__}, {len(kernel.arg_names)} arguments"
        if name in names:  # of the preparing kernel
            continue
        names.add(name)
        with compiled_here() as compiled:
            held.run(kernel, grid, *arguments, **options)
            compiled[0]._run = lambda *_: None
            ways = {
                "logchain": lambda k=kernel, g=grid, a=arguments, o=options: held.run(k, g, *a, **o),
                "triton": lambda k=kernel, g=grid, a=arguments, o=options: k[g](*a, **o),
            }
            times = _in_turns(ways, batch, rounds)
        for provider, found in times.items():
            quartiles = statistics.quantiles(found, n=4)
            for metric, value in zip(("lower quartile", "median", "upper quartile"), quartiles, strict=True):
                bar = BAR if (provider, metric) == ("logchain", "median") else ""
                yield Row(name, provider, "launch", metric, value, "us", bar)


def _in_turns(ways: dict[str, Callable[[], Any]], batch: int, rounds: int) -> dict[str, list[float]]:
    """The microseconds of each way, a batch of calls after the other."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, way in ways.items():
                start = time.thread_time_ns()
                for _ in range(batch):
                    way()
                times[name].append((time.thread_time_ns() - start) / batch / 1e3)
    finally:
        gc.enable()
    return times
