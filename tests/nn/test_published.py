"""`logchain.nn` reproduces published fits of regimes, and statsmodels' switching regressions."""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

from logchain import product
from logchain.nn import HMM, Gaussian, LinearGaussian, LogWeights
from tests.adapted import normal, peer
from tests.seeded import seeded

F64 = torch.float64


def series(module, name):
    """A list in one of the tests that statsmodels ships, which are not imported."""
    folder = Path(peer("statsmodels").__file__).parent / "tsa/regime_switching/tests"
    for node in ast.parse((folder / f"test_{module}.py").read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == name:
            return torch.tensor(ast.literal_eval(node.value), dtype=F64)
    raise LookupError(name)


def fitted(hmm, data, published, **options):
    report = hmm.fit(data, method="gradient", restarts=0, tolerance=1e-9, **options)
    assert report.converged and abs(report.log_likelihood - published) <= 6e-6


def test_interest_rates_around_means():
    """The federal funds rate in two regimes, and Stata's figures."""
    hmm = HMM(2, Gaussian(2, 1, "tied"), initial="stationary").double()
    hmm.emission.set(torch.tensor([[2.0], [12.0]]), torch.ones(1, 1))
    hmm.transition.set(torch.tensor([[0.9, 0.1], [0.1, 0.9]]))
    fitted(hmm, series("markov_regression", "fedfunds")[:, None], -508.63592)
    np.testing.assert_allclose(hmm.emission.means.detach(), [[3.70877], [9.556793]], rtol=0, atol=2e-4)


def test_interest_rates_by_an_autoregression():
    """The same, regressed on the rate before."""
    rates = series("markov_regression", "fedfunds")[:, None]
    hmm = HMM(2, LinearGaussian(2, 1, 1, "tied"), initial="stationary").double()
    hmm.emission.set(torch.tensor([[[0.5]], [[1.0]]]), torch.tensor([[1.0], [0.0]]), torch.ones(1, 1))
    hmm.transition.set(torch.tensor([[0.9, 0.1], [0.1, 0.9]]))
    fitted(hmm, rates[1:], -264.71069, covariates=rates[:-1])
    coefficients = torch.cat((hmm.emission.bias, hmm.emission.weights[..., 0]), -1).detach()
    np.testing.assert_allclose(coefficients, [[0.724457, 0.7631424], [-0.0988764, 1.061174]], rtol=0, atol=2e-4)


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
    hmm = HMM(32, Autoregression(), initial="stationary", transition=Regimes()).double()
    fitted(hmm, series("markov_autoregression", "rgnp").unfold(0, 5, 1).flip(-1)[None], -181.26339)
    stay, (means, lags, _) = hmm.transition.weights().exp().diagonal(), hmm.emission.parameters()
    np.testing.assert_allclose(stay.detach(), [0.754673, 1 - 0.095915], rtol=0, atol=1e-4)
    np.testing.assert_allclose(means.detach(), [-0.358811, 1.163516], rtol=0, atol=1e-4)
    np.testing.assert_allclose(lags.detach(), [0.013486, -0.057521, -0.246983, -0.212923], rtol=0, atol=1e-4)


@pytest.mark.parametrize("lagged", [True, False])
def test_switching_regression_and_autoregression_equal_statsmodels(lagged):
    data = normal(80).cumsum(0) / 3
    covariates = data[:-1, None] if lagged else normal(79, 2, seed=1)
    emission = LinearGaussian(2, covariates.shape[-1], generator=seeded()).double()
    start, transitions = torch.tensor([2 / 3, 1 / 3], dtype=F64), torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=F64)
    options = {"k_regimes": 2, "exog": covariates.numpy(), "switching_variance": True}
    model = peer("statsmodels.tsa.api").MarkovRegression(data[1:].numpy(), **options)
    weights = torch.cat((emission.bias[..., None], emission.weights), -1).detach()  # (c, 1, k + 1)
    parameters = np.concatenate([[0.9, 0.2], weights[:, 0].T.flatten(), emission.covariances[:, 0, 0]])
    found = product(emission(data[1:], covariates=covariates), transitions, start).item()
    assert found == pytest.approx(model.loglike(parameters), abs=1e-9)
