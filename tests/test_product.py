"""`logchain.product` keeps the accuracy contract, in values and gradients, on every family, shape, dtype and layout."""

import numpy as np
import pytest
import torch

import logchain
from logchain import reference
from logchain.schedules import overlapped
from tests.contract import (
    assert_contract,
    assert_values,
    drawn,
)
from tests.families import Chain, dense

F32, F64 = torch.float32, torch.float64


def test_lengths_of_unbroadcast_chains_and_of_int32():
    chain = dense(F32, v=5, n=4, t=1)
    chain = Chain(chain.x[:, 0], chain.bulk[0, 0], chain.p0[0, 0])
    assert_contract(chain, torch.tensor([2, 5, 1, 3], dtype=torch.int32))


@pytest.mark.parametrize("schedule", ["sequential", "chunked", "tree"])
@pytest.mark.parametrize("lengths", [None, [20, 18, 7]], ids=["whole", "lengths"])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize(
    "weights", [(1e4, -1.0, 0.0), (-1e6, -1e5, -1e3), (1e7, 1e-3, 1.0), (1e-7, -1e-6, 0.0)], ids=str
)
def test_gradients_take_weights_of_any_size(weights, each, lengths, schedule):
    chain = dense(F32, each=each, n=3, t=1, v=20, c=3)
    chain.x[0, :, 3, 1] -= 20.0  # a posterior of 1e-9
    chain.x[1, :, 2, 0] = -torch.inf
    chain = chain._replace(bulk=1e-30 * chain.bulk, p0=1e-30 * chain.p0.expand(3, 1, 3))
    ends = None if lengths is None else torch.tensor(lengths)
    operands = [operand.clone().requires_grad_() for operand in chain[:3]]
    out = logchain.product(*operands, lengths=ends, strategy=schedule)
    found = torch.autograd.grad(out, operands, torch.tensor(weights)[:, None])
    x, bulk, p0 = (operand.double().numpy() for operand in chain[:3])
    truth = reference.marginals(x, bulk, p0, lengths=None if lengths is None else np.array(lengths)[:, None])
    over, states, transitions = torch.tensor(weights, dtype=F64)[:, None], *map(torch.from_numpy, truth[:2])
    counts = over[..., None, None, None] * transitions
    counts = counts if each else counts.sum((0, 1), keepdim=True)
    expected = over[..., None, None] * states, counts / chain.bulk, over[..., None] * states[:, :, 0] / chain.p0
    for gradient, value in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, value.float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["dense", "bakis_jump", "impossible"])
def test_no_grad_gives_the_same_values_and_no_graph(name):
    chain, truth = drawn(name, F32, False, False)
    x = chain.x.clone().requires_grad_()
    with torch.no_grad():
        out = logchain.product(x, chain.bulk, chain.p0)
    assert out.grad_fn is None and not out.requires_grad
    assert_values(out, truth.log_norm, truth.value_bound())


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("at", [3, 400, 498, 499, 500, 998])
@pytest.mark.parametrize("schedule", ["meeting", "overlapped"])
def test_infinite_weights_give_what_one_walk_gives(schedule, at, dtype, monkeypatch):
    monkeypatch.setattr(overlapped, "steps_to_forget", lambda *_: 10)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 1000, 4, generator=generator, dtype=dtype).requires_grad_()
    bulk = torch.rand(2, 999, 4, 4, generator=generator, dtype=dtype)
    bulk[0, at, 1, 2] = torch.inf
    found = [logchain.product(x, bulk, torch.ones(2, 4, dtype=dtype), strategy=s) for s in (schedule, "sequential")]
    assert found[1][0] == torch.inf and found[1][1].isfinite()
    torch.testing.assert_close(*found)
    torch.testing.assert_close(*(torch.autograd.grad(one.sum(), x)[0] for one in found), equal_nan=True)
