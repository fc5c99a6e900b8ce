"""`logchain.product` reproduces published numbers: textbook HMMs, domino tilings, the earthquake series."""

import math

import numpy as np
import pytest
import torch

import logchain
from tests.contract import gradient_bound, value_bound

F32, F64 = torch.float32, torch.float64
BOTH = pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])


@BOTH
def test_umbrella_world(dtype):
    """Russell and Norvig, Artificial Intelligence, section 15.2: rain is hidden; an umbrella on days 1, 2, 4 and 5."""
    sensor = torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=dtype)  # (state, umbrella or none)
    x = sensor.log().T[[0, 0, 1, 0, 0]]  # (v, c)
    bulk = torch.tensor([[[0.7, 0.3], [0.3, 0.7]]], dtype=dtype)
    out = logchain.product(x, bulk, torch.tensor([0.5, 0.5], dtype=dtype))
    assert round(out.item(), 4) == -3.3725


@BOTH
def test_rainy_and_sunny_posteriors_are_the_gradient(dtype):
    """Wikipedia's walk, shop, clean; the posteriors are those of hmmlearn's tests, which claim 1e-6."""
    emission = torch.tensor([[0.1, 0.4, 0.5], [0.6, 0.3, 0.1]], dtype=dtype)  # (state, activity)
    x = emission.log().T.clone().requires_grad_()
    bulk = torch.tensor([[[0.7, 0.3], [0.4, 0.6]]], dtype=dtype)
    logchain.product(x, bulk, torch.tensor([0.6, 0.4], dtype=dtype)).backward()
    published = [[0.23170303, 0.76829697], [0.62406281, 0.37593719], [0.86397706, 0.13602294]]
    np.testing.assert_allclose(x.grad.numpy(), published, rtol=0, atol=1e-6 if dtype == F64 else 1e-6 + 1e-5)


def domino_rows(width: int) -> torch.Tensor:
    """[below, above]: 1 where dominoes that stick into a row and out of it leave gaps that flat dominoes fill."""
    c = 2**width
    bulk = torch.zeros(c, c, dtype=F64)
    for came in range(c):
        for leaves in range(c):
            if came & leaves == 0:
                gaps = f"{came | leaves:0{width}b}".split("1")
                bulk[came, leaves] = all(len(gap) % 2 == 0 for gap in gaps)
    return bulk


@BOTH
@pytest.mark.parametrize(("width", "tilings"), [(2, 34), (8, 12988816)])
def test_domino_tilings_of_eight_rows(width, tilings, dtype):
    """Kasteleyn 1961: 12,988,816 tilings of the chessboard; nothing sticks into the first row or out of the last."""
    bulk = domino_rows(width).to(dtype)
    x = torch.zeros(9, len(bulk), dtype=dtype)
    x[-1, 1:] = -torch.inf
    p0 = torch.eye(len(bulk), dtype=dtype)[0]
    bulk, x = bulk[None].requires_grad_(), x.requires_grad_()
    out = logchain.product(x, bulk, p0)
    if width == 8:
        assert (bulk == 0).double().mean() > 0.97
    truth = np.array(math.log(tilings))
    assert abs(out.item() - truth) <= value_bound(truth, *x.shape, dtype=dtype)
    out.backward()
    assert abs(bulk.grad.double().sum().item() - 8) <= gradient_bound(8.0, *x.shape, dtype=dtype, terms=bulk.numel())
    assert (bulk.grad[bulk == 0] == 0).all() and (x.grad[-1, 1:] == 0).all()


# Earthquakes of magnitude 7 or more, 1900 to 2006: Zucchini and MacDonald, Hidden Markov Models for Time Series, 2009.
EARTHQUAKES = """
13 14  8 10 16 26 32 27 18 32 36 24 22 23 22 18 25 21 21 14  8 11 14 23 18 17 19 20 22 19 13 26 13 14 22 24
21 22 26 21 23 24 27 41 31 27 35 26 28 36 39 21 17 22 17 19 15 34 10 15 22 18 15 20 15 22 19 16 30 27 29 23
20 16 21 21 25 16 18 15 18 14 10 15  8 15  6 11  8  7 18 16 13 12 13 20 15 16 12 18 15 16 13 15 16 11 11
"""


def minus_log_likelihood(log_rates: torch.Tensor, leaving: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Two Poisson states that are left with probability sigmoid(leaving), started in their stationary distribution."""
    out = leaving.sigmoid()
    bulk = torch.stack([torch.stack([1 - out[0], out[0]]), torch.stack([out[1], 1 - out[1]])])
    x = counts[:, None] * log_rates - log_rates.exp() - torch.lgamma(counts + 1)[:, None]  # (v, c)
    return -logchain.product(x, bulk[None], out.flip(0) / out.sum())


@pytest.fixture
def counts() -> torch.Tensor:
    counts = torch.tensor([int(count) for count in EARTHQUAKES.split()], dtype=F64)
    assert len(counts) == 107
    assert round(counts.mean().item(), 2) == 19.36 and round(counts.var().item(), 2) == 51.57
    return counts


@BOTH
def test_earthquakes_at_the_published_parameters(counts, dtype):
    """The published maximum is flat, so that parameters of four digits give the minimum to four decimals."""
    log_rates = torch.tensor([15.472, 26.125], dtype=dtype).log()
    leaving = torch.tensor([0.0660, 0.1285], dtype=dtype).logit()
    out = minus_log_likelihood(log_rates, leaving, counts.to(dtype)).item()
    # Float32 rounds the log-probabilities of 107 counts, each a sum of terms up to 120.
    assert abs(out - 342.3183) < (1e-4 if dtype == F64 else 1e-4 + 107 * float(np.spacing(np.float32(120))))


def test_earthquakes_maximum_likelihood(counts):
    """Gradients through bulk, p0 and x reach the published minimum, 342.3183, from a rough start."""
    log_rates = torch.tensor([10.0, 30.0], dtype=F64).log().requires_grad_()
    leaving = torch.tensor([-2.0, -2.0], dtype=F64, requires_grad=True)
    optimiser = torch.optim.LBFGS([log_rates, leaving], max_iter=100, line_search_fn="strong_wolfe")

    def closure():
        optimiser.zero_grad()
        loss = minus_log_likelihood(log_rates, leaving, counts)
        loss.backward()
        return loss

    optimiser.step(closure)
    assert round(closure().item(), 4) == 342.3183
    np.testing.assert_allclose(log_rates.detach().exp(), [15.472, 26.125], rtol=0, atol=5e-4)
    np.testing.assert_allclose(1 - leaving.detach().sigmoid(), [0.9340, 0.8715], rtol=0, atol=1e-4)
