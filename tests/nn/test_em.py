"""Expectation maximization: a step reaches the maximum of the expected log-likelihood; it never falls."""

import copy

import numpy as np
import pytest
import torch

from logchain.nn import Binomial, Gaussian, LogWeights, Poisson, em_step, fit
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
        found = layer.covariance().detach()
        shared = found[..., :1] if name == "gaussian-spherical" else found[..., :1, :, :]
        assert torch.equal(found, shared.expand_as(found))


def moments(layer):
    """Means of the sufficient statistics, of layers whose units share nothing."""
    if isinstance(layer, Poisson):
        return layer.log_rates.exp()
    if isinstance(layer, Binomial):
        return layer.logits.sigmoid()
    means = layer.means.detach()
    squares = means.square() if layer.factorised else means[..., :, None] * means[..., None, :]
    return torch.cat((means.flatten(), (layer.covariance().detach() + squares).flatten()))


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
    if name in ("gaussian", "gaussian-diagonal", "gaussian-full", "poisson", "binomial"):
        torch.testing.assert_close(moments(part.layer), 0.7 * moments(model.layer) + 0.3 * moments(whole.layer))


@ALONE
def test_state_without_data_stays(name):
    model, data, observed = drawn(name)
    model.shares.set(torch.tensor([1.0, 0.0]))
    before = copy.deepcopy(model.layer)
    step(model, data, observed)
    values = torch.zeros(1, 3, *model.layer.event, dtype=data.dtype)
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
    np.testing.assert_allclose(layer.covariance()[0].detach(), expected, rtol=1e-6)
    np.testing.assert_allclose(layer.means[0].detach() - 1e6, centered.mean(0), atol=1e-9)


def test_missing_features_do_not_count():
    layer = Gaussian(1, 2).double()
    data = torch.tensor([[1.0, torch.nan], [3.0, 5.0], [torch.nan, 6.0]], dtype=F64)
    expected = torch.tensor([[1.0, 0.25]], dtype=F64)
    em_step(layer, [lambda: layer(data).sum()])
    torch.testing.assert_close(layer.means.detach(), torch.tensor([[2.0, 5.5]], dtype=F64))
    torch.testing.assert_close(layer.covariance().detach(), expected)
    layer.initialize(data, generator=seeded())
    torch.testing.assert_close(layer.covariance().detach(), expected)
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


def test_log_weights_start_uniformly_over_the_simplex():
    many = LogWeights(100_000, 3, generator=seeded())().exp()
    # uniform over the simplex: the mean is 1/3, the variance 1/18
    torch.testing.assert_close(many.mean(0), torch.full((3,), 1 / 3), atol=3e-3, rtol=0)
    torch.testing.assert_close(many.var(0), torch.full((3,), 1 / 18), atol=1e-3, rtol=0)
