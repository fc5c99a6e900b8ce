"""Stationary distributions are left as they are by their matrix, to float64 however small."""

import numpy as np
import pytest
import torch

from logchain.nn.stationary import stationary
from tests.nn.hmms import F64, seeded


def test_stationary_distributions():
    matrix = torch.softmax(3 * torch.randn(2, 6, 6, generator=seeded(), dtype=F64), -1)
    found = stationary(matrix)
    np.testing.assert_allclose((found[:, None] @ matrix)[:, 0], found, rtol=1e-14)
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-14)
    # birth and death: p_{i+1} / p_i = 1e-12, far below where a linear solver's rounding is
    chain = torch.diag(torch.full((5,), 1e-13, dtype=F64), 1) + torch.diag(torch.full((5,), 0.1, dtype=F64), -1)
    chain = chain + torch.diag(1 - chain.sum(-1))
    np.testing.assert_allclose(stationary(chain)[1:] / stationary(chain)[:-1], 1e-12, rtol=1e-12)
    assert torch.autograd.gradcheck(lambda logits: stationary(logits.softmax(-1)), matrix[0].log().requires_grad_())
    with pytest.raises(ValueError, match="transition: expected every state to reach every other"):
        stationary(torch.eye(2))
