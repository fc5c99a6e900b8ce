"""The Triton max-plus product is one rounded sum, and names the smallest k that gives it."""

import pytest
import torch

pytest.importorskip("triton")

from logchain.kernels.gpu import max_matmul
from tests.kernels.gpu.test_log_matmul import batch
from tests.test_matmul import CASES, F32, F64, INF, NAN, dense, sparse


def assert_maximum(a, b, out=None):
    dtype = F64 if F64 in (a.dtype, b.dtype) else F32
    terms = a.to(dtype).unsqueeze(-1) + b.to(dtype).unsqueeze(-3)  # (g, p, m, k, n)
    value, argmax = max_matmul.forward(a, b, out)
    assert value.dtype == dtype and argmax.dtype == torch.int32
    expected = terms.amax(-2)
    torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)
    hit = (terms == expected.unsqueeze(-2)) | terms.isnan()
    assert torch.equal(argmax.long(), hit.int().argmax(-2))  # the first of them
    return value


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((7, 5, 3), F64), ((1, 17, 1), torch.bfloat16), ((33, 20, 17), F32), ((70, 3, 5), F32)],
    ids=str,
)
@pytest.mark.parametrize("case", CASES)
def test_every_case(device, case, sizes, dtype):
    assert_maximum(*batch(case, (1, 2), sizes, dtype, device))


def test_the_smallest_of_equals(device):
    a, b = batch(dense, (1, 1), (18, 9, 20), F32, device)
    assert_maximum(a.round(), b.round())
    assert_maximum(torch.zeros_like(a), torch.zeros_like(b))
    assert_maximum(torch.full_like(a, -INF), b)


@pytest.mark.parametrize("sizes", [(2, 0, 3), (0, 2, 3)], ids=str)
def test_nothing_to_choose_from(device, sizes):
    m, k, n = sizes
    value, argmax = max_matmul.forward(torch.zeros(2, 1, m, k, device=device), torch.zeros(2, 1, k, n, device=device))
    assert value.shape == argmax.shape == (2, 1, m, n)
    assert (value == -INF).all() and (argmax == 0).all()


def test_nan_wins(device):
    a, b = batch(sparse, (1, 2), (7, 5, 3), F32, device)
    a[0, 0, 1, 2] = a[0, 0, 1, 4] = b[0, 1, 0, 2] = NAN
    value = assert_maximum(a, b)
    wrong = torch.zeros_like(value, dtype=torch.bool)
    wrong[0, 0, 1] = wrong[0, 1, :, 2] = True
    assert torch.equal(value.isnan(), wrong)


def test_strange_strides(device):
    a, b = batch(sparse, (2, 3), (7, 5, 9), F32, device)
    assert_maximum(a.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0), b.repeat_interleave(3, 3)[..., ::3])
    assert_maximum(a[:1, :, :1].expand(2, 3, 7, 5), b)
    out = a.new_full((9, 7, 3, 4), NAN)
    assert_maximum(a, b, out[..., ::2].permute(3, 2, 1, 0))
    assert out[..., 1::2].isnan().all()
