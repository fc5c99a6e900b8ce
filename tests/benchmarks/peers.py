"""What `product` costs on a CPU beside everybody else's: `python -m tests.benchmarks run peers`.

Each peer runs in a process of its own, held on one core, in turns with logchain; a ratio is one of medians of that
process's CPU time. A peer's answer is compared with the reference first. What takes long runs on the first sequences
and steps and counts in proportion, which `share` says: its work is linear in both.

    python -m tests.benchmarks run peers --only hmmlearn XLA --workloads c=64

measures some of them again, and leaves the other rows of the results file as they are. What is not installed or fails
is in `results/left_out.csv`, with the reason. Floors, which are the GEMMs and the bytes alone, run as peers without
an answer.
"""

import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.benchmarks import aside, cases, kept, results
from tests.benchmarks.aside import attempts
from tests.benchmarks.cases import EACH, FULL, ONE, STEP, WORKLOADS, Case, Workload, draw
from tests.benchmarks.kept import Missing
from tests.benchmarks.resident import resident_peak
from tests.benchmarks.results import FORWARD, GRADIENTS, Measured

STATES = "forward and backward, posteriors alone"
CPU, GPU = "CPU", "GPU"

# seconds: of a peer's single run, and of all runs of a peer in a case
_MOST, _PATIENCE = 0.4, 0.6

# where one sequence promises so many times more, all of them are not even tried
_FAR = 20

_FEW_STEPS, _MOST_ROUNDS = 33, 15

# numbers that the reference takes in a minute or so
_CHECKED = 16_000_000

# A run gives values, [n] or [n, c, c], and their gradients for x or None; what it may prepare before is not timed.
Run = Callable[[], tuple[Any, Any]]


class Provider(NamedTuple):
    """Who computes the chain: `make` prepares a run, `package` is what has to be installed."""

    name: str
    make: Callable[[Any, str], Run]
    package: str
    matrices: tuple[str, ...] = (ONE, STEP, EACH)
    modes: tuple[str, ...] = (FORWARD, GRADIENTS)
    # always runs on the whole: each new shape would be compiled
    whole: bool = False
    # computes no answer
    floor: bool = False
    devices: tuple[str, ...] = (CPU,)


def seconds(run: Run) -> float:
    """CPU time of one call, of all threads."""
    start = time.process_time()
    run()
    return time.process_time() - start


def slice_of(provider: Provider, case: Case, mode: str) -> Case:
    """As much of the case as a run may take."""
    n, v = case.x.shape[:2]
    if provider.whole or v <= _FEW_STEPS:
        return case
    for few in dict.fromkeys((1, n)):
        run = provider.make(case.part(few, _FEW_STEPS), mode)
        run()
        whole = seconds(run) * v / _FEW_STEPS
        if whole * n / few <= _MOST:
            return case
        if few < n and whole > _MOST:  # one sequence is too long already
            return case.part(1, max(_FEW_STEPS, _power(v * _MOST / whole)))
        if few < n and whole * n > _FAR * _MOST:
            return case.part(_power(_MOST / whole), v)
    steps = _power(v * _MOST / whole)
    return case.part(n, steps) if steps >= _FEW_STEPS else case.part(max(1, n * steps // _FEW_STEPS), _FEW_STEPS)


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


def measured(provider: Provider, ours: Provider, workload: Workload, mode: str, folder: Path) -> Iterator[Measured]:
    """The errors, times and peak of one peer in one case."""
    case = draw(workload)
    few = slice_of(provider, case, mode)
    errors = [None, None] if provider.floor else _errors(provider, workload, few, mode, folder)
    theirs, own = provider.make(few, mode), ours.make(case, mode)
    theirs(), own()
    (_, ours_taken, _), times = pair_seconds([own, theirs])
    share = few.x.numel() / case.x.numel()
    lower, taken, upper = (1e3 * spent / share for spent in times)
    peak = resident_peak(theirs) / 1e6 if sys.platform == "linux" else None
    yield Measured(str(workload), provider.name, mode, CPU, taken, lower, upper, ours_taken * 1e3, share, peak, *errors)


def _errors(provider: Provider, workload: Workload, case: Case, mode: str, folder: Path) -> list[float | None]:
    """The largest of values and of gradients, on as many steps as the reference can do."""
    n, v = case.x.shape[:2]
    case = case.part(n, max(1, min(v, v * _CHECKED // case.x.numel())))
    pairs = zip(provider.make(case, mode)(), cases.truth(workload, case, folder), strict=True)
    return [None if found is None else _error(found, true) for found, true in pairs]


def _error(found: Any, true: np.ndarray) -> float:
    return float(np.abs(np.stack([np.asarray(one, np.float64) for one in found]) - true).max())


def times(workloads: Sequence[Workload], folder: Path, name: str) -> Iterator[Measured | Missing]:
    """Every case of one peer, beside logchain."""
    providers = every()
    provider, ours = providers[name], providers["logchain"]
    todo = [
        (one, mode)
        for one in workloads
        for mode in provider.modes
        if one.matrices in provider.matrices and (one.matrices, mode) != (FULL, STATES)
    ]
    return attempts(name, todo, lambda workload, mode: measured(provider, ours, workload, mode, folder))


def chosen(only: Sequence[str]) -> list[Provider]:
    """Providers on a CPU by parts of their names, or all; floors among them."""
    providers = [one for one in every().values() if CPU in one.devices]
    return [one for one in providers if not only or any(text in one.name for text in only)]


def main(only: Sequence[str] = (), patterns: Sequence[str] = ()) -> None:
    """Measure some providers in some workloads, or all in all, and write the results file after each provider."""
    workloads = [one for one in WORKLOADS if not patterns or any(text in str(one) for text in patterns)]
    with tempfile.TemporaryDirectory() as folder:
        task = functools.partial(times, workloads, Path(folder))
        for provider in chosen(only):
            new, missing = aside.measure(provider.name, provider.package, task)
            kept.keep(results.PEERS, new, list(map(str, WORKLOADS)))
            kept.leave_out("peers", new, missing)
    elsewhere = [one.name for one in every().values() if CPU not in one.devices]
    kept.leave_out("peers", [], [Missing("", "", name, "", "computes on a GPU alone") for name in elsewhere])


def every() -> dict[str, Provider]:
    """By name; a package is imported only when its provider runs."""
    from tests.benchmarks import peers_circuits, peers_floors, peers_formula, peers_hmm, peers_jax, peers_torch

    files = (peers_torch, peers_jax, peers_hmm, peers_circuits, peers_formula, peers_floors)
    return {provider.name: provider for file in files for provider in file.PROVIDERS}
