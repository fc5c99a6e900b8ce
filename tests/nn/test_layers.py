"""Layers of a circuit against scipy's log-sum-exp in float64."""

import copy

import numpy as np
import pytest
import torch
from scipy.special import logsumexp, softmax

from logchain import nn
from logchain.memory import peak_bytes
from tests.contract import assert_values, ulp, value_bound
from tests.seeded import seeded

DTYPES = [torch.float32, torch.float64]


def inputs(*shape, dtype=torch.float32):
    """Log-values far apart and far from 0, some of them impossible, and one row without anything possible."""
    x = 5 * torch.randn(shape, dtype=dtype, generator=seeded(1))
    x += 1e3 * torch.randn(shape[:-1], dtype=dtype, generator=seeded(2))[..., None].sign()
    x[torch.rand(shape, generator=seeded(3)) < 0.2] = -torch.inf
    x.view(-1, shape[-1])[0] = -torch.inf
    return x


def log_weights(layer):
    """Normalized by scipy."""
    logits = layer.weights.logits.detach().double().numpy()
    return logits - logsumexp(logits, -2, keepdims=True)


def mixed(x, layer, reduce=logsumexp):
    """`logsumexp_i (x_i + log W_io)`, term by term."""
    with np.errstate(divide="ignore"):
        return reduce(np.asarray(x)[..., :, None] + log_weights(layer), axis=-2)


def assert_close(found, truth):
    """Within the contract of a single product, whose weights are rounded once more."""
    assert_values(found, truth, ulp(truth, found.dtype) + value_bound(truth, 2, 4, dtype=found.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(), (5,), (2, 3)])
def test_sum_layer_mixes(lead, dtype):
    layer = nn.SumLayer(4, 6, lead, generator=seeded()).to(dtype)
    x = inputs(7, *lead, 4, dtype=dtype)
    found = layer(x)
    assert found.shape == (7, *lead, 6) and found.dtype == dtype
    assert_close(found, mixed(x.double(), layer))
    np.testing.assert_allclose(layer.weights().detach().exp().sum(-2), 1, rtol=1e-6)
    best = layer.best(x).detach()
    np.testing.assert_allclose(best, mixed(x.double(), layer, np.max), rtol=1e-6)
    # no leading axis at all, and two of them
    assert_close(layer(x[1]), mixed(x[1].double(), layer))
    assert_close(layer(x[None]), mixed(x[None].double(), layer))


def test_gradients_of_a_sum_layer_are_shares():
    layer = nn.SumLayer(4, 3, (5,), generator=seeded())
    x = inputs(7, 5, 4).requires_grad_()
    upstream = torch.randn(7, 5, 3, generator=seeded(5))
    layer(x).backward(torch.where(layer(x) > -torch.inf, upstream, 0.0))
    terms = x.detach().double().numpy()[..., None] + log_weights(layer)
    terms = np.where(np.isneginf(terms).all(-2, keepdims=True), 0.0, terms)
    shares = softmax(terms, -2) * upstream.double().numpy()[..., None, :]
    shares[np.isneginf(x.detach().numpy())] = 0.0
    np.testing.assert_allclose(x.grad, shares.sum(-1), atol=1e-6)
    flow = shares.sum(0)
    expected = flow - np.exp(log_weights(layer)) * flow.sum(-2, keepdims=True)
    np.testing.assert_allclose(layer.weights.logits.grad, expected, atol=1e-5)


def test_sum_layer_in_half_precision_compiled_and_differentiated_twice():
    layer, x = nn.SumLayer(4, 3, (5,), generator=seeded()), torch.randn(6, 5, 4, generator=seeded(1))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    half, rounded = copy.deepcopy(layer).bfloat16(), x.bfloat16()
    found = half(rounded)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), copy.deepcopy(half).double()(rounded.double()), rtol=0, atol=1e-5)
    leaf = x[:2].double().requires_grad_()
    assert torch.autograd.gradcheck(layer.double(), (leaf,)) and torch.autograd.gradgradcheck(layer, (leaf,))


def test_sum_layer_holds_no_terms():
    n, f, c = 256, 16, 32
    layer, x = nn.SumLayer(c, c, (f,)), torch.randn(n, f, c)
    with torch.no_grad():
        used = peak_bytes(lambda: [layer(x)])
    terms = n * f * c * c * 4
    assert used < terms / 5
