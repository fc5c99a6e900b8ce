"""`logchain.nn` reproduces published fits: earthquakes, hmmlearn's examples, regimes of interest rates and growth."""

import ast
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from logchain.nn import HMM, LogWeights
from tests.adapted import peer
from tests.seeded import seeded
from tests.test_published import EARTHQUAKES

F64 = torch.float64


COUNTS = torch.tensor([int(count) for count in EARTHQUAKES.split()])


@pytest.mark.parametrize(
    ("states", "published", "rates"), [(2, 342.3183, [15.472, 26.125]), (3, 329.4603, [13.146, 19.721, 29.714])]
)
def test_earthquakes(states, published, rates):
    """Zucchini and MacDonald, Hidden Markov Models for Time Series, 2009: stationary, from starts in the data."""
    hmm = HMM(states, "poisson", initial="stationary").double()
    report = hmm.fit(COUNTS, method="gradient", restarts=4, tolerance=1e-7, generator=seeded())
    assert report.converged
    assert round(-report.log_likelihood, 4) == published
    np.testing.assert_allclose(hmm.emission.log_rates.detach().exp().sort().values, rates, rtol=0, atol=2e-3)


def assert_same_iterations(model, data, samples, lengths=None, iterations=15):
    """hmmlearn's log-likelihoods of all iterations, from equal parameters; long sums in float64 round differently."""
    hmm = HMM.from_hmmlearn(model)
    ends = None if lengths is None else torch.tensor(lengths)
    report = hmm.fit(data, lengths=ends, restarts=0, max_iterations=iterations, tolerance=-math.inf)
    model.init_params, model.n_iter = "", iterations
    model.monitor_.n_iter, model.monitor_.tol = iterations, -math.inf
    model.fit(samples, lengths)
    np.testing.assert_allclose(report.history[:-1], model.monitor_.history, rtol=0, atol=1e-8)
    np.testing.assert_allclose(hmm.transition().exp()[0].detach(), model.transmat_, rtol=0, atol=1e-9)
    assert report.history[-1] > report.history[0] + 0.1


def test_the_dishonest_casino():
    """A fair die and one with half its throws a six, which are changed now and then: 1000 throws."""
    hmm = peer("hmmlearn.hmm")
    casino = hmm.CategoricalHMM(2, random_state=99)
    casino.startprob_ = np.array([1.0, 0.0])
    casino.transmat_ = np.array([[0.95, 0.05], [0.1, 0.9]])
    casino.emissionprob_ = np.array([[1 / 6] * 6, [0.1] * 5 + [0.5]])
    casino.n_features = 6
    throws, _ = casino.sample(1000)
    start = hmm.CategoricalHMM(2)
    start.n_features = 6
    start.startprob_ = np.array([0.6, 0.4])
    start.transmat_ = np.array([[0.8, 0.2], [0.3, 0.7]])
    start.emissionprob_ = np.array([[0.2, 0.2, 0.2, 0.1, 0.1, 0.2], [0.1, 0.1, 0.1, 0.2, 0.2, 0.3]])
    assert_same_iterations(start, torch.from_numpy(throws[:, 0]), throws)


@pytest.mark.parametrize("covariance", ["full", "diag"])
def test_four_gaussian_states_in_the_plane(covariance):
    """Four places, of which the first and third are never followed by each other; several sequences."""
    hmm = peer("hmmlearn.hmm")
    truth = hmm.GaussianHMM(4, covariance_type="full", random_state=3)
    truth.startprob_ = np.array([0.6, 0.3, 0.1, 0.0])
    truth.transmat_ = np.array([[0.7, 0.2, 0.0, 0.1], [0.3, 0.5, 0.2, 0.0], [0.0, 0.3, 0.5, 0.2], [0.2, 0.0, 0.2, 0.6]])
    truth.means_ = np.array([[0.0, 0.0], [0.0, 11.0], [9.0, 10.0], [11.0, -1.0]])
    truth.covars_ = np.tile(0.5 * np.eye(2), (4, 1, 1))
    lengths = [120, 60, 20]
    samples, _ = truth.sample(sum(lengths))
    # without the priors that are on by default
    start = hmm.GaussianHMM(4, covariance_type=covariance, covars_prior=0, covars_weight=1)
    start.n_features = 2
    start.startprob_, start.transmat_ = np.full(4, 0.25), np.full((4, 4), 0.1) + 0.6 * np.eye(4)
    start.means_ = truth.means_ + 2 * np.random.default_rng(0).normal(size=(4, 2))
    start.covars_ = np.tile(4 * np.eye(2), (4, 1, 1)) if covariance == "full" else np.full((4, 2), 4.0)
    pieces = torch.from_numpy(samples).split(lengths)
    data = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True, padding_value=torch.nan)
    assert_same_iterations(start, data, samples, lengths)


def test_counts_of_earthquakes():
    hmm = peer("hmmlearn.hmm")
    start = hmm.PoissonHMM(3)
    start.n_features = 1
    start.startprob_, start.transmat_ = np.full(3, 1 / 3), np.full((3, 3), 0.1) + 0.7 * np.eye(3)
    start.lambdas_ = np.array([[10.0], [20.0], [30.0]])
    assert_same_iterations(start, COUNTS[:, None], COUNTS[:, None].numpy())


def series(module, name):
    """A list in one of the tests that statsmodels ships, which are not imported."""
    folder = Path(peer("statsmodels").__file__).parent / "tsa/regime_switching/tests"
    for node in ast.parse((folder / f"test_{module}.py").read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == name:
            return torch.tensor(ast.literal_eval(node.value), dtype=F64)
    raise LookupError(name)


class Regression(torch.nn.Module):
    """`log p(y | state)` of data [..., 1 + k], y and what it is regressed on; errors are alike in all states."""

    def __init__(self, coefficients):
        super().__init__()
        self.coefficients = torch.nn.Parameter(torch.tensor(coefficients, dtype=F64))  # (c, k)
        self.log_scale = torch.nn.Parameter(torch.zeros((), dtype=F64))

    def forward(self, data):
        errors = data[..., :1] - data[..., 1:] @ self.coefficients.T
        return torch.distributions.Normal(0.0, self.log_scale.exp()).log_prob(errors)


@pytest.mark.parametrize(
    ("lagged", "start", "published", "coefficients"),
    [
        (False, [[2.0], [12.0]], -508.63592, [[3.70877], [9.556793]]),
        (True, [[1.0, 0.5], [0.0, 1.0]], -264.71069, [[0.724457, 0.7631424], [-0.0988764, 1.061174]]),
    ],
)
def test_interest_rates(lagged, start, published, coefficients):
    """The federal funds rate in two regimes, around means or an autoregression; Stata's figures."""
    rates = series("markov_regression", "fedfunds")
    ones = torch.ones_like(rates)
    data = torch.stack((rates[1:], ones[1:], rates[:-1]) if lagged else (rates, ones), -1)
    hmm = HMM(2, Regression(start), initial="stationary").double()
    hmm.transition.set(torch.tensor([[0.9, 0.1], [0.1, 0.9]]))
    report = hmm.fit(data[None], method="gradient", restarts=0, tolerance=1e-9)
    assert report.converged
    assert abs(report.log_likelihood - published) <= 6e-6
    np.testing.assert_allclose(hmm.emission.coefficients.detach(), coefficients, rtol=0, atol=2e-4)


class Regimes(torch.nn.Module):
    """Transitions of tuples of the last five regimes, the latest first."""

    def __init__(self):
        super().__init__()
        self.weights = LogWeights(2, 2)
        self.weights.set(torch.tensor([[0.7, 0.3], [0.1, 0.9]]))

    def forward(self, covariates):
        index = torch.arange(32)
        follows = (index[None, :] % 16) == (index[:, None] // 2)  # [from, to]
        return torch.where(follows, self.weights()[index[:, None] // 16, index[None, :] // 16], -torch.inf)[None]


class Autoregression(torch.nn.Module):
    """`log p(y_i | ...)` about the mean of its regime, with four lags; data [..., 5], latest first."""

    def __init__(self):
        super().__init__()
        self.means = torch.nn.Parameter(torch.tensor([-0.5, 1.0], dtype=F64))
        self.lags = torch.nn.Parameter(torch.zeros(4, dtype=F64))
        self.log_scale = torch.nn.Parameter(torch.zeros((), dtype=F64))

    def forward(self, data):
        regimes = torch.arange(32)[:, None] // torch.tensor([16, 8, 4, 2, 1]) % 2
        deviations = data[..., None, :] - self.means[regimes]  # (..., v, 32, 5)
        errors = deviations[..., 0] - deviations[..., 1:] @ self.lags
        return torch.distributions.Normal(0.0, self.log_scale.exp()).log_prob(errors)


def test_growth():
    """Hamilton 1989: the growth of gross national product in two regimes."""
    data = series("markov_autoregression", "rgnp").unfold(0, 5, 1).flip(-1)
    hmm = HMM(32, Autoregression(), initial="stationary", transition=Regimes()).double()
    report = hmm.fit(data[None], method="gradient", restarts=0, tolerance=1e-9)
    assert report.converged
    assert abs(report.log_likelihood - -181.26339) <= 6e-6
    stay = hmm.transition.weights().exp().diagonal().detach()
    np.testing.assert_allclose(stay, [0.754673, 1 - 0.095915], rtol=0, atol=1e-4)
    np.testing.assert_allclose(hmm.emission.means.detach(), [-0.358811, 1.163516], rtol=0, atol=1e-4)
    np.testing.assert_allclose(
        hmm.emission.lags.detach(), [0.013486, -0.057521, -0.246983, -0.212923], rtol=0, atol=1e-4
    )
