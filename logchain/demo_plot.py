"""The demonstration of `python -m logchain`, drawn by matplotlib, an optional dependency."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .demo import Cost, Demonstration

# ours, others, and what is promised or cannot be avoided
OURS, OTHERS, BOUND = "#3f51b5", "#9e9e9e", "#e65100"
SUFFIXES = (".png", ".pdf", ".svg")


def check_plot(path: str) -> None:
    """Raise unless `plot` can draw to a file of this name, which is left as it is.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the name does not end in .png, .pdf or .svg.
        OSError: the file cannot be written.
    """
    if find_spec("matplotlib") is None:
        raise ImportError("--plot: expected matplotlib to be installed, see `pip install matplotlib`")
    if Path(path).suffix.lower() not in SUFFIXES:
        raise ValueError(f"--plot: expected a name that ends in {', '.join(SUFFIXES)}, got {path}")
    existed = Path(path).exists()
    with open(path, "ab"):
        pass
    if not existed:
        Path(path).unlink()


def plot(demonstration: Demonstration, path: str) -> None:
    """Write a picture: times, memory and errors of the demonstration, on logarithmic axes, each with its number."""
    from matplotlib.figure import Figure

    n, v, c = demonstration[:3]
    figure = Figure(figsize=(9, 9), dpi=150, layout="constrained")
    figure.suptitle(f"logchain: {n} sequences of {v} steps with {c} states, float32, one thread", fontsize=13)
    times, memory, errors = figure.subplots(3, 1, height_ratios=[8, 5, 4])
    costs = [*_titled("log-partitions", demonstration.forward), *_titled("with gradients", demonstration.gradients)]
    _bars(times, costs, [cost.seconds for cost in costs], [cost.time for cost in costs])
    times.set(title="Time of one call", xlabel="seconds")
    sizes = [cost for cost in costs if cost.memory is not None] + [Cost("x itself", 0.0, demonstration.message)]
    _bars(memory, sizes, [cost.memory for cost in sizes], [cost.size for cost in sizes])
    memory.set(title="Memory beyond inputs, result and gradients", xlabel="bytes")
    _errors(errors, demonstration)
    figure.savefig(path)


def _titled(title: str, costs: list[Cost]) -> list[Cost]:
    return [cost._replace(name=f"{cost.name}\n{title}") for cost in costs]


def _bars(axes: Any, costs: list[Cost], widths: list[Any], labels: list[str]) -> None:
    """Horizontal bars from the top down, each with its number at its end."""
    colours = [OURS if "logchain" in cost.name else BOUND if "alone" in cost.name else OTHERS for cost in costs]
    bars = axes.barh(range(len(costs)), widths, color=colours)
    axes.bar_label(bars, labels, padding=4)
    axes.set_yticks(range(len(costs)), [cost.name for cost in costs], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)


def _errors(axes: Any, demonstration: Demonstration) -> None:
    """The largest error of each quantity, and the largest that there may be."""
    checks = demonstration.checks
    rows, floor = range(len(checks)), 2.0**-60
    axes.hlines(rows, [max(row.error, floor) for row in checks], [row.promised for row in checks], colors="#dddddd")
    axes.plot([max(row.error, floor) for row in checks], rows, "o", color=OURS, label="largest error")
    axes.plot([row.promised for row in checks], rows, "|", color=BOUND, markersize=14, mew=2, label="promised at most")
    axes.set_yticks(rows, [row.name for row in checks], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(y=0.2)
    axes.set(title="Errors against scipy in float64")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
