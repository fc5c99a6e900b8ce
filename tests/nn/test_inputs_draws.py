"""Draws of the input layers are as frequent as they are likely, and modes are maxima."""

import numpy as np
import pytest
import torch

from logchain.nn import Binomial, Mixture
from tests.nn.input_layers import FAMILIES, drawn, seeded, wide


@pytest.mark.parametrize("name", ["categorical", "bernoulli", "binomial", "mixture-binomial"])
def test_finite_families_sum_to_one_and_have_a_mode(name):
    if name == "mixture-binomial":
        layer = Mixture(Binomial((4, 2, 3), 16, generator=seeded()), generator=seeded()).double()
    else:
        layer, *_ = drawn(name, (4, 2), dtype=torch.float64)
    table = layer.log_probabilities().detach()
    k = table.shape[-1]
    torch.testing.assert_close(table.logsumexp(-1), torch.zeros(4, 2, dtype=torch.float64))
    each = layer(torch.arange(k)[:, None].expand(k, 4))
    torch.testing.assert_close(each.movedim(0, -1), table)
    if name != "mixture-binomial":
        value, log_density = layer.mode()
        assert torch.equal(value, table.argmax(-1)) and torch.equal(log_density, table.amax(-1))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_mode_is_a_maximum(name):
    layer, data, density = drawn(name, (4, 2), (300,), torch.float64)
    value, log_density = layer.mode()
    assert value.shape == (4, 2, *layer.event) and log_density.shape == (4, 2)
    if name != "mixture":
        assert (layer(data) <= log_density + 1e-12).all()
    for state in range(2):
        np.testing.assert_allclose(
            wide(log_density)[:, state], density(layer, value[:, state].numpy())[:, state], rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_draws_have_the_density_they_are_said_to_have(name):
    layer, *_ = drawn(name, (3, 2), dtype=torch.float64)
    states = torch.tensor([0, 1, 1]).expand(20000, 3)
    found = layer.draw(states, seeded())
    assert found.shape == (20000, 3, *layer.event)
    assert torch.equal(found, layer.draw(states, seeded()))
    # the integral of p q / (p + q), by draws of the one and of the other
    with torch.no_grad():
        of_one = layer(found).softmax(-1)[:, torch.arange(3), 1 - states[0]]
        of_other = layer(layer.draw(1 - states, seeded(1))).softmax(-1)[:, torch.arange(3), states[0]]
    error = 5 * (of_one.var(0) + of_other.var(0)).div(20000).sqrt()
    assert ((of_one.mean(0) - of_other.mean(0)).abs() < error).all()
    assert (error < 0.02).all()


@pytest.mark.parametrize("name", ["categorical", "bernoulli", "binomial", "poisson"])
def test_draws_are_as_frequent_as_they_are_likely(name):
    layer, *_ = drawn(name, (3, 2), dtype=torch.float64)
    states = torch.tensor([0, 1, 1])
    found = layer.draw(states.expand(20000, 3), seeded())
    k = int(found.max()) + 1
    shares = torch.stack([(found == value).double().mean(0) for value in range(k)])
    expected = layer(torch.arange(k)[:, None].expand(k, 3)).detach().exp()[:, torch.arange(3), states]
    error = 5 * (expected * (1 - expected) / 20000).sqrt() + 1e-4
    assert ((shares - expected).abs() < error).all()


def test_draws_of_a_full_gaussian_have_its_covariance():
    layer, *_ = drawn("gaussian-full", (2, 2), dtype=torch.float64)
    found = layer.draw(torch.tensor([1, 0]).expand(40000, 2), seeded())
    for variable, state in enumerate([1, 0]):
        expected = layer.covariance()[variable, state].detach()
        got = torch.cov(found[:, variable].T)
        scale = expected.diagonal().sqrt()
        assert ((got - expected).abs() < 0.04 * scale[:, None] * scale).all()
        torch.testing.assert_close(found[:, variable].mean(0), layer.means[variable, state].detach(), atol=0.05, rtol=0)
