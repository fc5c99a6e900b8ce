"""The seconds that work takes, by constants that were measured on a device; `costs.json` has them, with their date.

    seconds = sum over the fields of `Work` of (its count * its constant)

There are constants for each device, number of threads, schedule and pass.
"""

import json
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).with_name("costs.json")

# the passes of a product: without gradients, and with its backward pass
FORWARD, BOTH = "forward", "forward and backward"


class Work(NamedTuple):
    """Counts of what a schedule does: `steps` depend on each other, `launches` are GPU kernels or calls on a CPU."""

    multiply_adds: int
    exponentials: int
    bytes: int
    steps: int
    launches: int

    def __add__(self, other: "Work") -> "Work":  # type: ignore[override]
        return Work(*(a + b for a, b in zip(self, other, strict=True)))


class Constants(NamedTuple):
    """The seconds for one unit of each count in `Work`, by schedule and pass, with what they were measured on.

    `processors` is how many sequences the device computes side by side, and `available` the number of a CPU's threads
    now, where more than the `threads` of the measurement take sequences; 0 for those.
    """

    device: str
    threads: int
    processors: int
    measured: bool
    hardware: str
    versions: str
    date: str
    seconds: dict[str, dict[str, tuple[float, ...]]]
    available: int = 0

    def of(self, schedule: str, which: str, work: Work) -> float:
        """The seconds that work takes in a schedule and a pass."""
        return sum(count * constant for count, constant in zip(work, self.seconds[schedule][which], strict=True))

    @property
    def source(self) -> str:
        """One line that says on what hardware and when the constants were measured."""
        threads = f", {self.threads} thread{'s' * (self.threads > 1)}" * (self.device == "cpu")
        return f"{self.hardware}{threads}: {'measured' if self.measured else 'not measured'} {self.date}"


@cache
def read(path: Path = FILE) -> tuple[Constants, ...]:
    """All constants of a file."""
    entries: list[dict[str, Any]] = json.loads(path.read_text())["constants"]
    for entry in entries:
        for passes in entry["seconds"].values():
            passes.update({which: tuple(row[field] for field in Work._fields) for which, row in passes.items()})
    return tuple(Constants(**entry) for entry in entries)


@lru_cache
def constants(device: str, threads: int, path: Path = FILE) -> Constants:
    """The constants for so many threads, else the next fewer, else the fewest; CUDA's for unknown devices."""
    rows = [row for row in read(path) if row.device == ("cpu" if device == "cpu" else "cuda")]
    within = [row for row in rows if row.threads <= threads]
    return max(within, key=lambda row: row.threads) if within else min(rows, key=lambda row: row.threads)
