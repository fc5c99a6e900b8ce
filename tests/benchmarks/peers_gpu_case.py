"""One provider in one case on a GPU: its errors against float64 sums, its time, its peak."""

import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.benchmarks import cases
from tests.benchmarks.cases import Case, Chain, Workload, draw
from tests.benchmarks.peers import GPU, Provider, Run
from tests.benchmarks.results import Measured
from tests.benchmarks.session import Session

# seconds: of all runs of a provider, of one run, of what is done before it, which may be a compilation
_PATIENCE, _MOST, _MADE = 0.12, 0.15, 3.0

_FEW_STEPS, _GROWTH, _SETS = 32, 8, 8

# sequences whose answer is checked, and numbers in them
_SEQUENCES, _CHECKED = 4, 4_000_000


def exact(chain: Chain) -> tuple[np.ndarray, np.ndarray]:
    """Log-partitions (n,) and posteriors (n, v, c) of dense chains: linear messages in float64, scaled step by step."""
    x, bulk, p0 = (tensor.double().cpu().numpy() for tensor in chain)
    v, last = x.shape[1], bulk.shape[1] - 1
    top = x.max(-1, keepdims=True)
    weights = np.exp(x - top)
    forward, backward = np.empty_like(x), np.ones_like(x)
    message, total = p0 * weights[:, 0], top[:, 0].copy()
    for i in range(v):
        if i:
            message = (message[:, None] @ bulk[:, min(i - 1, last)])[:, 0] * weights[:, i]
            total += top[:, i]
        scale = message.sum(-1, keepdims=True)
        message, total = message / scale, total + np.log(scale)
        forward[:, i] = message
    for i in range(v - 1, 0, -1):
        behind = (bulk[:, min(i - 1, last)] @ (backward[:, i] * weights[:, i])[..., None])[..., 0]
        backward[:, i - 1] = behind / behind.sum(-1, keepdims=True)
    joint = forward * backward
    return total[:, 0], joint / joint.sum(-1, keepdims=True)


def truth(workload: Workload, part: Case, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Values and gradients in float64, computed by the first provider that asks and kept for the others."""
    n, v = part.x.shape[:2]
    file = folder / f"{workload}, {n} {v}.npz"
    if not file.exists():
        on_host = moved(part, "cpu")
        values, gradients = exact(on_host) if isinstance(on_host, Chain) else cases.product(on_host)
        unfinished = folder / "unfinished.npz"  # a process may be ended while it writes
        np.savez(unfinished, values=values, gradients=gradients)
        unfinished.replace(file)
    found = np.load(file)
    return found["values"], found["gradients"]


def errors(answer: tuple[Any, Any], true: tuple[np.ndarray, np.ndarray]) -> list[float | None]:
    """The largest of the values and of the gradients, of as many sequences as the truth has."""

    def largest(found: Any, wanted: np.ndarray) -> float:
        few = torch.as_tensor(found)[: len(wanted)].double().cpu().numpy()
        return float(np.abs(few - wanted).max())

    return [None if found is None else largest(found, wanted) for found, wanted in zip(answer, true, strict=True)]


def slice_of(session: Session, provider: Provider, case: Case, mode: str) -> Case:
    """As many steps of the case as a run may take, from few to more: the time may well grow less than the steps."""
    n, v = case.x.shape[:2]
    if provider.whole:
        return case
    steps = min(v, _FEW_STEPS)
    while True:
        part = case.part(n, steps)
        start = time.monotonic()
        run = provider.make(part, mode)
        making = time.monotonic() - start
        run()
        slow = max(session.host_seconds(run) / _MOST, making / _MADE, 1 / _GROWTH)
        longest = int(steps / slow)
        if longest < min(v, 2 * steps) or steps == v:
            return part
        steps = v if longest >= v else 1 << longest.bit_length() - 1  # peers that are cut share the truth


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


def measured(
    session: Session, provider: Provider, ours: Provider, folder: Path, workload: Workload, mode: str
) -> Iterator[Measured]:
    """The errors, times and peak of one provider in one case."""
    case = on_device(workload, session.device)
    few = slice_of(session, provider, case, mode)
    calls = prepared(session, provider, few, mode)
    found: list[float | None] = [None, None]
    if not provider.floor:
        found = checked(provider, workload, few, mode, calls[0], folder)
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
    yield Measured(str(workload), provider.name, mode, GPU, middle, lower, upper, own, share, peak, *found)


def checked(
    provider: Provider, workload: Workload, case: Case, mode: str, call: Run, folder: Path
) -> list[float | None]:
    """The errors of a few sequences; of very large stacks, those of their first matrices."""
    n, v = case.x.shape[:2]
    size = case.x[:_SEQUENCES].numel()
    if size > _CHECKED:
        case = case.part(n, max(2, v * _CHECKED // size))
        call = provider.make(case, mode)
    return errors(call(), truth(workload, case.part(min(n, _SEQUENCES), case.x.shape[1]), folder))
