"""What `product` costs on a GPU beside everybody else's: `python -m tests.benchmarks gpu`.

Each provider has a process of its own, which starts while another one measures, and an equal part of the time; the
most telling workloads come first. An answer is compared with float64 sums of a few sequences, then timed by CUDA
events over several sets of inputs, and logchain right after it. Floors are captured as a CUDA graph, so that launching
is not in them. What takes long runs on the first steps and counts in proportion, which `share` says; sequences stay,
since they run side by side. A case that takes too long or breaks the device ends its process, and another one goes on
with the next case. The next call goes on with what has no row of this commit and device. What fails or is not installed
is in `results/left_out.csv`, with the reason.
"""

import contextlib
import fcntl
import functools
import math
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.benchmarks import aside, kept, peers, results
from tests.benchmarks.aside import Item, Said
from tests.benchmarks.cases import EACH, FULL, ONE, STEP, WORKLOADS, Workload, draw
from tests.benchmarks.gpu_case import measured, moved
from tests.benchmarks.kept import Missing
from tests.benchmarks.peers import GPU
from tests.benchmarks.results import MODES, Measured, digits, machine
from tests.benchmarks.session import STUCK, WORDS, Session, hardware

GROUP = "peers on a GPU"

# exit codes: everything was measured, something of ours failed, time ran out
DONE, FAILED, CUT = 0, 1, 3

TINY = [Workload(3, 5, 4, matrices) for matrices in (STEP, EACH, FULL, ONE)]

# logchain's process compiles, computes what is true, and measures the floors too
_OURS = 3


class Files:
    """The results of a folder, to which rows of this device are added as they come."""

    def __init__(self, folder: Path, dry: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.peers, self.left_out = folder / "peers.csv", folder / "left_out.csv"
        self.hardware, commit = hardware(dry), machine()["commit"]
        self.lock = threading.Lock()  # the next provider starts while one is measured
        self.rows = [
            row
            for row in results.read(self.peers, Measured)
            if (row.device, row.hardware, row.commit) == (GPU, self.hardware, commit)
        ]
        failed = [entry for entry in kept.left_out(self.left_out) if (entry.results, entry.commit) == (GROUP, commit)]
        self.known = {row[:3] for row in self.rows} | {entry[1:4] for entry in failed if entry.reason != aside.LATE}

    def tell(self, row: Measured) -> None:
        """Put a row in the place of an older one of its case."""
        with self.lock:
            self.rows.append(row._replace(hardware=self.hardware))
            kept.keep(self.peers, self.rows[-1:], list(map(str, WORKLOADS)))

    def tell_missing(self, rows: Sequence[Measured], missing: Sequence[Missing]) -> None:
        """Write down what has no row, and why."""
        with self.lock:
            kept.leave_out(GROUP, rows, missing, self.left_out)


def times(dry: bool, folder: Path, seconds: float, end: float, todo: Sequence[Item]) -> Iterator[Said]:
    """The rows of a process, until it is done, its `seconds` for each item are over, or the device is lost."""
    session, every = Session(dry=dry, end=end), peers.every()
    with session.alarm(STUCK[dry]), contextlib.suppress(Exception):  # imports; what fails is said below
        tiny = draw(Workload(2, 3, 4, todo[0].workload.matrices))
        every[todo[0].provider].make(moved(tiny, session.device), todo[0].mode)()
    with (folder / "device").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # one at a time; a process that ends lets go
        session.end = min(time.monotonic() + seconds * len(todo), end)
        yield from session.through(todo, lambda session, item: measured(session, folder, item))


def processes(workloads: Sequence[Workload], only: Sequence[str] = ()) -> list[tuple[str, list[Item]]]:
    """Package and items of each process: logchain with the floors first, then everybody else on a GPU."""
    every = [one for one in peers.every().values() if GPU in one.devices or one.floor]
    together = [one for one in every if one.floor or one.name == "logchain"]
    pairs = []
    for group in [together, *([one] for one in every if one not in together)]:
        chosen = [one for one in group if not only or any(text in one.name for text in only)]
        items = [item for one in chosen for item in peers.items(one, workloads) if item.mode in MODES]
        items.sort(key=lambda item: (workloads.index(item.workload), MODES.index(item.mode)))
        # logchain is this repository, installed or not
        package = "torch" if group is together else group[0].package
        pairs += [(package, items)] if items else []
    return pairs


def measure(folder: Path, minutes: float, only: Sequence[str] = (), dry: bool = False) -> int:
    """An exit code; what a peer cannot do is no failure."""
    end = time.monotonic() + (3600 if dry else 60 * minutes)
    files = Files(folder, dry)
    todo = []
    for package, items in processes(TINY if dry else WORKLOADS, only):
        left = [item for item in items if item.key not in files.known]
        todo += [(package, left)] if left else []
    weights = [_OURS, *[1] * len(todo)]
    with tempfile.TemporaryDirectory() as shared, ThreadPoolExecutor(2) as pool:

        def one(i: int) -> list[Missing]:
            # the one before has just begun
            seconds = (end - time.monotonic()) * weights[i] / sum(weights[max(i - 1, 0) : len(todo)])
            package, items = todo[i]
            task = functools.partial(times, dry, Path(shared), seconds / len(items), end)
            rows, missing = aside.measure(package, items, task, silence=math.inf, end=end, words=WORDS, tell=files.tell)
            files.tell_missing(rows, missing)
            return missing

        # while one measures, the next one starts
        missing = [entry for of_one in pool.map(one, range(len(todo))) for entry in of_one]
    files.tell_missing([], [Missing("", "", "jax, dynamax, numpyro", "", "not tried on a GPU")])
    for line in table(files.rows):
        print(line)
    print(f"{files.hardware}; `?`: off by more than 0.01")
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
