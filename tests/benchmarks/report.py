"""The results file, and what is drawn from it: the plot and the README's tables."""

import csv
import datetime
import platform
import subprocess
from collections.abc import Callable, Iterable, Sequence
from math import isinf, isnan
from pathlib import Path
from typing import NamedTuple

import numpy
import scipy
import torch

RESULTS = Path(__file__).parent / "results" / "cpu.csv"
QUESTIONS = RESULTS.with_name("questions.csv")
LAYERS = RESULTS.with_name("layers.csv")
PEERS = RESULTS.with_name("peers.csv")
ACCURACY, MEMORY, COUNTS = (RESULTS.with_name(f"{name}.csv") for name in ("accuracy", "memory", "counts"))
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
    commit: str = ""

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
        "commit": _commit(),
    }


def _commit() -> str:
    """The last commit, with a plus where the library's files have changed since; nothing outside a repository."""

    def git(*command: str) -> str:
        run = subprocess.run(["git", *command], cwd=README.parent, capture_output=True, text=True, check=False)
        return run.stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + "+" * bool(git("status", "--porcelain", "logchain", "kernels"))
    except FileNotFoundError:  # no git
        return ""


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
    return _ratios(QUESTIONS, "question")


def layers(_: Sequence[Row]) -> str:
    """What training a layer costs, from its own results file."""
    return _ratios(LAYERS, "mode")


def _ratios(path: Path, mode: str) -> str:
    rows = [row for row in read(path) if row.metric != "time"]
    lines = [
        (r.workload, r.mode, r.metric, r.text, r.bar or "", ("yes" if r.reached else "no") if r.bar else "")
        for r in rows
    ]
    return _markdown(("workload, float32", mode, "what", "measured", "bar", "reached"), lines)


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


def accuracy(_: Sequence[Row]) -> str:
    """Errors of log-partitions and of posteriors, case by case."""
    metrics = ("error of a log-partition", "error of a posterior")
    found = {(r.provider, r.workload, r.metric): r for r in read(ACCURACY)}

    def cell(provider: str, case: str) -> str:
        if (provider, case, metrics[0]) not in found:
            return _reason("accuracy", provider, case)
        value = found[provider, case, "log-partition"]._replace(unit="")
        errors = [found[provider, case, metric]._replace(unit="") for metric in metrics]
        texts = ["NaN" if isnan(row.value) else "< 1e-12" if 0 < row.value < 1e-12 else row.text for row in errors]
        if isinf(errors[0].value):  # one of the two is -inf, and the other is not
            texts[0] = value.text if isinf(value.value) else f"finite: {value.text}"
        return ", ".join(texts)

    return _by_provider(list(found), cell)


def memory(_: Sequence[Row]) -> str:
    """Peaks over the size of the inputs."""
    ending = "over the inputs"
    found = {(r.provider, f"{r.workload}: {r.mode}", r.metric): r for r in read(MEMORY) if r.metric.endswith(ending)}

    def cell(provider: str, case: str) -> str:
        row = found.get((provider, case, f"peak of resident memory {ending}"))
        return row.text if row else _reason("memory", provider, *case.split(": "))

    return _by_provider(list(found), cell)


def _by_provider(keys: Sequence[tuple[str, str, str]], cell: Callable[[str, str], str]) -> str:
    """A line for each provider and a column for each case; logchain first."""
    cases = list(dict.fromkeys(case for _, case, _ in keys))
    providers = dict.fromkeys(["logchain", *(provider for provider, *_ in keys)])
    lines = [(provider, *(cell(provider, case) for case in cases)) for provider in providers]
    return _markdown(("provider", *cases), lines)


def _reason(results: str, provider: str, workload: str, mode: str = GRADIENTS) -> str:
    """Why there is no number; nothing for what a provider does not take."""
    from tests.benchmarks.kept import left_out  # which writes with this file

    reasons = {entry[:4]: entry.reason for entry in left_out()}
    return reasons.get((results, workload, provider, mode), "").split(":")[0]


def caption(rows: Sequence[Row]) -> str:
    """Where the numbers come from."""
    row = rows[0]
    return f"Measured on {row.date}: {row.hardware}, one thread where nothing else is said; {row.versions}."


TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "accuracy": accuracy,
    "caption": caption,
    "faults": faults,
    "figures": figures,
    "layers": layers,
    "memory": memory,
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
