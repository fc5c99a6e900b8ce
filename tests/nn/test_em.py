"""Expectation maximization: a step reaches the maximum of the expected log-likelihood; it never falls."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import scipy.stats
import torch

from logchain.nn import (
    HMM,
    Binomial,
    Categorical,
    Dirichlet,
    Distribution,
    Durations,
    Emission,
    Gamma,
    Gaussian,
    LinearGaussian,
    LogWeights,
    Multinomial,
    NormalInverseWishart,
    Poisson,
    Product,
    em_step,
    fit,
)
from logchain.nn.parameters import log_prior
from tests.adapted import normal
from tests.nn.emissions import CLOSED, COUNTS, FAMILIES
from tests.seeded import seeded

F64 = torch.float64
# parameters that are their own maximum; those of a mixture's components need its responsibilities
ALONE = pytest.mark.parametrize("name", [name for name in CLOSED if name != "mixture"])
COVARIANCES = pytest.mark.parametrize(
    "options", [{}, {"num_features": 2}, {"num_features": 2, "covariance": "full"}], ids=str
)


class Classes(torch.nn.Module):
    """A mixture of products over the variables: [n, *U, *event] to [n]."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.shares = layer, LogWeights(layer.units[-1])

    def log_prob(self, data, observed=None):
        found = self.layer(data, observed=observed)
        return (found.flatten(1, -2).sum(1) + self.shares()).logsumexp(-1)


def drawn(name, n=60, units=(3, 2), missing=0.0):
    """A model in float64 that starts at its data, the data, and what of it is observed."""
    torch.manual_seed(0)
    layer = FAMILIES[name].make(units).double()
    layer.reset_parameters(seeded())
    states = torch.randint(units[-1], (n, 1), generator=seeded(1)).expand(n, *units[:-1])
    data = layer.draw(states, seeded(2))
    model = Classes(layer).double()
    layer.initialize(data, generator=seeded(3))
    return model, data, torch.rand(n, *units[:-1], generator=seeded(4)) >= missing


def step(model, data, observed, **options):
    """A step of all data in two batches, which add up."""
    batches = slice(0, 17), slice(17, None)
    return em_step(model, [lambda at=at: model.log_prob(data[at], observed[at]).sum() for at in batches], **options)


@ALONE
def test_step_reaches_the_maximum(name):
    model, data, observed = drawn(name, missing=0.3)
    layer = model.layer
    with torch.no_grad():
        found = layer(data, observed)
        flow = (found.sum(1, keepdim=True) + model.shares()).softmax(-1).expand_as(found)
    step(model, data, observed)
    expected = (flow * layer(data, observed)).sum()
    slopes = torch.autograd.grad(expected, list(layer.parameters()))
    for parameter, slope in zip(layer.parameters(), slopes, strict=True):
        assert slope.abs().max() < 1e-9
        noise = torch.randn(parameter.shape, generator=seeded(5), dtype=F64)
        for size in (1e-2, -1e-2):
            with torch.no_grad():
                parameter += size * noise
                assert (flow * layer(data, observed)).sum() < expected
                parameter -= size * noise
    torch.testing.assert_close(model.shares().exp().detach(), flow[:, 0].mean(0))
    if name in ("gaussian-spherical", "gaussian-tied"):
        found = layer.variances if name == "gaussian-spherical" else layer.covariances
        shared = found[..., :1] if name == "gaussian-spherical" else found[..., :1, :, :]
        assert torch.equal(found, shared.expand_as(found))


def moments(layer):
    """Means of the sufficient statistics, of layers whose units share nothing."""
    if isinstance(layer, Poisson):
        return layer.log_rates.exp()
    if isinstance(layer, Binomial):
        return layer.probabilities
    means = layer.means.detach()
    squares = means[..., :, None] * means[..., None, :] if layer.has_matrices else means.square()
    spread = layer.covariances if layer.has_matrices else layer.variances
    return torch.cat((means.flatten(), (spread + squares).flatten()))


@pytest.mark.parametrize("name", CLOSED)
def test_partial_step_is_linear_in_the_moments_and_gains(name):
    model, data, observed = drawn(name)
    none, part, whole = (copy.deepcopy(model) for _ in range(3))
    step(none, data, observed, step=0.0)
    before = step(part, data, observed, step=0.3)
    torch.testing.assert_close(before, model.log_prob(data, observed).detach().sum())
    step(whole, data, observed)
    torch.testing.assert_close(none.layer(data), model.layer(data))
    torch.testing.assert_close(none.shares(), model.shares())
    assert part.log_prob(data, observed).sum() > before
    if name in ("gaussian", "gaussian-diag", "gaussian-full", "poisson", "binomial"):
        torch.testing.assert_close(moments(part.layer), 0.7 * moments(model.layer) + 0.3 * moments(whole.layer))


@ALONE
def test_state_without_data_stays(name):
    model, data, observed = drawn(name)
    model.shares.set(torch.tensor([1.0, 0.0]))
    before = copy.deepcopy(model.layer)
    step(model, data, observed)
    values = data[:1]
    after, was = model.layer(values), before(values)
    assert not torch.allclose(after[..., 0], was[..., 0])
    if name != "gaussian-tied":  # which shares the covariance
        torch.testing.assert_close(after[..., 1], was[..., 1])
    assert model.shares().exp().tolist() == [1.0, 0.0]


@pytest.mark.parametrize("name", COUNTS)
def test_values_without_data_become_impossible_and_stay_so(name):
    layer, zeros = FAMILIES[name].make((2,)).double(), torch.zeros(5, dtype=torch.long)
    for _ in range(2):
        em_step(layer, [lambda: layer(zeros).sum()])
        found = layer(torch.tensor([0, 1]))
        assert (found[0] == 0).all() and (found[1] == -torch.inf).all()


@COVARIANCES
def test_rounding_is_no_variance(options):
    layer = Gaussian((1, 2), **options, generator=seeded()).double()
    data = torch.full((9, 1, *layer.event), 12345.678, dtype=F64)
    for seed in range(40):
        flow = torch.rand(9, 1, 2, generator=seeded(seed), dtype=F64)
        with pytest.raises(ValueError, match=r"got 0 for unit \[0, 0\]"):
            em_step(layer, [lambda flow=flow: (flow * layer(data)).sum()])


@COVARIANCES
def test_data_far_from_zero_cost_no_digits(options):
    noise = torch.randn(500, 2, generator=seeded(), dtype=F64)
    noise = noise if options else noise[:, 0]
    layer = Gaussian(1, **options).double()
    layer.initialize(noise + 1e6)
    em_step(layer, [lambda: layer(noise + 1e6).sum()])
    centered = ((noise + 1e6) - 1e6).numpy()
    expected = np.cov(centered.T, ddof=0)
    expected = expected if "covariance" in options or not options else np.diagonal(expected)
    found = layer.covariances if "covariance" in options else layer.variances
    np.testing.assert_allclose(found[0], expected, rtol=1e-6)
    np.testing.assert_allclose(layer.means[0].detach() - 1e6, centered.mean(0), atol=1e-9)


def test_missing_features_do_not_count():
    layer = Gaussian(1, 2).double()
    data = torch.tensor([[1.0, torch.nan], [3.0, 5.0], [torch.nan, 6.0]], dtype=F64)
    expected = torch.tensor([[1.0, 0.25]], dtype=F64)
    em_step(layer, [lambda: layer(data).sum()])
    torch.testing.assert_close(layer.means.detach(), torch.tensor([[2.0, 5.5]], dtype=F64))
    torch.testing.assert_close(layer.variances, expected)
    layer.initialize(data, generator=seeded())
    torch.testing.assert_close(layer.variances, expected)
    near = torch.tensor([[1.0, 5.5], [3.0, 5.0], [2.0, 6.0]], dtype=F64)
    assert (near == layer.means.detach()).all(-1).any(), "an observation, at the mean where it is missing"


def test_parts_that_are_not_trained_stay():
    model, data, observed = drawn("poisson")
    model.shares.requires_grad_(False)
    before = model.shares().clone()
    step(model, data, observed)
    assert torch.equal(model.shares(), before)
    # one parameter of a layer is not trained
    model.layer = Gaussian((3, 2)).double()
    model.layer.means.requires_grad_(False)
    means, scales = model.layer.means.clone(), model.layer.log_scales.clone()
    step(model, data.double(), observed)
    assert torch.equal(model.layer.means, means) and not torch.equal(model.layer.log_scales, scales)
    scales = model.layer.log_scales.clone()
    fit(model, data.double(), method="gradient", max_iterations=1, restarts=0, tolerance=-torch.inf)
    assert torch.equal(model.layer.means, means) and torch.equal(model.shares(), before)
    assert not torch.equal(model.layer.log_scales, scales)


@pytest.mark.parametrize("prior", [None, NormalInverseWishart(0.5, 3.0, 1.0, 2.0)])
@pytest.mark.parametrize("frozen", ["nothing", "means", "spread"])
@pytest.mark.parametrize("covariance", ["spherical", "diag", "full", "tied"])
def test_gaussian_maximum_of_the_posterior_has_gradient_zero(covariance, frozen, prior):
    layer, data = Gaussian(2, 3, covariance, prior=prior, generator=seeded()).double(), normal(60, 3)
    flow = torch.rand(60, 2, generator=seeded(1), dtype=F64)
    parameters = {"means": layer.means, "spread": layer.factors if layer.has_matrices else layer.log_scales}
    if frozen in parameters:
        parameters.pop(frozen).requires_grad_(False)
    before = [parameter.clone() for parameter in layer.parameters()]
    layer.maximize(layer.statistics(flow, data))
    objective = (flow * layer(data)).sum() + layer.log_prior()
    for slope in torch.autograd.grad(objective, list(parameters.values())):
        assert slope.abs().max() < 1e-9
    for parameter, old in zip(layer.parameters(), before, strict=True):
        assert torch.equal(parameter, old) is not parameter.requires_grad


@pytest.mark.parametrize(
    ("layer", "data"),
    [
        (lambda: Poisson(2, prior=Gamma(3.0, 2.0)), [0, 1, 5]),
        (lambda: Binomial(2, 7, prior=Dirichlet(torch.tensor([2.0, 3.0]))), [0, 1, 5]),
        (lambda: Multinomial(2, 3, prior=Dirichlet(2.0)), [[1, 0, 2], [1, 0, 2], [3, 0, 0]]),
        (lambda: Categorical(2, 3, prior=Dirichlet(1.5)), [0, 1, 1]),
    ],
)
def test_maximum_of_the_posterior_of_counts_has_gradient_zero(layer, data):
    layer, data = layer().double(), torch.tensor(data)
    flow = torch.rand(3, 2, generator=seeded(1), dtype=F64)
    em_step(layer, [lambda: (flow * layer(data)).sum()])
    prior = log_prior(layer.modules())
    objective = (flow * layer(data)).sum() + prior
    assert prior.item() != 0
    for slope in torch.autograd.grad(objective, list(layer.parameters())):
        assert slope.abs().max() < 1e-9


@pytest.mark.parametrize("covariance", ["spherical", "diag", "full", "tied"])
def test_missing_features_of_vectors_are_marginalized(covariance):
    layer, data = Gaussian((2, 3), 3, covariance, generator=seeded()).double(), normal(50, 2, 3)
    with torch.no_grad():
        list(layer.parameters())[1].normal_(0, 0.5, generator=seeded(1))
    known = torch.rand(50, 2, 3, generator=seeded(2)) < 0.6
    means, covariances = layer.means.detach().numpy(), layer.covariances.numpy()
    found = layer(data.where(known, torch.nan))
    assert torch.equal(found, layer(data, known))
    for row, variable, unit in np.ndindex(50, 2, 3):
        at = known[row, variable].numpy()
        normal_at = scipy.stats.multivariate_normal
        truth = 0.0
        if at.any():
            inside = covariances[variable, unit][np.ix_(at, at)]
            truth = normal_at(means[variable, unit][at], inside).logpdf(data[row, variable].numpy()[at])
        assert abs(found[row, variable, unit].item() - truth) < 1e-12
    # the gradient of the expected log-likelihood of complete data is that of the observed, and EM never falls
    flow = torch.rand(50, 2, 3, generator=seeded(3), dtype=F64)
    history = []
    for _ in range(300):
        objective = (flow * layer(data, known)).sum()
        history.append(objective.item())
        layer.maximize(layer.statistics(flow, data, known))
    assert all(after >= before - 1e-9 for before, after in zip(history, history[1:], strict=False))
    objective = (flow * layer(data, known)).sum()
    for slope in torch.autograd.grad(objective, list(layer.parameters())):
        assert slope.abs().max() < 1e-5


@pytest.mark.parametrize(
    ("family", "parameters"),
    [
        ("StudentT", (4.0, 1.0, 2.0)),
        ("NegativeBinomial", (4.0, 0.5)),
        ("Gamma", (4.0, 2.0)),
        ("VonMises", (1.0, 2.0)),
        ("LogNormal", (1.0, 0.3)),
    ],
)
def test_default_step_reaches_the_maximum_of_a_family_of_torch(family, parameters):
    torch.manual_seed(0)
    layer = Distribution(family, 2, generator=seeded()).double()
    data = getattr(torch.distributions, family)(*parameters).sample((500,)).double()
    layer.initialize(data, generator=seeded(2))
    flow = torch.rand(500, 2, generator=seeded(1), dtype=F64)
    for _ in range(3):
        before = (flow * layer(data)).sum()
        em_step(layer, [lambda at=at: (flow[at] * layer(data[at])).sum() for at in (slice(100), slice(100, None))])
        assert (flow * layer(data)).sum() >= before - 1e-9
    objective = (flow * layer(data)).sum() / flow.sum()
    for slope in torch.autograd.grad(objective, list(layer.parameters())):
        assert slope.abs().max() < 1e-4


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("d", "covariance"), [(None, "diag"), (2, "diag"), (2, "spherical"), (2, "full"), (2, "tied")])
def test_regression_equals_least_squares_with_weights(d, covariance, bias):
    layer = LinearGaussian(2, 3, d, covariance, bias=bias, generator=seeded()).double()
    data, covariates = normal(40, d or 1), normal(40, 3, seed=1)
    data = data if d else data[:, 0]
    missing, flow = torch.rand(40, generator=seeded(2)) < 0.2, torch.rand(40, 2, generator=seeded(1), dtype=F64)
    holes = data.masked_fill(missing[:, None] if d else missing, torch.nan)
    em_step(layer, [lambda: (flow * layer(holes, covariates=covariates)).sum()])
    rows = np.column_stack([covariates, np.ones(40)] if bias else [covariates])
    scatters, counts = [], []
    for unit in range(2):
        weights = np.sqrt(np.where(missing, 0, flow[:, unit]))[:, None]
        y = data.reshape(40, -1).numpy()
        expected = np.linalg.lstsq(weights * rows, weights * y, rcond=None)[0].T
        np.testing.assert_allclose(layer.weights[unit].detach(), expected[:, :3], rtol=1e-9)
        if bias:
            np.testing.assert_allclose(layer.bias[unit].detach(), expected[:, 3], rtol=1e-9)
        rest = weights * (y - rows @ expected.T)
        scatters.append(rest.T @ rest)
        counts.append((weights**2).sum())
    for unit in range(2):
        scatter = sum(scatters) / sum(counts) if covariance == "tied" else scatters[unit] / counts[unit]
        if covariance == "spherical":
            scatter = np.eye(2) * np.trace(scatter) / 2
        scatter = scatter if covariance in ("full", "tied") else np.diag(np.diag(scatter))
        np.testing.assert_allclose(layer.covariances[unit], scatter, rtol=1e-9)


def test_regression_with_frozen_coefficients_has_gradient_zero():
    layer, data, covariates = LinearGaussian(2, 3, 2, "full", generator=seeded()).double(), normal(40, 2), normal(40, 3)
    flow = torch.rand(40, 2, generator=seeded(1), dtype=F64)
    for name in ("bias", "weights"):
        getattr(layer, name).requires_grad_(False)
        before = getattr(layer, name).clone()
        em_step(layer, [lambda: (flow * layer(data, covariates=covariates)).sum()])
        assert torch.equal(getattr(layer, name), before)
        trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        for slope in torch.autograd.grad((flow * layer(data, covariates=covariates)).sum(), trained):
            assert slope.tril().abs().max() < 1e-9
    layer.requires_grad_(True)
    with pytest.raises(ValueError, match="linearly independent"):
        em_step(layer, [lambda: (flow * layer(data, covariates=covariates[:, :1].expand(-1, 3))).sum()])


def test_log_weights_start_uniformly_over_the_simplex():
    many = LogWeights(100_000, 3, generator=seeded())().exp()
    # uniform over the simplex: the mean is 1/3, the variance 1/18
    torch.testing.assert_close(many.mean(0), torch.full((3,), 1 / 3), atol=3e-3, rtol=0)
    torch.testing.assert_close(many.var(0), torch.full((3,), 1 / 18), atol=1e-3, rtol=0)


def test_product_of_families_is_fitted_and_sampled():
    hmm = HMM(2, Product(Gaussian(2, 2, "full"), Poisson(2), Distribution("Gamma", 2)), generator=seeded()).double()
    pair, counts, waits = hmm.emission.families
    pair.set(torch.tensor([[0.0, 0.0], [4.0, 4.0]]), torch.eye(2))
    counts.set(torch.tensor([2.0, 9.0]))
    torch.manual_seed(0)
    states, data = hmm.sample(5, 40, generator=seeded(1))
    data[0, :9, 0], data[1, :9, 2], data[2, :9] = torch.nan, torch.nan, torch.nan
    report = hmm.fit(data, generator=seeded(2), tolerance=-torch.inf, max_iterations=8)
    assert all(after >= before - 1e-6 for before, after in zip(report.history, report.history[1:], strict=False))
    agree = (hmm.decode(data).states == states).double().mean()
    assert max(agree, 1 - agree) > 0.9
    torch.testing.assert_close(counts.rates.sort().values, torch.tensor([2.0, 9.0], dtype=F64), rtol=0.2, atol=0)


class Coins(Emission):
    """Bernoulli observations, whose probabilities are a part inside."""

    def __init__(self):
        super().__init__(2)
        self.weights = LogWeights(2, 2, generator=seeded())

    def reset_parameters(self, generator=None):
        self.weights.reset_parameters(generator)

    def distribution(self, at=()):
        return torch.distributions.Bernoulli(self.weights()[:, 0].exp()[at], validate_args=False)


@pytest.mark.parametrize(
    ("options", "data"),
    [
        ({"emission": "gaussian", "transition": Durations(3, 5, Binomial(3, 4, generator=seeded(3)))}, normal(4, 30)),
        ({"emission": Coins()}, normal(4, 30).gt(0).double()),
    ],
    ids=["durations", "emission"],
)
def test_parts_inside_a_part_are_fitted_by_it_alone(options, data):
    hmm = HMM(3 if "transition" in options else 2, **options, generator=seeded()).double()
    values = [em_step(hmm, [lambda: hmm.log_prob(data).sum()]) for _ in range(5)]
    assert all(after > before - 1e-6 for before, after in pairwise(values))


def test_search_for_a_family_of_torch_stays_where_data_are_possible():
    waits, data = Distribution("Pareto", 1, scale=0.5, alpha=2.0), 0.6 + torch.rand(20, generator=seeded())
    before = waits(data).sum()
    em_step(waits, [lambda: waits(data).sum()])
    assert waits(data).sum() > before + 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_step_in_half_precision_is_that_in_float32_rounded_once(dtype):
    half, data = Distribution("StudentT", 3, df=4.0, generator=seeded()).to(dtype), 300 * normal(200).float()
    single = copy.deepcopy(half).float()
    for layer in (half, single):
        em_step(layer, [lambda layer=layer: layer(data).logsumexp(-1).sum()])
    for name, value in single.free.items():
        assert torch.equal(half.free[name], value.to(dtype)) and value.isfinite().all()


def test_negative_counts_are_refused():
    weights = LogWeights(2)
    with pytest.raises(ValueError, match=r"^statistics: expected non-negative counts .*, got -1$"):
        weights.maximize(torch.tensor([3.0, -1.0]))
