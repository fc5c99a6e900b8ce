"""Chains whose steps are all alike, where each of them would be rounded alike: the contract's sqrt(v) all the same.

The truth is a power of one matrix, by repeated squares in float64.
"""

import numpy as np
import pytest
import torch

import logchain
from logchain import Stream, _device
from tests.contract import ulp

# states and steps: loops for few states keep a message in a register, others in float32
SIZES = [(2, 100_000), (5, 100_000), (16, 50_000), (40, 20_000)]
OBSERVATIONS = ["none", "constant", "balanced"]


def power(matrix: np.ndarray, exponent: int) -> tuple[np.ndarray, float]:
    """The power of a matrix over its largest entry, and the logarithm of that."""
    found, scale, square, taken = np.eye(len(matrix)), 0.0, matrix, 0.0
    while exponent:
        if exponent & 1:
            found, scale = found @ square, scale + taken
            scale += np.log(found.max())
            found = found / found.max()
        square, taken = square @ square, 2 * taken
        taken += np.log(square.max())
        square = square / square.max()
        exponent >>= 1
    return found, scale


class Steps:
    """A chain of equal steps: x (c) and bulk (c, c); p0 is the same for all states."""

    def __init__(self, c: int, observations: str, log: bool, seed: int, dtype=torch.float32):
        draw = torch.Generator().manual_seed(seed)
        logs = torch.log_softmax(torch.randn(c, c, generator=draw), -1).to(dtype)
        self.bulk = logs if log else logs.exp()
        self.p0 = torch.full((c,), 1 / c).log().to(dtype) if log else torch.full((c,), 1 / c).to(dtype)
        self.log = log
        self._matrix, self._start = (
            tensor.double().exp().numpy() if log else tensor.double().numpy() for tensor in (self.bulk, self.p0)
        )
        x = torch.randn(c, generator=draw) if observations != "none" else torch.zeros(c)
        if observations == "balanced":  # the log-partition stays near 0, where float32 has much room
            x -= float(np.log(np.abs(np.linalg.eigvals(self._matrix * x.double().exp().numpy())).max()))
        self.x = x.to(dtype)

    def truth(self, v: int) -> float:
        emission = np.exp(self.x.double().numpy())
        found, scale = power(self._matrix * emission, v - 1)
        return float(np.log((self._start * emission) @ found @ np.ones(len(found))) + scale)

    def check(self, found: torch.Tensor, v: int) -> None:
        truth = np.array(self.truth(v))
        bound = ulp(truth, torch.float32) + 2.0**-20 * v**0.5
        worst = np.abs(found.double().numpy() - truth).max()
        assert worst <= bound, f"{worst / bound:.2f} times the bound"


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("observations", OBSERVATIONS)
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize(("c", "v"), SIZES)
def test_compiled(c, v, n, observations, log):
    pytest.importorskip("numba")
    steps = Steps(c, observations, log, seed=c)
    x = steps.x.expand(n, v // n, c)
    found = logchain.product(x, steps.bulk[None, None], steps.p0[None], log_params=log, strategy="sequential")
    steps.check(found, v // n)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("observations", OBSERVATIONS)
@pytest.mark.parametrize("c", [2, 16, 40])
def test_without_numba(c, observations, log, monkeypatch):
    monkeypatch.setattr(_device, "_numba", lambda: False)
    v, steps = 8000, Steps(c, observations, log, seed=c)
    x = steps.x.expand(1, v, c)
    found = logchain.product(x, steps.bulk[None, None], steps.p0[None], log_params=log, strategy="sequential")
    steps.check(found, v)


def test_wide():
    """Products are the BLAS's, compiled loops or not."""
    c, v, n = 96, 2000, 16
    steps = Steps(c, "none", log=False, seed=0)
    x = steps.x.expand(n, v, c)
    found = logchain.product(x, steps.bulk[None, None], steps.p0[None], strategy="sequential")
    steps.check(found, v)


@pytest.mark.parametrize(
    ("dtype", "observations", "log", "seed"),
    [(torch.float32, "none", False, 3), (torch.bfloat16, "balanced", True, 2)],
)
def test_lengths(dtype, observations, log, seed):
    c, v = 16, 50_000
    steps = Steps(c, observations, log, seed, dtype=dtype)
    lengths = torch.tensor([1, 1000, 20_011, v])
    found = logchain.product(
        steps.x.expand(4, v, c),
        steps.bulk[None, None],
        steps.p0[None],
        log_params=log,
        lengths=lengths,
        strategy="sequential",
        out_dtype=torch.float32,
    )
    for value, length in zip(found, lengths.tolist(), strict=True):
        steps.check(value, length)


@pytest.mark.parametrize("size", [1, 7, 64])
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("numba", [True, False])
def test_stream(numba, log, size, monkeypatch):
    """Each piece goes on with the jitter where the one before left it."""
    if numba:
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr(_device, "_numba", lambda: False)
    c, v = 16, min(20_000, 3000 * size) if numba else min(4000, 500 * size)
    steps = Steps(c, "balanced", log, seed=c)
    stream = Stream(steps.bulk[None], steps.p0, log_params=log, filtered=False)
    piece = steps.x.expand(size, c)
    for _ in range(v // size):
        stream.update(piece)
    steps.check(stream.log_norm, v // size * size)


@pytest.mark.parametrize("n", [1, 6])
@pytest.mark.parametrize("c", [5, 16, 40])
def test_states_that_stay(c, n):
    """Small terms are not lost behind a large one, in each step the same way."""
    pytest.importorskip("numba")
    generator = torch.Generator().manual_seed(1)
    bulk = ((1 - 1e-6) * torch.eye(c, dtype=torch.float64) + 1e-6 / c).float()
    x, p0 = 0.01 * torch.randn(20_000, c, generator=generator), torch.full((c,), 1.0 / c)
    message, expected = p0.double().numpy() * np.exp(x[0].double().numpy()), 0.0
    for emission in x[1:].double().exp().numpy():
        message = message @ bulk.double().numpy() * emission
        expected += np.log(message.sum())
        message /= message.sum()
    expected += np.log(message.sum())
    found = logchain.product(x.expand(n, 20_000, c), bulk[None], p0, strategy="sequential", out_dtype=torch.float64)
    assert np.abs(found.numpy() - expected).max() <= np.spacing(np.float32(abs(expected))) + 2.0**-20 * 20_000**0.5
