"""Plots and tables of the README and of the pages, written from the results file."""

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from math import isinf, isnan
from pathlib import Path
from typing import NamedTuple

from tests.benchmarks import cases
from tests.benchmarks.cases import GRADIENTS
from tests.benchmarks.peers import FLOORS, PEERS
from tests.benchmarks.run import GRADIENT_ERROR, PEAK, RATIO, RESULTS, TIME, VALUE, VALUE_ERROR, Row, read

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
# every document that may hold tables
DOCUMENTS = [README, *sorted((ROOT / ".docs" / "pages").glob("*.md"))]
# a number with a unit, which documents show in tables only
MEASURED = re.compile(r"\d (ms|s|seconds|GB|MB|x|times)\b")
# of a case, the fastest providers that are shown
FASTEST = 4


class Job(NamedTuple):
    """A line of the summary: a case in a user's words."""

    name: str
    size: str
    case: str


JOBS = [
    Job("train a CRF: loss and gradients", "32 sentences of up to 128 words, 20 tags",
        f"layers/CRF n=32 v=128 c=20, ragged mask, 2 threads/loss, {GRADIENTS}"),
    Job("fit an HMM: 50 iterations of EM", "200 sequences of 50 steps, 50 states",
        "layers/HMM n=200 v=50 c=50, Gaussian, 2 threads/EM, 50 iterations"),
    Job("best paths (Viterbi)", "32 sequences of 512 steps, 64 states",
        "paths/n=32 v=512 c=64, one matrix/viterbi"),
    Job("log-likelihood and posteriors, one long sequence", "10,000 steps, 16 states",
        f"peers/n=1 v=10000 c=16, one matrix/{GRADIENTS}"),
    Job("log-partitions and gradients, a large batch", "500 sequences of 40 steps, 200 states",
        f"peers/n=500 v=40 c=200, shared bulk/{GRADIENTS}"),
    Job("log-partitions and gradients, a tiny batch", "10 sequences of 6 steps, 40 states",
        f"peers/n=10 v=6 c=40, shared bulk/{GRADIENTS}"),
]  # fmt: skip


# rows


def by_case(kind: str) -> dict[str, list[Row]]:
    """The rows of a kind."""
    found: dict[str, list[Row]] = {}
    for row in read():
        if row.case.startswith(f"{kind}/"):
            found.setdefault(row.case, []).append(row)
    return found


def milliseconds(rows: Iterable[Row], provider: str = "logchain") -> float | None:
    return next((row.value for row in rows if (row.provider, row.metric) == (provider, TIME)), None)


def ratios(rows: Iterable[Row]) -> list[tuple[float, str]]:
    """Others' times over logchain's, the fastest first; without floors."""
    return sorted((row.value, row.provider) for row in rows if row.metric == RATIO and row.provider not in FLOORS)


def digits(value: float) -> str:
    """Three of them."""
    if 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.3g}"


def times(ratio: float) -> str:
    return f"{ratio:.2g} x" if ratio < 99.5 else f"{ratio:,.0f} x"


# tables


def table(rows: Iterable[Row], header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, after a line that says where and when its rows were measured."""
    places: dict[str, set[str]] = {}
    for row in rows:
        places.setdefault(row.hardware, set()).add(row.date)
    measured = "; ".join(f"{', '.join(sorted(dates))}: {hardware}" for hardware, dates in places.items())
    body = ["| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *lines)]
    return f"Measured on {measured}.\n\n" + "\n".join(body)


def summary() -> str:
    """The fastest other package of each job."""
    found, lines = [row for job in JOBS for row in by_case(job.case.partition("/")[0])[job.case]], []
    for job in JOBS:
        rows = [row for row in found if row.case == job.case]
        (ratio, fastest), *others = ratios(rows)
        time = f"{digits(milliseconds(rows) or 0)} ms"
        lines.append((job.name, job.size, time, fastest, times(ratio), str(1 + len(others))))
    measured = "its time over logchain's", "packages measured"
    return table(found, ("job, float32", "size", "logchain", "fastest other package", *measured), lines)


def peers() -> str:
    """Logchain's time, the floors', and the fastest packages' over logchain's."""
    found, lines = by_case("peers"), []
    for case, rows in found.items():
        spent = [milliseconds(rows, name) for name in ("logchain", *FLOORS)]
        fastest = ratios(rows)
        text = "; ".join(f"{name} {times(ratio)}" for ratio, name in fastest[:FASTEST])
        lines.append((*case.split("/")[1:], *(f"{digits(time)} ms" if time else "" for time in spent), text))
        lines[-1] += (str(len(fastest)),)
    header = "workload, float32", "mode", "logchain", *FLOORS, "the fastest packages' time over logchain's", "packages"
    return table((row for rows in found.values() for row in rows), header, lines)


def compared(kind: str) -> str:
    """Logchain's time, and the others' over it, a column for each."""
    found, lines = by_case(kind), []
    others = list(dict.fromkeys(row.provider for rows in found.values() for row in rows if row.metric == RATIO))
    for case, rows in found.items():
        time, ratio = (
            milliseconds(rows),
            {row.provider: f"{digits(row.value)} x" for row in rows if row.metric == RATIO},
        )
        lines.append(
            (*case.split("/")[1:], f"{digits(time)} ms" if time else "", *(ratio.get(name, "") for name in others))
        )
    header = "workload, float32", "mode", "logchain", *others
    return table((row for rows in found.values() for row in rows), header, lines)


def by_provider(kind: str, cell: Callable[[dict[str, float]], str]) -> str:
    """A line for each provider and a column for each case, empty where a package does not take the case or failed."""
    found = by_case(kind)
    values = {(row.case, row.provider): {} for rows in found.values() for row in rows}
    for row in (row for rows in found.values() for row in rows):
        values[row.case, row.provider][row.metric] = row.value
    providers = [name for name in PEERS if any(name == provider for _, provider in values)]
    lines = [
        [name, *(cell(values[case, name]) if (case, name) in values else "" for case in found)] for name in providers
    ]
    header = ["provider", *(": ".join(case.split("/")[1:]) for case in found)]
    return table((row for rows in found.values() for row in rows), header, lines)


def errors(metrics: dict[str, float]) -> str:
    """Errors of the log-partition and of posteriors; the log-partition, if it or the exact one is infinite."""
    value = digits(metrics[VALUE])
    texts = [
        "NaN" if isnan(error) else "< 1e-12" if 0 < error < 1e-12 else digits(error)
        for error in (metrics[VALUE_ERROR], metrics[GRADIENT_ERROR])
    ]
    if isinf(metrics[VALUE_ERROR]):
        texts[0] = value if isinf(metrics[VALUE]) else f"finite: {value}"
    return ", ".join(texts)


TABLES: dict[str, Callable[[], str]] = {
    "summary": summary,
    "peers": peers,
    "accuracy": lambda: by_provider("accuracy", errors),
    "memory": lambda: by_provider("memory", lambda metrics: f"{digits(metrics[PEAK])} x"),
    **{kind: partial(compared, kind) for kind in ("layers", "paths", "ranks", "sharpness", "streams", "structures")},
    # where the numbers of the plot of jobs come from
    "caption": lambda: summary().partition("\n")[0],
}


def fill(text: str) -> str:
    """A document with the text between each pair of markers written again."""
    for name, write in TABLES.items():
        begin, end = f"<!-- {name}: from the results file -->\n", f"<!-- {name}: end -->"
        if begin in text:
            head, rest = text.split(begin)
            text = head + begin + write() + "\n" + end + rest.split(end)[1]
    return text


def prose(text: str) -> str:
    """A document without its tables of results and its code."""
    without_tables = re.sub(r"<!-- (\w+): from the results file -->.*?<!-- \1: end -->", "", text, flags=re.DOTALL)
    return re.sub(r"```.*?```", "", without_tables, flags=re.DOTALL)


# plots, narrow enough to be read on a phone; the same file for the same rows

# Okabe and Ito's colors, which the color-blind tell apart; markers repeat the distinction
STYLES = {
    "logchain": {"color": "#000000", "marker": "o"},
    "XLA scan": {"color": "#E69F00", "marker": "s"},
    "hmmlearn, scaling": {"color": "#CC79A7", "marker": "v"},
    "pyro": {"color": "#D55E00", "marker": "P"},
    "torch loop": {"color": "#777777", "marker": "*"},
}
FASTER, SLOWER = "#0072B2", "#D55E00"
# of a job, the packages that are shown, and the longest bar
SHOWN, LONGEST = 3, 25


@contextmanager
def figure(name: str, panels: int, height: float, title: str):
    """Panels one below the other, saved next to the results."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    with matplotlib.rc_context({"svg.hashsalt": "logchain", "font.size": 9, "axes.titlesize": 9}):
        drawing, axes = plt.subplots(panels, 1, figsize=(5.2, height), layout="constrained", squeeze=False)
        yield list(axes[:, 0])
        drawing.suptitle(title, fontsize=10)
        drawing.savefig(RESULTS.with_name(f"{name}.svg"), metadata={"Date": None})
        plt.close(drawing)


def plot_jobs() -> None:
    """The fastest packages' times over logchain's, job by job."""
    lines: list[tuple[float, float, str]] = []  # place, ratio, text
    headings: list[tuple[float, Job]] = []
    place = 0.0
    for job in JOBS:
        headings.append((place, job))
        fastest = ratios(by_case(job.case.partition("/")[0])[job.case])[:SHOWN]
        lines += [(place + 2 + i, ratio, f"{name}, {times(ratio)}") for i, (ratio, name) in enumerate(fastest)]
        place += len(fastest) + 2.8
    with figure("jobs", 1, 0.2 * place + 0.5, "Time of other packages over logchain's, float32") as [panel]:
        for y, ratio, text in lines:
            panel.barh(y, min(ratio, LONGEST) - 1, left=1, color=FASTER if ratio > 1 else SLOWER)
            panel.vlines(1, y - 0.5, y + 0.5, color="#000000")
            inside = {"ha": "right", "color": "white"} if ratio > LONGEST else {}
            panel.text(LONGEST * 0.96 if inside else max(ratio, 1) * 1.04, y, text, va="center", **inside)
        for y, job in headings:
            panel.text(0.5, y, job.name, va="center", weight="bold")
            panel.text(0.5, y + 0.9, job.size, va="center", color="#555555", fontsize=8)
        for text in panel.texts:
            text.set_in_layout(False)
        panel.set_xscale("log")
        panel.set(xlim=(0.5, 60), ylim=(place - 0.5, -1), yticks=[])
        panel.set_xticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
        panel.minorticks_off()
        panel.set_xlabel("right of 1 logchain is faster, left of it the other package")
        panel.spines[["top", "left", "right"]].set_visible(False)


def plot_scaling() -> None:
    """Times against v and c."""
    found, names = by_case("scaling"), {"v": "variables v", "c": "states c"}
    title = "Forward and backward, one matrix for all steps,\nfloat32, one thread"
    with figure("scaling", len(names), 2.6 * len(names) + 0.6, title) as panels:
        for panel, (axis, sweep) in zip(panels, cases.SCALING.items(), strict=True):
            for name in cases.SCALED:
                times = [milliseconds(found.get(f"scaling/{one}/{GRADIENTS}", []), name) for one in sweep]
                points = [(getattr(one, axis), time) for one, time in zip(sweep, times, strict=True) if time]
                panel.loglog([x for x, _ in points], [y for _, y in points], **STYLES[name], label=name)
            fixed = ", ".join(f"{name}={getattr(sweep[0], name)}" for name in "nvc" if name != axis)
            panel.set(xlabel=f"{names[axis]}, where {fixed}", ylabel="time, ms")
            panel.grid(alpha=0.3)
        panels[0].legend(frameon=False)


def main() -> None:
    """Draws the plots, and writes the tables of all documents."""
    plot_jobs()
    plot_scaling()
    for path in DOCUMENTS:
        path.write_text(fill(path.read_text()))
