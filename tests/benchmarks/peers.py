"""What `product` costs on a CPU beside everybody else's: `python -m tests.benchmarks peers`.

Each peer runs in a process of its own, held on one core, in turns with logchain; a ratio is one of medians of that
process's CPU time. A peer's answer is compared with the reference first. What takes long runs on the first sequences
and steps and counts in proportion, which the row `share computed` says: its work is linear in both.

    python -m tests.benchmarks peers --only hmmlearn XLA --workloads c=64

measures some of them again, and leaves the other rows of the results file as they are. Peers that are not installed
are left out; the extra `peers` has some of them, the others are, where numpyro needs Python 3.11,

    pip install --no-deps torch-semiring-einsum nvidia-ml-py pomegranate apricot-select
    pip install funsor dynamax numpyro
"""

import functools
import multiprocessing
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from logchain import reference
from tests.benchmarks import report
from tests.benchmarks.report import FORWARD, GRADIENTS, Row

RESULTS = report.PEERS
STATES = "forward and backward, posteriors alone"
ONE, STEP, EACH = "one matrix", "shared bulk", "bulk per sequence"

# seconds: of a peer's single run, of all runs of a peer in a case, and without a word from it
_MOST, _PATIENCE, _SILENCE = 0.4, 0.6, 300.0

_FEW_STEPS, _MOST_ROUNDS = 33, 15


class Workload(NamedTuple):
    """A dense chain: `matrices` is one for all steps, one for each step, or one for each step of each sequence."""

    n: int
    v: int
    c: int
    matrices: str

    def __str__(self) -> str:
        """As the results file names it."""
        return f"n={self.n} v={self.v} c={self.c}, {self.matrices}"


WORKLOADS = [
    Workload(1, 10_000, 16, ONE),
    Workload(1, 10_000, 16, STEP),
    Workload(1, 100_000, 4, ONE),
    Workload(1, 100_000, 4, STEP),
    Workload(10, 6, 40, ONE),
    Workload(10, 6, 40, STEP),
    Workload(32, 512, 64, ONE),
    Workload(32, 512, 64, STEP),
    Workload(8, 128, 64, EACH),
]


class Case(NamedTuple):
    """x [n, v, c], bulk [n or 1, v-1 or 1, c, c] and p0 [c] in float32; rows of bulk and p0 sum to 1."""

    x: Tensor
    bulk: Tensor
    p0: Tensor


# A run gives log-partitions [n], and posteriors [n, v, c] or None; what it may prepare before is not timed.
Run = Callable[[], tuple[Any, Any]]


class Provider(NamedTuple):
    """Who computes the chain: `make` prepares a run, `package` is what has to be installed."""

    name: str
    make: Callable[[Case, str], Run]
    package: str
    matrices: tuple[str, ...] = (ONE, STEP, EACH)
    modes: tuple[str, ...] = (FORWARD, GRADIENTS)
    # always runs on the whole: each new shape would be compiled
    whole: bool = False


def draw(workload: Workload) -> Case:
    """The same numbers for everybody."""
    n, v, c, matrices = workload
    generator = torch.Generator().manual_seed(v)
    x = torch.randn(n, v, c, generator=generator)
    sets, steps = (n if matrices == EACH else 1), (1 if matrices == ONE else v - 1)
    bulk = torch.rand(sets, steps, c, c, generator=generator).add_(0.01)
    p0 = torch.rand(c, generator=generator)
    return Case(x, bulk / bulk.sum(-1, keepdim=True), p0 / p0.sum())


def part(case: Case, n: int, v: int) -> Case:
    """The first sequences and steps."""
    bulk = case.bulk[: n if len(case.bulk) > 1 else 1, : max(v - 1, 1)]
    return Case(case.x[:n, :v].contiguous(), bulk.contiguous(), case.p0)


def seconds(run: Run) -> float:
    """CPU time of one call, of all threads."""
    start = time.process_time()
    run()
    return time.process_time() - start


def slice_of(provider: Provider, case: Case, mode: str) -> Case:
    """As much of the case as a run may take."""
    n, v, _ = case.x.shape
    if provider.whole or v <= _FEW_STEPS:
        return case
    for few in dict.fromkeys((1, n)):
        run = provider.make(part(case, few, _FEW_STEPS), mode)
        run()
        whole = seconds(run) * v / _FEW_STEPS
        if whole * n / few <= _MOST:
            return case
        if few < n and whole > _MOST:  # one sequence is too long already
            return part(case, 1, max(_FEW_STEPS, _power(v * _MOST / whole)))
    steps = _power(v * _MOST / whole)
    return part(case, n, steps) if steps >= _FEW_STEPS else part(case, max(1, n * steps // _FEW_STEPS), _FEW_STEPS)


def _power(number: float) -> int:
    """Of two, no more than the number: peers that are cut meet the same reference."""
    return 1 << max(int(number), 1).bit_length() - 1


def pair_seconds(runs: Sequence[Run]) -> list[float]:
    """Median CPU time of one call of each, in turns, short ones many times in a row."""
    once = [min(seconds(run) for _ in range(2)) for run in runs]
    repeats = [max(1, int(0.004 / max(spent, 1e-6))) for spent in once]
    a_round = sum(spent * repeat for spent, repeat in zip(once, repeats, strict=True))
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(max(3, min(_MOST_ROUNDS, int(_PATIENCE / a_round)))):
        for run, repeat, found in zip(runs, repeats, times, strict=True):
            start = time.process_time()
            for _ in range(repeat):
                run()
            found.append((time.process_time() - start) / repeat)
    return [statistics.median(found) for found in times]


def truth(workload: Workload, case: Case, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Log-partitions and posteriors by the reference, computed once for all providers."""
    n, v, _ = case.x.shape
    file = folder / f"{workload}, {n} {v}.npz"
    if not file.exists():
        forward, backward, log_norm = reference.forward_backward(*case)
        np.savez(file, log_norm=log_norm, states=np.exp(forward + backward - log_norm[:, None, None]))
    found = np.load(file)
    return found["log_norm"], found["states"]


def rows_of(provider: Provider, ours: Provider, workload: Workload, mode: str, folder: Path) -> Iterator[Row]:
    """The errors and times of one peer in one case."""
    case = draw(workload)
    few = slice_of(provider, case, mode)
    row = functools.partial(Row, str(workload), provider.name, mode)
    theirs, own = provider.make(few, mode), ours.make(case, mode)
    log_norm, states = truth(workload, few, folder)
    values, posteriors = theirs()
    yield row("error of a log-partition", np.abs(np.asarray(values, np.float64) - log_norm).max(), "nats")
    if posteriors is not None:
        yield row("error of a posterior", np.abs(np.asarray(posteriors, np.float64) - states).max(), "")
    own()
    times = pair_seconds([own, theirs])
    share = few.x.numel() / case.x.numel()
    yield row("logchain's time beside it", times[0] * 1e3, "ms")
    yield row("time", times[1] / share * 1e3, "ms")
    yield row(f"{provider.name}'s time over logchain's", times[1] / share / times[0], "x", ">= 1")
    if share < 1:
        yield row("share computed", share, "")


def child(name: str, workloads: Sequence[Workload], folder: Path, core: int, sender: Connection) -> None:
    """Everything of one peer, sent row by row; a text is the reason why there is none."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    providers = _providers()
    provider, ours = providers[name], providers["logchain"]
    try:
        sender.send(f"{provider.package} {metadata.version(provider.package)}")
    except metadata.PackageNotFoundError:
        sender.send(f"{name}: left out, {provider.package} is not installed")
        return
    for workload in workloads:
        for mode in provider.modes if workload.matrices in provider.matrices else ():
            try:
                for row in rows_of(provider, ours, workload, mode, folder):
                    sender.send(row)
            except Exception as error:  # what a peer cannot do is a finding
                sender.send(f"{name}, {workload}, {mode}: {traceback.format_exception_only(error)[-1][:300].strip()}")


def measure(provider: Provider, workloads: Sequence[Workload], folder: Path) -> tuple[list[Row], list[str]]:
    """The rows of one peer, from a process of its own, and what it says besides."""
    core = max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(provider.name, workloads, folder, core, sender))
    process.start()
    sender.close()
    found: list[Row] = []
    said: list[str] = []
    try:
        while receiver.poll(_SILENCE):
            item = receiver.recv()
            (found if isinstance(item, Row) else said).append(item)
            print("  ".join((*item[:4], item.text)) if isinstance(item, Row) else item, flush=True)
        said.append(f"{provider.name}: stopped, silent for {_SILENCE:g} s")
        print(said[-1], flush=True)
        process.kill()
    except EOFError:  # it has said everything
        pass
    process.join()
    return found, said


def rows(only: Sequence[str] = (), patterns: Sequence[str] = ()) -> list[Row]:
    """Every row of the results file, those of some providers and workloads measured anew; some minutes for all."""
    workloads = [one for one in WORKLOADS if not patterns or any(text in str(one) for text in patterns)]
    order = {str(workload): i for i, workload in enumerate(WORKLOADS)}
    with tempfile.TemporaryDirectory() as folder:
        for provider in _providers().values():
            if provider.name == "logchain" or (only and not any(text in provider.name for text in only)):
                continue
            new, said = measure(provider, workloads, Path(folder))
            place = report.machine()
            if new:
                place["versions"] += f", {said[0]}"
            replaced = {row[:3] for row in new}
            # read anew: another run may have written meanwhile
            found = report.read(RESULTS) if RESULTS.exists() else []
            found = [row for row in found if row[:3] not in replaced] + [row._replace(**place) for row in new]
            found.sort(key=lambda row: (order[row.workload], row.mode))
            report.write(found, RESULTS)
    return report.read(RESULTS)


def table(found: Sequence[Row]) -> str:
    """Each peer's time over logchain's; below 1 logchain loses."""
    ratios = {(r.provider, r.workload, r.mode): r.value for r in found if r.metric.endswith("over logchain's")}
    names = list(dict.fromkeys(name for name, *_ in ratios))
    lines = []
    for workload, mode in dict.fromkeys((r.workload, r.mode) for r in found):
        cells = sorted((ratios[key], name) for name in names if (key := (name, workload, mode)) in ratios)
        lines.append(f"{workload}, {mode}: " + ", ".join(f"{name} {ratio:.3g}" for ratio, name in cells))
    return "\n".join(lines)


def main(only: Sequence[str] = (), patterns: Sequence[str] = ()) -> None:
    """Measure, write the results file after each provider, and print the ratios."""
    print(table(rows(only, patterns)))


def _providers() -> dict[str, Provider]:
    """By name; a package is imported only when its provider runs."""
    from tests.benchmarks import peers_jax, peers_torch

    return {provider.name: provider for provider in (*peers_jax.PROVIDERS, *peers_torch.PROVIDERS)}
