"""Nothing that a chain on a CPU loses goes unseen: a random search, and the smallest of what it has found."""

import pytest
import torch

import logchain
from logchain import reference

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@pytest.mark.parametrize(("high", "low", "dtype"), [(1e30, 1e-30, torch.float32), (1e200, 1e-128, torch.float64)])
def test_an_entry_that_rescaling_its_matrix_loses_is_still_a_path(high, low, dtype):
    bulk, p0 = torch.tensor([[[high, 0.0], [0.0, low]]], dtype=dtype), torch.tensor([0.0, 1.0], dtype=dtype)
    x = torch.zeros(2, 3, 2, dtype=dtype)
    out = logchain.product(x, bulk, p0, strategy="sequential")
    torch.testing.assert_close(out.double(), torch.from_numpy(reference.product(x, bulk, p0)))


def test_a_weight_far_below_the_largest_is_still_a_start():
    x = torch.tensor([[-torch.inf, 0.0]], dtype=torch.float64)
    p0 = torch.tensor([1e275, 1e-320], dtype=torch.float64)
    out = logchain.product(x, torch.ones(1, 2, 2, dtype=torch.float64), p0)
    torch.testing.assert_close(out, torch.tensor(1e-320, dtype=torch.float64).log())
