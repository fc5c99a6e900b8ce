"""Everybody's numbers: each provider in its own process, errors against float64, rows of the same case replaced."""

import math
import multiprocessing
import os
import signal
import sys

import numpy as np
import pytest
import torch

from tests import oracle
from tests.benchmarks import accuracy, aside, kept, memory, peers, report, scaling
from tests.benchmarks.kept import Missing
from tests.benchmarks.peers import ONE, STEP, Workload
from tests.benchmarks.report import FORWARD, GRADIENTS, Row

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Results files of this test."""
    for module, name in ((accuracy, "accuracy"), (memory, "memory"), (scaling, "scaling")):
        monkeypatch.setattr(module, "RESULTS", tmp_path / f"{name}.csv")
    monkeypatch.setattr(report, "ACCURACY", tmp_path / "accuracy.csv")
    monkeypatch.setattr(report, "MEMORY", tmp_path / "memory.csv")
    monkeypatch.setattr(scaling, "PLOT", tmp_path / "scaling.svg")
    monkeypatch.setattr(kept, "LEFT_OUT", tmp_path / "left_out.csv")
    return tmp_path


def row(workload, provider, mode=FORWARD, metric="time", value=1.0):
    return Row(workload, provider, mode, metric, value, "ms")


def test_rows_of_the_same_case_are_replaced_and_others_stay(files):
    path = files / "some.csv"
    kept.keep(path, [row("b", "one"), row("a", "one"), row("a", "one", metric="share"), row("a", "two")], ["a", "b"])
    kept.keep(path, [row("a", "one", value=2.0)], ["a", "b"])
    assert [(*r[:4], r.value) for r in report.read(path)] == [
        ("a", "two", FORWARD, "time", 1.0),
        ("a", "one", FORWARD, "time", 2.0),
        ("b", "one", FORWARD, "time", 1.0),
    ]


def test_reasons_are_replaced_and_forgotten_once_there_is_a_number(files):
    absent, failed = Missing("", "", "one", "", "not installed"), Missing("", "a", "two", FORWARD, "NaN")
    kept.leave_out("memory", [], [absent, failed])
    kept.leave_out("accuracy", [], [absent])
    kept.leave_out("memory", [], [failed._replace(reason="too slow")])
    assert [entry.reason for entry in kept.left_out()] == ["not installed", "not installed", "too slow"]
    kept.leave_out("memory", [row("a", "one"), row("a", "two")], [])
    assert kept.left_out() == [absent._replace(results="accuracy")]


def test_files_without_a_commit_are_read(files):
    path = files / "old.csv"
    path.write_text("workload,provider,mode,metric,value,unit\na,one,forward,time,1.5,ms\n")
    assert report.read(path) == [Row("a", "one", "forward", "time", 1.5, "ms")]


def one_row_then_an_error_then_the_end(name):
    def one(workload, mode):
        if workload == "b":
            raise ArithmeticError("cannot\n  do this")
        yield row(workload, name, mode)

    yield from aside.attempts(name, [("a", FORWARD), ("b", FORWARD)], one)
    os.kill(os.getpid(), signal.SIGPROF)


def test_what_a_process_says_before_it_ends():
    rows, missing = aside.measure("one", "torch", one_row_then_an_error_then_the_end, about=("c", GRADIENTS))
    assert [found[:5] for found in rows] == [("a", "one", FORWARD, "time", 1.0)]
    assert f"torch {torch.__version__}" in rows[0].versions and rows[0].hardware and rows[0].date
    assert [entry[1:5] for entry in missing] == [
        ("b", "one", FORWARD, "ArithmeticError: cannot do this"),
        ("c", "one", GRADIENTS, "ended by SIGPROF"),
    ]
    assert all(entry.versions == rows[0].versions for entry in missing)
    assert memory.reason(missing[1].reason) == "longer than 60 s"


def test_what_says_nothing_is_stopped():
    rows, missing = aside.measure("one", "torch", one_row_then_an_error_then_the_end, silence=0.01)
    assert not rows and missing[-1].reason == "stopped, silent for 0.01 s"


def test_what_is_not_installed_is_reported():
    receiver, sender = multiprocessing.Pipe(duplex=False)
    aside._child("one", "no-such-package", one_row_then_an_error_then_the_end, 0, sender)
    assert receiver.recv() == Missing("", "", "one", "", "no-such-package is not installed") and not receiver.poll()


@pytest.mark.parametrize(
    ("found", "truth", "error"),
    [
        (2.5, 2.0, 0.5),
        (-math.inf, -math.inf, 0.0),
        (-23.0, -math.inf, math.inf),
        (-math.inf, 5.0, math.inf),
        (math.nan, 5.0, math.nan),
        (math.nan, -math.inf, math.nan),
    ],
)
def test_the_largest_error_counts_infinities_and_nan(found, truth, error):
    np.testing.assert_equal(accuracy.worst(np.array([found, 1.0]), np.array([truth, 1.0])), (error, found))


def test_cases_are_what_they_are_called(files):
    truths = {
        name: oracle.chain(case.x, case.bulk, case.p0) for name, case in accuracy.cases().items() if case.x.shape[1] < 9
    }
    apart = truths["misaligned maxima: two peaks, no way between"]
    assert apart.log_norm[0] == pytest.approx(math.log(0.5) - 200)
    assert truths["impossible evidence"].log_norm[0] == -math.inf
    for name, truth in truths.items():
        log_norm, states = peers.truth(name, accuracy.cases()[name], files)
        np.testing.assert_allclose(log_norm, truth.log_norm, rtol=1e-12)
        np.testing.assert_allclose(states, truth.states, atol=1e-12)


@pytest.mark.parametrize("name", [name for name, case in accuracy.cases().items() if case.x.shape[1] < 100])
def test_logchain_keeps_its_contract(name, files):
    found = accuracy.rows_of(peers.every()["logchain"], name, accuracy.cases()[name], GRADIENTS, files)
    bars = [one for one in found if one.bar]
    assert len(bars) == 2 and all(one.reached for one in bars), bars


def test_the_forums_faults_are_found(files):
    name, forum = "misaligned maxima: two peaks", peers.every()["forum"]
    errors = {one.metric: one.value for one in accuracy.rows_of(forum, name, accuracy.cases()[name], GRADIENTS, files)}
    assert errors["error of a log-partition"] == pytest.approx(46.05, abs=0.01)
    assert errors["log-partition"] == pytest.approx(-23.03, abs=0.01)


@pytest.mark.parametrize("matrices", [ONE, STEP, peers.EACH])
@pytest.mark.parametrize("name", ["GEMMs alone", "bytes copied", "forum, padding mended", "statsmodels"])
def test_rows_of_a_provider(name, matrices, files):
    provider = peers.every()[name]
    if matrices not in provider.matrices:
        pytest.skip("not taken")
    if name == "statsmodels":
        pytest.importorskip("statsmodels")
    ours = peers.every()["torch loop"]
    for mode in provider.modes:
        found = {r.metric: r.value for r in peers.rows_of(provider, ours, Workload(2, 4, 3, matrices), mode, files)}
        assert found["time, lower quartile"] <= found["time"] <= found["time, upper quartile"]
        errors = [value for metric, value in found.items() if metric.startswith("error")]
        assert len(errors) == (0 if provider.floor else 2 if mode == GRADIENTS else 1) and all(e < 1e-5 for e in errors)


@LINUX
def test_resident_memory_is_what_a_call_touches():
    size = 100_000_000

    def call():
        return np.ones(size, np.uint8).sum()

    assert 0.99 * size < memory.resident_peak(call) < 1.1 * size
    assert memory.resident_peak(lambda: None) < size / 100


@LINUX
def test_peaks_of_a_provider(files):
    tiny = Workload(2, 5, 3, STEP)
    memory.main(["torch loop", "GEMMs"], workloads=[tiny])
    found = report.read(memory.RESULTS)
    assert {r[:3] for r in found} == {(str(tiny), "torch loop", mode) for mode in (FORWARD, GRADIENTS)}
    ratios = {r.mode: r.value for r in found if r.metric == "peak of torch's allocator over the inputs"}
    assert 0.5 < ratios[FORWARD] < ratios[GRADIENTS] < 20
    assert not kept.left_out()
    kept.leave_out("memory", [], [Missing("", str(tiny), "other", FORWARD, "more than 16 GB")])
    ratio = next(r for r in found if r.metric == "peak of resident memory over the inputs" and r.mode == GRADIENTS)
    kept.keep(memory.RESULTS, [ratio._replace(provider="other", value=2.5)])
    *_, logchain, loop, other = report.memory([]).splitlines()
    assert (logchain, loop[:14], other) == (
        "| logchain |  |  |",
        "| torch loop |",
        "| other | more than 16 GB | 2.5 x |",
    )


def test_limits_show_as_such():
    assert memory.reason("RuntimeError: DefaultCPUAllocator: can't allocate memory") == "more than 16 GB"
    assert memory.reason("ValueError: no") == "ValueError: no"


def test_table_of_errors(files):
    def of(provider, case, errors, value):
        metrics = ("error of a log-partition", "log-partition", "error of a posterior")
        values = (errors[0], value, errors[1])
        return [row(case, provider, GRADIENTS, *pair) for pair in zip(metrics, values, strict=True)]

    report.write(
        [
            *of("one", "a", (2e-6, 1e-20), 5.0),
            *of("one", "b", (math.inf, math.nan), -math.inf),
            *of("logchain", "a", (0.0, 0.0), 5.0),
            *of("logchain", "b", (math.inf, 0.25), -23.0),
        ],
        report.ACCURACY,
    )
    kept.leave_out("accuracy", [], [Missing("", "a", "two", GRADIENTS, "ValueError: no")])
    assert report.accuracy([]).splitlines()[2:] == [
        "| logchain | 0, 0 | finite: -23, 0.25 |",
        "| one | 2.0e-06, < 1e-12 | -inf, NaN |",
    ]
    kept.keep(report.ACCURACY, of("two", "b", (1.0, 1.0), 0.0))
    assert report.accuracy([]).splitlines()[-1] == "| two | ValueError | 1, 1 |"


def test_scaling_is_measured_and_drawn(files, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(aside, "measure", lambda name, package, task: (list(task(name)), []))
    sweeps = {"v": [Workload(1, v, 3, ONE) for v in (5, 9)], "n": [Workload(n, 5, 3, ONE) for n in (1, 2)]}
    scaling.main(["torch loop"], sweeps=sweeps)
    found = report.read(scaling.RESULTS)
    for axis, sweep in sweeps.items():
        for provider in ("logchain", "torch loop"):
            line = scaling.points(found, provider, sweep, axis)
            assert [x for x, _ in line] == [getattr(one, axis) for one in sweep] and all(y > 0 for _, y in line)
    assert "<svg" in scaling.PLOT.read_text()
