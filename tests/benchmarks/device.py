"""Times and peaks of calls on a GPU, by CUDA events; on a CPU, in a dry run, they are the host's and mean nothing."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from logchain.memory import peak_bytes

Call = Callable[[], Any]

# inputs are taken in turns until together they are larger than any cache
_ROTATED = 256 * 2**20


class Device:
    """The device on which the calls of a process run."""

    def __init__(self, dry: bool) -> None:
        self.dry, self.name = dry, "cpu" if dry else "cuda"

    def wait(self) -> None:
        """Until the device has done what it was told."""
        if not self.dry:
            torch.cuda.synchronize()

    def answers(self) -> bool:
        """Whether the device still does, after an error perhaps; what is free goes back to it."""
        try:
            if not self.dry:
                torch.cuda.empty_cache()
            self.wait()
        except RuntimeError:
            return False
        return True

    def sets(self, size: int) -> int:
        """How many inputs of so many bytes leave the caches together."""
        return 2 if self.dry else max(1, _ROTATED // max(1, size))

    def seconds(self, call: Call) -> float:
        """What the host waits for one call."""
        self.wait()
        start = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - start

    def quartiles(self, calls: Sequence[Call], patience: float, *, graph: bool = False) -> list[float]:
        """Of one call's time, the calls taken in turns; each has run before. In a graph, launching is not in it."""
        if self.dry:
            return _quartiles([self.seconds(call) for call in calls])
        if graph:
            calls = [_captured(call) for call in calls]
        spent = sum(self.seconds(call) for call in calls)
        rounds = max(3, min(200, int(patience * len(calls) / max(1e-6, spent))))
        events = []
        for i in range(rounds):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            calls[i % len(calls)]()
            after.record()
            events.append((before, after))
        self.wait()
        return _quartiles([before.elapsed_time(after) / 1e3 for before, after in events])

    def peak(self, call: Call) -> int:
        """Most bytes that are held at once during a call beyond its inputs."""
        if self.dry:

            def nothing_kept() -> list[torch.Tensor]:
                call()
                return []

            return peak_bytes(nothing_kept)
        self.wait()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        self.wait()
        return torch.cuda.max_memory_allocated() - before


def _quartiles(times: list[float]) -> list[float]:
    return statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3


def _captured(call: Call) -> Call:
    """The call as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return lambda: (graph.replay(), results)
