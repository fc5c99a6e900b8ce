"""What `product` costs on a CPU beside everybody else's: `python -m tests.benchmarks peers`.

Each peer runs in a process of its own, held on one core, in turns with logchain; a ratio is one of medians of that
process's CPU time. A peer's answer is compared with the reference first. What takes long runs on the first sequences
and steps and counts in proportion, which the row `share computed` says: its work is linear in both.

    python -m tests.benchmarks peers --only hmmlearn XLA --workloads c=64

measures some of them again, and leaves the other rows of the results file as they are. What is not installed or fails
is in `results/left_out.csv`, with the reason. Floors, which are the GEMMs and the bytes alone, run as peers without
an answer. The extra `peers` has some of the packages, the others are, where numpyro needs Python 3.11,

    pip install --no-deps torch-semiring-einsum nvidia-ml-py pomegranate apricot-select
    pip install funsor dynamax numpyro
"""

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from logchain import reference
from tests.benchmarks import aside, kept, report
from tests.benchmarks.aside import attempts
from tests.benchmarks.kept import Missing
from tests.benchmarks.report import FORWARD, GRADIENTS, Row

RESULTS = report.PEERS
STATES = "forward and backward, posteriors alone"
ONE, STEP, EACH = "one matrix", "shared bulk", "bulk per sequence"

# seconds: of a peer's single run, and of all runs of a peer in a case
_MOST, _PATIENCE = 0.4, 0.6

_FEW_STEPS, _MOST_ROUNDS = 33, 15

# steps that the reference takes in a minute or so
_CHECKED = 100_000


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
    Workload(500, 40, 200, STEP),
    Workload(256, 784, 64, STEP),
    Workload(1, 10_000, 100, ONE),
    Workload(32, 25, 20, EACH),
]


class Case(NamedTuple):
    """x [n, v, c], bulk [n or 1, v-1 or 1, c, c] and p0 [c] in float32."""

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
    # computes no answer
    floor: bool = False


def draw(workload: Workload) -> Case:
    """The same numbers for everybody; rows of bulk and p0 sum to 1."""
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


def pair_seconds(runs: Sequence[Run]) -> list[list[float]]:
    """Quartiles of the CPU time of one call of each, in turns, short ones many times in a row."""
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
    return [statistics.quantiles(found, n=4) for found in times]


def truth(workload: object, case: Case, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Log-partitions and posteriors by the reference, computed once for all providers."""
    n, v, _ = case.x.shape
    file = folder / f"{workload}, {n} {v}.npz"
    if not file.exists():
        forward, backward, log_norm = reference.forward_backward(*case)
        norm = np.where(np.isneginf(log_norm), 0.0, log_norm)[:, None, None]
        np.savez(file, log_norm=log_norm, states=np.exp(forward + backward - norm))
    found = np.load(file)
    return found["log_norm"], found["states"]


def rows_of(provider: Provider, ours: Provider, workload: Workload, mode: str, folder: Path) -> Iterator[Row]:
    """The errors and times of one peer in one case."""
    case = draw(workload)
    few = slice_of(provider, case, mode)
    row = functools.partial(Row, str(workload), provider.name, mode)
    theirs, own = provider.make(few, mode), ours.make(case, mode)
    values, posteriors = theirs()
    if values is not None and few.x.shape[1] <= _CHECKED:
        log_norm, states = truth(workload, few, folder)
        yield row("error of a log-partition", np.abs(np.asarray(values, np.float64) - log_norm).max(), "nats")
        if posteriors is not None:
            yield row("error of a posterior", np.abs(np.asarray(posteriors, np.float64) - states).max(), "")
    own()
    (_, ours_taken, _), (lower, taken, upper) = pair_seconds([own, theirs])
    share = few.x.numel() / case.x.numel()
    yield row("logchain's time beside it", ours_taken * 1e3, "ms")
    yield row("time", taken / share * 1e3, "ms")
    yield row("time, lower quartile", lower / share * 1e3, "ms")
    yield row("time, upper quartile", upper / share * 1e3, "ms")
    if provider.floor:
        yield row(f"logchain's time over {provider.name}", ours_taken / taken * share, "x")
    else:
        yield row(f"{provider.name}'s time over logchain's", taken / share / ours_taken, "x", ">= 1")
    if share < 1:
        yield row("share computed", share, "")


def times(workloads: Sequence[Workload], folder: Path, name: str) -> Iterator[Row | Missing]:
    """Every case of one peer, beside logchain."""
    providers = every()
    provider, ours = providers[name], providers["logchain"]
    cases = [(one, mode) for one in workloads if one.matrices in provider.matrices for mode in provider.modes]
    return attempts(name, cases, lambda workload, mode: rows_of(provider, ours, workload, mode, folder))


def chosen(only: Sequence[str]) -> list[Provider]:
    """Providers by parts of their names, or all; floors among them."""
    return [one for one in every().values() if not only or any(text in one.name for text in only)]


def rows(only: Sequence[str] = (), patterns: Sequence[str] = ()) -> list[Row]:
    """Every row of the results file, those of some providers and workloads measured anew; some minutes for all."""
    workloads = [one for one in WORKLOADS if not patterns or any(text in str(one) for text in patterns)]
    with tempfile.TemporaryDirectory() as folder:
        task = functools.partial(times, workloads, Path(folder))
        for provider in chosen(only):
            if provider.name != "logchain":
                new, missing = aside.measure(provider.name, provider.package, task)
                kept.keep(RESULTS, new, [str(workload) for workload in WORKLOADS])
                kept.leave_out("peers", new, missing)
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


def every() -> dict[str, Provider]:
    """By name; a package is imported only when its provider runs."""
    from tests.benchmarks import peers_floors, peers_jax, peers_more, peers_torch

    files = (peers_jax, peers_torch, peers_more, peers_floors)
    return {provider.name: provider for file in files for provider in file.PROVIDERS}
