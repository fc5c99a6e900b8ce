"""One process's measurements on a GPU: its clock, and its time that is left.

Times are medians and quartiles of CUDA events; on a CPU, in a dry run, they are the host's and mean nothing.
"""

import contextlib
import functools
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from logchain.memory import peak_bytes
from tests.benchmarks import aside
from tests.benchmarks.aside import Item, Said
from tests.benchmarks.kept import Missing
from tests.benchmarks.results import Measured

# inputs are taken in turns until together they are larger than any cache
ROTATED = 256 * 2**20

# seconds that one number may take to measure
PATIENCE = 0.4

# seconds: of one item with its compilation, on a device and in a dry run, which may compile for a CPU
STUCK = (90.0, 300.0)
WORDS = {"SIGALRM": "stopped, takes too long"}


class Session:
    """What the measurements of a process share: the device and the last moment."""

    def __init__(self, *, dry: bool, end: float) -> None:
        self.dry, self.end = dry, end
        self.device = "cpu" if dry else "cuda"

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def through(self, todo: Sequence[Item], one: Callable[["Session", Item], Iterable[Measured]]) -> Iterator[Said]:
        """The rows of all items, until the time is over or the device is lost; an item that hangs ends the process."""
        if hasattr(os, "sched_setaffinity"):  # launching is no work for one core alone
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, range(os.cpu_count() or 1))
        for item in todo:
            if self.left < 0:
                yield item
                yield Missing("", *item.key, aside.LATE)
                continue
            with self.alarm(min(STUCK[self.dry], self.left + aside.GRACE)):
                yield from aside.attempts([item], functools.partial(one, self))
                if not self.answers():
                    return

    @contextmanager
    def alarm(self, seconds: float) -> Iterator[None]:
        """Ends the process after so many seconds in the body, whatever it does."""
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def answers(self) -> bool:
        """Whether the device still does, after an error perhaps; what is free goes back to it."""
        try:
            if not self.dry:
                torch.cuda.empty_cache()
                torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def calls(
        self, make: Callable[[str, int], Callable[[], Any]], size: int, *, most: int = 8
    ) -> list[Callable[[], Any]]:
        """Calls on as many sets of inputs as it takes to leave the caches; each has been called."""
        count = min(most, 2 if self.dry else max(1, ROTATED // max(1, size)))
        found = [make(self.device, seed) for seed in range(count)]
        for call in found:
            call()
        return found

    def host_seconds(self, call: Callable[[], Any]) -> float:
        """What the host waits for one call."""
        self._wait()
        start = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def seconds(
        self, calls: Sequence[Callable[[], Any]], *, graph: bool = False, patience: float = PATIENCE
    ) -> tuple[float, float, float]:
        """Median and quartiles of one call's time, the calls taken in turns; each has run before."""
        if self.dry:
            return _quartiles([self.host_seconds(call) for call in calls])
        if graph:
            calls = [_captured(call) for call in calls]
        spent = sum(self.host_seconds(call) for call in calls)
        rounds = max(3, min(200, int(patience * len(calls) / max(1e-6, spent))))
        events = []
        for i in range(rounds):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            calls[i % len(calls)]()
            after.record()
            events.append((before, after))
        torch.cuda.synchronize()
        return _quartiles([before.elapsed_time(after) / 1e3 for before, after in events])

    def peak(self, call: Callable[[], Sequence[Tensor]]) -> int:
        """Most bytes that are held at once during a call beyond its inputs and its results."""
        if self.dry:
            return peak_bytes(call)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept = call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before - sum(tensor.untyped_storage().nbytes() for tensor in kept)
        return peak


def _quartiles(times: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return middle, low, high


def _captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()
    return lambda: (graph.replay(), kept)


def hardware(dry: bool) -> str:
    """The device with its driver, as results name it."""
    if dry:
        return "CPU, dry run"
    major, minor = torch.cuda.get_device_capability()
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    except OSError:
        driver = []
    return f"{torch.cuda.get_device_name()}, capability {major}.{minor}, driver {driver[0] if driver else 'unknown'}"
