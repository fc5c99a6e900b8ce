"""Everybody's times: what providers compute, how much of a case, and what is drawn of it."""

import functools
import itertools
import sys
from unittest import mock

import numpy as np
import pytest
import torch

from logchain import reference
from tests import oracle
from tests.benchmarks import aside, cases, peers, peers_circuits, plots, report, results, scaling
from tests.benchmarks.aside import Item
from tests.benchmarks.cases import EACH, FULL, ONE, STEP, Workload
from tests.benchmarks.peers import Provider
from tests.benchmarks.results import FORWARD, GRADIENTS, Measured


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
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
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
