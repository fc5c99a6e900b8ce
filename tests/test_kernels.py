"""The arithmetic on its own: exponentials without bias, sums without loss, steps that agree with each other."""

import math
from fractions import Fraction

import pytest
import torch

from logchain.kernels import log_matmul
from logchain.kernels.chain import Chain
from logchain.kernels.exponentials import FLUSH, exp_shifted, finite
from logchain.kernels.log_steps import DenseSteps, Rows, SparseSteps, steps_for
from logchain.kernels.summation import exact_sum


def exponentials(d):
    return exp_shifted(d, torch.zeros(1, dtype=d.dtype), torch.empty_like(d), torch.empty_like(d))


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


def test_a_shift_of_minus_infinity_leaves_zeros():
    x = torch.full((3,), -math.inf)
    assert (exp_shifted(x, finite(x.amax(0, keepdim=True)), torch.empty(3), torch.empty(3)) == 0).all()


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 1001])
def test_sums_lose_nothing(count):
    terms = torch.randn(count, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    terms *= 10.0 ** torch.arange(count).remainder(17)[:, None]
    exact = [sum(map(Fraction, column)) for column in terms.T.tolist()]
    high, low = exact_sum(terms.clone())
    for column, truth in enumerate(exact):
        assert abs(Fraction((high + low)[column].item()) - truth) <= abs(truth) * Fraction(1, 2**52)


def test_infinite_sums_are_infinite():
    high, low = exact_sum(torch.tensor([[-math.inf, -1e308], [1.0, -1e308], [2.0, 5.0]], dtype=torch.float64))
    assert (high + low == -math.inf).all()


def rows_of(density, c=12, g=2, m=3, v=5, log_params=False):
    generator = torch.Generator().manual_seed(c)
    bulk = torch.rand(v - 1, g, c, c, dtype=torch.float64, generator=generator)
    bulk *= torch.rand(g, c, c, generator=generator) < density
    x = torch.randn(v, g, m, c, dtype=torch.float64, generator=generator) * 100
    p0 = torch.rand(g, m, c, dtype=torch.float64, generator=generator)
    if log_params:
        bulk, p0 = bulk.log(), p0.log()
    return Rows(Chain(x, bulk, p0, None, log_params, torch.float64), torch.arange(g), torch.arange(m)), bulk


@pytest.mark.parametrize("log_params", [False, True])
def test_both_kinds_of_log_steps_agree(log_params):
    rows, bulk = rows_of(0.2, log_params=log_params)
    linked = (bulk != rows.zero).any(0).any(0)
    sparse, dense = SparseSteps(rows, linked), DenseSteps(rows)
    before = torch.randn(rows.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 300
    before[0, 3] = -math.inf
    after = torch.randn(rows.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 300
    close = {"rtol": 1e-12, "atol": 1e-12}
    for step in (1, 2, 4):
        torch.testing.assert_close(sparse.forward(before, step), dense.forward(before, step), **close)
        torch.testing.assert_close(sparse.backward(after, step), dense.backward(after, step), **close)
    weight = torch.ones(rows.shape[0], 1, rows.shape[2], dtype=torch.float64)
    steps = range(2, 4)
    messages = torch.stack([before, before.flip(1)])
    ahead = torch.stack([after, after.flip(1)])
    sums = torch.stack([dense.forward(message, step) for message, step in zip(messages, steps, strict=True)])
    states = torch.softmax(sums + ahead, -2)
    found = torch.zeros(2, 4, 2, 12, 12, dtype=torch.float64)
    sparse.transitions(messages, ahead, states, weight, 2, found[0])
    dense.transitions(messages, ahead, states, weight, 2, found[1])
    torch.testing.assert_close(*found, **close)
    assert (found[:, [0, 3]] == 0).all() and (found[:, 1:3].sum((-1, -2)) != 0).all()


def test_few_links_are_gathered_and_many_multiplied():
    assert isinstance(steps_for(rows_of(0.05)[0]), SparseSteps)
    assert isinstance(steps_for(rows_of(0.9)[0]), DenseSteps)


def test_rescued_outputs_are_those_that_underflow_and_exist():
    a = torch.tensor([[[0.0, -200.0], [0.0, -math.inf], [0.0, 0.0]]])
    b = torch.tensor([[[-200.0, 0.0], [0.0, 0.0]]])
    out, rescued = log_matmul.forward(a, b)
    assert rescued == 2  # (0, 0), and (1, 0) whose only term is far below
    truth = torch.logsumexp(a[..., :, :, None].double() + b[..., None, :, :].double(), -2)
    torch.testing.assert_close(out.double(), truth, rtol=1e-6, atol=0)
