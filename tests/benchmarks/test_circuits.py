"""Circuits of other packages compute the chains of the benchmark; long ones are refused before they are compiled."""

import numpy as np
import pytest
import torch

from tests.benchmarks import cases, peers, peers_circuits
from tests.benchmarks.aside import Item
from tests.benchmarks.cases import ONE, STEP, Workload
from tests.benchmarks.results import FORWARD, GRADIENTS


@pytest.mark.parametrize(("n", "matrices"), [(1, ONE), (3, STEP)])
def test_rows_of_cirkit(n, matrices, tmp_path):
    pytest.importorskip("cirkit")
    for mode in FORWARD, GRADIENTS:
        (row,) = peers.measured(tmp_path, Item(Workload(n, 5, 3, matrices), "cirkit", mode))
        assert row.share == 1 and row.value_error < 1e-6
        assert row.gradient_error is None if mode == FORWARD else row.gradient_error < 1e-6


def test_cirkit_shares_one_matrix():
    pytest.importorskip("cirkit")
    learned = []
    for matrices in ONE, STEP:
        case = cases.draw(Workload(2, 5, 3, matrices))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.autograd, "grad", lambda out, wanted: learned.append(wanted) or wanted)
            peers_circuits.cirkit(case, GRADIENTS)()
    sizes = [sum(tensor.numel() for tensor in wanted) for wanted in learned]
    assert sizes == [2 * 5 * 3 + steps * 3 * 3 + 3 for steps in (1, 4)]


@pytest.mark.parametrize("provider", peers_circuits.PROVIDERS, ids=lambda provider: provider.name)
def test_long_circuits_are_refused(provider):
    case = cases.draw(Workload(1, 10_000, 2, ONE))
    with pytest.raises(NotImplementedError, match="circuit of 10000 variables takes minutes"):
        provider.make(case, FORWARD)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no device")
@pytest.mark.parametrize("matrices", [ONE, STEP])
@pytest.mark.parametrize("name", ["cirkit", "pyjuice", "pyjuice, float32", "pyjuice, CUDA graph"])
def test_answers_on_a_device(name, matrices):
    pytest.importorskip(name.split(",")[0])
    case = cases.draw(Workload(3, 7, 5, matrices))
    values, posteriors = cases.posteriors(case)
    run = peers.every()[name].make(cases.Chain(*(tensor.cuda() for tensor in case)), GRADIENTS)
    for _ in range(2):
        found, gradients = run()
        np.testing.assert_allclose(found.cpu(), values, atol=1e-4)
        np.testing.assert_allclose(gradients.cpu(), posteriors, atol=1e-4)
