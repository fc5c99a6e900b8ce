"""The plots, drawn from the results files; the same file for the same rows."""

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.benchmarks import results, scaling
from tests.benchmarks.cases import Workload
from tests.benchmarks.results import GRADIENTS, MODES, Measured, read

# Okabe and Ito's colours, which the colour-blind tell apart; markers say the same once more
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#D55E00", "#0072B2", "#F0E442")
STYLES = [{"color": colour, "marker": marker} for colour, marker in zip(COLOURS, "os^DvPX*", strict=True)]


@contextmanager
def figure(name: str, columns: int, width: float, height: float, title: str):
    """Panels side by side, saved beside the results."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    with matplotlib.rc_context({"svg.hashsalt": "logchain"}):
        drawing, panels = plt.subplots(1, columns, figsize=(width, height), layout="constrained")
        yield panels
        drawing.suptitle(title)
        drawing.savefig(file(name), metadata={"Date": None})
        plt.close(drawing)


def file(name: str) -> Path:
    """Where a plot lies."""
    return results.FOLDER / f"{name}.svg"


def against_v() -> None:
    """Time and memory of logchain, a loop and the forum's code against v."""
    names = {"logchain": "logchain", "torch loop": "a torch.logsumexp loop", "forum": "the forum's code"}
    rows = [row for row in read(results.PRODUCT) if row.workload.startswith("sweep")]
    title = "Forward and backward, n=32 sequences of c=64 states, float32, one thread"
    with figure("against_v", 2, 9, 3.2, title) as panels:
        for panel, (metric, label) in zip(panels, (("time", "time, ms"), ("memory", "peak memory, MB")), strict=True):
            for (provider, name), style in zip(names.items(), STYLES, strict=False):
                points = [
                    (int(row.workload.split("v=")[1].split()[0]), row.value)
                    for row in rows
                    if (row.provider, row.metric) == (provider, metric)
                ]
                panel.loglog(*zip(*points, strict=True), **style, label=name)
            panel.set(xlabel="variables v", ylabel=label)
            panel.set_xticks([x for x, _ in points], [str(x) for x, _ in points], minor=False)
            panel.minorticks_off()
            panel.grid(alpha=0.3)
        panels[0].legend(frameon=False)


def against_sizes(sweeps: Mapping[str, Sequence[Workload]] = scaling.SWEEPS) -> None:
    """Time against v, c and n."""
    rows = {(r.workload, r.provider): r for r in read(results.SCALING, Measured) if r.mode == GRADIENTS}
    names = {"v": "variables v", "c": "states c", "n": "sequences n"}
    title = "Forward and backward, one matrix for all steps, float32, one thread"
    with figure("scaling", len(sweeps), 4 * len(sweeps), 3.4, title) as panels:
        for panel, (axis, sweep) in zip(panels, sweeps.items(), strict=True):
            for provider, style in zip(scaling.SOME, STYLES, strict=False):
                found = [(getattr(one, axis), rows.get((str(one), provider))) for one in sweep]
                points = [(x, row.median_ms) for x, row in found if row]
                panel.loglog([x for x, _ in points], [y for _, y in points], **style, label=provider)
            fixed = ", ".join(f"{name}={getattr(sweep[0], name)}" for name in "nvc" if name != axis)
            panel.set(xlabel=names[axis], ylabel="time, ms", title=fixed)
            panel.grid(alpha=0.3)
        panels[0].legend(frameon=False)


def against_peers() -> None:
    """Everybody's time over logchain's, case by case."""
    rows = [row for row in read(results.PEERS, Measured) if row.device == "CPU" and row.provider != "logchain"]
    found = [(row.provider, row.workload, row.mode, row.ratio) for row in rows if row.mode in MODES]
    height = 0.36 * len({row.workload for row in rows}) + 2.6
    with figure("peers", 2, 12, height, "Time over logchain's, float32, one core") as panels:
        _dots(panels, found)
        for panel in panels:
            panel.axvline(1, color="#000000", linewidth=1)
            panel.set_xlabel("time over logchain's: right of the line, logchain is faster")


def against_memory() -> None:
    """Everybody's peak over the size of the inputs."""
    rows = [row for row in read(results.MEMORY) if row.metric == "peak of resident memory over the inputs"]
    height = 0.5 * len({row.workload for row in rows}) + 2.6
    with figure("memory", 2, 12, height, "Peak memory of a call over the size of its inputs, float32") as panels:
        _dots(panels, [(row.provider, row.workload, row.mode, row.value) for row in rows])
        for panel in panels:
            panel.set_xlabel("peak over inputs")


def _dots(panels: Sequence[Any], found: Sequence[tuple[str, str, str, float]]) -> None:
    """A panel for each mode, a line for each case, a mark for each provider; every eight are filled anew."""
    cases = list(dict.fromkeys(case for _, case, *_ in found))[::-1]
    for i, provider in enumerate(sorted({name for name, *_ in found})):
        filled = ("full", "none", "left")[i // len(STYLES)]
        style = dict(STYLES[i % len(STYLES)], linestyle="none", markersize=6, fillstyle=filled)
        for panel, mode in zip(panels, MODES, strict=True):
            points = [
                (value, cases.index(case)) for name, case, *rest, value in found if [name, *rest] == [provider, mode]
            ]
            panel.plot([x for x, _ in points], [y for _, y in points], **style, label=provider)
    for panel, mode, names in zip(panels, MODES, (cases, [""] * len(cases)), strict=True):
        panel.set_xscale("log")
        panel.set_yticks(range(len(cases)), names)
        panel.set_title(mode)
        panel.grid(alpha=0.3)
    handles = panels[0].get_legend_handles_labels()
    panels[0].figure.legend(*handles, loc="outside lower center", ncols=6, frameon=False)


def draw() -> None:
    """Every plot of which there are results."""
    for path, plot in (
        (results.PRODUCT, against_v),
        (results.SCALING, against_sizes),
        (results.PEERS, against_peers),
        (results.MEMORY, against_memory),
    ):
        if path.exists():
            plot()
