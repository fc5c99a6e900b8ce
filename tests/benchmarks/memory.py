"""What everybody holds at their peak, over the size of the inputs: `python -m tests.benchmarks run memory`.

Each provider, workload and mode has a process of its own, on one thread. Resident: the most that the process holds
during one call, above what it held before; inputs, and what a provider prepares of them, stand before the call, results
and gradients count. Torch's allocator: the same as torch counts it, without what others allocate. A call that takes
more than a minute of CPU time or more than 16 GB is left out.
"""

import functools
import resource
import signal
import time
from collections.abc import Iterator, Sequence

from logchain.memory import peak_bytes
from tests.benchmarks import aside, kept, peers, results
from tests.benchmarks.aside import Item, Said
from tests.benchmarks.cases import EACH, STEP, Case, Workload, draw
from tests.benchmarks.resident import resident_peak
from tests.benchmarks.results import MODES, Row

WORKLOADS = [Workload(500, 40, 200, STEP), Workload(32, 512, 64, STEP), Workload(8, 128, 64, EACH)]

_SECONDS, _BYTES = 60, 16_000_000_000
# how the limits show
WORDS = {"SIGPROF": f"longer than {_SECONDS} s", "alloc": "more than 16 GB", "MemoryError": "more than 16 GB"}

# seconds: a call that took less runs once more, with its compilation done
_SHORT = 10.0


def size(case: Case) -> int:
    """Bytes of the inputs."""
    return sum(tensor.nbytes for tensor in case)


def rows_of(item: Item) -> Iterator[Row]:
    """The peaks of one provider."""
    provider, case, mode = peers.every()[item.provider], draw(item.workload), item.mode
    provider.make(case.part(1, 3), mode)()  # imports, and what is compiled for all sizes
    run = provider.make(case, mode)
    start = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)  # ends the process, whatever it does
    held = resident_peak(run)
    signal.setitimer(signal.ITIMER_PROF, 0)
    if time.process_time() - start < _SHORT:
        held = resident_peak(run)
    row = functools.partial(Row, *item.key)
    yield row("peak of resident memory", held / 1e6, "MB")
    yield row("peak of resident memory over the inputs", held / size(case), "x")

    def nothing_kept() -> list:
        run()
        return []

    counted = peak_bytes(nothing_kept) if time.process_time() - start < _SHORT else 0
    if counted:
        yield row("peak of torch's allocator over the inputs", counted / size(case), "x")


def peaks(todo: Sequence[Item]) -> Iterator[Said]:
    """What is asked, within the limits."""
    resource.setrlimit(resource.RLIMIT_DATA, (_BYTES, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    return aside.attempts(todo, rows_of)


def main(only: Sequence[str] = (), patterns: Sequence[str] = (), workloads: Sequence[Workload] = WORKLOADS) -> None:
    """Measure, and write the results file after each; a quarter of an hour for all."""
    for provider in (one for one in peers.chosen(only) if not one.floor):
        for item in peers.items(provider, workloads, patterns):
            if item.mode in MODES:
                found = aside.measure(provider.package, [item], peaks, words=WORDS)
                kept.put(results.MEMORY, *found, list(map(str, WORKLOADS)))
