"""The gradients of the log-semiring product on Triton kernels, to the last bit; `test_matmul` asks them the rest."""

import numpy as np
import pytest
import torch

from tests import oracle
from tests.contract import TENSOR_CORES, gradient_bound, sum_to, unit
from tests.test_matmul import CASES, depth, draw

pytest.importorskip("triton")
F32, F64 = torch.float32, torch.float64


@pytest.fixture
def gradient(device, monkeypatch):
    from logchain.kernels.gpu import log_matmul_gradient

    monkeypatch.setattr(log_matmul_gradient, "_SHORTEST", 16)  # so that sums of a few dozen terms are cut
    return log_matmul_gradient


def assert_shares(gradient, device, a, b, *, weight=None):
    """Both gradients lie within the contract of a chain of two matrices."""
    wide = F64 if F64 in (a.dtype, b.dtype) else F32
    values, shares = oracle.matmul(a.double().numpy(), b.double().numpy())
    if weight is None:
        weight = torch.arange(shares[..., 0, :].size, dtype=wide).cos().reshape(*a.shape[:3], b.shape[-1])
    grads = {"a": torch.full(a.shape, torch.nan, dtype=wide, device=device)}
    grads["b"] = torch.full(b.shape, torch.nan, dtype=wide, device=device)
    gradient.backward(weight.to(device), a.to(device), b.to(device), grad_a=grads["a"], grad_b=grads["b"])
    shares = shares * weight.double().numpy()[..., None, :]
    below = depth(a.double().numpy(), b.double().numpy(), values)[..., :, None, :]
    allowed = gradient_bound(shares, 2, a.shape[-1], below, dtype=wide, k=TENSOR_CORES, terms=0)
    # nothing is flushed of a share but beside its weight
    allowed = allowed + a.shape[-1] * unit(wide) / 4 * np.abs(weight.double().numpy())[..., None, :]
    for name, operand, axis in (("a", a, -1), ("b", b, -3)):
        found, expected = grads[name].cpu().double().numpy(), shares.sum(axis)
        error = np.abs(found - expected)
        assert (error <= allowed.sum(axis)).all(), f"grad_{name}: {error.max():.3g}"
        assert (found[np.isneginf(operand.double().numpy())] == 0).all()
    return grads


def batch(case, sizes, dtype, count=1):
    drawn = [draw(case, sizes, dtype, seed) for seed in range(count)]
    return torch.stack([a for a, _ in drawn])[None], torch.stack([b for _, b in drawn])[None]


@pytest.mark.parametrize("sizes", [(33, 9, 17), pytest.param((70, 66, 5), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.__name__)
def test_larger_than_a_tile(gradient, device, case, sizes):
    assert_shares(gradient, device, *batch(case, sizes, F32))


@pytest.mark.parametrize("held", [1, 200])
def test_a_batch_takes_turns_in_the_workspace(gradient, device, held, monkeypatch):
    monkeypatch.setattr(gradient, "_HELD", held)
    a, b = batch(CASES[2], (5, 4, 3), F32, count=6)
    assert_shares(gradient, device, a.reshape(2, 3, 5, 4), b.reshape(2, 3, 4, 3))


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_gradient_may_be_written_over_the_weight(gradient, device, side):
    a, b = batch(CASES[2], (9, 9, 9), F32)
    weight = torch.arange(81.0).cos().reshape(1, 1, 9, 9)
    expected = assert_shares(gradient, device, a, b, weight=weight)[side]
    over = weight.to(device).clone()
    gradient.backward(over, a.to(device), b.to(device), **{f"grad_{side}": over})
    assert torch.equal(over, expected)


def test_long_sums_are_cut_and_the_same_every_time(gradient, device):
    a, b = batch(CASES[0], (5, 4, 150), F32)
    first, second = (assert_shares(gradient, device, a, b) for _ in range(2))
    assert torch.equal(first["a"], second["a"]) and torch.equal(first["b"], second["b"])
    whole = sum_to(first["a"].double().cpu().numpy(), (5, 1))
    weights = np.cos(np.arange(750.0)).reshape(5, 150).sum(-1, keepdims=True)
    np.testing.assert_allclose(whole, weights, rtol=0, atol=1e-4)  # shares of an output sum to 1


def test_no_weight_no_gradient_whatever_the_operands(gradient, device):
    a, b = batch(CASES[3], (6, 5, 4), F32)
    weight = torch.zeros(1, 1, 6, 4)
    grads = assert_shares(gradient, device, a, b, weight=weight)
    assert (grads["a"] == 0).all() and (grads["b"] == 0).all()
