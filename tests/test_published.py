"""`logchain.product` reproduces published numbers: textbook HMMs and domino tilings."""

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
