"""What `product` costs on a GPU beside everybody else's: `python -m tests.benchmarks gpu`.

Each provider has a process of its own and an equal part of the time; the most telling workloads come first. An answer
is compared with float64 sums of a few sequences, then timed on several sets of inputs, and logchain right after it.
What takes long runs on the first steps and counts in proportion, which `share` says; sequences stay, since they run
side by side. A case that takes too long or breaks the device ends its process, and another one goes on with the next
case. The next call goes on with what has no row of this commit and device. What fails or is not installed is in
`results/left_out.csv`, with the reason.
"""

import contextlib
import functools
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from tests.benchmarks import aside, cases, kept, peers, results
from tests.benchmarks.aside import Item, Said
from tests.benchmarks.cases import EACH, FULL, ONE, STEP, WORKLOADS, Case, Workload, draw
from tests.benchmarks.device import Device
from tests.benchmarks.kept import Missing
from tests.benchmarks.peers import GPU, Provider, Run
from tests.benchmarks.results import MODES, Measured, digits, machine

GROUP = "peers on a GPU"

# exit codes: everything was measured, something of ours failed, time ran out
DONE, FAILED, CUT = 0, 1, 3

TINY = [Workload(3, 5, 4, matrices) for matrices in (STEP, EACH, FULL, ONE)]

# equal parts of the time for logchain, which computes what is true, and measures the floors too
_OURS = 3

# seconds: of one item with its compilation, on a device and in a dry run, which may compile for a CPU
_STUCK = (90.0, 300.0)

# seconds: of all runs of a provider, of one run, of what is done before it, which may be a compilation
_PATIENCE, _MOST, _MADE = 0.12, 0.15, 3.0

# sets of inputs that are taken in turns, at most
_SETS = 8

# sequences whose answer is checked, and numbers in them
_SEQUENCES, _CHECKED = 4, 4_000_000


@functools.lru_cache(maxsize=1)
def on_device(workload: Workload, device: str) -> Case:
    """The same numbers as on a CPU."""
    case = draw(workload)
    return type(case)(*(tensor.to(device) for tensor in case))


def prepared(device: Device, provider: Provider, case: Case, mode: str) -> list[Run]:
    """Calls on several sets of inputs, each called once; on fewer sets if they are slow, which move more than a cache.

    What is prepared for one call may be a compilation.
    """
    start = time.monotonic()
    calls = [_fresh(provider, case, mode)]
    making = time.monotonic() - start
    slow = max(device.seconds(calls[0]) / _PATIENCE, making / _MADE)
    size = sum(tensor.nbytes for tensor in case)
    sets = min(_SETS, device.sets(size), int(1 / max(slow, 1e-9)))
    return calls + [_fresh(provider, case, mode) for _ in range(sets - 1)]


def _fresh(provider: Provider, case: Case, mode: str) -> Run:
    """A call on inputs of its own, which has been called."""
    call = provider.make(type(case)(*(tensor.clone() for tensor in case)), mode)
    call()
    return call


def measured(device: Device, folder: Path, item: Item) -> Iterator[Measured]:
    """The errors, times and peak of one provider in one case."""
    provider, ours, mode = peers.every()[item.provider], peers.every()["logchain"], item.mode
    case = on_device(item.workload, device.name)
    few = peers.slice_of(provider, case, mode, sequences=len(case.x), clock=device.seconds, most=_MOST, made=_MADE)
    calls = prepared(device, provider, few, mode)
    found: list[float | None] = [None, None]
    if not provider.floor:
        found = checked(provider, item, few, calls[0], folder)
    times = device.quartiles(calls, _PATIENCE, graph=provider.floor)
    peak = device.peak(calls[0]) / 1e6
    calls.clear()
    share = few.x.numel() / case.x.numel()
    lower, middle, upper = (1e3 * spent / share for spent in times)
    own = middle
    if provider.name != ours.name:
        own = 1e3 * device.quartiles(prepared(device, ours, case, mode), _PATIENCE)[1]
    yield Measured(*item.key, GPU, middle, lower, upper, own, share, peak, *found)


def checked(provider: Provider, item: Item, case: Case, call: Run, folder: Path) -> list[float | None]:
    """The errors of a few sequences; of very large stacks, those of their first matrices."""
    n, v = case.x.shape[:2]
    size = case.x[:_SEQUENCES].numel()
    if size > _CHECKED:
        case = case.part(n, max(2, v * _CHECKED // size))
        call = provider.make(case, item.mode)
    some = case.part(min(n, _SEQUENCES), case.x.shape[1])
    return peers.errors(call(), cases.truth(item.workload, some, folder))


def times(dry: bool, folder: Path, end: float, todo: Sequence[Item]) -> Iterator[Said]:
    """The rows of a process, until it is done, its time is over, or the device is lost."""
    if hasattr(os, "sched_setaffinity"):  # launching is no work for one core alone
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
    device = Device(dry)
    for item in todo:
        if time.monotonic() > end:
            yield item
            yield Missing("", *item.key, aside.LATE)
            continue
        yield from aside.attempts([item], functools.partial(measured, device, folder))
        if not device.answers():
            return


def hardware(dry: bool) -> str:
    """The device with its driver, as results name it."""
    if dry:
        return "CPU, dry run"
    major, minor = torch.cuda.get_device_capability()
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = []
    with contextlib.suppress(OSError):
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    return f"{torch.cuda.get_device_name()}, capability {major}.{minor}, driver {driver[0] if driver else 'unknown'}"


class Files:
    """The results of a folder, to which rows of this device are added as they come."""

    def __init__(self, folder: Path, dry: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.peers, self.left_out = folder / "peers.csv", folder / "left_out.csv"
        self.hardware, commit = hardware(dry), machine()["commit"]
        here = (GPU, self.hardware, commit)
        rows = results.read(self.peers, Measured)
        self.rows = [row for row in rows if (row.device, row.hardware, row.commit) == here]
        failed = [entry for entry in kept.left_out(self.left_out) if (entry.results, entry.commit) == (GROUP, commit)]
        self.known = {row[:3] for row in self.rows} | {entry[1:4] for entry in failed if entry.reason != aside.LATE}

    def tell(self, row: Measured) -> None:
        """Put a row in the place of an older one of its case."""
        self.rows.append(row._replace(hardware=self.hardware))
        kept.keep(self.peers, self.rows[-1:], list(map(str, WORKLOADS)))

    def tell_missing(self, rows: Sequence[Measured], missing: Sequence[Missing]) -> None:
        """Write down what has no row, and why."""
        kept.leave_out(GROUP, rows, missing, self.left_out)


def processes(workloads: Sequence[Workload], only: Sequence[str] = ()) -> list[tuple[str, list[Item]]]:
    """Package and items of each process: logchain with the floors first, then everybody else on a GPU."""
    every = [one for one in peers.every().values() if GPU in one.devices or one.floor]
    together = [one for one in every if one.floor or one.name == "logchain"]
    pairs = []
    for group in [together, *([one] for one in every if one not in together)]:
        named = [one for one in group if not only or any(text in one.name for text in only)]
        items = [item for one in named for item in peers.items(one, workloads) if item.mode in MODES]
        items.sort(key=lambda item: (workloads.index(item.workload), MODES.index(item.mode)))
        # logchain is this repository, installed or not
        package = "torch" if group is together else group[0].package
        pairs += [(package, items)] if items else []
    return pairs


def measure(folder: Path, minutes: float, only: Sequence[str] = (), dry: bool = False) -> int:
    """An exit code; what a peer cannot do is no failure."""
    end = time.monotonic() + (3600 if dry else 60 * minutes)
    files = Files(folder, dry)
    todo, missing = [], []
    for package, items in processes(TINY if dry else WORKLOADS, only):
        left = [item for item in items if item.key not in files.known]
        todo += [(package, left)] if left else []
    with tempfile.TemporaryDirectory() as shared:
        for i, (package, items) in enumerate(todo):
            others = len(todo) - i - 1
            parts = _OURS if i == 0 else 1
            now = time.monotonic()
            stop = now + (end - now) * parts / (parts + others)
            task = functools.partial(times, dry, Path(shared), stop)
            rows, left_out = aside.measure(package, items, task, silence=_STUCK[dry], end=stop, tell=files.tell)
            files.tell_missing(rows, left_out)
            missing += left_out
    files.tell_missing([], [Missing("", "", "jax, dynamax, numpyro", "", "not tried on a GPU")])
    return summary(files, missing)


def summary(files: Files, missing: Sequence[Missing]) -> int:
    """The exit code; prints the table, and what is missing."""
    print(*table(files.rows), f"{files.hardware}; `?`: off by more than 0.01", sep="\n")
    late = [entry for entry in missing if entry.reason == aside.LATE]
    ours = [entry for entry in missing if entry.provider == "logchain" and entry not in late]
    for entry in ours:
        print(f"FAILED {entry.workload} {entry.mode}: {entry.reason}")
    if late:
        print(f"NO TIME FOR {len(late)}, the first of them {late[0].workload} {late[0].provider} {late[0].mode}")
    return FAILED if ours else CUT if late else DONE


def table(rows: Sequence[Measured]) -> list[str]:
    """Of each workload and mode logchain's time, and everybody's in multiples of it; the most telling last."""
    lines: dict[tuple[str, str], list[str]] = {}
    for row in sorted(rows, key=lambda row: row.provider != "logchain"):
        off = "?" if row.value_error is not None and not row.value_error <= 0.01 else ""
        own = f"logchain {digits(row.median_ms)} ms{off}"
        theirs = f"{row.provider} {digits(row.ratio)}x{off}"
        lines.setdefault((row.workload, row.mode), []).append(own if row.provider == "logchain" else theirs)
    return [f"{workload} {mode}: {'; '.join(texts)}" for (workload, mode), texts in reversed(lines.items())]
