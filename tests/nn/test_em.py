"""Expectation maximization: a step reaches the maximum of the expected log-likelihood; it never falls."""

import copy
from functools import partial
from itertools import product

import numpy as np
import pytest
import scipy.stats
import torch

from logchain import nn
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
        self.layer, self.shares = layer, nn.LogWeights(layer.units[-1])

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
    return nn.em_step(model, [lambda at=at: model.log_prob(data[at], observed[at]).sum() for at in batches], **options)


def assert_stationary(objective, layer, atol=1e-9):
    """The slopes along what is trained are zero; of triangular factors those above the diagonal have no effect."""
    names, trained = zip(*[named for named in layer.named_parameters() if named[1].requires_grad], strict=True)
    for name, slope in zip(names, torch.autograd.grad(objective, trained), strict=True):
        assert (slope.tril() if name == "factors" else slope).abs().max() < atol


@ALONE
def test_step_reaches_the_maximum(name):
    model, data, observed = drawn(name, missing=0.3)
    layer = model.layer
    with torch.no_grad():
        found = layer(data, observed)
        flow = (found.sum(1, keepdim=True) + model.shares()).softmax(-1).expand_as(found)
    step(model, data, observed)
    expected = (flow * layer(data, observed)).sum()
    assert_stationary(expected, layer)
    with torch.no_grad():
        for parameter, size in product(layer.parameters(), (1e-2, -1e-2)):
            noise = size * torch.randn(parameter.shape, generator=seeded(5), dtype=F64)
            parameter += noise
            assert (flow * layer(data, observed)).sum() < expected
            parameter -= noise
    torch.testing.assert_close(model.shares().exp().detach(), flow[:, 0].mean(0))
    if name == "gaussian-spherical":
        assert torch.equal(layer.variances, layer.variances[..., :1].expand_as(layer.variances))
    if name == "gaussian-tied":
        assert torch.equal(layer.covariances, layer.covariances[..., :1, :, :].expand_as(layer.covariances))


def moments(layer):
    """Means of the sufficient statistics, of layers whose units share nothing."""
    if isinstance(layer, nn.Poisson):
        return layer.rates
    if isinstance(layer, nn.Binomial):
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
        nn.em_step(layer, [lambda: layer(zeros).sum()])
        found = layer(torch.tensor([0, 1]))
        assert (found[0] == 0).all() and (found[1] == -torch.inf).all()


@COVARIANCES
def test_rounding_is_no_variance(options):
    layer = nn.Gaussian((1, 2), **options, generator=seeded()).double()
    data = torch.full((9, 1, *layer.event), 12345.678, dtype=F64)
    for seed in range(40):
        flow = torch.rand(9, 1, 2, generator=seeded(seed), dtype=F64)
        with pytest.raises(ValueError, match=r"got 0 for unit \[0, 0\]"):
            nn.em_step(layer, [lambda flow=flow: (flow * layer(data)).sum()])


@COVARIANCES
def test_data_far_from_zero_cost_no_digits(options):
    noise = torch.randn(500, 2, generator=seeded(), dtype=F64)
    noise = noise if options else noise[:, 0]
    layer = nn.Gaussian(1, **options).double()
    layer.initialize(noise + 1e6)
    nn.em_step(layer, [lambda: layer(noise + 1e6).sum()])
    centered = ((noise + 1e6) - 1e6).numpy()
    expected = np.cov(centered.T, ddof=0)
    expected = expected if "covariance" in options or not options else np.diagonal(expected)
    found = layer.covariances if "covariance" in options else layer.variances
    np.testing.assert_allclose(found[0], expected, rtol=1e-6)
    np.testing.assert_allclose(layer.means[0].detach() - 1e6, centered.mean(0), atol=1e-9)


def test_missing_features_do_not_count():
    layer = nn.Gaussian(1, 2).double()
    data = torch.tensor([[1.0, torch.nan], [3.0, 5.0], [torch.nan, 6.0]], dtype=F64)
    expected = torch.tensor([[1.0, 0.25]], dtype=F64)
    nn.em_step(layer, [lambda: layer(data).sum()])
    torch.testing.assert_close(layer.means.detach(), torch.tensor([[2.0, 5.5]], dtype=F64))
    torch.testing.assert_close(layer.variances, expected)
    layer.initialize(data, generator=seeded())
    torch.testing.assert_close(layer.variances, expected)
    near = torch.tensor([[1.0, 5.5], [3.0, 5.0], [2.0, 6.0]], dtype=F64)
    assert (near == layer.means.detach()).all(-1).any(), "an observation, at the mean where it is missing"


WISHART = nn.NormalInverseWishart(0.5, 3.0, torch.tensor([1.0, 0.0, -1.0]), 2.0)
SCALES = {"diag": torch.tensor([0.5, 1.0, 2.0]), "full": torch.eye(3) + 0.5}
REGRESSION, KINDS = partial(nn.LinearGaussian, 2, 3, 2, "full"), ("spherical", "diag", "full", "tied")
TRIALS, VOTES = torch.arange(60) % 6, torch.tensor([[1, 0, 2], [3, 0, 0]] * 30)
# a layer, its prior, data with covariates, and the places of parameters that are not trained
POSTERIORS = [
    *(
        (partial(nn.Gaussian, 2, 3, kind), prior, [normal(60, 3)], frozen)
        for kind, prior, frozen in product(KINDS, (None, WISHART), ([], [0], [1]))
    ),
    *(
        (partial(nn.Gaussian, 2, 3, kind), nn.NormalInverseWishart(scale, 3.0, 1.0, 2.0), [normal(60, 3)], [])
        for kind, scale in SCALES.items()
    ),
    *((REGRESSION, None, [normal(60, 2), normal(60, 3)], frozen) for frozen in ([1], [0, 1])),
    (partial(nn.Poisson, 2), nn.Gamma(3.0, 2.0), [TRIALS], []),
    (partial(nn.Binomial, 2, 7), nn.Dirichlet(torch.tensor([2.0, 3.0])), [TRIALS], []),
    (partial(nn.Multinomial, 2, 3), nn.Dirichlet(2.0), [VOTES], []),
    (partial(nn.Categorical, 2, 3), nn.Dirichlet(1.5), [TRIALS % 3], []),
]


@pytest.mark.parametrize(("make", "prior", "data", "frozen"), POSTERIORS)
def test_maximum_of_the_posterior_has_gradient_zero(make, prior, data, frozen):
    layer = make(**({} if prior is None else {"prior": prior}), generator=seeded()).double()
    flow, parameters = torch.rand(60, 2, generator=seeded(1), dtype=F64), list(layer.parameters())
    for place in frozen:
        parameters[place].requires_grad_(False)
    before = [parameter.clone() for parameter in parameters]

    def objective():
        return (flow * layer(data[0], **dict(zip(["covariates"], data[1:], strict=False)))).sum()

    nn.em_step(layer, [objective])
    log_prior = sum(module.log_prior() for module in layer.modules() if hasattr(module, "log_prior"))
    assert (log_prior == 0) == (prior is None)
    assert_stationary(objective() + log_prior, layer)
    for place, (parameter, old) in enumerate(zip(parameters, before, strict=True)):
        assert torch.equal(parameter, old) is (place in frozen)


@pytest.mark.parametrize("covariance", KINDS)
def test_missing_features_of_vectors_are_marginalized(covariance):
    layer, data = nn.Gaussian((2, 3), 3, covariance, generator=seeded()).double(), normal(50, 2, 3)
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
    assert_stationary((flow * layer(data, known)).sum(), layer, 1e-5)


TORCH_FAMILIES = {
    "StudentT": (4.0, 1.0, 2.0),
    "NegativeBinomial": (4.0, 0.5),
    "Gamma": (4.0, 2.0),
    "VonMises": (1.0, 2.0),
    "LogNormal": (1.0, 0.3),
}


@pytest.mark.parametrize(("family", "parameters"), TORCH_FAMILIES.items())
def test_default_step_reaches_the_maximum_of_a_family_of_torch(family, parameters):
    torch.manual_seed(0)
    layer = nn.Distribution(family, 2, generator=seeded()).double()
    data = getattr(torch.distributions, family)(*parameters).sample((500,)).double()
    layer.initialize(data, generator=seeded(2))
    flow = torch.rand(500, 2, generator=seeded(1), dtype=F64)
    for _ in range(3):
        before = (flow * layer(data)).sum()
        nn.em_step(layer, [lambda at=at: (flow[at] * layer(data[at])).sum() for at in (slice(100), slice(100, None))])
        assert (flow * layer(data)).sum() >= before - 1e-9
    assert_stationary((flow * layer(data)).sum() / flow.sum(), layer, 1e-4)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("d", "covariance"), [(None, "diag"), (2, "diag"), (2, "spherical"), (2, "full"), (2, "tied")])
def test_regression_is_normal_about_its_means_which_a_step_takes_to_least_squares(d, covariance, bias):
    layer = nn.LinearGaussian(2, 3, d, covariance, bias=bias, generator=seeded()).double()
    data, covariates = normal(40, *layer.event), normal(40, 3, seed=1)
    missing, flow = torch.rand(40, generator=seeded(2)) < 0.2, torch.rand(40, 2, generator=seeded(1), dtype=F64)
    holes = data.masked_fill(missing[:, None] if d else missing, torch.nan)

    def objective():
        return (flow * layer(holes, covariates=covariates)).sum()

    nn.em_step(layer, [objective])
    assert_stationary(objective(), layer)
    density = layer(data, covariates=covariates).detach()
    for unit in range(2):
        means = covariates @ layer.weights[unit].mT + (layer.bias[unit] if bias else 0)
        truth = scipy.stats.multivariate_normal(cov=layer.covariances[unit])
        np.testing.assert_allclose(density[:, unit], truth.logpdf((data.view(40, -1) - means).detach()), rtol=1e-9)
    with pytest.raises(ValueError, match="linearly independent"):
        nn.em_step(layer, [lambda: (flow * layer(data, covariates=covariates[:, :1].expand(-1, 3))).sum()])


def test_log_weights_start_uniformly_over_the_simplex():
    many = nn.LogWeights(100_000, 3, generator=seeded())().exp()
    # uniform over the simplex: the mean is 1/3, the variance 1/18
    torch.testing.assert_close(many.mean(0), torch.full((3,), 1 / 3), atol=3e-3, rtol=0)
    torch.testing.assert_close(many.var(0), torch.full((3,), 1 / 18), atol=1e-3, rtol=0)


def test_search_for_a_family_of_torch_stays_where_data_are_possible():
    waits, data = nn.Distribution("Pareto", 1, scale=0.5, alpha=2.0), 0.6 + torch.rand(20, generator=seeded())
    before = waits(data).sum()
    nn.em_step(waits, [lambda: waits(data).sum()])
    assert waits(data).sum() > before + 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_step_in_half_precision_is_that_in_float32_rounded_once(dtype):
    half, data = nn.Distribution("StudentT", 3, df=4.0, generator=seeded()).to(dtype), 300 * normal(200).float()
    single = copy.deepcopy(half).float()
    for layer in (half, single):
        nn.em_step(layer, [lambda layer=layer: layer(data).logsumexp(-1).sum()])
    for name, value in single.free.items():
        assert torch.equal(half.free[name], value.to(dtype)) and value.isfinite().all()


def test_negative_counts_are_refused():
    weights = nn.LogWeights(2)
    with pytest.raises(ValueError, match=r"^statistics: expected non-negative counts .*, got -1$"):
        weights.maximize(torch.tensor([3.0, -1.0]))
