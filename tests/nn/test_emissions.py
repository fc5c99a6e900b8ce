"""Emission layers: densities equal scipy's, missing data are summed out, draws follow the density, modules copy."""

import copy
import math
from functools import partial

import numpy as np
import pytest
import scipy.stats
import torch

from logchain import nn
from tests.nn.emissions import CLOSED, COUNTS, F64, FAMILIES, array, drawn, seeded

ALL = pytest.mark.parametrize("name", FAMILIES)


@pytest.mark.parametrize(
    ("units", "dtype"), [((2,), F64), ((3, 4, 2), F64), ((4, 2), torch.float32), ((4, 2), torch.bfloat16)], ids=str
)
@ALL
def test_density_equals_scipy(name, units, dtype):
    layer, data = drawn(name, units, (5, 2), F64 if dtype == F64 else torch.float32)
    layer = layer.to(dtype)
    found = layer(data)
    assert found.shape == (5, 2, *units) and found.dtype == (F64 if dtype == F64 else torch.float32)
    truth = np.stack([FAMILIES[name].density(layer, y) for y in data.flatten(0, 1).numpy()])
    tolerance = 1e-12 if dtype == F64 else 2e-5
    np.testing.assert_allclose(array(found).reshape(10, *units), truth, rtol=tolerance, atol=tolerance)
    if name == "product":  # which has no single distribution
        return
    by_torch = layer.distribution().log_prob(data.double().unsqueeze(-1 - len(layer.event)))
    np.testing.assert_allclose(array(by_torch).reshape(10, *units), truth, rtol=tolerance, atol=tolerance)
    if units[:-1]:  # data that variables share broadcast
        shared = data[:, :, :1]
        torch.testing.assert_close(layer(shared), layer(shared.expand_as(data)), rtol=0, atol=0)


@ALL
def test_missing_entries_are_summed_out(name):
    layer, data = drawn(name, (4, 2))
    observed, every = torch.rand(7, 4, generator=seeded(3)) < 0.5, layer(data)
    found = layer(data, observed=observed)
    assert torch.equal(found[observed], every[observed]) and (found[~observed] == 0).all()
    for gradient in torch.autograd.grad(found.sum(), list(layer.parameters())):
        assert gradient.isfinite().all()
    poisoned = data.to(torch.float32, copy=True)
    poisoned[~observed] = torch.inf
    assert torch.equal(layer(poisoned, observed), found)
    poisoned[~observed] = torch.nan
    assert torch.equal(layer(poisoned), found)
    # some are NaN, others are masked
    first = torch.arange(7)[:, None] < 4
    poisoned[~observed & first] = 0
    assert torch.equal(layer(poisoned, observed | ~first), found)


@ALL
def test_gradients_of_first_and_second_order_and_of_each_observation(name):
    layer, data = drawn(name, (2, 2), (3,), F64)
    names, values = zip(*layer.named_parameters(), strict=True)

    def density(data, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (data,))

    assert torch.autograd.gradcheck(partial(density, data), values)
    assert torch.autograd.gradgradcheck(partial(density, data), values)
    values = tuple(value.detach() for value in values)
    gradient = torch.func.grad(lambda values, data: density(data, *values).sum())
    found = torch.func.vmap(gradient, (None, 0))(values, data)
    for row, datum in enumerate(data):
        expected = torch.autograd.grad(layer(datum).sum(), list(layer.parameters()))
        torch.testing.assert_close([gradients[row] for gradients in found], list(expected))


def test_impossible_values_are_minus_infinity_with_gradients_of_zero():
    rates, coins, trials = nn.Poisson(2), nn.Bernoulli(2), nn.Binomial(2, 3)
    rates.set(torch.tensor([0.0, 2.0]))
    coins.set(torch.tensor([0.0, 1.0]))
    trials.set(torch.tensor([0.0, 1.0]))
    scales = torch.tensor([2.0, 0.5])
    pareto = nn.Distribution(torch.distributions.Pareto, 2, scale=scales, alpha=3.0, spread=0)
    for layer, data, expected in [
        (rates, [0, 1], [[0.0, -2.0], [-math.inf, math.log(2) - 2]]),
        (coins, [0, 1], [[0.0, -math.inf], [-math.inf, 0.0]]),
        (trials, [0, 1, 3], [[0.0, -math.inf], [-math.inf, -math.inf], [-math.inf, 0.0]]),
        (pareto, [1.0, 4.0], scipy.stats.pareto(3, scale=scales).logpdf([[1.0], [4.0]]).tolist()),
    ]:
        found = layer(torch.tensor(data))
        torch.testing.assert_close(found, torch.tensor(expected))
        total = found.masked_fill(found == -torch.inf, 0.0).sum()
        for gradient in torch.autograd.grad(total, list(layer.parameters())):
            assert gradient.isfinite().all()
    mixed = nn.Mixture(nn.Bernoulli((1, 2)))
    mixed.layer.set(torch.tensor([0.0, 0.0]))
    found = mixed(torch.tensor([1, 0]))
    torch.testing.assert_close(found, torch.tensor([[-math.inf], [0.0]]))
    for gradient in torch.autograd.grad(found[0].sum(), list(mixed.parameters())):
        assert (gradient == 0).all()


def test_large_counts_large_means_and_long_data_keep_their_digits():
    counts = nn.Poisson(1)
    counts.set(torch.tensor([1e6]))
    found = counts(torch.tensor([1_000_300])).item()
    rate = math.exp(counts.log_rates.double().item())
    assert abs(found - scipy.stats.poisson(rate).logpmf(1_000_300)) < 1e-5
    far = nn.Gaussian(1).double()
    far.set(torch.tensor([1e8], dtype=F64), torch.tensor([1.0], dtype=F64))
    expected = scipy.stats.norm(1e8, 1).logpdf(1e8 + 0.5)
    assert abs(far(torch.tensor([1e8 + 0.5], dtype=F64)).item() - expected) < 1e-14
    layer, data = nn.Bernoulli(2, generator=seeded()), torch.randint(2, (300_000,), generator=seeded())
    layer.set(torch.tensor([0.1, 0.8]))
    flow = torch.rand(300_000, 2, generator=seeded(1))
    (found,) = torch.autograd.grad(layer(data), layer.weights.logits, flow)
    shares, flow = layer.weights.logits.detach().double().softmax(-1)[:, 0], flow.double()
    expected = (flow * (data[:, None] - shares)).sum(0)
    torch.testing.assert_close(found[:, 0].double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "multinomial"])  # torch knows no mode of it
def test_mode_maximizes_the_density(name):
    layer, data = drawn(name, (4, 2), (300,), F64)
    value, log_density = layer.mode()
    assert value.shape == (4, 2, *layer.event) and log_density.shape == (4, 2)
    if name != "mixture":
        assert (layer(data) <= log_density + 1e-12).all()
    for state in range(2):
        expected = FAMILIES[name].density(layer, value[:, state].numpy())[:, state]
        np.testing.assert_allclose(array(log_density)[:, state], expected, rtol=1e-12, atol=1e-12)


@ALL
def test_draws_follow_the_density(name):
    """Gradients are zero on average, or sufficient statistics would differ; counts have their probabilities."""
    layer, _ = drawn(name, (3, 2), dtype=F64)
    states = torch.tensor([0, 1, 1])
    draws = layer.draw(states.expand(20_000, 3), seeded())
    assert draws.shape == (20_000, 3, *layer.event)
    assert torch.equal(draws, layer.draw(states.expand(20_000, 3), seeded()))
    batches = []
    for batch in draws.chunk(50):
        log_density = layer(batch)[:, torch.arange(3), states].mean(0)
        batches.append(torch.autograd.grad(log_density.sum(), list(layer.parameters())))
    for gradients in zip(*batches, strict=True):
        gradients = torch.stack(gradients)
        assert (gradients.mean(0).abs() <= 5 * gradients.std(0) / 50**0.5 + 1e-12).all()
    if name in COUNTS:
        values = torch.arange(int(draws.max()) + 1)
        shares = torch.stack([(draws == value).double().mean(0) for value in values])
        expected = layer(values[:, None].expand(-1, 3)).detach().exp()[:, torch.arange(3), states]
        error = 5 * (expected * (1 - expected) / 20_000).sqrt() + 1e-4
        assert ((shares - expected).abs() < error).all()


def test_distribution_of_a_function_has_gradient_zero_at_the_maximum():
    def skewed(loc, scale):
        return torch.distributions.LogNormal(loc, scale)

    data = torch.distributions.LogNormal(1.0, 0.2).sample((400,)).double()
    start = {"loc": data.log().mean(), "scale": data.log().std(correction=0)}
    layer = nn.Distribution(skewed, 2, limits={"scale": torch.distributions.constraints.positive}, spread=0, **start)
    for gradient in torch.autograd.grad(layer(data).sum(), list(layer.parameters())):
        assert gradient.abs().max() < 1e-9
    trials = nn.Distribution(torch.distributions.Binomial, 3, total_count=7, probs=0.5)
    assert set(dict(trials.named_parameters())) == {"free.probs"}, "what is no real number is not trained"
    votes = nn.Distribution(torch.distributions.Multinomial, 2, total_count=5, probs=torch.tensor([0.3, 0.3, 0.4]))
    expected = scipy.stats.multinomial(5, array(votes.distribution().probs[0])).logpmf([1, 2, 2])
    assert abs(votes(torch.tensor([1.0, 2.0, 2.0]))[0].item() - expected) < 1e-6


@ALL
def test_start_at_the_data_suits_them_and_ignores_missing_entries(name):
    family = FAMILIES[name]
    data = torch.as_tensor(family.data(np.random.default_rng(1), (200, 4)))
    data = data * 3 + 20 if data.is_floating_point() and name != "product" else data
    layer = family.make((4, 3)).double()
    layer.reset_parameters(seeded(1))
    before = layer(data).logsumexp(-1).sum()
    layer.initialize(data, generator=seeded(1))
    after = layer(data)
    assert name not in CLOSED or after.logsumexp(-1).sum() > before
    differ = (after[..., :, None] != after[..., None, :]).any(0)
    assert (differ | torch.eye(3, dtype=torch.bool)).all(), "states differ"
    missing = torch.rand(200, 4, generator=seeded(2)) < 0.3
    poisoned, other = data.clone(), copy.deepcopy(layer)
    poisoned[missing] = 1
    layer.initialize(data, ~missing, generator=seeded(1))
    other.initialize(poisoned, ~missing, generator=seeded(1))
    for one, same in zip(layer.parameters(), other.parameters(), strict=True):
        assert one.isfinite().all() and torch.equal(one, same)


def test_start_takes_a_mean_from_each_cluster():
    centers = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0]])
    data = centers.repeat(50, 1) + 0.1 * torch.randn(200, 2, generator=seeded())
    with_missing = torch.cat([torch.full((400, 2), torch.nan), data])
    for seed in range(5):
        layer = nn.Gaussian(4, 2)
        layer.initialize(with_missing, generator=seeded(seed))
        distance, near = torch.cdist(layer.means.detach(), centers).min(-1)
        assert sorted(near.tolist()) == [0, 1, 2, 3] and (distance < 1).all()
        torch.testing.assert_close(layer.variances[0], data.var(0, correction=0))


def test_tensors_of_numbers_of_trials_are_buffers_in_the_order_of_the_states():
    counts, shares = torch.tensor([3, 7]), torch.tensor([0.2, 0.6])
    trials = nn.Distribution("Binomial", 2, total_count=counts, probs=shares, spread=0)
    assert torch.equal(trials.state_dict()["fixed.total_count"], counts)
    assert trials.to("meta").distribution().total_count.is_meta
    trials = nn.Distribution("Binomial", 2, total_count=counts, probs=shares, spread=0)
    draws = trials.draw(torch.tensor([1, 0]).expand(500, 2), seeded())
    assert draws.amax(0).tolist() == [7, 3]
    before = trials(torch.arange(8))
    np.testing.assert_allclose(array(before.exp()), scipy.stats.binom(counts, shares).pmf(np.arange(8)[:, None]), 1e-5)
    nn.HMM(2, trials).sort_states(by=torch.tensor([1.0, 0.0]))
    assert torch.equal(trials(torch.arange(8)), before.flip(-1))


def test_parameters_without_effect_and_shared_ones_count_once():
    normals = nn.Distribution("MultivariateNormal", 2, loc=torch.zeros(2), scale_tril=torch.eye(2))
    coins = nn.Bernoulli((1, 2))
    shared = nn.Product(nn.Mixture(coins), nn.Mixture(nn.Bernoulli((1, 2))))
    shared.families[1].layer.weights.logits = coins.weights.logits
    data, covariates = torch.randn(3, 9, 2, generator=seeded()), {"covariates": torch.ones(3, 9, 1)}
    for emission, data_of, options, expected in [
        (nn.LinearGaussian(2, 1, 2), data, covariates, 15),
        (nn.LinearGaussian(2, 1, 2, "full"), data, covariates, 17),
        (normals, data, {}, 13),
        (shared, data > 0, {}, 2 + 1 + 1),
    ]:
        hmm = nn.HMM(emission.units[0], emission)
        report = nn.fit(hmm, data_of, conditions=options, method="gradient", max_iterations=0, restarts=0)
        assert report.num_parameters == expected


def test_product_has_means_and_imputes_as_one_family_of_independent_parts():
    pair, single, vectors = nn.Gaussian(2, 2, "full"), nn.Gaussian(2), nn.Gaussian(2, 3, "full")
    means = torch.randn(2, 3, generator=seeded())
    spreads = torch.tensor([[2.0, 1.5, 0.0], [1.5, 3.0, 0.0], [0.0, 0.0, 4.0]])
    pair.set(means[:, :2], spreads[:2, :2]), single.set(means[:, 2], spreads[2, 2]), vectors.set(means, spreads)
    parts = nn.HMM(2, nn.Product(pair, single)).double()
    whole = nn.HMM(2, vectors).double()
    for name in ("initial", "transition"):
        getattr(parts, name).load_state_dict(getattr(whole, name).state_dict())
    data = torch.randn(3, 5, 3, generator=seeded(), dtype=F64)
    torch.testing.assert_close(parts.forecast(data, 2).mean, whole.forecast(data, 2).mean)
    data[0, 1, 0] = data[1, 2, 1:] = data[2, 3] = torch.nan
    torch.testing.assert_close(parts.impute(data), whole.impute(data))


def test_product_with_categories_imputes_the_most_probable():
    kinds = nn.Categorical(2, 3)
    kinds.weights.set(torch.tensor([[0.1, 0.2], [0.2, 0.2], [0.7, 0.6]]))
    hmm = nn.HMM(2, nn.Product(kinds, nn.Gaussian(2)))
    data = torch.tensor([[1.0, 0.5], [torch.nan, 0.5], [0.0, torch.nan]])
    assert hmm.forecast(data, 2).mean is None
    assert hmm.impute(data)[:, 0].tolist() == [1, 2, 0]
