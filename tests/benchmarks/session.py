"""One run on a GPU: its clock, its floors, what it has measured so far, and the file that goes into.

Times are medians and quartiles of CUDA events; on a CPU, in a dry run, they are the host's and mean nothing.
"""

import csv
import datetime
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logchain._measure import peak_bytes
from tests.benchmarks import predictions
from tests.benchmarks.results import Measured

RESULTS = Path(__file__).parent / "results" / "gpu.csv"
ROOT = Path(__file__).parents[2]

# inputs are taken in turns until together they are larger than any cache
ROTATED = 256 * 2**20

# seconds that one number may take to measure
PATIENCE = 0.4


class Row(NamedTuple):
    """One measured number; `low` and `high` are its quartiles, `floor` what it is compared with, in its own unit."""

    group: str
    workload: str
    provider: str
    mode: str
    precision: str
    metric: str
    value: float
    unit: str
    low: float = float("nan")
    high: float = float("nan")
    floor: float = float("nan")
    note: str = ""


class Session:
    """What the measurements share: the device, the time that is left, the floors and the rows so far."""

    def __init__(self, *, dry: bool, minutes: float, out: Path | None) -> None:
        self.dry = dry
        self.device = "cpu" if dry else "cuda"
        self.end = time.monotonic() + 60 * minutes
        self.out = out
        self.rows: list[Row] = []
        self.peers: list[Measured] = []
        self.bandwidth = predictions.BANDWIDTH
        self.rates = dict(predictions.RATE)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def calls(
        self, make: Callable[[str, int], Callable[[], Any]], size: int, *, most: int = 8
    ) -> list[Callable[[], Any]]:
        """Calls on as many sets of inputs as it takes to leave the caches; each has been called."""
        count = min(most, 2 if self.dry else max(1, ROTATED // max(1, size)))
        found = [make(self.device, seed) for seed in range(count)]
        for call in found:
            call()
        return found

    def add(self, row: Row) -> None:
        """Keep a row, and print it."""
        self.rows.append(row)
        over = f"  {row.value / row.floor:6.2f} x floor" if row.floor > 0 else ""
        head = f"{row.group:9} {row.workload:46} {row.provider:9} {row.mode:20} {row.precision:8}"
        print(f"{head} {row.metric:12} {row.value:10.4g} {row.unit}{over} {row.note}", flush=True)

    def enough(self, seconds: float, what: str) -> bool:
        """Whether there is still time, and says if there is not."""
        if self.dry or self.left > seconds:
            return True
        print(f"left out: {what}", flush=True)
        return False

    def write(self) -> None:
        """Write the results so far: all of them again, so that a run that is cut short leaves what it had."""
        place = stamp(self.device)
        folders = ([] if self.dry else [RESULTS.parent]) + ([self.out] if self.out else [])
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / RESULTS.name).open("w", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow([*Row._fields, *place])
                for row in self.rows:
                    cells = (f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row)
                    writer.writerow([*("" if cell == "nan" else cell for cell in cells), *place.values()])

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

    def floor(self, floor_bytes: int, multiply_adds: int, precision: str) -> float:
        """Seconds below which no program gets, by what this device was seen to do."""
        return max(floor_bytes / self.bandwidth, multiply_adds / self.rates[precision])


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


@contextmanager
def precision_of(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def stamp(device: str) -> dict[str, str]:
    """Where, when and with what."""
    cuda = device == "cuda"
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else ""
    import triton  # only now: a dry run says first that it is to be interpreted

    return {
        "device": torch.cuda.get_device_name() if cuda else "CPU, dry run",
        "capability": ".".join(map(str, torch.cuda.get_device_capability())) if cuda else "",
        "driver": driver,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": _output("git", "rev-parse", "--short", "HEAD") or "unknown",
    }


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT).stdout.strip()
    except OSError:
        return ""
