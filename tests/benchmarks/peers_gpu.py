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
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.benchmarks import aside, kept, peers, results
from tests.benchmarks.aside import Item, Said
from tests.benchmarks.cases import EACH, FULL, ONE, STEP, WORKLOADS, Workload, draw
from tests.benchmarks.kept import Missing
from tests.benchmarks.peers import GPU
from tests.benchmarks.peers_gpu_case import measured, moved
from tests.benchmarks.results import MODES, Measured, digits
from tests.benchmarks.session import Session

GROUP = "peers on a GPU"

TINY = [Workload(3, 5, 4, matrices) for matrices in (STEP, EACH, FULL, ONE)]

# of the time that is left: kernels and tiles come after
_PART = 2 / 3
# logchain's process compiles, computes what is true, and measures the floors too
_OURS = 3

# seconds: of one case with its compilation, on a device and in a dry run, which may compile for a CPU
_STUCK = (30.0, 300.0)
_ENDLESS = 3600.0
WORDS = {"SIGALRM": "stopped, takes too long"}


def times(
    dry: bool, folder: Path, cores: Sequence[int], seconds: float, end: float, todo: Sequence[Item]
) -> Iterator[Said]:
    """The rows of a process, until it is done, its `seconds` for each item are over, or the device is lost."""
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
        session.end = min(time.monotonic() + seconds * len(todo), end)
        for item in todo:
            if session.left < 0:
                yield item
                yield Missing("", *item.key, aside.LATE)
                continue
            signal.setitimer(signal.ITIMER_REAL, min(_STUCK[dry], session.left + aside.GRACE))
            yield from aside.attempts([item], functools.partial(measured, session, folder))
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


def measure(session: Session, only: Sequence[str] = ()) -> None:
    """All providers on the device, or some; the files are written after each."""
    hardware = "CPU, dry run" if session.dry else torch.cuda.get_device_name()
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    end = time.monotonic() + (_ENDLESS if session.dry else _PART * session.left)
    todo = processes(TINY if session.dry else WORKLOADS, only)
    weights = [_OURS, *[1] * len(todo)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:

        def one(i: int) -> tuple[list[Measured], list[Missing]]:
            # the one before has just begun
            seconds = (end - time.monotonic()) * weights[i] / sum(weights[max(i - 1, 0) : len(todo)])
            package, items = todo[i]
            task = functools.partial(times, session.dry, Path(folder), cores, seconds / len(items), end)
            return aside.measure(package, items, task, silence=math.inf, end=end, words=WORDS)

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
    kept.keep(folder / results.PEERS.name, new, list(map(str, WORKLOADS)))
    kept.leave_out(GROUP, new, missing, folder / results.LEFT_OUT.name)
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
