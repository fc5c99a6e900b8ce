"""What `product` costs on a GPU beside everybody else's: the group `peers` of `python -m tests.benchmarks gpu`.

Each provider has a process of its own, which starts while another one measures, and an equal part of the time; the
most telling workloads come first. Its answer is compared with float64 sums of a few sequences, then timed by CUDA
events over several sets of inputs, and logchain right after it. Floors are captured as a CUDA graph, so that launching
is not in them. What takes long runs on the first steps and counts in proportion, which `share` says; sequences stay,
since they run side by side. A case that takes too long or breaks the device ends its process, and another one goes on
with the next case. What does not fit into the time, fails or is not installed is in `results/left_out.csv`, with the
reason.
"""

import contextlib
import fcntl
import functools
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tests.benchmarks import aside, peers
from tests.benchmarks.aside import Item, Said
from tests.benchmarks.cases import EACH, FULL, ONE, STEP, WORKLOADS, Workload, draw
from tests.benchmarks.kept import Missing
from tests.benchmarks.peers import GPU
from tests.benchmarks.peers_gpu_case import measured, moved
from tests.benchmarks.results import MODES, Measured, digits
from tests.benchmarks.session import STUCK, WORDS, Session

if TYPE_CHECKING:
    from tests.benchmarks.gpu import Files

GROUP = "peers on a GPU"

TINY = [Workload(3, 5, 4, matrices) for matrices in (STEP, EACH, FULL, ONE)]

# logchain's process compiles, computes what is true, and measures the floors too
_OURS = 3


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
    others = [[one] for one in every if one not in together]
    found = []
    for group in [together, *others]:
        some = [one for one in group if not only or any(text in one.name for text in only)]
        items = [item for one in some for item in peers.items(one, workloads) if item.mode in MODES]
        items.sort(key=lambda item: (workloads.index(item.workload), MODES.index(item.mode)))
        # logchain is this repository, installed or not
        package = "torch" if group is together else group[0].package
        found += [(package, items)] if items else []
    return found


def measure(files: "Files", dry: bool, end: float, only: Sequence[str] = ()) -> list[Missing]:
    """All providers on the device, or some, as far as an earlier call has not finished them; what is missing."""
    every = processes(TINY if dry else WORKLOADS, only)
    todo = [(package, left) for package, items in every if (left := files.left(GROUP, items))]
    weights = [_OURS, *[1] * len(todo)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:

        def one(i: int) -> list[Missing]:
            # the one before has just begun
            seconds = (end - time.monotonic()) * weights[i] / sum(weights[max(i - 1, 0) : len(todo)])
            package, items = todo[i]
            task = functools.partial(times, dry, Path(folder), seconds / len(items), end)
            finish = functools.partial(files.finish, GROUP)
            rows, missing = aside.measure(
                package, items, task, silence=math.inf, end=end, words=WORDS, tell=files.tell, finished=finish
            )
            for entry in missing:
                if entry.reason != aside.LATE and entry.provider != "logchain":
                    finish((entry.workload, entry.provider, entry.mode))
            files.leave_out(GROUP, rows, missing)
            return missing

        # while one measures, the next one starts
        missing = [entry for found in pool.map(one, range(len(todo))) for entry in found]
    files.leave_out(GROUP, [], [Missing("", "", "jax, dynamax, numpyro", "", "not tried on a GPU")])
    return missing


def table(rows: Sequence[Measured]) -> dict[tuple[str, ...], list[str]]:
    """Of each workload and mode logchain's time, and everybody's in multiples of it; `?`: off by more than 0.01.

    The most telling last, as `gpu.summary` has it.
    """
    lines: dict[tuple[str, ...], list[str]] = {}
    for row in sorted(rows, key=lambda row: row.provider != "logchain"):
        line = lines.setdefault((row.workload, row.mode), [])
        off = "?" if row.value_error is not None and not row.value_error <= 0.01 else ""
        own = f"logchain {digits(row.median_ms)} ms{off}"
        line.append(own if row.provider == "logchain" else f"{row.provider} {digits(row.ratio)}x{off}")
    return dict(reversed(lines.items()))
