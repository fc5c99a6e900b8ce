"""Expectation maximisation: the E step against responsibilities in numpy, the M step against the maximum it claims."""

import copy
import math

import numpy as np
import pytest
import scipy.stats
import torch

from logchain.nn import Bernoulli, Binomial, Categorical, Gaussian, LogWeights, Mixture, Poisson, em_step
from logchain.nn.em import expected_statistics, maximise
from tests.seeded import seeded

FAMILIES = {
    "categorical": lambda units: Categorical(units, 4),
    "bernoulli": Bernoulli,
    "binomial": lambda units: Binomial(units, 3),
    "poisson": Poisson,
    "gaussian": Gaussian,
    "gaussian-diagonal": lambda units: Gaussian(units, 2),
    "gaussian-full": lambda units: Gaussian(units, 2, "full"),
    "mixture": lambda units: Mixture(Gaussian((*units, 2), 2)),
}


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
    layer = FAMILIES[name](units).double()
    layer.reset_parameters(seeded())
    states = torch.randint(units[-1], (n, 1), generator=seeded(1)).expand(n, *units[:-1])
    data = layer.draw(states, seeded(2))
    model = Classes(layer).double()
    layer.initialise(data, generator=seeded(3))
    return model, data, torch.rand(n, *units[:-1], generator=seeded(4)) >= missing


def step(model, data, observed, **options):
    return em_step(model, [lambda: model.log_prob(data, observed).sum()], **options)


@pytest.mark.parametrize("missing", [0.0, 0.3])
@pytest.mark.parametrize("name", FAMILIES)
def test_likelihood_never_falls(name, missing):
    model, data, observed = drawn(name, n=300, missing=missing)
    history = [step(model, data, observed).item() for _ in range(15)]
    assert all(after >= before - 1e-9 * abs(before) for before, after in zip(history, history[1:], strict=False))
    assert history[-1] > history[0] + 1e-3


@pytest.mark.parametrize("missing", [0.0, 0.3])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "mixture"])
def test_the_maximum_is_one(name, missing):
    model, data, observed = drawn(name, missing=missing)
    layer = model.layer
    with torch.no_grad():
        found = layer(data, observed)
        flow = (found.sum(1, keepdim=True) + model.shares()).softmax(-1).expand_as(found)
    step(model, data, observed)
    expected = (flow * layer(data, observed)).sum()
    for parameter, slope in zip(
        layer.parameters(), torch.autograd.grad(expected, list(layer.parameters())), strict=True
    ):
        assert slope.abs().max() < 1e-9
        noise = torch.randn(parameter.shape, generator=seeded(5), dtype=torch.float64)
        for size in (1e-2, -1e-2):
            with torch.no_grad():
                parameter += size * noise
                assert (flow * layer(data, observed)).sum() < expected
                parameter -= size * noise
    shares = flow[:, 0].mean(0)
    torch.testing.assert_close(model.shares().exp().detach(), shares)


def test_gaussian_maximum_in_numpy():
    model, data, observed = drawn("gaussian-full")
    y, layer = data.numpy(), model.layer
    means, covariance = layer.means.detach().numpy(), layer.covariance().detach().numpy()
    joint = np.repeat(model.shares().detach().numpy()[:, None], len(y), 1)
    for u in range(3):
        for s in (0, 1):
            joint[s] += scipy.stats.multivariate_normal(means[u, s], covariance[u, s]).logpdf(y[:, u])
    responsible = np.exp(joint - np.logaddexp(*joint))  # (c, n)
    assert math.isclose(step(model, data, observed).item(), np.logaddexp(*joint).sum(), rel_tol=1e-12)
    for u in range(3):
        for s in (0, 1):
            expected = np.average(y[:, u], axis=0, weights=responsible[s])
            np.testing.assert_allclose(layer.means[u, s].detach(), expected, rtol=1e-11)
            expected = np.cov(y[:, u].T, aweights=responsible[s], ddof=0)
            np.testing.assert_allclose(layer.covariance()[u, s].detach(), expected, rtol=1e-10)


@pytest.mark.parametrize("name", FAMILIES)
def test_batches_add_up(name):
    model, data, observed = drawn(name, missing=0.2)
    other = copy.deepcopy(model)
    total = step(model, data, observed)
    pieces = [slice(0, 17), slice(17, 60)]
    parts = em_step(other, [lambda at=at: other.log_prob(data[at], observed[at]).sum() for at in pieces])
    torch.testing.assert_close(parts, total)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_step_changes_nothing_and_half_a_step_less_than_a_whole(name):
    model, data, observed = drawn(name)
    still, half = copy.deepcopy(model), copy.deepcopy(model)
    step(still, data, observed, step=0.0)
    torch.testing.assert_close(still.layer(data), model.layer(data))
    torch.testing.assert_close(still.shares(), model.shares())
    before = step(half, data, observed, step=0.5)
    assert half.log_prob(data, observed).sum() > before


def moments(layer):
    """What a step is taken in: the means of the sufficient statistics."""
    if isinstance(layer, Poisson):
        return layer.log_rates.exp()
    if isinstance(layer, Binomial):
        return layer.logits.sigmoid()
    means = layer.means.detach()
    squares = means[..., :, None] * means[..., None, :] if layer.event else means.square()
    return torch.cat((means.flatten(), (layer.covariance().detach() + squares).flatten()))


@pytest.mark.parametrize("name", ["gaussian", "gaussian-full", "poisson", "binomial"])
def test_a_step_is_taken_in_the_moments(name):
    model, data, observed = drawn(name)
    whole, part = copy.deepcopy(model), copy.deepcopy(model)
    step(whole, data, observed)
    step(part, data, observed, step=0.3)
    expected = 0.7 * moments(model.layer) + 0.3 * moments(whole.layer)
    torch.testing.assert_close(moments(part.layer), expected)


def test_a_unit_on_one_observation_has_no_maximum_but_with_a_prior():
    data = torch.tensor([[0.0], [1.0], [2.0], [50.0]], dtype=torch.float64)
    for options in ({}, {"num_features": 2}, {"num_features": 2, "covariance": "full"}):
        y = data[..., None].expand(4, 1, 2) * torch.tensor([1.0, 0.5]) if options else data
        layer = Gaussian((1, 2), **options).double()
        means = torch.tensor([1.0, 50.0], dtype=torch.float64)
        variance = torch.tensor(0.5, dtype=torch.float64)
        if options:
            means = means[:, None] * torch.tensor([1.0, 0.5])
            variance = variance * (torch.eye(2) if "covariance" in options else 1)
        if "covariance" in options:
            y = y + 0.1 * torch.tensor([0.0, 1.0]) * (data[..., None] - 1).square().clamp(max=1)
        layer.set(means, variance)
        model = Classes(layer).double()
        with pytest.raises(ValueError, match=r"got 0 for unit \[0, 1\]"):
            step(model, y, None)
        layer.prior_scatter, layer.prior_count = 0.02, 1.0
        step(model, y, None)
        found = layer.covariance().detach()[0, 1]
        expected = torch.eye(2) if "covariance" in options else torch.ones(found.shape)
        torch.testing.assert_close(found, 0.01 * expected.to(found))


@pytest.mark.parametrize("options", [{}, {"num_features": 2}, {"num_features": 2, "covariance": "full"}], ids=str)
def test_rounding_is_no_variance(options):
    layer = Gaussian((1, 2), **options, generator=seeded()).double()
    data = torch.full((9, 1, *layer.event), 12345.678, dtype=torch.float64)
    for seed in range(40):
        flow = torch.rand(9, 1, 2, generator=seeded(seed), dtype=torch.float64)
        with pytest.raises(ValueError, match=r"got 0 for unit \[0, 0\]"):
            layer.maximise(layer.statistics(flow, data))


def test_the_prior_is_that_of_hmmlearn():
    layer = Gaussian(1, prior_scatter=0.01).double()
    layer.set(torch.tensor([0.0]), torch.tensor([1.0]))
    data = torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64)
    em_step(layer, [lambda: layer(data).sum()])
    expected = (0.01 + ((data - 2) ** 2).sum()) / 3
    torch.testing.assert_close(layer.covariance().detach()[0], expected)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "mixture"])
def test_what_is_not_expected_stays(name):
    model, data, observed = drawn(name)
    model.shares.set(torch.tensor([1.0, 0.0]))
    before = copy.deepcopy(model.layer)
    step(model, data, observed)
    values = torch.zeros(1, 3, *model.layer.event, dtype=data.dtype)
    after, was = model.layer(values), before(values)
    torch.testing.assert_close(after[..., 1], was[..., 1])
    assert not torch.allclose(after[..., 0], was[..., 0])
    assert model.shares().exp().tolist() == [1.0, 0.0]


@pytest.mark.parametrize("name", ["bernoulli", "binomial", "poisson", "categorical"])
def test_what_never_happens_becomes_impossible(name):
    layer = FAMILIES[name](2).double()
    data = torch.zeros(5, dtype=torch.long)
    model = Classes(layer)
    em_step(model, [lambda: layer(data).sum()])
    found = layer(torch.tensor([0, 1]))
    assert (found[0] == 0).all() and (found[1] == -torch.inf).all()
    em_step(model, [lambda: layer(data).sum()])
    assert torch.equal(layer(torch.tensor([0, 1])), found)
    if name in ("bernoulli", "binomial"):
        em_step(model, [lambda: layer(data + layer.total_count).masked_fill(torch.tensor(True), 0).sum()])
        assert torch.equal(layer(torch.tensor([0, 1])), found), "no flow, no change"


@pytest.mark.parametrize("options", [{}, {"num_features": 2}, {"num_features": 2, "covariance": "full"}], ids=str)
def test_far_data_cost_no_digits(options):
    noise = torch.randn(500, 2, generator=seeded(), dtype=torch.float64)
    noise = noise if options else noise[:, 0]
    layer = Gaussian(1, **options).double()
    layer.initialise(noise + 1e6)
    em_step(layer, [lambda: layer(noise + 1e6).sum()])
    centred = (noise + 1e6) - 1e6
    expected = np.cov(centred.numpy().T, ddof=0)
    expected = expected if "covariance" in options or not options else np.diagonal(expected)
    np.testing.assert_allclose(layer.covariance()[0].detach(), expected, rtol=1e-6)
    np.testing.assert_allclose(layer.means[0].detach() - 1e6, centred.numpy().mean(0), atol=1e-9)


def test_single_features_that_are_missing_do_not_count():
    layer = Gaussian(1, 2).double()
    data = torch.tensor([[1.0, torch.nan], [3.0, 5.0], [torch.nan, 6.0]], dtype=torch.float64)
    em_step(layer, [lambda: layer(data).sum()])
    torch.testing.assert_close(layer.means.detach(), torch.tensor([[2.0, 5.5]], dtype=torch.float64))
    torch.testing.assert_close(layer.covariance().detach(), torch.tensor([[1.0, 0.25]], dtype=torch.float64))
    layer.initialise(data, generator=seeded())
    torch.testing.assert_close(layer.covariance().detach(), torch.tensor([[1.0, 0.25]], dtype=torch.float64))
    near = torch.tensor([[1.0, 5.5], [3.0, 5.0], [2.0, 6.0]], dtype=torch.float64)
    assert (near == layer.means.detach()).all(-1).any(), "an observation, at the mean where it is missing"


def test_half_parameters_are_fitted():
    for dtype in (torch.float32, torch.bfloat16):
        model, data, observed = drawn("gaussian")
        exact = copy.deepcopy(model)
        model = model.to(dtype)
        for _ in range(3):
            step(model, data, observed)
            step(exact, data, observed)
        tolerance = 1e-4 if dtype == torch.float32 else 5e-2
        torch.testing.assert_close(model.layer.means.double(), exact.layer.means, atol=tolerance, rtol=tolerance)


def test_parts_that_are_not_trained_stay_and_shared_parts_are_used_twice():
    model, data, observed = drawn("poisson")
    model.shares.requires_grad_(False)
    before = model.shares().clone()
    step(model, data, observed)
    assert torch.equal(model.shares(), before)
    model.layer = Gaussian((3, 2)).double()
    model.layer.means.requires_grad_(False)
    scales = model.layer.log_scales.clone()
    step(model, data.double(), observed)
    assert torch.equal(model.layer.log_scales, scales), "half of a part is no part"
    coin = LogWeights(2).double()
    total, found = expected_statistics(coin, lambda: 3 * coin()[0] + coin()[1])
    assert found[coin].tolist() == [3.0, 1.0] and not total.requires_grad
    maximise(found)
    torch.testing.assert_close(coin().exp().detach(), torch.tensor([0.75, 0.25], dtype=torch.float64))
    with pytest.raises(ValueError, match="at least one batch"):
        em_step(coin, [])
