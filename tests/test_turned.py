"""A chain walked from its last step to its first gives the same log-partition and gradients."""

import itertools

import pytest
import torch

from logchain import kernels
from logchain.kernels.plain import backward as plain_backward
from logchain.kernels.plain import forward as plain_forward
from logchain.layout import Layout
from logchain.operands import chain_of
from logchain.schedules.turned import Turned
from tests.contract import of_steps

F32, F64 = torch.float32, torch.float64


def operands(batch, own, v, c, *, one_matrix, log_params, dtype, zeros=0.2):
    generator = torch.Generator().manual_seed(v * c + len(batch))
    x = torch.randn(*batch, v, c, generator=generator, dtype=F64)
    bulk = torch.rand(*own, 1 if one_matrix else v - 1, c, c, generator=generator, dtype=F64)
    bulk = bulk * (torch.rand(bulk.shape, generator=generator, dtype=F64) > zeros)
    p0 = torch.rand(c, generator=generator, dtype=F64)
    bulk, p0 = (bulk.log(), p0.log()) if log_params else (bulk, p0)
    return x.to(dtype), bulk.to(dtype), p0.to(dtype)


def gradients(chain, turned):
    """log Z, and the gradients of x and bulk for weights that differ by sequence."""
    grid = chain.g, chain.m
    weight = torch.linspace(-1, 2, chain.g * chain.m, dtype=F64).view(grid)
    keep = torch.full((chain.v, *grid, chain.c), torch.nan, dtype=chain.dtype)
    grad_x = torch.full(chain.x.shape, torch.nan, dtype=chain.dtype)
    grad_bulk = torch.full(chain.bulk.shape, torch.nan, dtype=chain.dtype)
    if not turned:
        kept = plain_forward.forward(chain, keep=keep)[0]
        plain_backward.backward(chain, kept, weight, None, grad_x, grad_bulk)
        return kept.log_norm, grad_x, grad_bulk
    walk = Turned(chain)
    ((kept, first),) = kernels.at_once(walk.forward(keep))
    start = chain.log_p0()
    log_norm = torch.logsumexp(start + first.values, -1) + first.scale.sum(0)
    kernels.at_once(walk.backward(kept._replace(log_norm=log_norm), weight, start, grad_x, grad_bulk))
    return log_norm, grad_x, grad_bulk


def assert_same(chain):
    (truth, *expected), (log_norm, *found) = gradients(chain, False), gradients(chain, True)
    bound = of_steps(chain.v, chain.c, 40.0, dtype=chain.dtype)
    torch.testing.assert_close(log_norm, truth, rtol=0, atol=bound + 1e-7)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=4 * bound, atol=1e-6)


@pytest.mark.parametrize("c", [1, 2, 3, 4, 7, 8, 13, 16, 17, 33])
@pytest.mark.parametrize("one_matrix", [True, False])
def test_every_number_of_states(c, one_matrix):
    for v, log_params, dtype in itertools.product([1, 2, 3, 9, 70], [False, True], [F32, F64]):
        chain = chain_of(
            *operands((), (), v, c, one_matrix=one_matrix, log_params=log_params, dtype=dtype), None, log_params
        )[1]
        assert_same(chain)


@pytest.mark.parametrize("batch, own", [((5,), ()), ((3, 4), (3, 1)), ((3, 4), (4,)), ((50,), (50,)), ((0,), (0,))])
@pytest.mark.parametrize("one_matrix", [True, False])
def test_batches(batch, own, one_matrix):
    for c, x_last in itertools.product([3, 16, 20], [True, False]):
        x, bulk, p0 = operands(batch, own, 12, c, one_matrix=one_matrix, log_params=False, dtype=F32)
        x = x if x_last else x.movedim(-2, 0).contiguous().movedim(0, -2)  # steps outermost in memory
        assert_same(chain_of(x, bulk, p0, None, False)[1])


def test_narrow_rows_are_not_read_outside_their_memory():
    for c, one_matrix in itertools.product([1, 2, 3, 5, 9], [True, False]):
        x, bulk, p0 = operands((), (), 40, c, one_matrix=one_matrix, log_params=False, dtype=F32)
        around = torch.full((42, c), torch.nan)
        around[1:-1] = x
        chain = chain_of(around[1:-1], bulk, p0, None, False)[1]
        assert_same(chain)


def test_sequences_that_underflow_are_redone():
    x, bulk, p0 = operands((3,), (), 60, 6, one_matrix=True, log_params=False, dtype=F32)
    x[1, ::7] = torch.tensor([0.0, -400.0, 0.0, -300.0, -90.0, 0.0])
    bulk[..., 0, 1] = 1e-30
    assert_same(chain_of(x, bulk, p0, None, False)[1])


def test_other_devices_copy(monkeypatch):
    x, bulk, p0 = operands((3,), (), 9, 4, one_matrix=False, log_params=False, dtype=F32)
    monkeypatch.setattr(kernels, "in_c", lambda tensor: False)
    assert_same(chain_of(x, bulk, p0, None, False)[1])
    assert Layout.of(x, bulk).grid == (1, 3)
