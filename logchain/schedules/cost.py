"""How many seconds work takes: constants that were measured on a device and lie in `costs.json`, with their date.

    seconds = sum over what is counted of (its number * its constant)

Each backend, number of threads, schedule and pass has constants of its own, fitted by `tests/benchmarks/fit.py`.
"""

import json
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).with_name("costs.json")

# the passes of a product: without gradients, and with its backward pass
FORWARD, BOTH = "forward", "forward and backward"


class Work(NamedTuple):
    """What a schedule does: what has to be computed and moved, what waits, and how often something is started.

    `steps` wait for each other; `launches` are kernels of a GPU, and calls of torch on a CPU.
    """

    multiply_adds: int
    exponentials: int
    bytes: int
    steps: int
    launches: int

    def __add__(self, other: "Work") -> "Work":  # type: ignore[override]
        return Work(*(a + b for a, b in zip(self, other, strict=True)))


class Constants(NamedTuple):
    """Seconds for one of each thing in a `Work`, by schedule and pass, and where they come from.

    `processors` work side by side: what fewer programs leave idle counts as if it were done.
    """

    device: str
    backend: str
    threads: int
    processors: int
    measured: bool
    hardware: str
    versions: str
    date: str
    seconds: dict[str, dict[str, tuple[float, ...]]]

    def of(self, schedule: str, name: str, work: Work) -> float:
        """The seconds of work in a schedule and a pass."""
        return sum(number * constant for number, constant in zip(work, self.seconds[schedule][name], strict=True))

    @property
    def source(self) -> str:
        """Where they come from, in a line."""
        threads = "" if self.device != "cpu" else f", {self.threads} thread{'s' * (self.threads > 1)}"
        return (
            f"{self.hardware}, {self.backend}{threads}: {'measured' if self.measured else 'not measured'} {self.date}"
        )


@cache
def read(path: Path = FILE) -> tuple[Constants, ...]:
    """All that the file holds."""
    entries: list[dict[str, Any]] = json.loads(path.read_text())["constants"]
    return tuple(Constants(**{**entry, "seconds": _in_order(entry["seconds"])}) for entry in entries)


@lru_cache
def constants(device: str, backend: str, threads: int, path: Path = FILE) -> Constants:
    """Those of a device and backend; measured with that many threads, or with the next fewer, or with the fewest.

    A device that the file does not have gets those of a GPU, a backend those of torch.
    """
    found = [entry for entry in read(path) if entry.device == device] or [e for e in read(path) if e.device == "cuda"]
    found = [entry for entry in found if entry.backend == backend] or found
    fewer = [entry for entry in found if entry.threads <= threads]
    return max(fewer, key=lambda e: e.threads) if fewer else min(found, key=lambda e: e.threads)


def _in_order(seconds: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, tuple[float, ...]]]:
    return {
        schedule: {name: tuple(float(row[field]) for field in Work._fields) for name, row in passes.items()}
        for schedule, passes in seconds.items()
    }
