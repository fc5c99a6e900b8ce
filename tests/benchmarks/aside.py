"""Providers in processes of their own: rows as they come, and the reasons why others do not."""

import ctypes
import functools
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from tests.benchmarks.kept import Missing
from tests.benchmarks.results import AnyRow, Measured, Row, machine


class Item(NamedTuple):
    """What is asked of a provider."""

    workload: Any
    provider: str
    mode: str

    @property
    def key(self) -> tuple[str, str, str]:
        """As rows and reasons name it."""
        return str(self.workload), self.provider, self.mode


class _Ended(NamedTuple):
    """How a process did, if it did not do so by itself."""

    reason: str


ROWS = Row, Measured
Said = Item | Row | Measured | Missing

# Goes through items, one after another, and says which one it begins. It is a function at the top of a module, since
# another process calls it.
Task = Callable[[Sequence[Item]], Iterable[Said]]

_SILENCE = 300.0
# seconds for a process to end after its last row
GRACE = 8.0


def attempts(items: Iterable[Item], one: Callable[[Item], Iterable[AnyRow]]) -> Iterator[Item | AnyRow | Missing]:
    """Each item and its rows; what a provider cannot do is a finding."""
    for item in items:
        yield item
        try:
            yield from one(item)
        except Exception as error:
            reason = " ".join(traceback.format_exception_only(error)[-1].split())
            yield Missing("", *item.key, reason[:200])


def measure(
    package: str,
    todo: Sequence[Item],
    task: Task,
    *,
    silence: float = _SILENCE,
    words: Mapping[str, str] | None = None,
) -> tuple[list[Any], list[Missing]]:
    """Rows and reasons for all items, in as many processes as it takes to get past those that end one.

    Args:
        package: which has to be installed; its version is noted beside the results.
        todo: the items, of one provider as a rule.
        task: gives their rows.
        silence: seconds without a word from a process after which it is stopped.
        words: what to say for a reason with such a text in it.
    """
    rows: list[Any] = []
    missing: list[Missing] = []
    place = machine()
    while todo:
        at, begun = ("", todo[0].provider, ""), 0
        for said in _process(package, functools.partial(task, todo), silence):
            print("  ".join((*said[:4], said.text)) if isinstance(said, ROWS) else said, flush=True)
            if isinstance(said, Item):
                at, begun = said.key, begun + 1
            elif isinstance(said, ROWS):
                rows.append(said._replace(**place))
            elif isinstance(said, str):  # the package with its version
                place["versions"] += "" if said in place["versions"] else f", {said}"
            else:
                missing.append(said if isinstance(said, Missing) else Missing("", *at, said.reason))
        if not begun:  # not installed, or broken from the start
            break
        todo = todo[begun:]
    for i, entry in enumerate(missing):
        reason = next((new for old, new in (words or {}).items() if old in entry.reason), entry.reason)
        missing[i] = entry._replace(reason=reason, **{name: place[name] for name in ("versions", "date", "commit")})
    return rows, missing


def _process(package: str, task: Callable[[], Iterable[Said]], silence: float) -> Iterator[Said | str | _Ended]:
    """What a task says in a process of its own, held on one core."""
    core = max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(package, task, core, sender))
    process.start()
    sender.close()
    try:
        while receiver.poll(silence):
            yield receiver.recv()
        process.kill()
        process.join()
        yield _Ended(f"stopped, silent for {silence:.3g} s")
    except EOFError:  # it has said everything
        process.join(GRACE)
        process.kill()  # one that has said everything may hang on a device that it has lost
        process.join()
        if code := process.exitcode:
            yield _Ended(f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}")


def keep_memory() -> None:
    """Of glibc: what is given back stays with the process, so that no time hangs on how another one's memory lies.

    Of what is larger than 32 MB, the most that it takes for a threshold, fresh pages are paid for in each call.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        trim, mapped = -1, -3
        accepted = mallopt(mapped, 32 << 20), mallopt(trim, 2**31 - 1)
        assert all(accepted)


def _child(package: str, task: Callable[[], Iterable[Said]], core: int, sender: Connection) -> None:
    try:
        sender.send(f"{package} {metadata.version(package)}")
    except metadata.PackageNotFoundError:
        sender.send(_Ended(f"{package} is not installed"))
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    keep_memory()
    for said in task():
        sender.send(said)
