"""The contract as it is meant: exact results of chains whose factors are a little off bracket that of `product`."""

from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch

import logchain
from logchain import reference
from tests import oracle
from tests.contract import Truth, assert_values, ulp, unit, value_bound
from tests.families import F32, F64, FAMILIES, LARGE, Chain

BOTH = pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
LOG = pytest.mark.parametrize("log", [False, True], ids=["given", "log_params"])
# large ones are too much for decimals
NAMES = pytest.mark.parametrize("name", [name for name in FAMILIES if name not in LARGE])


def drawn(name: str, dtype: torch.dtype, log: bool) -> tuple[Chain, Truth]:
    sizes = {} if name[-1].isdigit() else {"v": 6, "c": 5}  # decimals take their time
    chain = FAMILIES[name](dtype, n=2, t=1, each=True, log=log, **sizes)
    return chain, Truth(chain)


def perturbed(chain: Chain, x_errors, bulk_errors, p0_errors) -> np.ndarray:
    """log Z [*B] in decimals of chains whose factors are multiplied by one plus such errors, which broadcast."""
    x, bulk, p0 = (tensor.double().numpy() for tensor in chain[:3])
    batch, (v, c) = x.shape[:-2], x.shape[-2:]
    bulk, p0 = np.broadcast_to(bulk, (*batch, v - 1, c, c)), np.broadcast_to(p0, (*batch, c))
    found = np.zeros(batch)
    errors = (
        np.broadcast_to(part, whole.shape)
        for part, whole in zip((x_errors, bulk_errors, p0_errors), (x, bulk, p0), strict=True)
    )
    factors = [np.vectorize(Decimal, otypes=[object])(part) + 1 if part.size else part for part in errors]
    with localcontext(oracle.DIGITS):
        for b in np.ndindex(*batch):
            weights = oracle._weights(x[b], bulk[b], p0[b], chain.log_params)
            forward, _ = oracle._messages(*(weight * part[b] for weight, part in zip(weights, factors, strict=True)))
            total = sum(forward[-1], Decimal(0))
            found[b] = float(total.ln()) if total else -np.inf
    return found


def assert_between(out: torch.Tensor, low: np.ndarray, high: np.ndarray, dtype: torch.dtype) -> None:
    """The result, which has been rounded to its dtype, lies in the bracket."""
    found = out.double().numpy()
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(low))
    possible = np.isfinite(low)
    rounding = ulp(low, dtype)[possible]
    found, low, high = found[possible], low[possible], high[possible]
    assert (low - rounding <= found).all() and (found <= high + rounding).all()


@LOG
@BOTH
@NAMES
def test_factors_that_are_all_off_by_the_most_move_the_result_to_the_ends(name, dtype, log):
    chain, truth = drawn(name, dtype, log)
    # [*B, 1, 1]
    error = ((truth.c + 8 + 2 * truth.depth) * unit(dtype))[..., None, None]
    low, high = (perturbed(chain, sign * error, 0.0, 0.0) for sign in (-1, 1))
    out = logchain.product(*chain[:3], log_params=chain.log_params)
    assert_between(out, low, high, dtype)
    possible = np.isfinite(truth.log_norm)
    exact, bound = truth.log_norm[possible], (truth.value_bound() - ulp(truth.log_norm, dtype))[possible]
    # but for the square of the error, and for the rounding of log Z to float64
    slack = bound * error.max() + np.spacing(np.abs(exact)) * (1 if dtype == F64 else 20)
    np.testing.assert_array_less(np.abs(high[possible] - exact - bound), slack)
    np.testing.assert_array_less(np.abs(low[possible] - exact + bound), slack)


def depths(array: np.ndarray, axes) -> np.ndarray:
    """How far entries lie below the largest along some axes; 0 where that is infinitely far."""
    top = array.max(axes, keepdims=True)
    return np.where(np.isfinite(array), top - np.where(np.isfinite(array), array, 0.0), 0.0)


@LOG
@BOTH
@NAMES
def test_factors_that_are_off_by_what_their_states_allow_bracket_the_result(name, dtype, log):
    """Each state by its own depth, which is tighter, and lies within the formula."""
    chain, truth = drawn(name, dtype, log)
    x, bulk, p0 = (tensor.double().numpy() for tensor in chain[:3])
    messages = reference.forward_backward(x, bulk, p0, log_params=chain.log_params)
    below = np.max([depths(array, -1) for array in (messages.forward, messages.backward, x)], 0)
    errors = [truth.c + 8 + 2 * below, 0.0, 0.0]
    if chain.log_params:
        errors[1:] = 2 * depths(bulk, (-2, -1)), 2 * depths(p0, -1)
    errors = [error * unit(dtype) for error in errors]
    low, high = (perturbed(chain, *(sign * error for error in errors)) for sign in (-1, 1))
    assert_between(logchain.product(*chain[:3], log_params=chain.log_params), low, high, dtype)


def sticky(c: int) -> torch.Tensor:
    return 0.99 * torch.eye(c) + 0.01 / c


def cycle(c: int) -> torch.Tensor:
    return torch.eye(c).roll(1, 1) + 3e-8


@LOG
@pytest.mark.parametrize("strategy", ["sequential", "segments", "tree"])
@pytest.mark.parametrize("matrix", [sticky, cycle])
def test_steps_that_are_all_alike_may_all_be_wrong_alike(matrix, strategy, log):
    """Roundings of steps add up, but to no more than the contract."""
    v, c = 5000, 16
    bulk, p0 = matrix(c)[None], torch.full((c,), 1.0 / c)
    bulk, p0 = (bulk.log(), p0.log()) if log else (bulk, p0)
    x = torch.zeros(v, c)
    truth = logchain.product(x.double(), bulk.double(), p0.double(), log_params=log, strategy="sequential").numpy()
    found = logchain.product(x, bulk, p0, log_params=log, strategy=strategy)
    deep = float(bulk.max() - bulk.min()) if log else 0.0
    assert_values(found, truth, value_bound(truth, v, c, deep, dtype=F32))
