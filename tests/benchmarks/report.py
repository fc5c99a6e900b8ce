"""The results file, and what is drawn from it: the plot and the README's tables."""

import csv
import datetime
import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy
import scipy
import torch

RESULTS = Path(__file__).parent / "results" / "cpu.csv"
QUESTIONS = RESULTS.with_name("questions.csv")
PEERS = RESULTS.with_name("peers.csv")
PLOT = RESULTS.with_name("against_v.svg")
README = Path(__file__).parents[2] / "README.md"
FORWARD, GRADIENTS = "forward", "forward and backward"


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

    @property
    def text(self) -> str:
        """The value to three digits, with its unit."""
        digits = f"{self.value:.1e}" if 0 < abs(self.value) < 1e-3 else f"{self.value:.3g}"
        if 1000 <= abs(self.value) < 1e6:
            digits = f"{self.value:,.0f}"
        return f"{digits} {self.unit}".strip()

    @property
    def reached(self) -> bool:
        """Whether the value is on the right side of its bar."""
        sign, limit = self.bar.split()
        return self.value <= float(limit) if sign == "<=" else self.value >= float(limit)


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
    }


def write(rows: Iterable[Row], path: Path = RESULTS) -> None:
    """Write a results file."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows(row._replace(value=f"{row.value:.6g}") for row in rows)


def read(path: Path = RESULTS) -> list[Row]:
    """Read a results file."""
    with path.open(newline="") as file:
        return [Row(**fields)._replace(value=float(fields["value"])) for fields in csv.DictReader(file)]


def figures(rows: Sequence[Row]) -> str:
    """Every number that has a bar."""
    lines = [(r.workload, r.mode, r.metric, r.text, r.bar, "yes" if r.reached else "no") for r in rows if r.bar]
    return _markdown(("workload, float32", "mode", "what", "measured", "bar", "reached"), lines)


def times(rows: Sequence[Row]) -> str:
    """Times of every provider, workload by workload."""
    providers = ("logchain", "GEMMs alone", "torch loop", "forum")
    cell = {(r.workload, r.mode, r.provider): r.text for r in rows if r.metric == "time" and "sweep" not in r.workload}
    cases = dict.fromkeys((workload, mode) for workload, mode, _ in cell)
    lines = [(*case, *(cell[(*case, provider)] for provider in providers)) for case in cases]
    return _markdown(("workload, float32", "mode", "logchain", "GEMMs alone", "torch loop", "forum's code"), lines)


def faults(rows: Sequence[Row]) -> str:
    """What the forum's code gets wrong, in numbers."""
    values = {(r.workload, r.provider): f"{r.value:.2f}" for r in rows if r.metric == "value"}
    providers = ("scipy float64", "logchain", "forum")
    cases = dict.fromkeys(workload for workload, _ in values)
    lines = [(case, *(values[case, provider] for provider in providers)) for case in cases]
    return _markdown(("log-partition in nats", "scipy, float64", "logchain, float32", "forum's code"), lines)


def questions(_: Sequence[Row]) -> str:
    """What the questions of a chain cost, from their own results file."""
    rows = [row for row in read(QUESTIONS) if row.metric != "time"]
    lines = [
        (r.workload, r.mode, r.metric, r.text, r.bar or "", ("yes" if r.reached else "no") if r.bar else "")
        for r in rows
    ]
    return _markdown(("workload, float32", "question", "what", "measured", "bar", "reached"), lines)


def peers(_: Sequence[Row]) -> str:
    """The fastest peers of each workload, from their own results file."""
    ratios: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for row in read(PEERS):
        if row.metric.endswith("over logchain's") and row.mode in (FORWARD, GRADIENTS):
            ratios.setdefault((row.workload, row.mode), []).append((row.value, row.provider))
    lines = [
        (*case, ", ".join(f"{name} {ratio:.2g} x" for ratio, name in sorted(found)[:4]), str(len(found)))
        for case, found in ratios.items()
    ]
    return _markdown(("workload, float32", "mode", "the fastest peers' time over logchain's", "peers"), lines)


def caption(rows: Sequence[Row]) -> str:
    """Where the numbers come from."""
    row = rows[0]
    return f"Measured on {row.date}: {row.hardware}, one thread where nothing else is said; {row.versions}."


TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "caption": caption,
    "faults": faults,
    "figures": figures,
    "peers": peers,
    "questions": questions,
    "times": times,
}


def fill(readme: str, rows: Sequence[Row]) -> str:
    """The README with the text between each pair of markers written anew."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: from the results file -->\n", f"<!-- {name}: end -->"
        head, rest = readme.split(begin)
        readme = head + begin + table(rows) + "\n" + end + rest.split(end)[1]
    return readme


def update_readme(rows: Sequence[Row]) -> None:
    """Write the README's tables from the results file."""
    README.write_text(fill(README.read_text(), rows))


def plot(rows: Sequence[Row]) -> None:
    """Time and memory against v; the same file for the same rows."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "logchain"
    names = {"forum": "the forum's code", "torch loop": "a torch.logsumexp loop", "logchain": "logchain"}
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for panel, (metric, label) in zip(panels, (("time", "time, ms"), ("memory", "peak memory, MB")), strict=True):
        for provider, name in names.items():
            points = [
                (int(row.workload.split("v=")[1].split()[0]), row.value)
                for row in rows
                if row.workload.startswith("sweep") and (row.provider, row.metric) == (provider, metric)
            ]
            panel.loglog(*zip(*points, strict=True), marker="o", label=name)
        panel.set(xlabel="variables v", ylabel=label)
        panel.set_xticks([x for x, _ in points], [str(x) for x, _ in points], minor=False)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].legend(frameon=False)
    figure.suptitle("Forward and backward, n=32 sequences of c=64 states, float32, one thread")
    figure.savefig(PLOT, metadata={"Date": None})
    plt.close(figure)


def _markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    body = ["| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *lines)]
    return "\n".join(body)
