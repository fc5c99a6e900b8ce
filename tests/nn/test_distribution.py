"""Families of torch.distributions as input layers; `test_nn_inputs` asks them what every family can be asked."""

import numpy as np
import scipy.stats
import torch

from logchain.nn import Distribution
from tests.nn.input_layers import normals


def test_a_distribution_ends_where_the_support_of_each_unit_does():
    scales = torch.tensor([2.0, 0.5])
    layer = Distribution(torch.distributions.Pareto, 2, scale=scales, alpha=3.0, spread=0)
    found = layer(torch.tensor([1.0, 4.0]))
    expected = scipy.stats.pareto(3, scale=scales.numpy()).logpdf(np.array([[1.0], [4.0]]))
    torch.testing.assert_close(found.double(), torch.tensor(expected), rtol=0, atol=1e-5)
    for gradient in torch.autograd.grad(found[:, 1].sum() + found[1, 0], list(layer.parameters())):
        assert gradient.isfinite().all()


def test_a_distribution_learns_by_gradients_and_takes_functions():
    def skewed(loc, scale):
        return torch.distributions.LogNormal(loc, scale)

    layer = Distribution(skewed, 2, limits={"scale": torch.distributions.constraints.positive}, loc=0.0, scale=1.0)
    data = torch.distributions.LogNormal(1.0, 0.2).sample((400,))
    optimiser = torch.optim.LBFGS(layer.parameters(), max_iter=50, line_search_fn="strong_wolfe")

    def loss():
        optimiser.zero_grad()
        found = -layer(data).sum() / 400
        found.backward()
        return found

    optimiser.step(loss)
    values = layer.parameters_of_units()
    torch.testing.assert_close(values["loc"].detach(), data.log().mean().expand(2), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(values["scale"].detach(), data.log().std(correction=0).expand(2), rtol=1e-3, atol=1e-3)
    found = layer(data[:3], torch.tensor([True, False, True]))
    assert (found[1] == 0).all()
    for gradient in torch.autograd.grad(found.sum(), list(layer.parameters())):
        assert gradient.isfinite().all(), "what stands for a missing entry is allowed"
    trials = Distribution(torch.distributions.Binomial, 3, total_count=7, probs=0.5)
    assert set(dict(trials.named_parameters())) == {"free.probs"}
    assert trials(torch.tensor([7])).shape == (1, 3)
    assert set(dict(normals((2,)).named_parameters())) == {"free.loc", "free.scale_tril"}
