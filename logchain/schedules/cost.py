"""How many seconds work takes: constants that were measured on a device and lie in `costs.json`, with their date.

    seconds = sum over the fields of `Work` of (its count * its constant)

Each device, number of threads, schedule and pass has constants of its own, fitted by `tests/benchmarks/fit.py`.
"""

import json
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).with_name("costs.json")

# the passes of a product: without gradients, and with its backward pass
FORWARD, BOTH = "forward", "forward and backward"


class Work(NamedTuple):
    """Counts of a schedule: `steps` wait for each other, `launches` are kernels of a GPU, or calls on a CPU."""

    multiply_adds: int
    exponentials: int
    bytes: int
    steps: int
    launches: int

    def __add__(self, other: "Work") -> "Work":  # type: ignore[override]
        return Work(*(a + b for a, b in zip(self, other, strict=True)))


class Constants(NamedTuple):
    """Seconds for one of each count in a `Work`, by schedule and pass, and their origin.

    `processors` work side by side: idle ones count as if they worked.
    """

    device: str
    threads: int
    processors: int
    measured: bool
    hardware: str
    versions: str
    date: str
    seconds: dict[str, dict[str, tuple[float, ...]]]

    def of(self, schedule: str, which: str, work: Work) -> float:
        """The seconds of work in a schedule and a pass."""
        return sum(count * constant for count, constant in zip(work, self.seconds[schedule][which], strict=True))

    @property
    def source(self) -> str:
        """The origin of the constants, in a line."""
        threads = f", {self.threads} thread{'s' * (self.threads > 1)}" * (self.device == "cpu")
        return f"{self.hardware}{threads}: {'measured' if self.measured else 'not measured'} {self.date}"


@cache
def read(path: Path = FILE) -> tuple[Constants, ...]:
    """All constants in a file."""
    entries: list[dict[str, Any]] = json.loads(path.read_text())["constants"]
    for entry in entries:
        for passes in entry["seconds"].values():
            passes.update({which: tuple(row[field] for field in Work._fields) for which, row in passes.items()})
    return tuple(Constants(**entry) for entry in entries)


@lru_cache
def constants(device: str, threads: int, path: Path = FILE) -> Constants:
    """The constants for as many threads, else for the next fewer, else for the fewest; a GPU's for other devices."""
    rows = [row for row in read(path) if row.device == ("cpu" if device == "cpu" else "cuda")]
    within = [row for row in rows if row.threads <= threads]
    return max(within, key=lambda row: row.threads) if within else min(rows, key=lambda row: row.threads)
