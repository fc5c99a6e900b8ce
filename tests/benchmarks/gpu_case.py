"""One provider in one case on a GPU: its errors against float64 sums, its time, its peak."""

import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks import cases, peers
from tests.benchmarks.aside import Item
from tests.benchmarks.cases import Case, Workload, draw
from tests.benchmarks.peers import GPU, Provider, Run
from tests.benchmarks.results import Measured
from tests.benchmarks.session import Session

# seconds: of all runs of a provider, of one run, of what is done before it, which may be a compilation
_PATIENCE, _MOST, _MADE = 0.12, 0.15, 3.0

_SETS = 8

# sequences whose answer is checked, and numbers in them
_SEQUENCES, _CHECKED = 4, 4_000_000


@functools.lru_cache(maxsize=1)
def on_device(workload: Workload, device: str) -> Case:
    """The same numbers as on a CPU."""
    return moved(draw(workload), device)


def moved(case: Case, device: str) -> Case:
    """On a device."""
    return type(case)(*(tensor.to(device) for tensor in case))


def prepared(session: Session, provider: Provider, case: Case, mode: str) -> list[Run]:
    """Calls on several sets of inputs, fewer if they are slow: those move more than a cache holds by themselves."""
    size = sum(tensor.nbytes for tensor in case)

    def make(_: str, seed: int) -> Run:
        return provider.make(type(case)(*(tensor.clone() for tensor in case)), mode)

    start = time.monotonic()
    calls = session.calls(make, size, most=1)
    making = time.monotonic() - start
    slow = max(session.host_seconds(calls[0]) / _PATIENCE, making / _MADE)
    most = min(_SETS, int(1 / max(slow, 1e-9)))
    return calls if most < 2 else session.calls(make, size, most=most)


def measured(session: Session, folder: Path, item: Item) -> Iterator[Measured]:
    """The errors, times and peak of one provider in one case."""
    provider, ours, mode = peers.every()[item.provider], peers.every()["logchain"], item.mode
    case = on_device(item.workload, session.device)
    few = peers.slice_of(
        provider, case, mode, sequences=len(case.x), clock=session.host_seconds, most=_MOST, made=_MADE
    )
    calls = prepared(session, provider, few, mode)
    found: list[float | None] = [None, None]
    if not provider.floor:
        found = checked(provider, item, few, calls[0], folder)
    times = session.seconds(calls, graph=provider.floor, patience=_PATIENCE)

    def nothing_kept() -> list[Any]:
        calls[0]()
        return []

    peak = session.peak(nothing_kept) / 1e6
    calls.clear()
    share = few.x.numel() / case.x.numel()
    middle, lower, upper = (1e3 * spent / share for spent in times)
    own = middle
    if provider.name != ours.name:
        own = 1e3 * session.seconds(prepared(session, ours, case, mode), patience=_PATIENCE)[0]
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
