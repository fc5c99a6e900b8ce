"""Measure every schedule of `product` on this machine, and fit the cost model: `logchain/schedules/costs.json`.

    python -m tests.benchmarks.fit_costs

A few minutes. One thread's times are its CPU time, those of more threads, and of a GPU, wall time. The constants are
not negative, and fitted to the logarithms of the times: a factor of two counts the same for a microsecond and a second.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import least_squares, nnls
from torch import Tensor

from logchain.autograd import chain as chain_functions
from logchain.autograd.chain_operators import number_of
from logchain.schedules import choose
from logchain.schedules.choose import SEQUENTIAL, TREE, Schedule, Size, Where
from logchain.schedules.cost import BOTH, FILE, FORWARD, Constants, Work, constants, read
from tests.benchmarks.run import machine

# (n, v, c, sets of matrices), 0 for one matrix for every step and sequence
SWEEP = [
    (1, 3, 4, 1), (1, 30, 2, 0), (1, 300, 4, 1), (1, 10_000, 4, 0), (1, 3_000, 8, 1), (1, 10_000, 16, 0),
    (1, 1_000, 16, 1), (1, 1_000, 40, 0), (1, 300, 64, 1), (1, 100, 128, 0), (1, 40, 256, 1), (10, 6, 40, 1),
    (10, 1_000, 3, 0), (8, 128, 64, 8), (8, 500, 16, 8), (32, 100, 64, 1), (32, 500, 16, 1),
    (100, 10, 100, 0), (200, 40, 100, 1), (500, 40, 20, 1), (1_000, 50, 5, 1_000), (1, 20_000, 2, 0),
    (100, 100, 2, 0), (2_000, 20, 1, 0), (20_000, 2, 3, 1), (2_000, 100, 2, 0), (300, 100, 3, 1),
    (1, 100_000, 4, 0), (1, 100_000, 16, 0), (1, 20_000, 32, 0), (1, 5_000, 64, 0), (1, 20_000, 64, 0),
    (4, 5_000, 64, 0), (1, 2_000, 64, 1), (1, 2_000, 256, 0), (1, 200, 1_024, 0),
]  # fmt: skip
NAMES = ("sequential", "chunked", "tree", "overlapped")
# multiply-adds, and steps of calls, that a single measurement may take; its seconds, and how often it is run at most
MOST_ADDS, MOST_LAUNCHES, PATIENCE, ROUNDS = 2e9, 2e5, 0.25, 7


class Sample(NamedTuple):
    """How long a schedule took."""

    size: Size
    schedule: Schedule
    seconds: float


Timer = Callable[[Size, Schedule, Callable[[], object]], float]


def least(place: Where, size: Size, schedule: Schedule, call: Callable[[], object]) -> float:
    """The least time of a few runs, each by itself."""
    clock = time.thread_time if place.device == "cpu" and place.threads == 1 else time.perf_counter
    wait = torch.cuda.synchronize if place.device == "cuda" else lambda: None
    times: list[float] = []
    call()
    while len(times) < ROUNDS and sum(times) < PATIENCE:
        wait()
        start = clock()
        call()
        wait()
        times.append(clock() - start)
    return min(times)


def samples(place: Where, sweep: Iterable[tuple[int, int, int, int]], measure: Timer) -> Iterator[Sample]:
    """Every schedule on every size, with few, some and many segments, forward, then forward and backward."""
    for n, v, c, sets in sweep:
        generator = torch.Generator().manual_seed(v)
        shapes = [(n, v, c), (max(sets, 1), v - 1 if sets else 1, c, c), (c,)]
        operands = [torch.rand(shape, generator=generator).add_(0.1).to(place.device) for shape in shapes]
        for gradients in (False, True):
            x, bulk, p0 = (operand.clone().requires_grad_(gradients) for operand in operands)
            size = Size.of(x.shape, bulk.shape, False, False, False, gradients, place.device == "cuda")
            overlapped = choose.overlapped(size, place) if place.device == "cpu" else []
            for schedule in [SEQUENTIAL, *choose.candidates(size, place)[4::10], TREE, *overlapped]:
                work = choose.work(size, schedule)
                if work.multiply_adds <= MOST_ADDS and work.launches <= MOST_LAUNCHES:
                    yield Sample(size, schedule, measure(size, schedule, partial(product, schedule, x, bulk, p0)))


def product(schedule: Schedule, x: Tensor, bulk: Tensor, p0: Tensor) -> object:
    """By a schedule, with the gradients of what requires one."""
    found = chain_functions.log_norm(x, bulk, p0, None, False, segments=number_of(schedule))
    return torch.autograd.grad(found.sum(), (x, bulk, p0)) if found.requires_grad else found


def fitted(place: Where, found: Sequence[Sample], about: dict[str, str], processors: int = 1) -> Constants:
    """Constants for each schedule and pass."""
    entry = Constants(*place, processors, True, **about, seconds={name: {} for name in NAMES})
    for name in NAMES:
        for gradients, which in ((False, FORWARD), (True, BOTH)):
            chosen = [
                sample
                for sample in found
                if sample.size.gradients == gradients
                and sample.schedule.name == choose.constants_for(sample.size, sample.schedule) == name
            ]
            counted = [choose.counted(sample.size, sample.schedule, entry) for sample in chosen]
            entry.seconds[name][which] = constants_of(counted, [sample.seconds for sample in chosen])
    return entry


def constants_of(counted: Sequence[Work], seconds: Sequence[float]) -> tuple[float, ...]:
    """Non-negative constants for which the logarithms of the predicted seconds are nearest to those of the measured."""
    shares = np.array(counted, dtype=float) / np.array(seconds)[:, None]
    scale = np.maximum(shares.max(0), 1e-300)  # each column's largest share is 1
    start, _ = nnls(shares / scale, np.ones(len(shares)))
    off = lambda constants: np.log(np.maximum(shares / scale @ constants, 1e-3))  # noqa: E731
    found = least_squares(off, start, bounds=(0, np.inf)).x
    return tuple(float(f"{value:.4g}") for value in found / scale)


def h200() -> Constants:
    """A data sheet's, for a GPU that nobody has measured: seconds of a multiply-add, an exponential and a byte.

    Guessed are those of a launch, and of a step that waits for the last one, with one tile in registers or several.
    """
    row = 6 / 495e12, 1e-13, 1 / 4.3e12, 1.5e-6, 4e-6
    wide = (*row[:3], 4e-6, 4e-6)
    seconds = {name: {which: row if name == "sequential" else wide for which in (FORWARD, BOTH)} for name in NAMES}
    seconds["chunked"][FORWARD] = row
    return Constants("cuda", 1, 132, False, "NVIDIA H200, data sheet", "", "", seconds)


def write(entries: Iterable[Constants], path: Path = FILE) -> None:
    """Constants, which take the place of those that the file had for their device and number of threads."""
    rows = {(entry.device, entry.threads): entry for entry in (*(read(path) if path.exists() else ()), *entries)}
    table = [entry._asdict() for entry in rows.values()]
    for row in table:
        row["seconds"] = {
            name: {which: dict(zip(Work._fields, values, strict=True)) for which, values in passes.items()}
            for name, passes in row["seconds"].items()
        }
    text = json.dumps({"command": "python -m tests.benchmarks.fit_costs", "constants": table}, indent=1)
    path.write_text(text + "\n")
    read.cache_clear()
    constants.cache_clear()


def main() -> None:
    """Measure, fit and write."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.fit_costs", description=__doc__)
    parser.add_argument("--out", type=Path, default=FILE, help="the file to write")
    path, here = parser.parse_args().out, machine()
    about = {"hardware": here["hardware"], "versions": here["version"], "date": here["date"]}
    if not path.exists():
        write([h200()], path)
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        place = Where("cpu", threads)
        write([fitted(place, list(samples(place, SWEEP, partial(least, place))), about)], path)
    if torch.cuda.is_available():
        place, device = Where("cuda", 1), torch.cuda.get_device_properties(0)
        found = list(samples(place, SWEEP, partial(least, place)))
        write([fitted(place, found, about | {"hardware": device.name}, device.multi_processor_count)], path)


if __name__ == "__main__":
    main()
