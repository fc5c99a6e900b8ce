"""Trained probabilities: uniform at the start, set, fitted, with zeros that stay and a prior that leaves none."""

import numpy as np
import pytest
import torch

from logchain.nn import Categorical, LogWeights, em_step
from tests.seeded import seeded


def test_log_weights():
    weights = LogWeights(3, 4, dim=-2, generator=seeded())
    again = LogWeights(3, 4, dim=-2, generator=seeded())
    assert torch.equal(weights(), again()) and repr(weights) == "LogWeights(3, 4, dim=-2)"
    torch.testing.assert_close(weights().exp().sum(-2), torch.ones(4))
    assert weights.half()().dtype == torch.float32
    many = LogWeights(100_000, 3, generator=seeded())().exp()
    # uniform over the simplex: the mean is 1/3, the variance 1/18
    torch.testing.assert_close(many.mean(0), torch.full((3,), 1 / 3), atol=3e-3, rtol=0)
    torch.testing.assert_close(many.var(0), torch.full((3,), 1 / 18), atol=1e-3, rtol=0)
    weights = LogWeights(3)
    weights.set(torch.tensor([2.0, 0.0, 2.0]))
    assert weights().exp().tolist() == [0.5, 0.0, 0.5]
    (slope,) = torch.autograd.grad(weights()[0], list(weights.parameters()))
    torch.testing.assert_close(slope, torch.tensor([0.5, 0.0, -0.5]))
    em_step(weights, [lambda: weights()[0] + 0 * weights()[2]])
    assert weights().exp().tolist() == [1.0, 0.0, 0.0]
    for wrong in (torch.tensor([-1.0, 1.0, 1.0]), torch.zeros(3), torch.tensor([torch.nan, 1.0, 1.0])):
        with pytest.raises(ValueError, match="probabilities: expected"):
            weights.set(wrong)
    with pytest.raises(TypeError, match="probabilities: expected"):
        weights.set([1.0, 2.0, 3.0])
    for shape, dim in [((), -1), ((3,), 0), ((3, 0), -1)]:
        with pytest.raises(ValueError, match="dim: expected"):
            LogWeights(*shape, dim=dim)


def test_a_prior_count_is_added_to_expected_counts():
    coins = Categorical((2, 1), 3, prior_count=0.5)
    data = torch.tensor([[0, 2], [0, 2], [1, 2]])
    em_step(coins, [lambda: coins(data).sum()])
    np.testing.assert_allclose(
        coins.weights().exp().detach()[..., 0],
        [[2.5 / 4.5, 1.5 / 4.5, 0.5 / 4.5], [0.5 / 4.5, 0.5 / 4.5, 3.5 / 4.5]],
        rtol=1e-6,
    )
    with pytest.raises(ValueError, match=r"prior_count: expected a number from 0 on, got -1"):
        LogWeights(2, prior_count=-1)
