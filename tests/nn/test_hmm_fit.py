"""Fitting a hidden Markov model: expectation maximisation counts paths, gradients agree, starts and batches add up."""

import copy

import numpy as np
import pytest
import torch

from logchain.nn import HMM, Categorical, LogWeights, em_step, fit
from tests.nn.hmms import F64, C, V, all_paths, array, categories, close, parameters, probabilities, random_hmm, seeded


def test_a_step_takes_the_expected_counts():
    """Of paths by enumeration, and of categories weighted by them; batches add up to the same."""
    hmm, data = random_hmm(), categories(5, V)
    p0, bulk = parameters(hmm)
    table = array(hmm.emission.weights())
    truth = all_paths(table[data.numpy()], bulk, p0)
    starts, moves = truth.states[:, 0].sum(0), truth.transitions.sum((0, 1))
    seen = np.stack([truth.states[(data == k).numpy()].sum(0) for k in range(4)])  # (K, c)
    other = copy.deepcopy(hmm)
    report = hmm.fit(data, max_iterations=1, restarts=0)
    assert report.history[0] == pytest.approx(truth.log_norm.sum(), abs=1e-10)
    close(hmm.initial().exp(), starts / starts.sum())
    close(hmm.transition().exp()[0], moves / moves.sum(-1, keepdims=True))
    close(hmm.emission.weights().exp(), seen / seen.sum(0))
    other.fit(data, max_iterations=1, restarts=0, batch_size=2)
    for a, b in zip(other.parameters(), hmm.parameters(), strict=True):
        close(a, array(b))
    with pytest.raises(ValueError, match="data: expected a finite log-likelihood, got -inf"):
        hmm.emission.weights.set(torch.tensor([[1.0], [1.0], [1.0], [0.0]]))
        hmm.fit(data, restarts=0)


@pytest.mark.parametrize("method", ["em", "gradient"])
def test_a_fit_without_gradients_is_refused(method):
    """Expectation maximisation left the parameters as they were, and said that it converged."""
    hmm, data = random_hmm(), categories(5, V)
    with torch.inference_mode():
        with pytest.raises(RuntimeError, match=r"^fit: expected a call outside torch\.inference_mode"):
            hmm.fit(data, method=method)
        with pytest.raises(RuntimeError, match=r"^em_step: expected a call outside torch\.inference_mode"):
            em_step(hmm, [lambda: hmm.log_prob(data).sum()])
    with torch.no_grad():
        assert hmm.fit(data, method=method, generator=seeded()).iterations > 2


@pytest.mark.parametrize("options", [{}, {"num_steps": 6}], ids=str)
def test_expectation_maximisation_never_falls(options):
    hmm = random_hmm("gaussian", **options)
    data = torch.randn(20, 6, generator=seeded(), dtype=F64)
    data[3, 2] = torch.nan
    lengths = torch.randint(1, 7, (20,), generator=seeded())
    report = hmm.fit(data, lengths=lengths, max_iterations=30, tolerance=-torch.inf, generator=seeded())
    assert report.iterations == 30 and not report.converged
    assert (np.diff(report.history) > -1e-9).all()
    assert report.log_likelihood == pytest.approx(hmm.log_prob(data, lengths=lengths).sum().item(), abs=1e-9)


def test_parameters_are_found_again():
    """From 400 sequences of 25 numbers, of a model whose states are far apart."""
    truth = HMM(2, "gaussian").double()
    truth.initial.set(torch.tensor([0.7, 0.3]))
    truth.transition.set(torch.tensor([[0.9, 0.1], [0.3, 0.7]]))
    truth.emission.set(torch.tensor([-2.0, 3.0]), torch.tensor([1.0, 0.25]))
    data = truth.sample(400, 25, generator=seeded()).data
    hmm = HMM(2, "gaussian", generator=seeded()).double()
    report = hmm.fit(data, generator=seeded(), tolerance=1e-6)
    assert report.converged
    order = array(hmm.emission.means).argsort()
    close(hmm.emission.means[order], [-2, 3], atol=0.05)
    close(hmm.transition().exp()[0][order][:, order], [[0.9, 0.1], [0.3, 0.7]], atol=0.02)
    close(hmm.initial().exp()[order], [0.7, 0.3], atol=0.1)
    assert report.log_likelihood > truth.log_prob(data).sum().item()


def test_gradients_and_expectation_maximisation_agree_where_to_stop():
    hmm, data = random_hmm(num_categories=3), torch.randint(3, (30, 12), generator=seeded())
    by_gradient = hmm.fit(data, restarts=0, method="gradient", tolerance=1e-9, max_iterations=200)
    assert by_gradient.converged
    assert by_gradient.log_likelihood > by_gradient.history[0] + 1
    by_em = hmm.fit(data, restarts=0, max_iterations=3, tolerance=-torch.inf)
    assert abs(by_em.log_likelihood - by_gradient.log_likelihood) < 1e-6


@pytest.mark.parametrize("options", [{"method": "em", "step": lambda k: (k + 2) ** -0.6}, {"method": "gradient"}])
def test_mini_batches(options):
    hmm, data = random_hmm(), categories(40, 8)
    before = hmm.log_prob(data).sum().item()
    report = hmm.fit(data, batch_size=8, restarts=0, max_iterations=20, generator=seeded(), **options)
    assert report.iterations == 20
    assert report.log_likelihood > before + 10


def test_of_several_starts_the_best_is_kept():
    hmm, data = random_hmm(), categories(20, 8)
    report = hmm.fit(data, restarts=4, max_iterations=10, generator=seeded())
    assert len(report.starts) == 4 and len(set(report.starts)) == 4
    assert report.log_likelihood == max(report.starts)
    assert hmm.log_prob(data).sum().item() == pytest.approx(max(report.starts), abs=1e-10)
    assert "best of 4 starts" in str(report)
    again = random_hmm(seed=9).fit(data, restarts=4, max_iterations=10, generator=seeded())
    assert again == report


def test_what_is_not_trained_stays():
    hmm, data = random_hmm(), categories(20, 8)
    hmm.transition.requires_grad_(False)
    before = hmm.transition.logits.clone()
    hmm.fit(data, max_iterations=3, generator=seeded())
    assert torch.equal(hmm.transition.logits, before)


def test_forbidden_transitions_stay_forbidden():
    """Left to right."""
    hmm, data = random_hmm(), categories(20, 8)
    hmm.transition.set(torch.ones(C, C).triu())
    for options in ({}, {"method": "gradient", "max_iterations": 3}):
        hmm.fit(data, restarts=0, **options)
        matrix = probabilities(hmm.transition)[0]
        assert (matrix[np.tril_indices(C, -1)] == 0).all() and np.isfinite(matrix).all()


def test_a_start_keeps_single_parameters_that_are_not_trained():
    hmm, data = HMM(2, "gaussian", generator=seeded()), torch.randn(5, V, generator=seeded())
    kept = [hmm.transition.logits, hmm.emission.log_scales]
    for parameter in kept:
        parameter.requires_grad_(False)
    before = [parameter.clone() for parameter in kept]
    hmm.fit(data, method="gradient", max_iterations=1, generator=seeded())
    assert all(torch.equal(one, other) for one, other in zip(kept, before, strict=True))


def test_a_model_of_ones_own():
    """`fit` takes any module with a `log_prob`."""

    class Mixture(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.shares, self.coins = LogWeights(2, generator=seeded()), Categorical(2, 2, generator=seeded(1))

        def log_prob(self, data):
            return (self.shares() + self.coins(data).sum(-2)).logsumexp(-1)

    data = (torch.rand(50, 5, generator=seeded()) < torch.tensor([0.9, 0.2])[torch.arange(50) % 2, None]).long()
    report = fit(Mixture().double(), data, tolerance=1e-8)
    assert report.converged and report.log_likelihood > report.history[0]
    with pytest.raises(TypeError, match="restarts: expected 0 for Mixture, which has no `initialise`"):
        fit(Mixture(), data, restarts=2)
    with pytest.raises(ValueError, match="observed: expected 50 along the first axis, as the data, got 3"):
        fit(Mixture(), data, conditions={"observed": torch.ones(3)}, batch_size=10)
    with pytest.raises(ValueError, match="data: expected at least one sequence, got none"):
        fit(Mixture(), data[:0])


def test_progress(capsys):
    pytest.importorskip("tqdm")
    random_hmm().fit(categories(5, V), max_iterations=2, progress=True)
    assert "iterations" in capsys.readouterr().err
