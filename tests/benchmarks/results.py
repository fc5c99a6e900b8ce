"""The results files: what a row holds, where and with what it was measured, and how it is written and read."""

import contextlib
import csv
import datetime
import hashlib
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy
import scipy
import torch

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "results"
PRODUCT, QUESTIONS, LAYERS, PEERS, ACCURACY, MEMORY, SCALING, COUNTS, LEFT_OUT = (
    FOLDER / f"{name}.csv"
    for name in ("cpu", "questions", "layers", "peers", "accuracy", "memory", "scaling", "counts", "left_out")
)
OVERLAPPED, IDLE, STRUCTURES, RANKS, SHARPNESS = (
    FOLDER / f"{name}.csv" for name in ("overlapped", "idle", "structures", "ranks", "sharpness")
)
MODES = FORWARD, GRADIENTS = "forward", "forward and backward"
# what precedes the modes of products whose halves are walked at once, in the results of idle threads
MEETING = "meeting, "
STRATEGIES = "sequential", "chunked", "tree", "overlapped", "auto"


class Row(NamedTuple):
    """One measured number; `bar` is what it should reach, where that was agreed: `<= 1.5`."""

    workload: str
    provider: str
    mode: str
    metric: str
    value: float
    unit: str
    bar: str = ""
    hardware: str = ""
    versions: str = ""
    date: str = ""
    commit: str = ""

    @property
    def text(self) -> str:
        """The value to three digits, with its unit."""
        return f"{digits(self.value)} {self.unit}".strip()

    @property
    def reached(self) -> bool:
        """Whether the value is on the right side of its bar."""
        sign, limit = self.bar.split()
        return self.value <= float(limit) if sign == "<=" else self.value >= float(limit)


class Measured(NamedTuple):
    """One provider in one case: its time, beside logchain's in the same process, its peak and its errors.

    Times are of the whole case, of which `share` was computed; the peak is what that share held beyond its inputs.
    What was not measured or is not computed is None, and empty in the file; an error of NaN is an answer of NaN.
    """

    workload: str
    provider: str
    mode: str
    device: str
    median_ms: float
    lower_ms: float
    upper_ms: float
    logchain_ms: float
    share: float = 1.0
    peak_mb: float | None = None
    value_error: float | None = None
    gradient_error: float | None = None
    hardware: str = ""
    versions: str = ""
    date: str = ""
    commit: str = ""

    @property
    def ratio(self) -> float:
        """Its time over logchain's."""
        return self.median_ms / self.logchain_ms

    @property
    def text(self) -> str:
        """For the eye."""
        errors = [digits(error) for error in (self.value_error, self.gradient_error) if error is not None]
        off = f", off by {' and '.join(errors)}" if errors else ""
        return f"{digits(self.median_ms)} ms, {digits(self.ratio)} x logchain{off}"


class Scheduled(NamedTuple):
    """One sequence by one strategy: its time, and the fastest other schedule's, or its own where it is alone.

    `taken` is the schedule that the strategy stands for; `products_ms` is the time that torch takes for as many
    products of rows and the matrix, thousands of rows at once.
    """

    chain: str
    threads: str
    mode: str
    strategy: str
    taken: str
    median_ms: float
    lower_ms: float
    upper_ms: float
    other_ms: float
    products_ms: float
    hardware: str = ""
    versions: str = ""
    date: str = ""
    commit: str = ""

    @property
    def ratio(self) -> float:
        """Its time over the fastest other schedule's."""
        return self.median_ms / self.other_ms


AnyRow = TypeVar("AnyRow", bound=NamedTuple)


def digits(value: float) -> str:
    """Three of them."""
    if 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.3g}"


def machine() -> dict[str, str]:
    """Where and with what the numbers were measured."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    packages = {"torch": torch.__version__, "numpy": numpy.__version__, "scipy": scipy.__version__}
    return {
        "hardware": f"{models[0] if models else platform.machine()}, {max(len(models), 1)} cores",
        "versions": ", ".join([f"python {platform.python_version()}", *(f"{k} {v}" for k, v in packages.items())]),
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
    }


def _commit() -> str:
    """The last commit, with a plus where the library's files have changed since; without git a digest of the files."""

    def git(*command: str) -> str:
        run = subprocess.run(["git", *command], cwd=FOLDER.parent, capture_output=True, text=True, check=False)
        return run.stdout.strip()

    with contextlib.suppress(FileNotFoundError):  # no git
        if commit := git("rev-parse", "--short", "HEAD"):
            return commit + "+" * bool(git("status", "--porcelain", ":/logchain", ":/kernels"))
    return f"files {digest()}"


def digest() -> str:
    """Twelve digits that change with any file of the library or of its tests, where there may be no git."""
    sources = hashlib.sha256()
    for folder in ("kernels", "logchain", "tests"):  # `logchain/kernels` is a link, which is not followed
        for path in sorted((ROOT / folder).rglob("*.py")):
            sources.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return sources.hexdigest()[:12]


def write(rows: Iterable[AnyRow], path: Path) -> None:
    """Write a results file."""
    rows, new = list(rows), path.with_suffix(".new")
    with new.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(type(rows[0])._fields)
        writer.writerows([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row] for row in rows)
    new.replace(path)  # whoever is stopped meanwhile leaves the file as it was


def read(path: Path, kind: type[AnyRow] = Row) -> list[AnyRow]:
    """Read a results file; there may be none yet."""
    if not path.exists():
        return []
    numbers = [name for name, annotation in kind.__annotations__.items() if annotation in (float, float | None)]
    with path.open(newline="") as file:
        return [
            kind(**fields | {name: float(fields[name]) if fields[name] else None for name in numbers})
            for fields in csv.DictReader(file)
        ]
