"""Figures of a GPU: `python -m tests.benchmarks gpu`.

Each group runs in a process of its own, and a row is in the results file as soon as it is known. The next call goes on
with what has no row yet; what it needs for that lies beside the cache of kernels, in a folder named by the digest of
all files.
"""

import functools
import json
import math
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.benchmarks import aside, gpu_figures, kept, peers_gpu, results, session
from tests.benchmarks.aside import Item, Said
from tests.benchmarks.cases import WORKLOADS
from tests.benchmarks.kept import Missing
from tests.benchmarks.results import AnyRow, Measured, OnGpu

# exit codes: everything was measured, something failed, time ran out
DONE, FAILED, CUT = 0, 1, 3

# the most wanted first
GROUPS = (
    "arithmetic",
    "floors",
    "main job",
    "log_matmul",
    "own matrices",
    "one long chain",
    "wide",
    "peers",
    "accuracy",
    "others",
)
# of the time that is left: what comes after the peers is measured too
PEERS_PART = 0.8

MOST_CHARACTERS = 11_500


class Files:
    """Where rows go: this run's folder, the results files, and copies for a caller far away.

    A dry run leaves the results files of the repository alone.
    """

    def __init__(self, folder: Path, out: Path | None, dry: bool) -> None:
        self.folder, self.out = folder / results.digest(), out
        self.results = folder / "dry" if dry else results.FOLDER
        for path in (self.folder, self.results, *([out] if out else [])):
            path.mkdir(parents=True, exist_ok=True)
        self.hardware = session.hardware(dry)
        self.lock = threading.Lock()  # peers are prepared side by side
        self.finished_before = self.folder / "finished.jsonl"
        lines = self.finished_before.read_text().splitlines() if self.finished_before.exists() else []
        self.finished = {tuple(json.loads(line)) for line in lines}
        self.rows = [*self.read("gpu.csv", OnGpu), *self.read("peers.csv", Measured)]
        for row in self.rows:
            self.keep(row)

    def read(self, name: str, kind: type[AnyRow]) -> list[AnyRow]:
        """The rows of an earlier call with this device and today's files."""
        return [row for row in results.read(self.folder / name, kind) if row.hardware == self.hardware]

    def of(self, group: str) -> list[OnGpu]:
        """The rows of a group so far."""
        return [row for row in self.rows if isinstance(row, OnGpu) and row.group == group]

    def left(self, group: str, items: Sequence[Item]) -> list[Item]:
        """The items of a group that no earlier call has finished."""
        return [item for item in items if (self.hardware, group, *item.key) not in self.finished]

    def finish(self, group: str, key: tuple[str, str, str]) -> None:
        """Remember that an item is done."""
        with self.lock, self.finished_before.open("a") as file:
            self.finished.add((self.hardware, group, *key))
            file.write(json.dumps([self.hardware, group, *key]) + "\n")

    def tell(self, row: OnGpu | Measured) -> None:
        """Put a new row into all files."""
        with self.lock:
            self.rows.append(row._replace(hardware=self.hardware))
            self.keep(self.rows[-1])

    def keep(self, row: OnGpu | Measured) -> None:
        """Put a row into all files, in the place of an older one of its case."""
        name, order = ("gpu.csv", []) if isinstance(row, OnGpu) else ("peers.csv", list(map(str, WORKLOADS)))
        for folder in (self.folder, self.results):
            kept.keep(folder / name, [row], order)
        self.copy(name)

    def leave_out(self, group: str, rows: Sequence[Measured], missing: Sequence[Missing]) -> None:
        """Write down what has no row."""
        with self.lock:
            kept.leave_out(group, rows, missing, self.results / "left_out.csv")
            self.copy("left_out.csv")

    def copy(self, name: str) -> None:
        """A copy of a results file."""
        if self.out:
            shutil.copy(self.results / name, self.out)


def measured(dry: bool, name: str, end: float, floors: Sequence[OnGpu], todo: Sequence[Item]) -> Iterator[Said]:
    """The rows of a group, in a process of its own."""
    bandwidth, rates = gpu_figures.best(floors)
    this = session.Session(dry=dry, end=end, bandwidth=bandwidth, rates=rates)
    yield from this.through(todo, gpu_figures.every()[name].measured)


def measure(
    *, folder: Path, minutes: float, out: Path | None = None, only: Sequence[str] = (), dry: bool = False
) -> int:
    """Measure groups, by default all; 0 if all is measured, 1 if something failed, 3 if time ran out.

    What a peer cannot do is no failure: it is in `left_out.csv` with the reason, and is not tried again.
    """
    start = time.monotonic()
    end = start + (3600 if dry else 60 * minutes)
    files = Files(folder, out, dry)
    missing: list[Missing] = []
    for name in only or GROUPS:
        print(f"measuring: {name}, {end - time.monotonic():.0f} s left", flush=True)
        if name == "peers":
            until = end if dry else time.monotonic() + PEERS_PART * (end - time.monotonic())
            missing += [entry for entry in peers_gpu.measure(files, dry, until) if _counts(entry)]
            continue
        todo = files.left(name, gpu_figures.every()[name].items(dry))
        task = functools.partial(measured, dry, name, end, files.of(gpu_figures.FLOORS))
        _, new = aside.measure(
            "triton", todo, task, silence=math.inf, end=end, words=session.WORDS,
            tell=files.tell, finished=functools.partial(files.finish, name),
        )  # fmt: skip
        missing += new
    print("\n" + summary(files.rows, missing))
    print(f"{time.monotonic() - start:.0f} s")
    late = [entry for entry in missing if entry.reason == aside.LATE]
    return FAILED if len(late) < len(missing) else CUT if late else DONE


def _counts(entry: Missing) -> bool:
    """Whether what a provider lacks is ours, or has only been put off."""
    return entry.reason == aside.LATE or entry.provider == "logchain"


def summary(rows: Sequence[OnGpu | Measured], missing: Sequence[Missing]) -> str:
    """The figures once more, the most important last: what a caller far away sees of a long output."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for name in reversed(GROUPS):
        lines |= peers_gpu.table([row for row in rows if isinstance(row, Measured)]) if name == "peers" else {}
        for row in rows:
            if isinstance(row, OnGpu) and row.group == name:
                lines.setdefault((row.workload, row.provider, row.mode), []).append(row.text)
    found = [f"{' '.join(filter(None, case))}: {'; '.join(texts)}" for case, texts in lines.items()]
    found.append("in brackets: over the floor, or over the promised error")
    found += [f"{rows[0].hardware}; {rows[0].versions}; {rows[0].date}; {rows[0].commit}"] if rows else []
    late = [entry for entry in missing if entry.reason == aside.LATE]
    if late:
        found.append(f"NO TIME FOR {len(late)}, the first of them {late[0].workload} {late[0].provider} {late[0].mode}")
    for entry in missing:
        if entry not in late:
            found.append(f"FAILED {entry.workload} {entry.provider} {entry.mode}: {entry.reason[:200]}")
    return "\n".join(found)[-MOST_CHARACTERS:]
