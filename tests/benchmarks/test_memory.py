"""Everybody's peaks."""

import sys

import numpy as np
import pytest

from tests.benchmarks import aside, kept, memory, report, resident, results
from tests.benchmarks.aside import Item
from tests.benchmarks.cases import STEP, Workload
from tests.benchmarks.kept import Missing
from tests.benchmarks.results import FORWARD, GRADIENTS

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@LINUX
def test_resident_memory_is_what_a_call_touches():
    size = 100_000_000

    def call():
        return np.ones(size, np.uint8).sum()

    assert 0.99 * size < resident.resident_peak(call) < 1.1 * size
    assert resident.resident_peak(lambda: None) < size / 100


@pytest.mark.slow
@LINUX
def test_peaks_of_a_provider(files):
    tiny = Workload(2, 5, 3, STEP)
    memory.main(["torch loop", "GEMMs"], workloads=[tiny])
    found = results.read(results.MEMORY)
    assert {r[:3] for r in found} == {(str(tiny), "torch loop", mode) for mode in (FORWARD, GRADIENTS)}
    ratios = {r.mode: r.value for r in found if r.metric == "peak of torch's allocator over the inputs"}
    assert 0.5 < ratios[FORWARD] < ratios[GRADIENTS] < 20
    assert not kept.left_out()
    kept.leave_out("memory", [], [Missing("", str(tiny), "other", FORWARD, "more than 16 GB")])
    ratio = next(r for r in found if r.metric == "peak of resident memory over the inputs" and r.mode == GRADIENTS)
    kept.keep(results.MEMORY, [ratio._replace(provider="other", value=2.5)])
    *_, logchain, loop, other = report.memory().splitlines()
    assert (logchain, loop[:14], other) == (
        "| logchain |  |  |",
        "| torch loop |",
        "| other | more than 16 GB | 2.5 x |",
    )


def too_large(todo):
    def one(item):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        yield

    return aside.attempts(todo, one)


def test_limits_show_as_such():
    _, missing = aside.measure("torch", [Item("a", "one", FORWARD)], too_large, words=memory.WORDS)
    assert [entry.reason for entry in missing] == ["more than 16 GB"]
