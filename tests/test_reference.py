"""The float64 reference agrees with the sum over all state paths, on every family and at every length."""

import numpy as np
import pytest

from logchain import reference
from tests import oracle
from tests.contract import numbers
from tests.families import FAMILIES, INF, LARGE

ENUMERABLE = {"v": 5, "c": 3, "n": 2}
FIXED = ("v1", "v2", "v3", "c1", "c301", "far_start1")


def assert_same(found: reference.Marginals, truth: oracle.Truth, largest: float) -> None:
    """Every step of the reference rounds sums of size `largest` a few times in float64."""
    slack = 4 * truth.states.shape[-2] * np.spacing(max(largest, 1.0))
    np.testing.assert_allclose(found.log_norm, truth.log_norm, rtol=0, atol=slack)
    np.testing.assert_allclose(found.states, truth.states, rtol=0, atol=2 * slack)
    np.testing.assert_allclose(found.transitions, truth.transitions, rtol=0, atol=2 * slack)
    dead = np.isneginf(truth.log_norm)
    assert (found.states[dead] == 0).all() and (found.transitions[dead] == 0).all()


def largest_sum(x, forward) -> float:
    return max(np.abs(array[np.isfinite(array)]).max(initial=0.0) for array in (x, forward))


@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in LARGE])
def test_reference_agrees_with_all_paths(name, each):
    sizes = ENUMERABLE if name not in FIXED else {}
    chain = FAMILIES[name](each=each, **sizes)
    for case in (chain, chain.logs()):
        x, bulk, p0 = numbers(case)
        truth = oracle.all_paths(x, bulk, p0, log_params=case.log_params)
        found = reference.marginals(x, bulk, p0, log_params=case.log_params)
        messages = reference.forward_backward(x, bulk, p0, log_params=case.log_params)
        assert_same(found, truth, largest_sum(x, messages.forward))
        np.testing.assert_array_equal(messages.log_norm, found.log_norm)
        np.testing.assert_array_equal(reference.product(x, bulk, p0, log_params=case.log_params), found.log_norm)


@pytest.mark.parametrize("name", ["dense", "detour", "sparse", "one_dead", "impossible"])
@pytest.mark.parametrize("lengths", [[1, 4], [5, 2], [[5, 1], [3, 2]]], ids=str)
def test_reference_agrees_with_all_paths_at_every_length(name, lengths):
    chain = FAMILIES[name](each=True, **ENUMERABLE)
    x, bulk, p0 = numbers(chain)
    options = {"log_params": chain.log_params, "lengths": lengths}
    truth = oracle.all_paths(x, bulk, p0, **options)
    messages = reference.forward_backward(x, bulk, p0, **options)
    assert_same(reference.marginals(x, bulk, p0, **options), truth, largest_sum(x, messages.forward))


def test_nan_behind_the_end_has_no_influence():
    x, bulk, p0 = numbers(FAMILIES["dense"](each=True, **ENUMERABLE))
    clean = reference.marginals(x, bulk, p0, lengths=[3, 5])
    x[0, :, 3:], bulk[0, :, 2:] = np.nan, np.nan
    for found, expected in zip(reference.marginals(x, bulk, p0, lengths=[3, 5]), clean, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in LARGE])
def test_decimal_chain_agrees_with_all_paths(name):
    sizes = ENUMERABLE | {"v": 4} if name not in FIXED else {}
    chain = FAMILIES[name](each=True, **sizes)
    options = {"log_params": chain.log_params, "lengths": [[1, sizes["v"]], [2, 3]] if sizes else None}
    for found, truth in zip(oracle.chain(*chain[:3], **options), oracle.all_paths(*chain[:3], **options), strict=True):
        np.testing.assert_allclose(found, truth, rtol=1e-15, atol=0)


@pytest.mark.parametrize("shapes", [((2, 3), (3, 4)), ((5, 2, 3), (1, 3, 1)), ((2, 1), (3, 1, 2))], ids=str)
def test_reference_matmul_agrees_with_decimals(shapes):
    rng = np.random.default_rng(0)
    a, b = (100 * rng.standard_normal(shape) for shape in shapes)
    b[rng.random(b.shape) < 0.3] = -INF
    a[..., 0, :] = -INF
    truth, _ = oracle.matmul(a, b)
    assert np.isneginf(truth[..., 0, :]).all() and np.isfinite(truth).any()
    np.testing.assert_allclose(reference.matmul(a, b), truth, rtol=1e-15, atol=1e-13)


def test_entropy_does_not_lose_digits_to_an_offset():
    x, bulk, p0 = numbers(FAMILIES["offsets"](n=1, t=1, v=60, c=4))
    assert abs(reference.entropy(x, bulk, p0) - oracle.entropy(x[0, 0], bulk[0, 0], p0[0, 0])) < 1e-10


def test_an_empty_batch_has_no_result():
    chain = np.zeros((0, 3, 2)), np.ones((1, 2, 2)), np.ones(2)
    assert reference.entropy(*chain).shape == reference.kl_divergence(chain, chain).shape == (0,)
