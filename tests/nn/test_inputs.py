"""The densities of the input layers are scipy's, to the last digits, and what is missing is summed out."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from logchain.nn import Bernoulli, Binomial, Gaussian, Mixture, Poisson
from tests.nn.input_layers import FAMILIES, drawn, seeded, wide

UNITS = [(2,), (4, 2), (3, 4, 2)]


def truth(layer, density, data, lead):
    return np.stack([density(layer, y) for y in data.numpy().reshape(-1, *data.shape[lead:])])


@pytest.mark.parametrize("units", UNITS, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_density_is_that_of_scipy(name, units):
    layer, data, density = drawn(name, units, (5, 2), torch.float64)
    found = layer(data)
    assert found.shape == (5, 2, *units) and found.dtype == torch.float64
    np.testing.assert_allclose(wide(found).reshape(10, *units), truth(layer, density, data, 2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_low_precision_parameters_are_computed_with_in_float32(name, dtype):
    layer, data, density = drawn(name, (4, 2), (9,))
    layer = layer.to(dtype)
    found = layer(data)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(wide(found), truth(layer, density, data, 1), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_data_shared_by_the_variables_need_not_be_expanded(name):
    layer, data, _ = drawn(name, (3, 4, 2))
    shared = data[:, :1]
    torch.testing.assert_close(layer(shared), layer(shared.expand_as(data)), rtol=0, atol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_missing_is_summed_out(name):
    layer, data, _ = drawn(name, (4, 2))
    observed = torch.rand(7, 4, generator=seeded(3)) < 0.5
    found = layer(data, observed=observed)
    full = layer(data)
    assert torch.equal(found[observed], full[observed]) and (found[~observed] == 0).all()
    if data.is_floating_point():
        gone = data.clone()
        gone[~observed] = torch.nan
        assert torch.equal(layer(gone), found)
    for gradient in torch.autograd.grad(found.sum(), list(layer.parameters())):
        assert gradient.isfinite().all()


def test_single_features_of_a_factorised_vector_may_be_missing():
    layer, data, _ = drawn("gaussian-diagonal", (4, 2), dtype=torch.float64)
    known = torch.rand(data.shape, generator=seeded(3)) < 0.5
    each = scipy.stats.norm(wide(layer.means), np.exp(wide(layer.log_scales))).logpdf(data.numpy()[..., None, :])
    expected = np.where(known.numpy()[..., None, :], each, 0).sum(-1)
    np.testing.assert_allclose(wide(layer(data, known)), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(wide(layer(data.where(known, torch.nan))), expected, rtol=1e-12, atol=1e-12)
    whole, *_ = drawn("gaussian-full", (4, 2), dtype=torch.float64)
    with pytest.raises(ValueError, match="whole or missing"):
        whole(data, known)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_first_and_second_order(name):
    layer, data, _ = drawn(name, (2, 2), (3,), torch.float64)
    names, values = zip(*layer.named_parameters(), strict=True)

    def call(*values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (data,))

    assert torch.autograd.gradcheck(call, values)
    assert torch.autograd.gradgradcheck(call, values)


def test_impossible_is_exactly_minus_infinity_with_gradients_of_zero():
    rates = Poisson(2)
    rates.set(torch.tensor([0.0, 2.0]))
    coins = Bernoulli(2)
    coins.set(torch.tensor([0.0, 1.0]))
    trials = Binomial(2, 3)
    trials.set(torch.tensor([0.0, 1.0]))
    for layer, data, expected in [
        (rates, [0, 1], [[0.0, -2.0], [-math.inf, math.log(2) - 2]]),
        (coins, [0, 1], [[0.0, -math.inf], [-math.inf, 0.0]]),
        (trials, [0, 1, 3], [[0.0, -math.inf], [-math.inf, -math.inf], [-math.inf, 0.0]]),
    ]:
        found = layer(torch.tensor(data))
        torch.testing.assert_close(found, torch.tensor(expected))
        total = found.masked_fill(found == -torch.inf, 0.0).sum()
        (gradient,) = torch.autograd.grad(total, list(layer.parameters()))
        assert gradient.isfinite().all()
    mixed = Mixture(Bernoulli((1, 2)))
    mixed.layer.set(torch.tensor([0.0, 0.0]))
    found = mixed(torch.tensor([1, 0]))
    torch.testing.assert_close(found, torch.tensor([[-math.inf], [0.0]]))
    for gradient in torch.autograd.grad(found[0].sum(), list(mixed.parameters())):
        assert (gradient == 0).all()


def test_what_is_not_observed_may_be_anything():
    data, observed = torch.tensor([torch.inf, 1.0]), torch.tensor([False, True])
    for layer in (Gaussian(2), Poisson(2), Mixture(Gaussian((2, 2))), Bernoulli(2)):
        assert torch.equal(layer(data, observed), layer(torch.tensor([torch.nan, 1.0])))


def test_large_counts_and_large_means_cost_no_digits():
    counts = Poisson(1)
    counts.set(torch.tensor([1e6]))
    found = counts(torch.tensor([1_000_300])).item()
    rate = math.exp(counts.log_rates.double().item())
    assert abs(found - scipy.stats.poisson(rate).logpmf(1_000_300)) < 1e-5
    far = Gaussian(1).double()
    far.set(torch.tensor([1e8], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64))
    expected = scipy.stats.norm(1e8, 1).logpdf(1e8 + 0.5)
    assert abs(far(torch.tensor([1e8 + 0.5], dtype=torch.float64)).item() - expected) < 1e-14


def test_small_gradients_do_not_drown_in_long_data():
    layer = Bernoulli(2)
    data = torch.randint(2, (300_000,), generator=seeded())
    flow = torch.rand(300_000, 2, generator=seeded(1))
    table = layer.table().detach().requires_grad_()
    layer.table = lambda: table
    (found,) = torch.autograd.grad(layer(data), table, flow)
    expected = torch.zeros(2, 2, dtype=torch.float64).index_add_(0, data, flow.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
