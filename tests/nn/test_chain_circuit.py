"""A chain-shaped circuit is the mixture of the library's chains; `test_nn_circuit` asks it the rest."""

import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from logchain import nn, reference
from logchain.memory import peak_bytes
from tests.nn import circuits


def made(v, c, t, k=4):
    return nn.ChainCircuit(v, c, t, num_categories=k, generator=torch.Generator().manual_seed(0))


def drawn(n, v, k=4):
    return torch.randint(k, (n, v), generator=torch.Generator().manual_seed(1))


def reference_of(circuit, data, question):
    """The reference's answer for every repetition, with numpy's own look-up and weights."""
    w = circuits.weights_of(circuit)
    t, v = w["input.weights"].shape[:2]
    x = np.log(w["input.weights"])[np.arange(t)[:, None], np.arange(v), data.numpy()[:, None]]  # (n, t, v, c)
    return question(x, w["bulk"][None], w["p0"][None]), w["mixing"]


def test_log_prob_and_posterior_are_those_of_the_reference():
    circuit, data = made(12, 5, 3), drawn(20, 12)
    found, mixing = reference_of(circuit, data, reference.marginals)
    joint = np.log(mixing) + found.log_norm
    total = logsumexp(joint, -1)
    np.testing.assert_allclose(circuit.log_prob(data).detach(), total, rtol=2e-7, atol=4e-6)
    shares = np.exp(joint - total[:, None])[..., None, None] * found.states
    np.testing.assert_allclose(circuit.posterior(data), shares, atol=1e-5)


def test_the_most_probable_states_are_the_viterbi_path_of_the_best_repetition():
    circuit, data = made(12, 5, 3), drawn(20, 12)
    found, mixing = reference_of(circuit, data, reference.viterbi)
    scores = np.log(mixing) + found.score
    explained = circuit.mpe(data)
    best = scores.argmax(-1)
    np.testing.assert_array_equal(explained.repetition, best)
    np.testing.assert_array_equal(explained.states, found.states[np.arange(20), best])
    np.testing.assert_allclose(explained.log_prob, scores.max(-1), rtol=1e-6)
    assert torch.equal(explained.data, data)


@pytest.mark.parametrize("method", ["em", "gradient"])
def test_a_forbidden_transition_stays_forbidden(method):
    circuit = made(6, 3, 1)
    circuit.bulk.set(torch.ones(3, 3).triu())
    report = circuit.fit(drawn(30, 6), method=method, max_iterations=3, restarts=0)
    assert report.log_likelihood > report.history[0]
    bulk = circuit.bulk().detach().exp()
    assert (bulk.tril(-1) == 0).all() and not bulk.isnan().any()
    assert (bulk.sum(-1) - 1).abs().max() < 1e-6


def test_one_repetition_of_one_state_is_independent_variables():
    circuit, data = made(5, 1, 1), drawn(8, 5)
    shares = circuits.weights_of(circuit)["input.weights"][0, :, :, 0]
    expected = np.log(shares)[np.arange(5), data.numpy()].sum(-1)
    np.testing.assert_allclose(circuit.log_prob(data).detach(), expected, rtol=1e-6)


def test_more_repetitions_and_states_learn_more():
    """Two clusters that a chain of one state cannot tell apart."""
    data = torch.cat([torch.zeros(20, 6, dtype=torch.int64), torch.ones(20, 6, dtype=torch.int64)])
    reached = {}
    for c, t in ((1, 1), (2, 1), (1, 2)):
        circuit = made(6, c, t, k=2)
        circuit.fit(data, max_iterations=40, generator=torch.Generator().manual_seed(1))
        reached[c, t] = circuit.log_prob(data).mean().item()
    assert abs(reached[1, 1] - 6 * math.log(0.5)) < 1e-3
    assert abs(reached[2, 1] - math.log(0.5)) < 1e-3 and abs(reached[1, 2] - math.log(0.5)) < 1e-3


def test_a_step_of_training_holds_a_few_tensors_of_the_size_of_the_messages():
    n, v, c = 64, 20, 32
    circuit, data = made(v, c, 1), drawn(n, v)

    def step():
        return torch.autograd.grad(circuit.log_prob(data).sum(), list(circuit.parameters()))

    messages, parameters = n * v * c * 4, sum(4 * parameter.numel() for parameter in circuit.parameters())
    step()
    # potentials, messages, the posteriors, and one more for what is computed again
    assert peak_bytes(step) < 4 * messages + 6 * parameters + 2**20
