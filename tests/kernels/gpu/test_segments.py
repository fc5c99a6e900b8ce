"""Products of segments by the fused kernels, beside float64 log-sum-exp."""

import pytest
import torch

from tests.contract import TENSOR_CORES, value_bound

segments = pytest.importorskip("logchain.kernels.gpu.segments")

F64 = torch.float64
INF, NAN = float("inf"), float("nan")


def product_of(bulk, x, log_params):
    """float64 logsumexp of a segment (L, g1, g2, c, c) and (L, g1, g2, c)."""
    bulk = bulk.double() if log_params else bulk.double().log()
    total = None
    for i, factor in enumerate(bulk):
        total = factor if total is None else torch.logsumexp(total[..., :, :, None] + factor[..., None, :, :], -2)
        if x is not None:
            total = total + x[i].double()[..., None, :]
    return total


def assert_product(found, offset, truth, length, slack=0.0):
    top = found.flatten(-2).amax(-1)
    assert (torch.where(truth.flatten(-2).amax(-1) == -INF, top == -INF, top == 0.0)).all()
    value = found.double() + offset[..., None, None]
    assert torch.equal(value == -INF, truth == -INF)
    possible = truth > -INF
    depth = slack + (truth.amax((-2, -1), keepdim=True) - truth)[possible].numpy()
    bound = value_bound(truth[possible].numpy(), length, truth.shape[-1], depth, dtype=torch.float32, k=TENSOR_CORES)
    allowed = torch.from_numpy(bound)
    error = (value - truth)[possible].abs()
    assert (error <= allowed).all(), f"{(error / allowed).max():.3g} times the bound"


@pytest.mark.parametrize("log_params, with_x", [(False, True), (True, False)])
@pytest.mark.parametrize("length, c", [(1, 1), (2, 5), (5, 16), (3, 17), (2, 32), (2, 64), (2, 70)])
def test_segments(device, length, c, with_x, log_params):
    generator = torch.Generator().manual_seed(c)
    bulk = torch.rand(length, 2, 1, c, c, generator=generator)
    bulk = (bulk * (torch.rand(length, 2, 1, c, c, generator=generator) < 0.7)).to(device)
    x = 10 * torch.randn(length, 2, 1, c, generator=generator).to(device) if with_x else None
    bulk = bulk.log() if log_params else bulk
    out, offset = segments.segment_product(bulk, x, log_params=log_params)
    assert_product(out.cpu(), offset.cpu(), product_of(bulk, x, log_params).cpu(), length)


def test_segments_of_a_stack(device):
    """Views of one stack, into given memory; 1e4 in one matrix, 200 nats of misalignment, an impossible product."""
    stack = torch.randn(3, 7, 8, 8, generator=torch.Generator().manual_seed(0))
    slope = -200 * torch.linspace(0, 1, 8)
    stack[1, 2] += slope
    stack[1, 3] += slope.flip(0)[:, None]
    stack[0, 1] += 1e4
    stack[2, 4] = -INF
    stack = stack.to(device)
    bulk = stack[:, :6].unflatten(1, (2, 3)).movedim(2, 0)  # (3, 3, 2, 8, 8)
    out, offset = torch.full((3, 2, 8, 8), NAN, device=device), torch.full((3, 2), NAN, device=device, dtype=F64)
    given = segments.segment_product(bulk, log_params=True, out=out, offset=offset)
    assert given[0] is out and given[1] is offset
    assert_product(out.cpu(), offset.cpu(), product_of(bulk.cpu(), None, True), 3, slack=200.0)
    assert (out[2, 1] == -INF).all() and offset[2, 1] == 0


def test_segments_of_wide_matrices_and_doubles(device):
    bulk = torch.randn(2, 1, 2, 20, 20, dtype=F64, generator=torch.Generator().manual_seed(0)).to(device)
    out, offset = segments.segment_product(bulk, log_params=True)
    assert out.dtype == F64
    truth = product_of(bulk, None, True)
    assert (out + offset[..., None, None] - truth).abs().max() < 1e-13
