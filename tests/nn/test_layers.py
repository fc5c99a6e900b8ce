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
    """Normalised by scipy."""
    logits = layer.weights.logits.detach().double().numpy()
    return logits - logsumexp(logits, -2, keepdims=True)


def mixed(x, layer, reduce=logsumexp):
    """`logsumexp_i (x_i + log W_io)`, term by term."""
    with np.errstate(divide="ignore"):
        return reduce(np.asarray(x)[..., :, None] + log_weights(layer), axis=-2)


def neighbours(x, arity=2):
    """Sums over groups along the axis before the last."""
    return np.stack([x[..., i : i + arity, :].sum(-2) for i in range(0, x.shape[-2], arity)], -2)


def assert_close(found, truth):
    """Within the contract of a single product, whose weights are rounded once more."""
    assert_values(found, truth, ulp(truth, found.dtype) + value_bound(truth, 2, 4, dtype=found.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(), (5,), (2, 3)])
def test_a_sum_layer_mixes(lead, dtype):
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


def test_a_sum_layer_holds_no_terms():
    n, f, c = 256, 16, 32
    layer, x = nn.SumLayer(c, c, (f,)), torch.randn(n, f, c)
    with torch.no_grad():
        used = peak_bytes(lambda: [layer(x)])
    terms = n * f * c * c * 4
    assert used < terms / 5


@pytest.mark.parametrize("f", [1, 4, 5])
@pytest.mark.parametrize("arity", [2, 3])
def test_a_product_layer_adds_neighbours(f, arity):
    x = inputs(3, f, 4)
    found = nn.ProductLayer(arity)(x)
    assert found.shape == (3, -(-f // arity), 4)
    np.testing.assert_array_equal(found, neighbours(x.numpy(), arity))
    half = x.bfloat16()
    found = nn.ProductLayer(arity)(half)
    assert found.dtype == torch.float32
    np.testing.assert_array_equal(found, neighbours(half.float().numpy(), arity))


@pytest.mark.parametrize("f", [1, 4, 5])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_a_cp_layer_is_a_product_of_mixtures(f, lead):
    layer = nn.CPLayer(f, 4, 3, arity=3, lead=lead, generator=seeded()).double()
    x = inputs(6, *lead, f, 4, dtype=torch.float64)
    for method, reduce in ((layer.forward, logsumexp), (layer.best, np.max)):
        found = method(x).detach()
        assert found.shape == (6, *lead, -(-f // 3), 3)
        np.testing.assert_allclose(found, neighbours(mixed(x, layer.sums, reduce), 3), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("f", [1, 4, 5])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_a_tucker_layer_mixes_pairs(f, lead):
    layer = nn.TuckerLayer(f, 4, 3, lead=lead, generator=seeded())
    x = inputs(6, *lead, f, 4)
    wide = x.double().numpy()
    for method, reduce in ((layer.forward, logsumexp), (layer.best, np.max)):
        found = method(x).detach()
        assert found.shape == (6, *lead, -(-f // 2), 3)
        for j in range(f // 2):
            pairs = wide[..., 2 * j, :, None] + wide[..., 2 * j + 1, None, :]
            logs = log_weights(layer.pairs)[..., j, :, :]
            with np.errstate(divide="ignore"):
                truth = reduce(pairs.reshape(*pairs.shape[:-2], 16)[..., None] + logs, axis=-2)
            np.testing.assert_allclose(found[..., j, :], truth, rtol=1e-6)
        if f % 2:
            truth = mixed(wide[..., -1:, :], layer.alone, reduce)
            np.testing.assert_allclose(found[..., -1:, :], truth, rtol=1e-6)


LAYERS = {
    "sum": lambda: (nn.SumLayer(4, 3, (5,), generator=seeded()), 5),
    "cp": lambda: (nn.CPLayer(5, 4, 3, generator=seeded()), 3),
    "tucker": lambda: (nn.TuckerLayer(5, 4, 3, generator=seeded()), 3),
}


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_chosen_as_the_best_has_the_best_weight(name):
    """Its inputs alone give as much as all of them."""
    layer, nodes = LAYERS[name]()
    x = torch.randn(50, 5, 4, generator=seeded(1))
    units = torch.randint(3, (50, nodes), generator=seeded(2))
    chosen = layer.choose(x, units, lambda logs: logs.argmax(-1))
    assert chosen.shape == (50, 5) and chosen.min() >= 0 and chosen.max() < 4
    alone = torch.where(torch.arange(4) == chosen[..., None], x, -torch.inf)
    of_units = (layer.best(each).gather(-1, units[..., None]) for each in (x, alone))
    torch.testing.assert_close(*of_units)


@pytest.mark.parametrize("name", LAYERS)
def test_draws_have_the_frequencies_of_the_terms(name):
    """How often an input unit is drawn is the derivative of the output's logarithm."""
    layer, nodes = LAYERS[name]()
    x = torch.randn(5, 4, generator=seeded(1)).requires_grad_()
    units = torch.randint(3, (nodes,), generator=seeded(2))
    generator, n = seeded(3), 20_000

    def draw(logs):
        return torch.multinomial(logs.softmax(-1).flatten(0, -2), 1, generator=generator).view(logs.shape[:-1])

    drawn = layer.choose(x.detach(), units.expand(n, nodes), draw)  # (n, 5)
    (shares,) = torch.autograd.grad(layer(x).gather(-1, units[:, None]).sum(), x)
    frequencies = torch.nn.functional.one_hot(drawn, 4).double().mean(0)
    assert ((frequencies - shares).abs() <= 4 * (shares / n).sqrt()).all()


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_behaves(name):
    layer, _ = LAYERS[name]()
    x = torch.randn(6, 5, 4, generator=seeded(1))
    expected = layer(x)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not torch.allclose(other(x), expected)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other(x), expected, rtol=0, atol=0)
    assert other.double()(x.double()).dtype == torch.float64
    half, rounded = copy.deepcopy(layer).bfloat16(), x.bfloat16()
    found, exact = half(rounded), copy.deepcopy(half).double()(rounded.double())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)
    assert torch.autograd.gradcheck(layer.double(), (x[:2].double().requires_grad_(),))
