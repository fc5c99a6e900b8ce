"""Times against v, c and n, logchain's and some peers': `python -m tests.benchmarks scaling`.

Measured as `peers` does; answers are compared with the reference up to a hundred thousand steps.
"""

import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.benchmarks import aside, kept, peers, report
from tests.benchmarks.peers import ONE, Workload
from tests.benchmarks.report import GRADIENTS, Row

RESULTS = report.RESULTS.with_name("scaling.csv")
PLOT = RESULTS.with_suffix(".svg")
SOME = ("XLA scan", "hmmlearn, scaling", "pyro", "torch loop")
SWEEPS = {
    "v": [Workload(1, v, 16, ONE) for v in (10, 100, 1000, 10_000, 100_000, 1_000_000)],
    "c": [Workload(8, 128, c, ONE) for c in (4, 16, 64, 256, 1024)],
    "n": [Workload(n, 128, 64, ONE) for n in (1, 4, 16, 64, 256, 1024)],
}
# Okabe and Ito's colours, which the colour-blind tell apart
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7")


def points(rows: Sequence[Row], provider: str, sweep: Sequence[Workload], axis: str) -> list[tuple[int, float]]:
    """A provider's times with gradients, in ms; logchain's are those beside the first peer of each workload."""
    metric = "logchain's time beside it" if provider == "logchain" else "time"
    found: dict[str, float] = {}
    for row in rows:
        if (row.metric, row.mode) == (metric, GRADIENTS) and provider in ("logchain", row.provider):
            found.setdefault(row.workload, row.value)
    return [(getattr(one, axis), found[str(one)]) for one in sweep if str(one) in found]


def plot(rows: Sequence[Row], sweeps: Mapping[str, Sequence[Workload]] = SWEEPS) -> None:
    """One panel for each sweep; the same file for the same rows."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "logchain"
    names = {"v": "variables v", "c": "states c", "n": "sequences n"}
    figure, panels = plt.subplots(1, len(sweeps), figsize=(4 * len(sweeps), 3.4), layout="constrained", squeeze=False)
    for panel, (axis, sweep) in zip(panels[0], sweeps.items(), strict=True):
        for provider, colour in zip(("logchain", *SOME), COLOURS, strict=True):
            line = points(rows, provider, sweep, axis)
            panel.loglog([x for x, _ in line], [y for _, y in line], marker="o", color=colour, label=provider)
        fixed = ", ".join(f"{name}={getattr(sweep[0], name)}" for name in "nvc" if name != axis)
        panel.set(xlabel=names[axis], ylabel="time, ms", title=fixed)
        panel.grid(alpha=0.3)
    panels[0][0].legend(frameon=False)
    figure.suptitle("Forward and backward, one matrix for all steps, float32, one thread")
    figure.savefig(PLOT, metadata={"Date": None})
    plt.close(figure)


def main(
    only: Sequence[str] = (), patterns: Sequence[str] = (), sweeps: Mapping[str, Sequence[Workload]] = SWEEPS
) -> None:
    """Measure, write the results file after each provider, and draw the plot."""
    order = [one for sweep in sweeps.values() for one in sweep]
    some = [one for one in order if not patterns or any(text in str(one) for text in patterns)]
    with tempfile.TemporaryDirectory() as folder:
        task = functools.partial(peers.times, some, Path(folder))
        for provider in peers.chosen(only or SOME):
            if provider.name in SOME:
                new, missing = aside.measure(provider.name, provider.package, task)
                kept.keep(RESULTS, new, list(map(str, order)))
                kept.leave_out("scaling", new, missing)
    plot(report.read(RESULTS), sweeps)
