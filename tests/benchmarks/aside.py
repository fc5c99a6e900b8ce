"""One provider in a process of its own: its rows as they come, and the reasons why others do not."""

import ctypes
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.benchmarks.kept import Missing
from tests.benchmarks.results import AnyRow, Measured, Row, machine

# What is asked of a provider, by name: a function at the top of a module, since another process calls it.
Task = Callable[[str], Iterable[Row | Measured | Missing]]

_SILENCE = 300.0


def attempts(
    name: str, cases: Iterable[tuple[Any, str]], one: Callable[[Any, str], Iterable[AnyRow]]
) -> Iterator[AnyRow | Missing]:
    """The rows of each workload and mode; what a provider cannot do is a finding."""
    for workload, mode in cases:
        try:
            yield from one(workload, mode)
        except Exception as error:
            reason = " ".join(traceback.format_exception_only(error)[-1].split())
            yield Missing("", str(workload), name, mode, reason[:200])


def measure(
    name: str, package: str, task: Task, *, silence: float = _SILENCE, about: Sequence[str] = ("", "")
) -> tuple[list[Any], list[Missing]]:
    """Run a task in a process of its own, held on one core.

    Args:
        name: of the provider, for the reasons.
        package: which has to be installed; its version is noted beside the results.
        task: gives the rows of the provider of that name.
        silence: seconds without a word from it after which it is stopped.
        about: the workload and the mode, if the task is one.
    """
    core = max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, package, task, core, sender))
    process.start()
    sender.close()
    found: list[Any] = []
    missing: list[Missing] = []
    reason = ""
    place = machine()
    try:
        while receiver.poll(silence):
            item = receiver.recv()
            if isinstance(item, Row | Measured):
                found.append(item)
            elif isinstance(item, Missing):
                missing.append(item)
            else:  # the package's version
                place["versions"] += f", {item}"
            print("  ".join((*item[:4], item.text)) if isinstance(item, Row | Measured) else item, flush=True)
        reason = f"stopped, silent for {silence:g} s"
        process.kill()
    except EOFError:  # it has said everything
        pass
    process.join()
    if process.exitcode and not reason:
        code = process.exitcode
        reason = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    if reason:
        missing.append(Missing("", about[0], name, about[1], reason))
        print(missing[-1], flush=True)
    versions, date, commit = (place[key] for key in ("versions", "date", "commit"))
    missing = [entry._replace(versions=versions, date=date, commit=commit) for entry in missing]
    return [row._replace(**place) for row in found], missing


def keep_memory() -> None:
    """Of glibc: what is given back stays with the process, so that no time hangs on how another one's memory lies.

    Of what is larger than 32 MB, the most that it takes for a threshold, fresh pages are paid for in each call.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        trim, mapped = -1, -3
        accepted = mallopt(mapped, 32 << 20), mallopt(trim, 2**31 - 1)
        assert all(accepted)


def _child(name: str, package: str, task: Task, core: int, sender: Connection) -> None:
    try:
        sender.send(f"{package} {metadata.version(package)}")
    except metadata.PackageNotFoundError:
        sender.send(Missing("", "", name, "", f"{package} is not installed"))
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    keep_memory()
    for item in task(name):
        sender.send(item)
