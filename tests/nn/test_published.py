"""`logchain.nn` reproduces published fits: earthquakes, regimes of interest rates and of growth."""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

from logchain import product
from logchain.nn import HMM, LinearGaussian, LogWeights
from tests.adapted import normal, peer
from tests.seeded import seeded

F64 = torch.float64
# Earthquakes of magnitude 7 or more, 1900 to 2006: Zucchini and MacDonald, Hidden Markov Models for Time Series, 2009.
EARTHQUAKES = """
13 14  8 10 16 26 32 27 18 32 36 24 22 23 22 18 25 21 21 14  8 11 14 23 18 17 19 20 22 19 13 26 13 14 22 24
21 22 26 21 23 24 27 41 31 27 35 26 28 36 39 21 17 22 17 19 15 34 10 15 22 18 15 20 15 22 19 16 30 27 29 23
20 16 21 21 25 16 18 15 18 14 10 15  8 15  6 11  8  7 18 16 13 12 13 20 15 16 12 18 15 16 13 15 16 11 11
"""
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


def test_switching_regression_and_autoregression_equal_statsmodels():
    tsa = peer("statsmodels.tsa.api")
    data = normal(80).cumsum(0) / 3
    lagged, other = data[:-1, None], normal(79, 2, seed=1)
    transitions = torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=torch.float64)
    start = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)  # stationary
    for covariates in (lagged, other):
        emission = LinearGaussian(2, covariates.shape[-1], generator=seeded()).double()
        x = emission(data[1:], covariates=covariates)
        options = {"k_regimes": 2, "exog": covariates.numpy(), "switching_variance": True}
        model = tsa.MarkovRegression(data[1:].numpy(), **options)
        weights = torch.cat((emission.bias[..., None], emission.weights), -1).detach()  # (c, 1, k + 1)
        variances = emission.covariances[:, 0]
        parameters = np.concatenate([[0.9, 0.2], weights[:, 0].T.flatten(), variances[:, 0]])
        found = product(x, transitions, start).item()
        assert found == pytest.approx(model.loglike(parameters), abs=1e-9)
