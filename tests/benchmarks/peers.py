"""What `product` costs on a CPU beside everybody else's: `python -m tests.benchmarks run peers`.

Each peer runs in a process of its own, held on one core, in turns with logchain; a ratio is one of medians of that
process's CPU time. A peer's answer is compared with float64 sums first. What takes long runs on the first sequences
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
import torch

from tests.benchmarks import aside, cases, kept, results
from tests.benchmarks.aside import Item, Said
from tests.benchmarks.cases import EACH, FULL, ONE, STEP, WORKLOADS, Case, Truth, Workload, draw
from tests.benchmarks.resident import resident_peak
from tests.benchmarks.results import FORWARD, GRADIENTS, Measured

STATES = "forward and backward, posteriors alone"
CPU = "CPU"

# seconds: of a peer's single run, of what is done before it, of all runs of a peer in a case
_MOST, _MADE, _PATIENCE = 0.4, 20.0, 0.6

_FEW_STEPS, _GROWTH, _MOST_ROUNDS = 32, 8, 15

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


def seconds(run: Run) -> float:
    """CPU time of one call, of all threads."""
    start = time.process_time()
    run()
    return time.process_time() - start


def slice_of(
    provider: Provider,
    case: Case,
    mode: str,
    *,
    clock: Callable[[Run], float] = seconds,
    made: float = _MADE,
) -> Case:
    """As much of the case as a run may take: from one sequence of few steps to all sequences, then to all steps.

    Its time may grow less than its size does, but not more, so that little is spent on what is too long.
    """
    n, v = case.x.shape[:2]
    if provider.whole:
        return case
    size = 1, min(v, _FEW_STEPS)
    while True:
        part = case.part(*size)
        start = time.monotonic()
        run = provider.make(part, mode)
        making = time.monotonic() - start
        run()
        slow = max(clock(run) / _MOST, making / made, 1 / _GROWTH)
        larger = (_grown(size[0], n, slow), size[1]) if size[0] < n else (n, _grown(size[1], v, slow))
        if larger == size:
            return part
        size = larger


def _grown(size: int, limit: int, slow: float) -> int:
    """A power of two, so that peers that are cut share the truth; or the limit."""
    longest = int(size / slow)
    return limit if longest >= limit else max(size, 1 << max(longest, 1).bit_length() - 1)


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


def measured(folder: Path, item: Item) -> Iterator[Measured]:
    """The errors, times and peak of one peer in one case."""
    provider, ours, mode = every()[item.provider], every()["logchain"], item.mode
    case = draw(item.workload)
    few = slice_of(provider, case, mode)
    theirs, own = provider.make(few, mode), ours.make(case, mode)
    found: list[float | None] = [None, None]
    if not provider.floor:
        found = errors(theirs(), cases.truth(item.workload, few, folder))
    own()
    (_, ours_taken, _), times = pair_seconds([own, theirs])
    share = few.x.numel() / case.x.numel()
    lower, taken, upper = (1e3 * spent / share for spent in times)
    peak = resident_peak(theirs) / 1e6 if sys.platform == "linux" else None
    yield Measured(*item.key, CPU, taken, lower, upper, ours_taken * 1e3, share, peak, *found)


def errors(answer: tuple[Any, Any], true: Truth) -> list[float | None]:
    """The largest of the values and of the gradients, of as many sequences as the truth has."""

    def numbers(found: Any) -> np.ndarray:
        if isinstance(found, torch.Tensor):
            return found.double().cpu().numpy()
        return np.stack([np.asarray(one, np.float64) for one in found])

    pairs = zip(answer, true, strict=True)
    return [None if found is None else float(np.abs(numbers(found)[: len(t)] - t).max()) for found, t in pairs]


def times(folder: Path, todo: Sequence[Item]) -> Iterator[Said]:
    """Cases of one peer, beside logchain."""
    return aside.attempts(todo, functools.partial(measured, folder))


def chosen(only: Sequence[str]) -> list[Provider]:
    """Providers by parts of their names, or all; floors among them."""
    return [one for one in every().values() if not only or any(text in one.name for text in only)]


def items(provider: Provider, workloads: Sequence[Workload], patterns: Sequence[str] = ()) -> list[Item]:
    """What to ask of a provider, with workloads by parts of their names, or all."""
    return [
        Item(one, provider.name, mode)
        for one in workloads
        for mode in provider.modes
        if one.matrices in provider.matrices and (one.matrices, mode) != (FULL, STATES)
        if not patterns or any(text in str(one) for text in patterns)
    ]


def main(only: Sequence[str] = (), patterns: Sequence[str] = ()) -> None:
    """Measure some providers in some workloads, or all in all, and write the results file after each provider."""
    with tempfile.TemporaryDirectory() as folder:
        task = functools.partial(times, Path(folder))
        for provider in chosen(only):
            found = aside.measure(provider.package, items(provider, WORKLOADS, patterns), task)
            kept.put(results.PEERS, *found, list(map(str, WORKLOADS)))


def every() -> dict[str, Provider]:
    """By name; a package is imported only when its provider runs."""
    from tests.benchmarks import peers_circuits, peers_floors, peers_formula, peers_hmm, peers_jax, peers_torch

    files = (peers_torch, peers_jax, peers_hmm, peers_circuits, peers_formula, peers_floors)
    return {provider.name: provider for file in files for provider in file.PROVIDERS}
