"""The arithmetic on its own: exponentials without bias, sums without loss, steps that agree with each other."""

import math
from fractions import Fraction

import pytest
import torch

from logchain.kernels.numbers import FLUSH, exact_sum, exp_shifted


def exponentials(d):
    return exp_shifted(d, torch.zeros(1, dtype=d.dtype))


def test_float32_exponentials_have_no_bias():
    d = -torch.rand(2**20, generator=torch.Generator().manual_seed(0)) * 10
    truth = d.double().exp()
    error = (exponentials(d).double() - truth) / truth
    assert abs(error.mean().item()) < 2.0**-26  # uncorrected, log2(e) as a float32 gives 2^-24
    assert error.abs().max().item() < 2.0**-20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exponentials_are_zero_before_they_are_denormal(dtype):
    edge = math.log(FLUSH[dtype])
    d = torch.tensor([edge + 1, edge - 1, edge * 10, -math.inf, 0.0, math.nan], dtype=dtype)
    out = exponentials(d)
    assert out[0] > FLUSH[dtype]
    assert (out[1:4] == 0).all()
    assert out[4] == 1 and out[5].isnan()


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 1001])
def test_sums_lose_nothing(count):
    terms = torch.randn(count, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    terms *= 10.0 ** torch.arange(count).remainder(17)[:, None]
    exact = [sum(map(Fraction, column)) for column in terms.T.tolist()]
    high, low = exact_sum(terms.clone())
    for column, truth in enumerate(exact):
        assert abs(Fraction((high + low)[column].item()) - truth) <= abs(truth) * Fraction(1, 2**52)
