"""Measure every schedule of `product` on this machine, and fit the cost model: `logchain/schedules/costs.json`.

    python -m tests.benchmarks.fit_costs

A few minutes. One thread's times are its CPU time, those of more threads, and of a GPU, wall time. The constants are
not negative, and fitted to the logarithms of the times: a factor of two counts the same for a microsecond and a second.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from logchain.autograd import chain as chain_functions
from logchain.autograd.chain_operators import number_of
from logchain.schedules import choose
from logchain.schedules.choose import SEQUENTIAL, TREE, Schedule, Size, Where
from logchain.schedules.cost import BOTH, FILE, FORWARD, Constants, Work, constants, read
from tests.benchmarks.run import machine, on_threads

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

# multiply-adds, and steps of calls, that a single measurement may take
_MOST_ADDS, _MOST_LAUNCHES = 2e9, 2e5

_NAMES = ("sequential", "chunked", "tree", "overlapped")

# a data sheet's, of an H200: bytes a second that a copy reaches, multiply-adds a second in 3xTF32
BANDWIDTH, RATE = 4.3e12, 495e12 / 6

# seconds, guessed: a launch, and a step that waits for the last one, with one tile in registers and with several
LAUNCH, STEP, WIDE_STEP = 4e-6, 1.5e-6, 4e-6

# seconds that one is given, and how often it is run at most
_PATIENCE, _ROUNDS = 0.25, 7


class Sample(NamedTuple):
    """How long a schedule took."""

    size: Size
    schedule: Schedule
    seconds: float


Timer = Callable[[Size, Schedule, Callable[[], object]], float]


def timer(place: Where) -> Timer:
    """The least time of a few runs, each by itself."""
    clock = time.thread_time if place.device == "cpu" and place.threads == 1 else time.perf_counter
    wait = torch.cuda.synchronize if place.device == "cuda" else lambda: None

    def measure(size: Size, schedule: Schedule, call: Callable[[], object]) -> float:
        call()
        times: list[float] = []
        while len(times) < _ROUNDS and sum(times) < _PATIENCE:
            wait()
            start = clock()
            call()
            wait()
            times.append(clock() - start)
        return min(times)

    return measure


def samples(place: Where, sweep: Iterable[tuple[int, int, int, int]], measure: Timer) -> Iterator[Sample]:
    """Every schedule on every size, forward, then forward and backward."""
    for n, v, c, sets in sweep:
        generator = torch.Generator().manual_seed(v)
        shapes = [(n, v, c), (max(sets, 1), v - 1 if sets else 1, c, c), (c,)]
        operands = [torch.rand(shape, generator=generator).add_(0.1).to(place.device) for shape in shapes]
        for gradients in (False, True):
            x, bulk, p0 = (operand.clone().requires_grad_(gradients) for operand in operands)
            size = choose.Size.of(x.shape, bulk.shape, False, False, False, gradients, place.device == "cuda")
            for schedule in schedules(size, place):
                work = choose.work(size, schedule)
                if work.multiply_adds <= _MOST_ADDS and work.launches <= _MOST_LAUNCHES:
                    yield Sample(size, schedule, measure(size, schedule, call(schedule, x, bulk, p0)))


def schedules(size: Size, place: Where) -> list[Schedule]:
    """All kinds, with few, some and many segments."""
    overlapped = choose.overlapped(size, place) if place.device == "cpu" else []
    return [SEQUENTIAL, *choose.candidates(size, place)[4::10], TREE, *overlapped]


def call(schedule: Schedule, x: Tensor, bulk: Tensor, p0: Tensor) -> Callable[[], object]:
    """One product by a schedule, with the gradients of what requires one."""

    def run() -> object:
        found = chain_functions.log_norm(x, bulk, p0, None, False, segments=number_of(schedule))
        return torch.autograd.grad(found.sum(), (x, bulk, p0)) if found.requires_grad else found

    return run


def fitted(place: Where, found: Sequence[Sample], about: dict[str, str], processors: int = 1) -> Constants:
    """Constants for each schedule and pass."""
    entry = Constants(*place, processors, True, **about, seconds={})
    for name in _NAMES:
        entry.seconds[name] = {}
        for gradients, which in ((False, FORWARD), (True, BOTH)):
            own = [
                sample
                for sample in found
                if sample.size.gradients == gradients
                and sample.schedule.name == choose.constants_for(sample.size, sample.schedule) == name
            ]
            counted = [choose.counted(sample.size, sample.schedule, entry) for sample in own]
            entry.seconds[name][which] = least_squares(counted, [sample.seconds for sample in own])
    return entry


def least_squares(counted: Sequence[Work], seconds: Sequence[float], rounds: int = 20) -> tuple[float, ...]:
    """Non-negative constants for which the logarithms of the predicted seconds are nearest to those of the measured."""
    counts, times = np.array(counted, dtype=float), np.array(seconds)
    scale = np.maximum((counts / times[:, None]).max(0), 1e-300)  # each column's largest share is 1
    shares = counts / times[:, None] / scale
    # about the times themselves, then about what was predicted last
    constants, _ = nnls(shares, np.ones(len(times)))
    best, least = constants, np.inf
    for _ in range(rounds):
        predicted = np.maximum(shares @ constants, 1e-3)
        error = (np.log(predicted) ** 2).sum()
        if error < least:
            best, least = constants, error
        step, _ = nnls(shares / predicted[:, None], np.maximum(1 - np.log(predicted), 0.1))
        constants = (constants + step) / 2
    return tuple(float(f"{value:.4g}") for value in best / scale)


def h200() -> Constants:
    """A data sheet's, for a GPU that nobody has measured."""
    adds, moved = 1 / RATE, 1 / BANDWIDTH
    # an exponential takes a few instructions beside the loads; a product of matrices waits longer than a vector's
    row = (adds, 1e-13, moved, STEP, LAUNCH)
    wide = row[:3] + (WIDE_STEP, LAUNCH)
    seconds = {name: {which: row if name == "sequential" else wide for which in (FORWARD, BOTH)} for name in _NAMES}
    seconds["chunked"][FORWARD] = row
    return Constants("cuda", 1, 132, False, "NVIDIA H200, data sheet", "", "", seconds)


def text(entry: Constants, found: Sequence[Sample]) -> str:
    """How far predictions are off, by schedule: in the median and at most."""
    lines = [entry.source]
    for name in _NAMES:
        own = [sample for sample in found if sample.schedule.name == name]
        off = [abs(math.log(choose.seconds(one.size, one.schedule, entry) / one.seconds)) for one in own]
        if off:
            lines.append(
                f"  {name}: off by {math.exp(statistics.median(off)):.2f} x, {math.exp(max(off)):.2f} x at most"
            )
    return "\n".join(lines)


def write(entries: Iterable[Constants], path: Path = FILE) -> None:
    """The file anew: a place's constants take the place of those that it had."""
    kept = {(e.device, e.threads): e for e in (*read(path), *entries)} if path.exists() else {}
    kept |= {(e.device, e.threads): e for e in entries}
    rows = []
    for entry in kept.values():
        seconds = {
            name: {which: dict(zip(Work._fields, row, strict=True)) for which, row in passes.items()}
            for name, passes in entry.seconds.items()
        }
        rows.append({**entry._asdict(), "seconds": seconds})
    path.write_text(json.dumps({"command": "python -m tests.benchmarks.fit_costs", "constants": rows}, indent=1) + "\n")
    read.cache_clear()
    constants.cache_clear()


def places() -> list[Where]:
    """What this machine has to measure."""
    threads = sorted({1, torch.get_num_threads()})
    return [*(Where("cpu", number) for number in threads), *[Where("cuda", 1)] * torch.cuda.is_available()]


def main() -> None:
    """Measure, fit, write, and print how well it fits."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.fit_costs", description=__doc__)
    parser.add_argument("--only", nargs="+", default=(), help="devices to measure: cpu, cuda")
    parser.add_argument("--out", type=Path, default=FILE, help="the file to write")
    options = parser.parse_args()
    measured = [entry for entry in read(options.out) if entry.measured] if options.out.exists() else []
    if not any(entry.device == "cuda" for entry in measured):
        write([h200()], options.out)
    for place in places():
        if options.only and place.device not in options.only:
            continue
        here = machine()
        about = {"hardware": here["hardware"], "versions": here["version"], "date": here["date"]}
        if place.device == "cuda":
            about["hardware"] = torch.cuda.get_device_name()
        with on_threads(place.threads):
            found = list(samples(place, SWEEP, timer(place)))
        processors = torch.cuda.get_device_properties(0).multi_processor_count if place.device == "cuda" else 1
        entry = fitted(place, found, about, processors)
        write([entry], options.out)
        print(text(entry, found), flush=True)


if __name__ == "__main__":
    main()
