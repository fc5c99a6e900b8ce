"""`adapters.from_statsmodels` gives that package's log-likelihoods and smoothed regimes, and published ones."""

from pathlib import Path

import numpy as np
import pytest

from logchain import adapters
from tests.adapted import NATS, SHARE, answers, distance, peer


def growth():
    """Quarterly growth of the real gross domestic product of the United States, 1959 to 2009, in per cent."""
    data = peer("statsmodels.datasets").macrodata.load_pandas().data
    return 100 * np.diff(np.log(data["realgdp"].to_numpy()))


def switching(case):
    """Smoothed results at chosen parameters: nothing is fitted."""
    api = peer("statsmodels.tsa.api")
    y = growth()
    stay = [0.85, 0.1]
    if case == "regression":
        return api.MarkovRegression(y, 2, switching_variance=True).smooth([*stay, 0.0, 1.0, 1.2, 0.3])
    if case == "three regimes":
        staying = [0.8, 0.1, 0.1, 0.1, 0.8, 0.2]
        return api.MarkovRegression(y, 3).smooth([*staying, -0.5, 0.7, 1.5, 0.4])
    if case == "known start":
        model = api.MarkovRegression(y, 2)
        model.initialize_known([1.0, 0.0])
        return model.smooth([*stay, 0.0, 1.0, 0.5])
    if case == "varying transitions":
        leading = np.column_stack([np.ones(len(y)), np.sin(np.arange(len(y)))])
        model = api.MarkovRegression(y, 2, exog_tvtp=leading)
        model.initialize_known([0.5, 0.5])
        return model.smooth([1.5, -1.5, 0.7, 0.2, 0.0, 1.0, 0.5])
    order = {"first order": 1, "fourth order": 4, "varying transitions, second order": 2}[case]
    if "varying" in case:
        leading = np.column_stack([np.ones(len(y)), np.sin(np.arange(len(y)))])
        model = api.MarkovAutoregression(y, 2, order, switching_ar=False, exog_tvtp=leading)
        model.initialize_known([0.5, 0.5])
        return model.smooth([1.5, -1.5, 0.7, 0.2, 0.0, 1.0, 0.5, *[0.1] * order])
    model = api.MarkovAutoregression(y, 2, order, switching_ar=False)
    return model.smooth([*stay, 0.0, 1.0, 0.5, *[0.1] * order])


SWITCHING = pytest.mark.parametrize(
    "case",
    [
        "regression",
        "three regimes",
        "known start",
        "varying transitions",
        "first order",
        "fourth order",
        "varying transitions, second order",
    ],
)


@SWITCHING
def test_statsmodels(case):
    results = switching(case)
    arguments = adapters.from_statsmodels(results)
    log_norm, posteriors = answers(arguments)
    assert distance(log_norm, results.llf) <= NATS
    if results.order:
        assert distance(posteriors.T, results.smoothed_joint_probabilities.reshape(-1, len(posteriors))) <= SHARE
    regimes = posteriors.unflatten(-1, (results.k_regimes, -1)).sum(-1)
    assert distance(regimes, results.smoothed_marginal_probabilities) <= SHARE


def test_statsmodels_published_numbers():
    """Filardo's industrial production with a leading indicator: Kim and Nelson's table 4.2 says -586.5718."""
    api, package = peer("statsmodels.tsa.api"), Path(peer("statsmodels").__file__).parent
    path = package / "tsa/regime_switching/tests/results/mar_filardo.csv"
    series = peer("pandas").read_csv(path)
    leading = np.column_stack([np.ones(len(series) - 1), series["dmdlleading"].to_numpy()[:-1]])
    model = api.MarkovAutoregression(series["dlip"].to_numpy()[1:], 2, 4, switching_ar=False, exog_tvtp=leading)
    transition = [4.35941747, -1.6493936, 1.7702123, 0.9945672]
    others = [0.517298, -0.865888, np.exp(-0.362469) ** 2, 0.189474, 0.079344, 0.110944, 0.122251]
    log_norm, posteriors = answers(adapters.from_statsmodels(model.filter(np.array(transition + others))))
    assert distance(log_norm, -586.5718) <= 5e-5
    assert distance(posteriors.unflatten(-1, (2, 16)).sum(-1)[:, 0], series["smoothed_0"].to_numpy()[5:]) <= 1e-5
