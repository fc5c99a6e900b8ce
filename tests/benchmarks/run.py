"""Measures cases, each in a process of its own, and keeps their rows in one results file.

Calls are timed in turns with logchain's in one process, by its CPU time on one thread, by wall time on more. A peer is
timed only if its values agree with float64. Slow peers run on the first sequences and steps, and count in proportion:
their work is linear in both.
"""

import csv
import ctypes
import datetime
import gc
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import logchain
from tests.benchmarks import cases, structures
from tests.benchmarks.cases import GRADIENTS, MODES, ONE, Call, Comparison, Part, Workload, draw
from tests.benchmarks.peers import PEERS, Peer

RESULTS = Path(__file__).parent / "results" / "results.csv"
TIME, RATIO, SHARE = "time, ms", "time over logchain's", "share of the case"
VALUE, VALUE_ERROR, GRADIENT_ERROR = "log-partition", "error of the log-partition", "error of posteriors"
PEAK, EXCESS = "peak memory over inputs", "error over its tolerance, so not timed"

# relative errors of a peer's values and gradients up to which it is timed
TOLERANCES = 1e-3, 5e-2
# seconds of a single run of a peer, and of what is done before it
LONGEST, PREPARED = 0.4, 20.0
# seconds of all rounds of a pair, and their number
PATIENCE, ROUNDS = 2.0, (5, 15)
# v and c of one sequence on two ranks
RANKS = (1_000_000, 16), (20_000, 64), (4000, 256), (400, 1024)
# limits of two calls whose memory is measured
MOST_SECONDS, MOST_BYTES = 120.0, 16_000_000_000


class Row(NamedTuple):
    """One measured number, `kind/workload/mode` its case: a median and its quartiles, if it was repeated."""

    case: str
    provider: str
    metric: str
    value: float
    lower: float | None = None
    upper: float | None = None
    version: str = ""
    commit: str = ""
    hardware: str = ""
    date: str = ""

    @classmethod
    def of(cls, case: str, provider: str, metric: str, values: Sequence[float]) -> "Row":
        lower, median, upper = statistics.quantiles(values, n=4)
        return cls(case, provider, metric, median, lower, upper)


def read(path: Path = RESULTS) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    numbers = ("value", "lower", "upper")
    return [Row(**line | {name: float(line[name]) if line[name] else None for name in numbers}) for line in lines]


def keep(rows: Sequence[Row], path: Path = RESULTS) -> None:
    """Writes rows in the place of those of the same case and provider."""
    replaced, table = {row[:2] for row in rows}, {row[:3]: row for row in rows}
    kept = {row[:3]: row for row in read(path) if row[:2] not in replaced or row[:3] in table}
    unfinished = path.with_suffix(".new")
    with unfinished.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        for row in (kept | table).values():
            writer.writerow([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row])
    unfinished.replace(path)


def machine(packages: str = "torch") -> dict[str, str]:
    """Where and with what numbers are measured; packages are separated by commas."""
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", info.read_text() if info.exists() else "")
    names = dict.fromkeys(("torch", "numpy", "scipy", *packages.split(", ")))
    command = ["git", "describe", "--always", "--dirty=+"]
    described = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=False)
    return {
        "version": ", ".join([f"python {platform.python_version()}", *(f"{n} {metadata.version(n)}" for n in names)]),
        "commit": described.stdout.strip(),
        "hardware": f"{models[0] if models else platform.machine()}, {max(len(models), 1)} cores",
        "date": datetime.date.today().isoformat(),
    }


def map_blocks_from(size: int) -> None:
    """Allocate blocks of at least `size` bytes in pages that are returned when they are freed, and smaller ones not."""
    if sys.platform == "linux":
        mallopt, trim_threshold, mmap_threshold = ctypes.CDLL(None).mallopt, -1, -3
        mallopt(mmap_threshold, size)
        mallopt(trim_threshold, 2**31 - 1)


def in_turns(calls: Sequence[Call]) -> list[list[float]]:
    """Seconds of each call, round by round; short calls run many times in a row."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    timers = [timeit.Timer(call, timer=clock) for call in calls]
    once = [min(timer.repeat(2, 1)) for timer in timers]
    repeats = [max(1, int(0.004 / max(seconds, 1e-6))) for seconds in once]
    a_round = sum(seconds * count for seconds, count in zip(once, repeats, strict=True))
    rounds = max(ROUNDS[0], min(ROUNDS[1], int(PATIENCE / a_round)))
    pairs = list(zip(timers, repeats, strict=True))
    times = [[timer.timeit(count) / count for timer, count in pairs] for _ in range(rounds)]
    return [list(column) for column in zip(*times, strict=True)]


def compare(comparison: Comparison) -> Iterator[Row]:
    """Logchain's time, the others' times, and their ratios, each in turns with logchain alone."""
    map_blocks_from(32 << 20)  # so that calls do not pay for pages each time
    case, calls = comparison
    parts = {name: call if isinstance(call, Part) else Part(call, 1.0) for name, call in calls.items()}
    ours = parts.pop("logchain").call
    times = {name: in_turns([ours, part.call]) for name, part in parts.items()} or {"": in_turns([ours])}
    yield Row.of(case, "logchain", TIME, [1e3 * seconds for seconds in next(iter(times.values()))[0]])
    for name, (_, share) in parts.items():
        yield Row.of(case, name, TIME, [1e3 * seconds / share for seconds in times[name][1]])
        yield Row.of(case, name, RATIO, [other / own / share for own, other in zip(*times[name], strict=True)])
        if share < 1:
            yield Row(case, name, SHARE, share)


def part_of(peer: Peer, case: cases.Case) -> cases.Case:
    """As much of a case as a run may take: from one sequence of few steps to all sequences, then to all steps."""
    peer.make(case.part(1, 3))()  # imports, and what is compiled for all sizes
    (n, v), sequences, steps = case.x.shape[:2], 1, 8
    share = 0.0
    while share < 1 / 4 and (sequences, steps) != (n, v):
        sequences, steps = (min(4 * sequences, n), steps) if sequences < n else (n, min(4 * steps, v))
        start = time.monotonic()
        run = peer.make(case.part(sequences, steps))
        prepared = time.monotonic() - start
        seconds = min(timeit.repeat(run, timer=time.process_time, number=1, repeat=3))  # the first may compile
        share = max(seconds / LONGEST, prepared / PREPARED)
    return case.part(sequences, steps)


def worst(values: Any, exact: np.ndarray) -> tuple[float, float]:
    """The largest error, infinite where one number is and the other is not, and the value that has it."""
    numbers = np.broadcast_to(np.stack([np.asarray(row, np.float64) for row in values]), exact.shape).ravel()
    with np.errstate(invalid="ignore"):  # of equal infinities
        error = np.where(numbers == exact.ravel(), 0.0, np.abs(numbers - exact.ravel()))
    return float(error.max()), float(numbers[error.argmax()])


def excess(answer: tuple[Any, Any], exact: cases.Truth) -> float:
    """The largest error of values and gradients over its tolerance."""
    parts = zip(answer, exact, TOLERANCES, strict=True)
    return np.max([worst(values, true)[0] / (rtol * max(1.0, np.abs(true).max())) for values, true, rtol in parts])


def peer(kind: str, workload: Workload, name: str) -> Iterator[Row]:
    """A peer's time in turns with logchain's, if its values agree with float64."""
    case, peer = draw(workload), PEERS[name]
    key, part = f"{kind}/{workload}/{GRADIENTS}", case if name == "logchain" else part_of(peer, case)
    ours, theirs = PEERS["logchain"].make(case), peer.make(part)
    if not peer.floor and not (error := excess(theirs(), cases.truth(part))) <= 1:
        yield Row(key, name, EXCESS, error)
        return
    calls = {"logchain": ours, name: Part(theirs, part.x.numel() / case.x.numel())}
    yield from (row for row in compare(Comparison(key, calls)) if row.provider == name)


def errors(family: str, name: str) -> Iterator[Row]:
    """The largest errors of a peer."""
    chain, case = cases.accuracy()[family], f"accuracy/{family}"
    values, posteriors = PEERS[name].make(chain)()
    log_norm, states = cases.reference_truth(chain)
    error, value = worst(values, log_norm)
    yield Row(case, name, VALUE_ERROR, error)
    yield Row(case, name, VALUE, value)
    yield Row(case, name, GRADIENT_ERROR, worst(posteriors, states)[0])


def resident_peak(call: Call) -> int:
    """Bytes that this process holds at its peak during a call, above what it held before; needs Linux."""

    def status(field: str) -> int:
        return int(re.findall(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())[0]) << 10

    map_blocks_from(64 << 10)  # so that a call cannot use pages of an earlier one unseen
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is held now
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


def peak(workload: Workload, name: str) -> Iterator[Row]:
    """The peak of resident memory over the bytes of the inputs; results and gradients count."""
    import resource  # of Unix alone

    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    case, make = draw(workload), PEERS[name].make
    make(case.part(1, 3))()  # imports, and what is compiled for all sizes
    run = make(case)
    held = [resident_peak(run) for _ in range(2)][1]  # the first may compile
    yield Row(f"memory/{workload}/{GRADIENTS}", name, PEAK, held / sum(operand.nbytes for operand in case))


def of_durations(c: int, longest: int, n: int = 8, v: int = 1000) -> Iterator[Row | Comparison]:
    """Times, and the peak of memory over the bytes of x, of providers that compute the whole case."""
    for comparison in structures.durations(c, longest, n, v):
        yield comparison
        for name, call in comparison.calls.items():
            if not isinstance(call, Part):
                yield Row(comparison.case, name, PEAK, resident_peak(call) / (4 * n * v * c))


def on_rank(rank: int, v: int, c: int, mode: str, rounds: int) -> list[list[float]]:
    """Wall and CPU seconds of one process and of this rank's part of the variables, round by round."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    (x, bulk, p0), make = draw(Workload(1, v, c, ONE)), cases.with_gradients if mode == GRADIENTS else partial
    whole, part = (x[0], bulk[0], p0), (x[0, v * rank // 2 : v * (rank + 1) // 2].clone(), bulk[0], p0)
    cases.agree(logchain.product(*whole), logchain.distributed.product(*part))
    single = make(partial(logchain.product, strategy="sequential"), *whole) if rank == 0 else lambda: None
    sharded, clocks = make(logchain.distributed.product, *part), (time.perf_counter, time.process_time)
    runs = [(call, dist.barrier, clock, 1) for call in (single, sharded) for clock in clocks]
    return [[timeit.timeit(*run) for run in runs] for _ in range(rounds)]


def two_ranks(v: int, c: int, rounds: int = 15) -> Iterator[Row]:
    """One process compared with two ranks of one thread each over loopback; the slower rank counts."""
    from tests.distributed.processes import Team

    with tempfile.TemporaryDirectory() as folder, Team(2, Path(folder), timeout=60) as team:
        for mode in MODES:
            seconds = np.array(team.values(on_rank, v, c, mode, rounds)).max(0)  # (round, 4)
            single, single_cpu, ranks, ranks_cpu = seconds.T
            case = f"ranks/v={v} c={c}, two ranks/{mode}"
            yield Row.of(case, "logchain", TIME, 1e3 * ranks)
            yield Row.of(case, "one process", TIME, 1e3 * single)
            yield Row.of(case, "one process", RATIO, single / ranks)
            yield Row.of(case, "one process, CPU time", RATIO, single_cpu / ranks_cpu)


class Task(NamedTuple):
    """A function of rows or comparisons that another process runs; its name is `kind/workload/provider`.

    The process is killed after `limit` seconds without a row.
    """

    name: str
    function: Callable[..., Iterable[Row | Comparison]]
    arguments: tuple[Any, ...] = ()
    packages: str = "torch"
    threads: int = 1
    limit: float = 300.0


def tasks() -> list[Task]:
    """All cases."""
    result = []
    workloads = [("peers", workload) for workload in cases.WORKLOADS]
    workloads += [("scaling", workload) for sweep in cases.SCALING.values() for workload in sweep]
    for name, (_, package, matrices, floor) in PEERS.items():
        for kind, workload in workloads:
            if workload.matrices in matrices and (kind == "peers" or name in cases.SCALED):
                result.append(Task(f"{kind}/{workload}/{name}", peer, (kind, workload, name), package))
        families = [] if floor else cases.accuracy()
        memory = [] if floor else [workload for workload in cases.MEMORY if workload.matrices in matrices]
        result += [Task(f"accuracy/{family}/{name}", errors, (family, name), package) for family in families]
        for workload in memory:
            result.append(Task(f"memory/{workload}/{name}", peak, (workload, name), package, limit=MOST_SECONDS))
    for size in cases.DECODED:
        result.append(Task("paths/n={} v={} c={}/viterbi".format(*size), cases.viterbi, size, "hmmlearn, torch-struct"))
    return [
        *result,
        Task("layers/CRF", cases.crf, packages="pytorch-crf", threads=2),
        *(
            Task("layers/HMM n={} v={} c={}".format(*size), cases.hmm, size, "hmmlearn, pomegranate", threads=2)
            for size in cases.FITTED
        ),
        *(Task(f"layers/circuits/threads={count}", cases.circuits, threads=count) for count in (1, 2)),
        *(Task(f"sharpness/{sharp[0]}", cases.sharpness, sharp) for sharp in cases.SHARP),
        *(Task(f"structures/{make.__name__}", make) for make in structures.STRUCTURES),
        *(
            Task("durations/c={} D={}".format(*size), of_durations, size, "torch-struct")
            for size in structures.DURATIONS
        ),
        *(Task(f"schedules/{workload}", cases.schedules, (workload,), threads=count) for count, workload in cases.CUT),
        *(Task(f"ranks/v={v} c={c}", two_ranks, (v, c), threads=2) for v, c in RANKS),
    ]


def work(task: Task, sender: Any) -> None:
    """A task, in its process."""
    warnings.simplefilter("ignore")  # the peers'
    torch.set_num_threads(task.threads)
    if task.threads == 1 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    for item in task.function(*task.arguments):
        for row in compare(item) if isinstance(item, Comparison) else [item]:
            sender.send(row)


def measure(task: Task) -> list[Row]:
    """The rows of a task; those before its process ended, if a peer ends it."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process, rows, place = context.Process(target=work, args=(task, sender)), [], machine(task.packages)
    process.start()
    sender.close()
    with suppress(EOFError):
        while receiver.poll(task.limit):
            rows.append(receiver.recv()._replace(**place))
            print(*rows[-1][:4], sep="  ", flush=True)
    process.join(10)
    process.kill()
    process.join()
    if process.exitcode:
        print(f"{task.name}: ended with {process.exitcode}", flush=True)
    return rows


def main(patterns: Sequence[str] = (), path: Path = RESULTS) -> None:
    """Measures the tasks whose names contain a pattern, in which * is anything, or all."""
    chosen = [task for task in tasks() if any(fnmatch(task.name, f"*{pattern}*") for pattern in patterns or [""])]
    if not chosen:
        raise SystemExit(f"no case has {' or '.join(patterns)} in its name")
    for task in chosen:
        try:
            keep(measure(task), path)
        except metadata.PackageNotFoundError as error:
            print(f"{task.name}: {error.name} is not installed")
