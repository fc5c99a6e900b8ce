"""The plots, drawn from the results files, narrow enough to be read on a phone; the same file for the same rows."""

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.benchmarks import report, results, scaling
from tests.benchmarks.cases import WORKLOADS, Workload
from tests.benchmarks.results import GRADIENTS, MODES, Measured, read

# Okabe and Ito's colours, which the colour-blind tell apart; markers say the same once more
STYLES = {
    "logchain": {"color": "#000000", "marker": "o"},
    "XLA scan": {"color": "#E69F00", "marker": "s"},
    "GOOM's formula": {"color": "#56B4E9", "marker": "^"},
    "dynamax": {"color": "#009E73", "marker": "D"},
    "hmmlearn, scaling": {"color": "#CC79A7", "marker": "v"},
    "pyro": {"color": "#D55E00", "marker": "P"},
    "torch-struct": {"color": "#0072B2", "marker": "X"},
    "torch loop": {"color": "#777777", "marker": "*"},
    "forum": {"color": "#E69F00", "marker": "d"},
}
FASTER, SLOWER, OTHERS = "#0072B2", "#D55E00", {"color": "#BBBBBB", "marker": "|"}
# of a job, the packages that are shown, and the longest bar
FASTEST, LONGEST = 3, 25


@contextmanager
def figure(name: str, panels: int, height: float, title: str):
    """Panels one below the other, saved beside the results."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    with matplotlib.rc_context({"svg.hashsalt": "logchain", "font.size": 9, "axes.titlesize": 9}):
        drawing, axes = plt.subplots(panels, 1, figsize=(5.2, height), layout="constrained", squeeze=False)
        yield list(axes[:, 0])
        drawing.suptitle(title, fontsize=10)
        drawing.savefig(file(name), metadata={"Date": None})
        plt.close(drawing)


def file(name: str) -> Path:
    """Where a plot lies."""
    return results.FOLDER / f"{name}.svg"


def jobs() -> None:
    """The fastest other packages' times over logchain's, job by job."""
    lines: list[tuple[float, float, str]] = []  # place, ratio, text
    headings: list[tuple[float, report.Job]] = []
    place = 0.0
    for job in report.SUMMARY:
        _, ratios = report.measured(job)
        headings.append((place, job))
        fastest = sorted((ratio, name) for name, ratio in ratios.items())[:FASTEST]
        lines += [
            (place + 2 + i, ratio, f"{name}, {ratio:,.0f} x" if ratio > LONGEST else f"{name}, {ratio:.2g} x")
            for i, (ratio, name) in enumerate(fastest)
        ]
        place += len(fastest) + 2.8
    with figure("jobs", 1, 0.2 * place + 0.5, "Time of other packages over logchain's, float32") as [panel]:
        places, values, texts = zip(*lines, strict=True)
        colours = [FASTER if value > 1 else SLOWER for value in values]
        panel.barh(places, [min(value, LONGEST) - 1 for value in values], left=1, color=colours)
        panel.vlines([1] * len(places), [y - 0.5 for y in places], [y + 0.5 for y in places], color="#000000")
        for y, value, text in zip(places, values, texts, strict=True):
            inside = {"ha": "right", "color": "white"} if value > LONGEST else {}
            panel.text(LONGEST * 0.96 if inside else max(value, 1) * 1.04, y, text, va="center", **inside)
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


def against_v() -> None:
    """Time and memory of logchain, a loop and the forum's code against v."""
    names = {"logchain": "logchain", "torch loop": "a torch.logsumexp loop", "forum": "the forum's code"}
    rows = [row for row in read(results.PRODUCT) if row.workload.startswith("sweep")]
    title = "Forward and backward, n=32 sequences of\nc=64 states, float32, one thread"
    with figure("against_v", 2, 5, title) as panels:
        for panel, (metric, label) in zip(panels, (("time", "time, ms"), ("memory", "peak memory, MB")), strict=True):
            for provider, name in names.items():
                points = [
                    (int(row.workload.split("v=")[1].split()[0]), row.value)
                    for row in rows
                    if (row.provider, row.metric) == (provider, metric)
                ]
                panel.loglog(*zip(*points, strict=True), **STYLES[provider], label=name)
            panel.set(ylabel=label)
            panel.set_xticks([x for x, _ in points], [str(x) for x, _ in points], minor=False)
            panel.minorticks_off()
            panel.grid(alpha=0.3)
        panels[0].legend(frameon=False)
        panels[-1].set_xlabel("variables v")


def against_sizes(sweeps: Mapping[str, Sequence[Workload]] = scaling.SWEEPS) -> None:
    """Time against v, c and n."""
    rows = {(r.workload, r.provider): r for r in read(results.SCALING, Measured) if r.mode == GRADIENTS}
    names = {"v": "variables v", "c": "states c", "n": "sequences n"}
    title = "Forward and backward, one matrix for all steps,\nfloat32, one thread"
    with figure("scaling", len(sweeps), 2.6 * len(sweeps) + 0.6, title) as panels:
        for panel, (axis, sweep) in zip(panels, sweeps.items(), strict=True):
            for provider in scaling.SOME:
                found = [(getattr(one, axis), rows.get((str(one), provider))) for one in sweep]
                points = [(x, row.median_ms) for x, row in found if row]
                panel.loglog([x for x, _ in points], [y for _, y in points], **STYLES[provider], label=provider)
            fixed = ", ".join(f"{name}={getattr(sweep[0], name)}" for name in "nvc" if name != axis)
            panel.set(xlabel=f"{names[axis]}, where {fixed}", ylabel="time, ms")
            panel.grid(alpha=0.3)
        panels[0].legend(frameon=False)


def against_peers() -> None:
    """Everybody's time over logchain's, case by case; sharp emissions are in the table alone."""
    sharp = {str(workload) for workload in WORKLOADS if workload.sharpness > 1}
    measured = (row for row in read(results.PEERS, Measured) if row.workload not in sharp)
    rows = [row for row in measured if row.device == "CPU" and row.mode == GRADIENTS]
    found = [
        (row.provider, row.workload, row.ratio) for row in rows if row.provider not in ("logchain", *report.FLOORS)
    ]
    height = 0.36 * len({row.workload for row in rows}) + 2
    with figure("peers", 1, height, "Time over logchain's, forward and backward, float32, one core") as [panel]:
        _dots(panel, found)
        panel.axvline(1, color="#000000", linewidth=1)
        panel.set_xlabel("right of the line, logchain is faster")
        _legend(panel)


def against_memory() -> None:
    """Everybody's peak over the size of the inputs."""
    rows = [row for row in read(results.MEMORY) if row.metric == "peak of resident memory over the inputs"]
    height = 0.9 * len({row.workload for row in rows}) + 2.6
    with figure("memory", 2, height, "Peak memory of a call over the size of its inputs, float32") as panels:
        for panel, mode in zip(panels, MODES, strict=True):
            _dots(panel, [(row.provider, row.workload, row.value) for row in rows if row.mode == mode])
            panel.set_title(mode)
        panels[-1].set_xlabel("peak over inputs")
        _legend(panels[0])


def _dots(panel: Any, found: Sequence[tuple[str, str, float]]) -> None:
    """A line for each case, a mark for each of those who are named, grey ones for the others."""
    cases = list(dict.fromkeys(case for _, case, _ in found))[::-1]
    providers = dict.fromkeys(name for name, *_ in found)
    shown = [name for name in STYLES if name in providers and name != "forum"]
    for name in [*sorted(providers.keys() - {*shown}), *shown]:
        points = [(value, cases.index(case)) for provider, case, value in found if provider == name]
        mark = STYLES[name] if name in shown else OTHERS
        label = name if name in shown else None
        panel.plot(*zip(*points, strict=True), **mark, linestyle="none", markersize=6, alpha=0.8, label=label)
    panel.plot([], [], **OTHERS, linestyle="none", label="others")
    panel.set_xscale("log")
    panel.set_yticks(range(len(cases)), [case.replace(", ", ",\n") for case in cases], fontsize=8)
    panel.set_ylim(-0.5, len(cases) - 0.5)
    panel.grid(alpha=0.3)


def _legend(panel: Any) -> None:
    """What the marks mean, below all panels."""
    panel.figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)


def draw() -> None:
    """Every plot of which there are results."""
    for paths, plot in (
        ((results.LAYERS, results.QUESTIONS, results.PEERS), jobs),
        ((results.PRODUCT,), against_v),
        ((results.SCALING,), against_sizes),
        ((results.PEERS,), against_peers),
        ((results.MEMORY,), against_memory),
    ):
        if all(path.exists() for path in paths):
            plot()
