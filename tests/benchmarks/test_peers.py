"""Everybody's numbers: each provider in its own process, errors against float64, rows of the same case replaced."""

import functools
import itertools
import math
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from unittest import mock

import numpy as np
import pytest
import torch

from logchain import reference
from tests import oracle
from tests.benchmarks import (
    accuracy,
    aside,
    cases,
    kept,
    memory,
    peers,
    peers_circuits,
    plots,
    report,
    resident,
    results,
    scaling,
)
from tests.benchmarks.aside import Item
from tests.benchmarks.cases import EACH, FULL, ONE, STEP, Workload
from tests.benchmarks.kept import Missing
from tests.benchmarks.peers import Provider
from tests.benchmarks.results import FORWARD, GRADIENTS, Measured, Row

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Results files of this test."""
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    for name in ("PEERS", "ACCURACY", "MEMORY", "SCALING", "LEFT_OUT"):
        monkeypatch.setattr(results, name, tmp_path / f"{name.lower()}.csv")
    return tmp_path


def row(workload, provider, mode=FORWARD, metric="time", value=1.0):
    return Row(workload, provider, mode, metric, value, "ms")


def test_rows_of_the_same_case_are_replaced_and_others_stay(files):
    path = files / "some.csv"
    kept.keep(path, [row("b", "one"), row("a", "one"), row("a", "one", metric="share"), row("a", "two")], ["a", "b"])
    kept.keep(path, [row("a", "one", value=2.0)], ["a", "b"])
    assert [(*r[:4], r.value) for r in results.read(path)] == [
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
    assert results.read(path) == [Row("a", "one", "forward", "time", 1.5, "ms")]


ITEMS = [Item(workload, "one", mode) for workload in ("a", "b", "c") for mode in (FORWARD, GRADIENTS)]


def half_of_it(todo):
    """In a process of its own: a row, an error, then the end, or silence for ever, as an item says."""

    def one(item):
        if item.key == ITEMS[1].key:
            raise ArithmeticError("cannot\n  do this")
        if item.key == ITEMS[2].key:
            os.kill(os.getpid(), signal.SIGPROF)
        if item.key == ITEMS[4].key:
            signal.pause()
        yield row(*item.key, value=len(todo))

    return aside.attempts(todo, one)


@pytest.fixture
def impatient(monkeypatch):
    """Waits for a process as long as it takes, but not for the item that never ends."""
    poll, recv, said = Connection.poll, Connection.recv, []

    def receive(connection):
        said.append(recv(connection))
        return said[-1]

    def wait(connection, patience):
        if said[-1:] == ITEMS[4:5]:
            said.clear()
            return False
        return poll(connection, None)

    monkeypatch.setattr(Connection, "recv", receive)
    monkeypatch.setattr(Connection, "poll", wait)


@LINUX
@pytest.mark.usefixtures("impatient")
def test_what_ends_a_process_is_named_and_the_rest_goes_on():
    rows, missing = aside.measure("torch", ITEMS, half_of_it, silence=40.0, words={"SIGPROF": "longer than 60 s"})
    assert [found[:5] for found in rows] == [
        ("a", "one", FORWARD, "time", 6),
        ("b", "one", GRADIENTS, "time", 3),
        ("c", "one", GRADIENTS, "time", 1),
    ]
    assert rows[0].versions.count(f"torch {torch.__version__}") == 1 and rows[0].hardware and rows[0].date
    assert [entry[1:5] for entry in missing] == [
        (*ITEMS[1].key, "ArithmeticError: cannot do this"),
        (*ITEMS[2].key, "longer than 60 s"),
        (*ITEMS[4].key, "stopped, silent for 40 s"),
    ]
    assert all(entry.versions == rows[0].versions for entry in missing)


def test_what_is_late_is_left_out():
    rows, missing = aside.measure("torch", ITEMS, half_of_it, end=time.monotonic() - 1)
    assert not rows and [entry[1:5] for entry in missing] == [(*item.key, "no time left") for item in ITEMS]


def broken(todo):
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("package", "task", "reason"),
    [("no-such-package", half_of_it, "no-such-package is not installed"), ("torch", broken, "ended with code 3")],
)
def test_what_does_not_begin_is_reported_once(package, task, reason):
    rows, missing = aside.measure(package, ITEMS, task)
    assert not rows and [entry[:5] for entry in missing] == [("", "", "one", "", reason)]


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
        log_norm, states = cases.truth(name, accuracy.cases()[name], files, accuracy.by_reference)
        np.testing.assert_allclose(log_norm, truth.log_norm, rtol=1e-12)
        np.testing.assert_allclose(states, truth.states, atol=1e-12)


@pytest.mark.parametrize("name", [name for name, case in accuracy.cases().items() if case.x.shape[1] < 100])
def test_logchain_keeps_its_contract(name, files):
    found = accuracy.rows_of(files, Item(name, "logchain", GRADIENTS))
    bars = [one for one in found if one.bar]
    assert len(bars) == 2 and all(one.reached for one in bars), bars


def test_the_forums_faults_are_found(files):
    found = accuracy.rows_of(files, Item("misaligned maxima: two peaks", "forum", GRADIENTS))
    errors = {one.metric: one.value for one in found}
    assert errors["error of a log-partition"] == pytest.approx(46.05, abs=0.01)
    assert errors["log-partition"] == pytest.approx(-23.03, abs=0.01)


def pairs():
    """Providers that need nothing that the tests do not install, with all matrices that they take."""
    names = (
        "GEMMs alone",
        "bytes copied",
        "forum, padding mended",
        "torch loop",
        "statsmodels",
        "hmmlearn, log",
        "cirkit",
    )
    return [(name, matrices) for name in names for matrices in peers.every()[name].matrices]


@pytest.mark.slow
@LINUX
@pytest.mark.parametrize(("name", "matrices"), pairs())
def test_a_provider_is_measured(name, matrices, files):
    provider = peers.every()[name]
    pytest.importorskip("cirkit" if name == "cirkit" else provider.package)
    for mode in (FORWARD, GRADIENTS):
        (found,) = peers.measured(files, Item(Workload(2, 4, 3, matrices), name, mode))
        assert found[:4] == (f"n=2 v=4 c=3, {matrices}", name, mode, "CPU") and found.share == 1
        assert 0 < found.lower_ms <= found.median_ms <= found.upper_ms and found.logchain_ms > 0
        errors = found.value_error, found.gradient_error
        assert [error is None for error in errors] == [provider.floor, provider.floor or mode == FORWARD]
        assert all(error is None or error < 1e-5 for error in errors)
        assert found.peak_mb is not None and 0 <= found.peak_mb < 10


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo looks at it
def test_no_case_is_left_to_a_loop_that_is_no_longer_compiled(monkeypatch):
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    provider = peers.every()["torch.compile, step by step"]
    for matrices, mode in itertools.product(provider.matrices, results.MODES):
        before = len(compiled)
        for size in ((1, 4, 3), (2, 5, 3), (3, 4, 4)):
            provider.make(cases.draw(Workload(*size, matrices)), mode)()  # beyond its limit dynamo would raise
        assert len(compiled) > before


def test_one_matrix_is_shared_by_the_layers_of_a_circuit(monkeypatch):
    pytest.importorskip("cirkit")
    learned = []
    monkeypatch.setattr(torch.autograd, "grad", lambda out, wanted: learned.append(wanted) or wanted)
    for matrices in ONE, STEP:
        peers_circuits.cirkit(cases.draw(Workload(2, 5, 3, matrices)), GRADIENTS)()
    sizes = [sum(tensor.numel() for tensor in wanted) for wanted in learned]
    assert sizes == [2 * 5 * 3 + steps * 3 * 3 + 3 for steps in (1, 4)]
    with pytest.raises(NotImplementedError, match="circuit of 10000 variables takes minutes"):
        peers_circuits.cirkit(cases.draw(Workload(1, 10_000, 2, ONE)), FORWARD)


def test_a_wrong_answer_shows(files):
    for matrices in (STEP, FULL):  # three matrices, of which the last is padded with ones
        workload = Workload(2, 4 if matrices == STEP else 3, 5, matrices)
        (found,) = peers.measured(files, Item(workload, "forum", GRADIENTS))
        assert found.value_error > 1 and found.gradient_error > 0.1


@pytest.mark.parametrize(
    ("spent", "making", "size"),
    [
        (lambda n, v: 2e-4 * n * v, 0.0, (32, 32)),  # of 0.4 seconds
        (lambda n, v: 1e-6 * n * v, 0.0, (100, 1000)),
        (lambda n, v: 1e-3 * v, 0.0, (100, 256)),  # does not grow with the sequences
        (lambda n, v: 0.01, 0.0, (100, 1000)),  # nor with the steps
        (lambda n, v: 1.0 * v, 0.0, (1, 32)),
        (lambda n, v: 0.01 if v < 200 else 1.0, 0.0, (100, 256)),
        (lambda n, v: 0.01, 1e-3, (100, 128)),  # a compilation takes long
    ],
)
def test_a_case_that_takes_long_is_cut(spent, making, size, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(peers.time, "monotonic", lambda: now[0])

    def make(part, mode):
        sizes.append(part.x.shape[:2].numel())
        now[0] += making * part.x.shape[1]
        run = mock.Mock()
        run.size = part.x.shape[:2]
        return run

    sizes = [4]
    provider = Provider("one", make, "torch")
    case = cases.draw(Workload(100, 1000, 2, STEP))
    part = peers.slice_of(provider, case, FORWARD, clock=lambda run: spent(*run.size), made=0.2)
    assert part.x.shape == (*size, 2) and part.bulk.shape == (1, size[1] - 1, 2, 2)
    # what is much slower than a few steps promise is found out in time
    assert all(after <= 8 * before for before, after in itertools.pairwise(sizes))
    assert peers.slice_of(provider._replace(whole=True), case, FORWARD) is case


def test_errors_are_the_largest():
    true = np.array([1.0, 2.0]), np.zeros((1, 2, 2))
    assert peers.errors((torch.tensor([1.0, 2.5, 99.0]), None), true) == [0.5, None]
    assert peers.errors(([1.0, 2.5], [np.full((2, 2), -0.25)]), true) == [0.5, 0.25]


@pytest.mark.parametrize("matrices", [ONE, STEP, EACH, FULL])
def test_truth(matrices, files):
    case = cases.draw(Workload(2, 4, 3, matrices))
    values, gradients = cases.truth("some", case, files)
    if matrices == FULL:
        np.testing.assert_allclose(values, reference.matrix_product(case.x), rtol=1e-13)
        # each path takes one entry of every matrix
        np.testing.assert_allclose(gradients.sum((-2, -1)), 9.0, rtol=1e-12)
    else:
        wanted = oracle.chain(case.x, case.bulk, case.p0)
        np.testing.assert_allclose(values, wanted.log_norm, rtol=1e-12)
        np.testing.assert_allclose(gradients, wanted.states, atol=1e-12)
    again = cases.truth("some", type(case)(*(0 * tensor for tensor in case)), files)  # from the file
    np.testing.assert_array_equal(again[1], gradients)


def test_rows_are_read_as_they_were_written(files):
    rows = [
        Measured("a", "one", FORWARD, "CPU", 1.5, 1.0, 2.0, 0.5),
        Measured(
            "a", "one", FORWARD, "GPU", 1.5, 1.0, 2.0, 0.5, 0.25, 3.0, math.inf, 0.0, "cpu", "torch", "today", "c"
        ),
    ]
    kept.keep(results.PEERS, rows)
    assert results.read(results.PEERS, Measured) == rows
    kept.keep(results.PEERS, [rows[0]._replace(median_ms=3.0)])
    assert [(row.device, row.ratio) for row in results.read(results.PEERS, Measured)] == [("GPU", 3.0), ("CPU", 6.0)]


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
    _, missing = aside.measure("torch", ITEMS[:1], too_large, words=memory.WORDS)
    assert [entry.reason for entry in missing] == ["more than 16 GB"]


def test_table_of_errors(files):
    def of(provider, case, errors, value):
        metrics = ("error of a log-partition", "log-partition", "error of a posterior")
        values = (errors[0], value, errors[1])
        return [row(case, provider, GRADIENTS, *pair) for pair in zip(metrics, values, strict=True)]

    results.write(
        [
            *of("one", "a", (2e-6, 1e-20), 5.0),
            *of("one", "b", (math.inf, math.nan), -math.inf),
            *of("logchain", "a", (0.0, 0.0), 5.0),
            *of("logchain", "b", (math.inf, 0.25), -23.0),
        ],
        results.ACCURACY,
    )
    kept.leave_out("accuracy", [], [Missing("", "a", "two", GRADIENTS, "ValueError: no")])
    assert report.accuracy().splitlines()[2:] == [
        "| logchain | 0, 0 | finite: -23, 0.25 |",
        "| one | 2.0e-06, < 1e-12 | -inf, NaN |",
    ]
    kept.keep(results.ACCURACY, of("two", "b", (1.0, 1.0), 0.0))
    assert report.accuracy().splitlines()[-1] == "| two | ValueError | 1, 1 |"


@pytest.mark.slow
def test_everybody_is_measured_and_drawn(files, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(
        aside, "measure", lambda package, todo, task: ([row for row in task(todo) if isinstance(row, Measured)], [])
    )
    monkeypatch.setattr(scaling, "SOME", ("logchain", "torch loop"))
    sweeps = {"v": [Workload(1, v, 3, ONE) for v in (5, 9)], "n": [Workload(n, 5, 3, ONE) for n in (1, 2)]}
    scaling.main(sweeps=sweeps)
    found = results.read(results.SCALING, Measured)
    assert {(row.workload, row.provider, row.mode) for row in found} == {
        (str(one), provider, mode)
        for sweep in sweeps.values()
        for one in sweep
        for provider in scaling.SOME
        for mode in peers.every()[provider].modes
    }
    plots.against_sizes(sweeps)
    monkeypatch.setattr(peers, "WORKLOADS", [Workload(2, 4, 3, ONE), Workload(2, 4, 3, FULL)])
    peers.main(["torch loop", "logchain", "GEMMs"])
    plots.against_peers()
    assert "variables v" in (files / "scaling.svg").read_text() and "torch loop" in (files / "peers.svg").read_text()
    table = report.peers().splitlines()
    assert len(table) == 2 + 4 and all("torch loop" in line and " ms |" in line for line in table[2:])
