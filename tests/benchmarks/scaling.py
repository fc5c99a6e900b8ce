"""Times against v, c and n, logchain's and some peers': `python -m tests.benchmarks run scaling`.

Measured as `peers` does.
"""

import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.benchmarks import aside, kept, peers, results
from tests.benchmarks.cases import ONE, Workload

SOME = ("logchain", "XLA scan", "hmmlearn, scaling", "pyro", "torch loop")
SWEEPS = {
    "v": [Workload(1, v, 16, ONE) for v in (10, 100, 1000, 10_000, 100_000, 1_000_000)],
    "c": [Workload(8, 128, c, ONE) for c in (4, 16, 64, 256, 1024)],
    "n": [Workload(n, 128, 64, ONE) for n in (1, 4, 16, 64, 256, 1024)],
}


def main(
    only: Sequence[str] = (), patterns: Sequence[str] = (), sweeps: Mapping[str, Sequence[Workload]] = SWEEPS
) -> None:
    """Measure, and write the results file after each provider."""
    order = [one for sweep in sweeps.values() for one in sweep]
    with tempfile.TemporaryDirectory() as folder:
        task = functools.partial(peers.times, Path(folder))
        for provider in peers.chosen(only or SOME):
            if provider.name in SOME:
                found = aside.measure(provider.package, peers.items(provider, order, patterns), task)
                kept.put(results.SCALING, *found, list(map(str, order)))
