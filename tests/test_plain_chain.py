"""The recursion in torch's operations keeps the contract, and says what the loops in C say."""

import pytest
import torch

from logchain.kernels.chain import Chain
from logchain.kernels.cpu import sum_product as cpu_room
from logchain.kernels.plain import sum_product as plain_room
from tests.contract import assert_contract, drawn
from tests.families import FAMILIES

NAN = torch.nan


@pytest.mark.parametrize("log", [False, True], ids=["given", "log_params"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.usefixtures("plain")
def test_every_family_keeps_the_contract(name, each, dtype, log):
    chain, truth = drawn(name, dtype, each, log)
    assert_contract(chain, truth=truth, strategy="sequential")


def both(chain, weight):
    """What the rooms find: the log-partition, shares of forward messages, and the gradients."""
    for room in (plain_room, cpu_room):
        log_norm, messages, scales, redone = kept = room.forward(chain, keep=True, steps=chain.v)
        grad_x, grad_bulk = torch.full_like(chain.x, NAN), torch.full((*chain.bulk.shape,), NAN, dtype=chain.dtype)
        grad_p0 = room.backward(chain, *kept, weight, grad_x, grad_bulk)
        assert torch.equal(room.forward(chain, keep=False, steps=chain.v)[0], log_norm)
        logs = torch.where(redone[..., None], messages, messages.log())
        shares = torch.softmax(logs, -1).masked_fill((logs == -torch.inf).all(-1, keepdim=True), 0.0)
        if chain.ended is not None:
            shares = shares.masked_fill(chain.ended, 0.0)
        yield log_norm, shares, grad_x, grad_bulk, grad_p0


@pytest.mark.parametrize("form", ["linear", "logs", "by_log"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("one_matrix", [True, False], ids=["one", "each"])
@pytest.mark.parametrize("ends", [False, True], ids=["whole", "ends"])
@pytest.mark.parametrize("final", [False, True], ids=["ones", "final"])
def test_the_loops_in_c_find_the_same(form, dtype, one_matrix, ends, final):
    v, g, m, c = 6, 2, 3, 5
    draw = torch.Generator().manual_seed(0)
    bulk = torch.rand(1 if one_matrix else v - 1, g, c, c, generator=draw, dtype=dtype)
    bulk *= torch.rand(bulk.shape, generator=draw) < 0.7
    p0, x = torch.rand(g, m, c, generator=draw, dtype=dtype), 9 * torch.randn(v, g, m, c, generator=draw, dtype=dtype)
    x[:, 0, 1] *= 30  # to be redone
    x[1, 1, 1] = -torch.inf  # to be impossible
    weights = torch.rand(g, m, c, generator=draw, dtype=dtype) if final else None
    lengths = torch.tensor([[6, 3, 1], [2, 5, 6]])[..., None] if ends else None
    if form == "logs":
        bulk, p0 = bulk.log(), p0.log()
    chain = Chain(x, bulk, p0, lengths, form == "logs", dtype, form == "by_log", weights)
    weight = torch.tensor([[1.0, -2.0, 0.5], [3.0, 1.0, 0.0]], dtype=dtype)
    eps = torch.finfo(dtype).eps
    for ours, theirs in zip(*both(chain, weight), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=300 * eps, atol=300 * eps)
