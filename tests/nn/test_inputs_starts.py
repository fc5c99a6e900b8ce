"""Where the input layers start: states differ, and suit the data."""

import copy

import numpy as np
import pytest
import torch

from logchain.nn import Gaussian
from tests.nn.input_layers import FAMILIES, drawn, seeded


@pytest.mark.parametrize("name", FAMILIES)
def test_states_differ_from_the_start(name):
    layer, data, _ = drawn(name, (4, 6))
    for _ in range(2):
        found = layer(data)
        apart = (found[..., :, None] - found[..., None, :]).abs().amax(0) > 0
        assert (apart | torch.eye(6, dtype=torch.bool)).all()
        layer.initialise(data, generator=seeded(4))


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"gamma", "normals"}))
def test_starting_at_the_data_is_better_than_anywhere(name):
    make, data, _ = FAMILIES[name]
    rng = np.random.default_rng(1)
    found = torch.as_tensor(data(rng, (200, 4)))
    found = found * 3 + 20 if found.is_floating_point() else found
    layer = make((4, 3)).double()
    layer.reset_parameters(seeded(1))
    before = torch.logsumexp(layer(found), -1).sum()
    layer.initialise(found, generator=seeded(1))
    assert torch.logsumexp(layer(found), -1).sum() > before
    missing = torch.rand(200, 4, generator=seeded(2)) < 0.3
    twin = copy.deepcopy(layer)
    poisoned = found.clone()
    poisoned[missing] = 1
    layer.initialise(found, ~missing, generator=seeded(1))
    twin.initialise(poisoned, ~missing, generator=seeded(1))
    for a, b in zip(layer.parameters(), twin.parameters(), strict=True):
        assert a.isfinite().all() and torch.equal(a, b), "what is missing has an influence"


def test_a_variable_that_never_changes_needs_a_prior():
    data = torch.zeros(9, 2)
    data[:, 1] = torch.arange(9)
    layer = Gaussian((2, 3), prior_scatter=0.9)
    layer.initialise(data, generator=seeded())
    torch.testing.assert_close(layer.covariance()[0], torch.full((3,), 0.1))
    torch.testing.assert_close(layer.covariance()[1], (data[:, 1].var(correction=0) + 0.1).expand(3))


def test_seeds_lie_apart():
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0]])
    data = centres.repeat(50, 1) + 0.1 * torch.randn(200, 2, generator=seeded())
    for seed in range(5):
        layer = Gaussian(4, 2)
        layer.initialise(data, generator=seeded(seed))
        near = torch.cdist(layer.means.detach(), centres).argmin(-1)
        assert sorted(near.tolist()) == [0, 1, 2, 3]
        torch.testing.assert_close(layer.covariance()[0], data.var(0, correction=0))
