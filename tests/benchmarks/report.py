"""Plots and tables of the README and of the pages, written from the results file."""

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from math import isinf, isnan
from pathlib import Path

from tests.benchmarks.cases import GRADIENTS, SCALED, SCALING
from tests.benchmarks.peers import FLOORS, PEERS
from tests.benchmarks.run import GRADIENT_ERROR, PEAK, RATIO, TIME, VALUE, VALUE_ERROR, read

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = ROOT / ".docs" / "pages"
PICTURES = PAGES / "pictures"
# every document that may hold tables
DOCUMENTS = [README, *sorted(PAGES.glob("*.md"))]
# a number with a unit, which documents show in tables only
MEASURED = re.compile(r"\d (ms|s|seconds|GB|MB|x|times)\b")
# of a case, the fastest providers that are shown
FASTEST = 2
# in the results file, not in tables: parts of logchain's work, cases like others, loops and variants
PARTS = {*FLOORS, "copies of five tensors", "its products alone", "product alone", "one process, CPU time"}
OMITTED = re.compile("full product|full mask")
VARIANTS = {"torch loop", "torch.compile, step by step", "dynamax, parallel"}
# of the plot of jobs: a case in a user's words, and its name
JOBS = [
    ("train a CRF: loss and gradients", "32 sentences of up to 128 words, 20 tags",
        f"layers/CRF n=32 v=128 c=20, ragged mask, 2 threads/loss, {GRADIENTS}"),
    ("fit an HMM: 50 iterations of EM", "200 sequences of 50 steps, 50 states",
        "layers/HMM n=200 v=50 c=50, Gaussian, 2 threads/EM, 50 iterations"),
    ("best paths (Viterbi)", "32 sequences of 512 steps, 64 states",
        "paths/n=32 v=512 c=64, one matrix/viterbi"),
    ("log-likelihood and posteriors, one long sequence", "10,000 steps, 16 states",
        f"peers/n=1 v=10000 c=16, one matrix/{GRADIENTS}"),
    ("log-partitions and gradients, a large batch", "500 sequences of 40 steps, 200 states",
        f"peers/n=500 v=40 c=200, shared bulk/{GRADIENTS}"),
    ("log-partitions and gradients, a tiny batch", "10 sequences of 6 steps, 40 states",
        f"peers/n=10 v=6 c=40, shared bulk/{GRADIENTS}"),
]  # fmt: skip


# by provider and metric
Values = dict[tuple[str, str], float]


def load(shown: Callable[[str], bool]) -> tuple[str, dict[str, Values]]:
    """Where, when and at which commits the cases that are shown were measured, and their values by case."""
    places: dict[tuple[str, str], set[str]] = {}
    values: dict[str, Values] = {}
    for row in read():
        if shown(row.case):
            torch = re.search(r"torch [\d.]+", row.version)
            if torch:
                places.setdefault((row.date, f"{row.hardware}, {torch[0]}"), set()).add(row.commit)
            values.setdefault(row.case, {})[row.provider, row.metric] = row.value
    texts = (
        f"{date}: {machine}, commit {', '.join(sorted(places[date, machine]))}" for date, machine in sorted(places)
    )
    return f"Measured on {'; '.join(texts)}.", values


def of_jobs() -> tuple[str, dict[str, Values]]:
    return load(lambda case: case in [job for _, _, job in JOBS])


def ratios(values: Values) -> list[tuple[float, str]]:
    """Times of other packages over logchain's, the fastest first."""
    return sorted(
        (value, provider) for (provider, metric), value in values.items() if metric == RATIO and provider not in PARTS
    )


def digits(value: float) -> str:
    """Three of them."""
    if 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.3g}"


def times(ratio: float) -> str:
    return f"{ratio:.2g} x" if ratio < 99.5 else f"{ratio:,.0f} x"


def cell(values: Values, provider: str, metric: str, unit: str) -> str:
    """A number with its unit; empty if a package does not take the case or failed."""
    value = values.get((provider, metric))
    return "" if value is None else f"{digits(value)} {unit}"


def table(place: str, header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, after the place where its rows were measured."""
    body = ["| " + " | ".join(line) + " |" for line in (header, *lines)]
    body.insert(1, "|---" * len(header) + "|")
    return f"{place}\n\n" + "\n".join(body)


def compared(kind: str, mode: str = "") -> str:
    """Logchain's time, and the fastest others' over it; of one mode, if it is named."""
    place, cases = load(lambda case: case.startswith(f"{kind}/") and case.endswith(mode) and not OMITTED.search(case))
    fastest = {
        case: "; ".join(f"{name} {times(ratio)}" for ratio, name in ratios(cases[case])[:FASTEST]) for case in cases
    }
    names = {case: case.split("/", 1)[1].removesuffix(mode).replace("/", ": ").rstrip(": ") for case in cases}
    lines = [(names[case], cell(cases[case], "logchain", TIME, "ms"), text) for case, text in fastest.items() if text]
    return table(place, (f"float32{mode and ', '}{mode}", "logchain", "others' time over logchain's"), lines)


def by_provider(text: Callable[[Values, str], str], shown: Callable[[str], bool]) -> str:
    """A line for each provider and a column for each case that is shown."""
    place, cases = load(shown)
    lines = [(name, *(text(values, name) for values in cases.values())) for name in PEERS if name not in VARIANTS]
    names = [case.split("/")[1] for case in cases]
    return table(place, ("", *names), (line for line in lines if any(line[1:])))


def errors(values: Values, name: str) -> str:
    """Errors of the log-partition and of posteriors; the log-partition, if it or the exact one is infinite."""
    if (name, VALUE) not in values:
        return ""
    value, *numbers = (values[name, metric] for metric in (VALUE, VALUE_ERROR, GRADIENT_ERROR))
    texts = ["NaN" if isnan(error) else "< 1e-12" if 0 < error < 1e-12 else digits(error) for error in numbers]
    if isinf(numbers[0]):
        texts[0] = digits(value) if isinf(value) else f"finite: {digits(value)}"
    return ", ".join(texts)


TABLES: dict[str, Callable[[], str]] = {
    "peers": lambda: compared("peers", GRADIENTS),
    "layers": lambda: compared("layers"),
    "paths": lambda: compared("paths", "viterbi"),
    "memory": lambda: by_provider(
        lambda values, name: cell(values, name, PEAK, "x"),
        lambda case: case.startswith("memory/"),
    ),
    "accuracy": lambda: by_provider(errors, lambda case: case.startswith("accuracy/")),
    "durations": lambda: compared("durations", GRADIENTS),
    "structures": lambda: compared("structures", GRADIENTS),
    "ranks": lambda: compared("ranks", GRADIENTS),
    # where the numbers of the plots come from
    "caption": lambda: of_jobs()[0],
    "scaling": lambda: load(lambda case: case.startswith("scaling/"))[0],
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
    """Panels one below the other, to be read on a phone, saved next to the pages: the same file for the same rows."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    with matplotlib.rc_context({"svg.hashsalt": "logchain", "font.size": 9, "axes.titlesize": 9}):
        drawing, axes = plt.subplots(panels, 1, figsize=(5.2, height), layout="constrained", squeeze=False)
        yield list(axes[:, 0])
        drawing.suptitle(title, fontsize=10)
        drawing.savefig(PICTURES / f"{name}.svg", metadata={"Date": None})
        plt.close(drawing)


def plot_jobs() -> None:
    """The fastest packages' times over logchain's, job by job."""
    _, values = of_jobs()
    fastest = [ratios(values[case])[:SHOWN] for _, _, case in JOBS]
    places = [0.0, *itertools.accumulate(len(bars) + 2.8 for bars in fastest)]
    with figure("jobs", 1, 0.2 * places[-1] + 0.5, "Time of other packages over logchain's, float32") as [panel]:
        for place, bars in zip(places, fastest, strict=False):
            for y, (ratio, name) in enumerate(bars, 2):
                panel.barh(place + y, min(ratio, LONGEST) - 1, left=1, color=FASTER if ratio > 1 else SLOWER)
                panel.vlines(1, place + y - 0.5, place + y + 0.5, color="#000000")
                inside = {"ha": "right", "color": "white"} if ratio > LONGEST else {}
                x = LONGEST * 0.96 if inside else max(ratio, 1) * 1.04
                panel.text(x, place + y, f"{name}, {times(ratio)}", va="center", **inside)
        for place, (name, size, _) in zip(places, JOBS, strict=False):
            panel.text(0.5, place, name, va="center", weight="bold")
            panel.text(0.5, place + 0.9, size, va="center", color="#555555", fontsize=8)
        for text in panel.texts:
            text.set_in_layout(False)
        panel.set_xscale("log")
        panel.set(xlim=(0.5, 60), ylim=(places[-1] - 0.5, -1), yticks=[])
        panel.set_xticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
        panel.minorticks_off()
        panel.set_xlabel("right of 1 logchain is faster, left of it the other package")
        panel.spines[["top", "left", "right"]].set_visible(False)


def plot_scaling() -> None:
    """Times against v and c."""
    _, values = load(lambda case: case.startswith("scaling/"))
    names = {"v": "variables v", "c": "states c"}
    title = "Forward and backward, one matrix for all steps,\nfloat32, one thread"
    with figure("scaling", len(names), 2.6 * len(names) + 0.6, title) as panels:
        for panel, (axis, sweep) in zip(panels, SCALING.items(), strict=True):
            for name in SCALED:
                sizes = {getattr(size, axis): values.get(f"scaling/{size}/{GRADIENTS}", {}) for size in sweep}
                points = {x: numbers[name, TIME] for x, numbers in sizes.items() if (name, TIME) in numbers}
                panel.loglog(list(points), list(points.values()), **STYLES[name], label=name)
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
