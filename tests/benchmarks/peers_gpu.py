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
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from tests.benchmarks import aside, kept, peers, results
from tests.benchmarks.cases import EACH, FULL, ONE, STEP, WORKLOADS, Workload, draw
from tests.benchmarks.kept import Missing
from tests.benchmarks.peers import GPU
from tests.benchmarks.peers_gpu_case import measured, moved
from tests.benchmarks.results import FORWARD, GRADIENTS, Measured, digits
from tests.benchmarks.session import Session

GROUP = "peers on a GPU"

FIRST = [
    Workload(500, 40, 200, STEP),
    Workload(32, 512, 64, STEP),
    Workload(8, 128, 64, EACH),
    Workload(8, 256, 64, FULL),
    Workload(32, 512, 64, ONE),
    Workload(1, 10_000, 16, STEP),
    Workload(256, 784, 64, STEP),
    Workload(10, 6, 40, STEP),
    Workload(1, 100_000, 4, ONE),
    Workload(32, 25, 20, FULL),
]
ORDER = [*FIRST, *(one for one in WORKLOADS if one not in FIRST)]
TINY = [Workload(3, 5, 4, matrices) for matrices in (STEP, EACH, FULL, ONE)]

# of the time that is left: kernels and tiles come after
_PART = 2 / 3
# logchain's process compiles, computes what is true, and measures the floors too
_OURS = 3

# seconds: of one case with its compilation, on a device and in a dry run, which may compile for a CPU
_STUCK = (30.0, 300.0)
# beyond the last moment, for a case that was begun
_GRACE = 8.0
_ENDLESS = 3600.0
_LATE = "no time left"


class Item(NamedTuple):
    """What a process is asked for, one after another."""

    workload: Workload
    provider: str
    mode: str

    @property
    def key(self) -> tuple[str, str, str]:
        """As rows and reasons name it."""
        return str(self.workload), self.provider, self.mode


Task = Callable[[Sequence[Item], float, float, str], Iterator[Measured | Missing]]


def times(
    dry: bool, folder: Path, cores: Sequence[int], todo: Sequence[Item], seconds: float, end: float, _: str
) -> Iterator[Measured | Missing]:
    """The rows of a process, until it is done, its time is over, or the device no longer answers."""
    if cores:
        os.sched_setaffinity(0, cores)  # launching is no work for one core alone
    # ends the process, whatever it does
    signal.setitimer(signal.ITIMER_REAL, _STUCK[dry])
    session, every = Session(dry=dry, minutes=0, out=None), peers.every()
    with contextlib.suppress(Exception):  # imports; what fails is said below
        tiny = draw(Workload(2, 3, 4, todo[0].workload.matrices))
        every[todo[0].provider].make(moved(tiny, session.device), todo[0].mode)()
    signal.setitimer(signal.ITIMER_REAL, 0)
    with (folder / "device").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # one at a time; a process that ends lets go
        session.end = min(time.monotonic() + seconds, end)
        for item in todo:
            if session.left < 0:
                yield Missing("", *item.key, _LATE)
                continue
            signal.setitimer(signal.ITIMER_REAL, min(_STUCK[dry], session.left + _GRACE))
            one = functools.partial(measured, session, every[item.provider], every["logchain"], folder)
            yield from aside.attempts(item.provider, [(item.workload, item.mode)], one)
            if not answers(session):
                break
        signal.setitimer(signal.ITIMER_REAL, 0)


def answers(session: Session) -> bool:
    """Whether the device still does, after an error perhaps; what is free goes back to it."""
    try:
        if not session.dry:
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def through(
    todo: Sequence[Item], package: str, seconds: float, end: float, task: Task
) -> tuple[list[Measured], list[Missing]]:
    """Rows and reasons for all that is asked, in as many processes as it takes to get past what ends one."""
    found: list[Measured] = []
    missing: list[Missing] = []
    todo, barren = list(todo), 0
    while todo:
        if time.monotonic() > end or barren == 2:
            reason = "two processes in a row gave nothing" if barren == 2 else _LATE
            missing += [Missing("", *item.key, reason) for item in todo]
            break
        silence = end - time.monotonic() + _GRACE  # most of it may be the wait for a turn
        run = functools.partial(task, todo, seconds, end)
        rows, reasons = aside.measure(todo[0].provider, package, run, silence=silence)
        if any("is not installed" in entry.reason for entry in reasons):
            return found, reasons
        found += rows
        missing += [entry for entry in reasons if entry.workload]
        answered = {row[:3] for row in rows} | {entry[1:4] for entry in missing}
        before = len(todo)
        todo = [item for item in todo if item.key not in answered]
        barren = barren + 1 if len(todo) == before else 0
        ended = [entry.reason for entry in reasons if not entry.workload]
        if ended and todo:  # the case in which it was
            reason = ended[0].replace("ended by SIGALRM", "stopped, takes too long")
            missing.append(Missing("", *todo.pop(0).key, reason))
        seconds /= 2  # another process is another wait
    return found, missing


def processes(workloads: Sequence[Workload], only: Sequence[str] = ()) -> list[tuple[str, list[Item]]]:
    """Package and items of each process: logchain with the floors first, then everybody else on a GPU."""
    every = [one for one in peers.every().values() if GPU in one.devices or one.floor]
    together = [one for one in every if one.floor or one.name == "logchain"]
    others = [[one] for one in every if one not in together]
    found = []
    for group in [together, *others]:
        names = [one for one in group if not only or any(text in one.name for text in only)]
        items = [
            Item(workload, one.name, mode)
            for workload in workloads
            for mode in (FORWARD, GRADIENTS)
            for one in names
            if workload.matrices in one.matrices and mode in one.modes
        ]
        # logchain is this repository, installed or not
        package = "torch" if group is together else group[0].package
        found += [(package, items)] if items else []
    return found


def measure(session: Session, only: Sequence[str] = ()) -> None:
    """All providers on the device, or some; the files are written after each."""
    hardware = "CPU, dry run" if session.dry else torch.cuda.get_device_name()
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    end = time.monotonic() + (_ENDLESS if session.dry else _PART * session.left)
    todo = processes(TINY if session.dry else ORDER, only)
    weights = [_OURS, *[1] * len(todo)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        task = functools.partial(times, session.dry, Path(folder), cores)

        def one(i: int) -> tuple[list[Measured], list[Missing]]:
            # the one before has just begun
            seconds = (end - time.monotonic()) * weights[i] / sum(weights[max(i - 1, 0) : len(todo)])
            package, items = todo[i]
            return through(items, package, seconds, end, task)

        # while one measures, the next one starts
        for new, missing in pool.map(one, range(len(todo))):
            new = [row._replace(hardware=hardware) for row in new]
            session.peers += new
            write(session, new, missing)
    jax = "needs jax with CUDA, hundreds of MB that are not carried"
    write(session, [], [Missing("", "", "jax, dynamax, numpyro", "", jax)])


def write(session: Session, new: Sequence[Measured], missing: Sequence[Missing]) -> None:
    """Into the results files and a copy in `out`; a dry run writes there alone."""
    folder = session.out if session.dry else results.FOLDER
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / results.LEFT_OUT.name
    with mock.patch.object(results, "LEFT_OUT", file):
        kept.keep(folder / results.PEERS.name, new, list(map(str, WORKLOADS)))
        kept.leave_out(GROUP, new, missing)
    if session.out and not session.dry:
        session.out.mkdir(parents=True, exist_ok=True)
        for path in (results.PEERS, results.LEFT_OUT):
            if path.exists():
                shutil.copy(path, session.out)


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
