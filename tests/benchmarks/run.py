"""Measures cases, each in a process of its own, and keeps their rows in one results file.

Calls are timed in turns with logchain's in one process, by its CPU time on one thread, by wall time on more. A peer is
timed only if its values agree with float64. Slow peers run on the first sequences and steps, and count in proportion:
their work is linear in both.
"""

import csv
import ctypes
import datetime
import fnmatch
import functools
import gc
import multiprocessing
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.benchmarks import cases, comparisons
from tests.benchmarks.cases import GRADIENTS, MODES, STEP, Case, Truth, Workload, draw
from tests.benchmarks.comparisons import Call, Comparison
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
# seconds without a row after which a process is killed
SILENCE = 300.0
# limits of a call whose memory is measured
MOST_SECONDS, MOST_BYTES = 60, 16_000_000_000


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
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    names = dict.fromkeys(("torch", "numpy", "scipy", *packages.split(", ")))
    commit = ""
    with suppress(FileNotFoundError):  # no git
        command = ["git", "describe", "--always", "--dirty=+"]
        commit = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "version": ", ".join([f"python {platform.python_version()}", *(f"{n} {metadata.version(n)}" for n in names)]),
        "commit": commit,
        "hardware": f"{models[0] if models else platform.machine()}, {max(len(models), 1)} cores",
        "date": datetime.date.today().isoformat(),
    }


# times


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Where torch computes on so many."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_turns(calls: Sequence[Call]) -> list[list[float]]:
    """Seconds of each call, round by round; short calls run many times in a row."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def seconds(call: Call, repeats: int = 1) -> float:
        start = clock()
        for _ in range(repeats):
            call()
        return (clock() - start) / repeats

    once = [min(seconds(call) for _ in range(2)) for call in calls]
    repeats = [max(1, int(0.004 / max(spent, 1e-6))) for spent in once]
    a_round = sum(spent * repeat for spent, repeat in zip(once, repeats, strict=True))
    rounds = max(ROUNDS[0], min(ROUNDS[1], int(PATIENCE / a_round)))
    times = [[seconds(*pair) for pair in zip(calls, repeats, strict=True)] for _ in range(rounds)]
    return [list(column) for column in zip(*times, strict=True)]


def compare(comparison: Comparison) -> Iterator[Row]:
    """Logchain's time, the others' times, and their ratios, each in turns with logchain alone."""
    case, calls, shares = comparison
    ours, others = calls["logchain"], {name: call for name, call in calls.items() if name != "logchain"}
    times = {name: in_turns([ours, call]) for name, call in others.items()} or {"": in_turns([ours])}
    yield Row.of(case, "logchain", TIME, [1e3 * spent for spent in next(iter(times.values()))[0]])
    for name in others:
        share = shares.get(name, 1.0)
        yield Row.of(case, name, TIME, [1e3 * spent / share for spent in times[name][1]])
        yield Row.of(case, name, RATIO, [theirs / own / share for own, theirs in zip(*times[name], strict=True)])
        if share < 1:
            yield Row(case, name, SHARE, share)


# peers


def part_of(peer: Peer, case: Case, mode: str) -> Case:
    """As much of a case as a run may take: from one sequence of few steps to all sequences, then to all steps."""

    def grown(size: int, limit: int, slow: float) -> int:
        longest = int(size / slow)
        return limit if longest >= limit else max(size, 1 << max(longest, 1).bit_length() - 1)

    n, v = case.x.shape[:2]
    if peer.whole:
        return case
    peer.make(case.part(1, 3), mode)()  # imports, and what is compiled for all sizes
    size = 1, min(v, 32)
    while True:
        part = case.part(*size)
        start = time.monotonic()
        run = peer.make(part, mode)
        prepared = time.monotonic() - start
        run()
        start = time.process_time()
        run()
        # its time may grow less than its size, but not more
        slow = max((time.process_time() - start) / LONGEST, prepared / PREPARED, 1 / 8)
        larger = (grown(size[0], n, slow), size[1]) if size[0] < n else (n, grown(size[1], v, slow))
        if larger == size:
            return part
        size = larger


def excess(answer: tuple[Any, Any], exact: Truth) -> float:
    """The largest error of values and gradients over its tolerance."""
    ratios = [0.0]
    for values, true, tolerance in zip(answer, exact, TOLERANCES, strict=True):
        if values is not None:
            numbers = np.stack([np.asarray(row, np.float64) for row in values])
            ratios.append(np.abs(numbers - true).max() / (tolerance * max(1.0, np.abs(true).max())))
    return float(np.max(ratios))


def peer(kind: str, workload: Workload, name: str) -> Iterator[Row]:
    """A peer's time in turns with logchain's, if its values agree with float64."""
    case, peer = draw(workload), PEERS[name]
    for mode in MODES:
        key, part = f"{kind}/{workload}/{mode}", part_of(peer, case, mode)
        calls = {"logchain": PEERS["logchain"].make(case, mode), name: peer.make(part, mode)}
        if not peer.floor and not (error := excess(calls[name](), cases.truth(part))) <= 1:
            yield Row(key, name, EXCESS, error)
            continue
        rows = compare(Comparison(key, calls, {name: part.x.numel() / case.x.numel()}))
        yield from (row for row in rows if row.provider == name)


def errors(family: str, name: str) -> Iterator[Row]:
    """The largest errors of a peer, infinite where one number is and the other is not."""
    chain, case = cases.accuracy()[family], f"accuracy/{family}"

    def worst(values: Any, exact: np.ndarray) -> tuple[float, float]:
        numbers = np.broadcast_to(np.stack([np.asarray(row, np.float64) for row in values]), exact.shape).ravel()
        with np.errstate(invalid="ignore"):  # of equal infinities
            error = np.where(numbers == exact.ravel(), 0.0, np.abs(numbers - exact.ravel()))
        return float(error.max()), float(numbers[error.argmax()])

    values, posteriors = PEERS[name].make(chain, GRADIENTS)()
    log_norm, states = cases.reference_truth(chain)
    error, value = worst(values, log_norm)
    yield Row(case, name, VALUE_ERROR, error)
    yield Row(case, name, VALUE, value)
    yield Row(case, name, GRADIENT_ERROR, worst(posteriors, states)[0])


# memory


def resident_peak(call: Call) -> int:
    """Bytes that this process holds at its peak during a call, above what it held before; needs Linux."""

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is held now
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


def peak(workload: Workload, name: str, mode: str) -> Iterator[Row]:
    """The peak of resident memory over the bytes of the inputs; results and gradients count."""
    import resource  # of Unix alone

    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    case, make = draw(workload), PEERS[name].make
    make(case.part(1, 3), mode)()  # imports, and what is compiled for all sizes
    run = make(case, mode)
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)  # ends the process
    held = resident_peak(run)
    if signal.setitimer(signal.ITIMER_PROF, 0)[0] > MOST_SECONDS - 10:
        held = resident_peak(run)  # without its compilation
    yield Row(f"memory/{workload}/{mode}", name, PEAK, held / sum(operand.nbytes for operand in case))


# ranks


def two_ranks(v: int, c: int, rounds: int = 15) -> Iterator[Row]:
    """One process compared with two ranks of one thread each over loopback; the slower rank counts."""
    from tests.distributed.processes import Team

    with tempfile.TemporaryDirectory() as folder, Team(2, Path(folder), timeout=60) as team:
        for mode in MODES:
            seconds = np.array(team.values(comparisons.ranks, v, c, mode, rounds)).max(0)  # (round, 4)
            single, single_cpu, ranks, ranks_cpu = seconds.T
            case = f"ranks/v={v} c={c}, two ranks/{mode}"
            yield Row.of(case, "logchain", TIME, 1e3 * ranks)
            yield Row.of(case, "one process", TIME, 1e3 * single)
            yield Row.of(case, "one process", RATIO, single / ranks)
            yield Row.of(case, "one process, CPU time", RATIO, single_cpu / ranks_cpu)


# tasks


class Task(NamedTuple):
    """A function of rows or comparisons that another process runs; its name is `kind/workload/provider`."""

    name: str
    function: Callable[..., Iterable[Row | Comparison]]
    arguments: tuple[Any, ...] = ()
    threads: int = 1
    packages: str = "torch"


def tasks() -> list[Task]:
    """All cases."""
    scaling = [workload for sweep in cases.SCALING.values() for workload in sweep]
    result = []
    for name, entry in PEERS.items():
        task = functools.partial(Task, packages=entry.package)
        kinds = {"peers": cases.WORKLOADS, "scaling": scaling if name in cases.SCALED else []}
        for kind, workloads in kinds.items():
            possible = [workload for workload in workloads if workload.matrices in entry.matrices]
            result += [task(f"{kind}/{workload}/{name}", peer, (kind, workload, name)) for workload in possible]
        if not entry.floor:
            result += [task(f"accuracy/{family}/{name}", errors, (family, name)) for family in cases.accuracy()]
            for workload in cases.MEMORY if STEP in entry.matrices else []:
                result += [task(f"memory/{workload}/{mode}/{name}", peak, (workload, name, mode)) for mode in MODES]
    viterbi = functools.partial(Task, function=comparisons.viterbi, packages="hmmlearn, torch-struct")
    result += [
        Task("layers/CRF", comparisons.crf, threads=2, packages="pytorch-crf"),
        Task("layers/HMM", comparisons.hmm, threads=2, packages="hmmlearn, pomegranate"),
        *(Task(f"layers/circuits/threads={count}", comparisons.circuits, threads=count) for count in (1, 2)),
        *(viterbi(f"paths/n={n} v={v} c={c}/viterbi", arguments=(n, v, c)) for n, v, c in comparisons.DECODED),
        *(Task(f"sharpness/{sharp[0]}", comparisons.sharpness, sharp) for sharp in comparisons.SHARP),
        *(Task(f"structures/{make.__name__}", make) for make in comparisons.STRUCTURES),
        Task("streams", comparisons.streams),
        *(Task(f"ranks/v={v} c={c}", two_ranks, (v, c), threads=2) for v, c in comparisons.RANKS),
    ]
    return result


def work(task: Task, sender: Any) -> None:
    """A task, in its process."""
    warnings.simplefilter("ignore")  # the peers'
    torch.set_num_threads(task.threads)
    if task.threads == 1 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if sys.platform == "linux":  # freed memory stays with the process, so that pages are not paid for in each call
        mallopt, trim_threshold, mmap_threshold = ctypes.CDLL(None).mallopt, -1, -3
        mallopt(mmap_threshold, 32 << 20), mallopt(trim_threshold, 2**31 - 1)
    for item in task.function(*task.arguments):
        for row in compare(item) if isinstance(item, Comparison) else [item]:
            sender.send(row)


def measure(task: Task, silence: float = SILENCE) -> list[Row]:
    """The rows of a task; those before its process ended, if a peer ends it."""
    try:
        place = machine(task.packages)
    except metadata.PackageNotFoundError as error:
        print(f"{task.name}: {error.name} is not installed")
        return []
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process, rows = context.Process(target=work, args=(task, sender)), []
    process.start()
    sender.close()
    try:
        while receiver.poll(silence):
            rows.append(receiver.recv()._replace(**place))
            print("  ".join(map(str, rows[-1][:4])), flush=True)
    except EOFError:
        process.join(10)
    process.kill()
    process.join()
    if process.exitcode:
        print(f"{task.name}: ended with {process.exitcode}", flush=True)
    return rows


def main(patterns: Sequence[str] = (), path: Path = RESULTS) -> None:
    """Measures the tasks whose names contain a pattern, in which * is anything, or all."""
    chosen = [
        task for task in tasks() if any(fnmatch.fnmatch(task.name, f"*{pattern}*") for pattern in patterns or [""])
    ]
    if not chosen:
        raise SystemExit(f"no case has {' or '.join(patterns)} in its name")
    for task in chosen:
        if rows := measure(task):
            keep(rows, path)
