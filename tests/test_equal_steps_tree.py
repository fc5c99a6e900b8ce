"""Equal matrices are not rounded equally: errors of trees and segments grow as sqrt(v), not as v."""

import numpy as np
import pytest
import torch

import logchain
from logchain import _device

V = 30_000


@pytest.fixture(params=["numba", "torch"], autouse=True)
def _compiled(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(_device, "native", lambda tensor: False)
    else:
        pytest.importorskip("numba")


def transitions(c, *, band=False):
    """Logarithms of a stochastic matrix (c, c); of a cycle of states with `band`."""
    generator = torch.Generator().manual_seed(c)
    weights = 2.0 * torch.randn(c, c, generator=generator)
    if band:
        here = torch.eye(c, dtype=torch.bool)
        weights = weights.masked_fill(~(here | here.roll(1, 1)), -torch.inf)
    return torch.log_softmax(weights, -1)


def power(matrix, exponent):
    """The logarithm of a power of a matrix in float64, that goes over its largest eigenvalue."""
    top = np.abs(np.linalg.eigvals(matrix)).max()
    return np.log(np.linalg.matrix_power(matrix / top, exponent)) + exponent * np.log(top)


def assert_within_the_contract(found, expected, steps):
    bound = np.spacing(np.abs(expected).astype(np.float32)) + 2.0**-20 * steps**0.5
    assert np.abs(found.double().numpy() - expected).max() <= bound.min()


@pytest.mark.parametrize("log_params", [False, True], ids=["linear", "log"])
@pytest.mark.parametrize("c", [2, 4, 16])
@pytest.mark.parametrize("observed", [False, True], ids=["nothing", "the_same"])
@pytest.mark.parametrize("strategy", ["tree", "chunked"])
def test_a_chain_whose_steps_are_equal(strategy, observed, c, log_params):
    bulk, p0 = transitions(c), torch.full((c,), 1.0 / c)
    if not log_params:
        bulk = bulk.exp()
    linear = bulk.double().exp().numpy() if log_params else bulk.double().numpy()
    x = torch.randn(c, generator=torch.Generator().manual_seed(1)) if observed else torch.zeros(c)
    if observed:  # so that the result is small, and the spacing of floats there
        x -= np.log(np.abs(np.linalg.eigvals(linear * x.double().exp().numpy())).max())
    given = p0.log() if log_params else p0
    found = logchain.product(x.repeat(V, 1), bulk[None], given, log_params=log_params, strategy=strategy)
    emission = x.double().exp().numpy()
    start = np.log((given.double().exp() if log_params else p0.double()).numpy() * emission)
    expected = np.logaddexp.reduce(start[:, None] + power(linear * emission, V - 1), axis=None)
    assert_within_the_contract(found, expected, V)


PRODUCTS = {
    "expanded": lambda matrix: logchain.matrix_product(matrix.expand(V, *matrix.shape)),
    "repeated": lambda matrix: logchain.matrix_product(matrix.repeat(V, 1, 1)),
    "in_place": lambda matrix: logchain.matrix_product(matrix.repeat(V, 1, 1), inplace=True),
    "last_prefix": lambda matrix: logchain.prefix_products(matrix.expand(V, *matrix.shape))[-1],
}


@pytest.mark.parametrize("c", [2, 4, 16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_stack_of_one_matrix(name, c):
    matrix = transitions(c)
    assert_within_the_contract(PRODUCTS[name](matrix), power(matrix.double().exp().numpy(), V), V)


@pytest.mark.parametrize("c", [4, 16])
def test_a_tree_where_a_loop_would_do(c, monkeypatch):
    monkeypatch.setattr(_device, "fold_kernels", lambda whole: None)
    matrix = transitions(c)
    assert_within_the_contract(PRODUCTS["repeated"](matrix), power(matrix.double().exp().numpy(), V), V)


@pytest.mark.parametrize("name", ["repeated", "last_prefix"])
def test_nodes_that_are_logarithms(name):
    matrix = transitions(5, band=True)
    assert_within_the_contract(PRODUCTS[name](matrix), power(matrix.double().exp().numpy(), V), V)
