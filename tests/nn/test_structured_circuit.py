"""A chain circuit whose transitions are structures answers as the one with their dense matrices."""

import copy

import numpy as np
import pytest
import torch

from logchain import nn
from tests.contract import of_steps
from tests.seeded import seeded

T, V, C, K = 2, 3, 4, 3
MAKERS = {
    "banded": lambda lead: nn.transitions.Banded(C, [0, 1], lead=lead),
    "sparse": lambda lead: nn.transitions.Sparse(torch.tensor([[0, 0, 1, 2, 3], [1, 2, 3, 0, 3]]), lead=lead),
    "low rank": lambda lead: nn.transitions.LowRank(C, 2, diagonal=True, lead=lead),
    "monarch": lambda lead: nn.transitions.Monarch(2, 2, lead=lead),
}


def made(kind, lead=(T, V - 1)):
    circuit = nn.ChainCircuit(V, C, T, num_categories=K, transition=MAKERS[kind](lead), generator=seeded()).double()
    circuit.bulk.reset_parameters(seeded(1))
    return circuit


def dense_twin(circuit):
    twin = copy.deepcopy(circuit)
    twin.bulk = nn.LogWeights(T, V - 1, C, C).double()
    twin.bulk.set(circuit.bulk().to_dense(log_params=True).exp().detach())
    return twin


DATA = torch.cartesian_prod(*[torch.arange(K)] * V)
OBSERVED = torch.rand(len(DATA), V, generator=seeded()) < 0.6


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("lead", [(T, V - 1), (1, V - 1), (T, 1), ()])
def test_answers_are_those_of_dense_matrices(kind, lead):
    circuit = made(kind, lead)
    twin = dense_twin(circuit)
    for question in ("log_prob", "posterior", "conditionals"):
        found, truth = (getattr(one, question)(DATA, OBSERVED) for one in (circuit, twin))
        torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)
    assert circuit.log_prob(DATA).exp().sum().item() == pytest.approx(1, abs=1e-12)
    if lead != (T, V - 1):
        return
    single = copy.deepcopy(circuit).float().log_prob(DATA).detach()
    tolerance = 2e-6 + of_steps(V, C, dtype=torch.float32)  # of the logarithms that go in, and of the steps
    np.testing.assert_allclose(single, twin.log_prob(DATA).detach(), rtol=0, atol=tolerance)
    if kind == "low rank":
        with pytest.raises(TypeError, match="bulk: expected a structure whose entries are products, got LowRank"):
            circuit.mpe(DATA, OBSERVED)
    else:
        found, truth = circuit.mpe(DATA, OBSERVED), twin.mpe(DATA, OBSERVED)
        torch.testing.assert_close(found.log_prob, truth.log_prob, rtol=1e-10, atol=1e-12)
        assert torch.equal(found.states, truth.states) and torch.equal(found.data, truth.data)
    drawn = circuit.sample(4000, seeded(2))
    counts = (drawn[:, None] == DATA).all(-1).double().mean(0)
    torch.testing.assert_close(counts, circuit.log_prob(DATA).exp().detach(), rtol=0, atol=0.03)
    drawn = circuit.sample_conditional(DATA, OBSERVED, 3, seeded(2))
    assert drawn.shape == (3, *DATA.shape) and (drawn == DATA)[:, OBSERVED].all()


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("method", ["em", "gradient"])
def test_fits_rise_and_zeros_stay(kind, method):
    circuit = made(kind)
    before = circuit.bulk().to_dense(log_params=True)
    data = DATA[torch.randint(len(DATA), (12,), generator=seeded())]
    steps = 4 if method == "em" else 1
    report = circuit.fit(data, method=method, max_iterations=steps, tolerance=-torch.inf, generator=seeded())
    assert (np.diff(report.history) > -1e-9).all() and report.log_likelihood > report.history[0]
    after = circuit.bulk().to_dense(log_params=True)
    assert ((after == -torch.inf) >= (before == -torch.inf)).all()
    torch.testing.assert_close(after.exp().sum(-1), torch.ones(T, V - 1, C, dtype=torch.float64))


def test_wrong_transitions_say_what_is_wrong():
    with pytest.raises(TypeError, match="transition: expected a torch.nn.Module, got str"):
        nn.ChainCircuit(V, C, num_categories=K, transition="banded")
    with pytest.raises(ValueError, match="bulk: expected"):
        made("banded", (T, V)).log_prob(DATA)
