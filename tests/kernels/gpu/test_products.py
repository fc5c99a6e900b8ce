"""Products of matrices by Triton: strides, precision, tiles, counts; cf. `test_matmul`, `test_matrix_product`."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import logchain
from logchain import reference
from logchain.kernels.gpu import log_matmul, matmul
from tests import oracle, stacks
from tests.contract import TENSOR_CORES, assert_values, value_bound
from tests.families import F32, F64, INF
from tests.test_matmul import abyss, dense, depth, draw
from tests.test_matrix_product import gradients

pytestmark = pytest.mark.usefixtures("small_tiles")


def batch(case, shape, sizes, dtype, device):
    """Different operands for every batch index: (*shape, m, k) and (*shape, k, n)."""
    drawn = [draw(case, sizes, dtype, seed) for seed in range(int(np.prod(shape)))]
    return tuple(torch.stack(each).unflatten(0, shape).to(device) for each in zip(*drawn, strict=True))


def multiply(a, b):
    """The product without shifts."""
    zero = torch.zeros((), device=a.device)
    return log_matmul.forward(a, b, (zero.expand(a.shape[:-1]), zero.expand(b.mT.shape[:-1])))


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("side", [0, 1])
def test_strides_are_multiplied_in_64_bits(side, axis, device):
    """2 times 2^30 entries, in memory that is almost all untouched."""
    shape, strides = [1] * 4, [1] * 4
    shape[axis], strides[axis] = 3, 2**30
    far = torch.empty(2**31 + 1, dtype=torch.bfloat16, device=device).as_strided(shape, strides)
    operands = [far.copy_(torch.arange(3.0).view(shape)), torch.ones(1, 1, 1, 1, device=device)]
    operands[1] = operands[1].expand(*shape[:2], *((shape[3], 1) if side == 0 else (1, shape[2])))
    a, b = operands if side == 0 else operands[::-1]
    assert torch.equal(multiply(a, b), multiply(a.contiguous(), b))


@pytest.mark.parametrize("dtype", [F32, F64])
def test_entries_that_underflow_are_counted(dtype, device):
    def count(a, b):
        return matmul.forward(a, b)[1].item()

    a, b = batch(dense, (2,), (17, 5, 3), dtype, device)
    assert count(a, b) == 0
    assert count(*batch(abyss, (2,), (17, 5, 3), dtype, device)) == 2 * 17 * 3
    a[..., 0], b[..., 0, :] = 0.0, -INF  # a large entry without a partner
    a[..., 1:] -= 40.0
    assert count(a, b) == 0
    a[1, 7, 1:] -= 700.0
    assert count(a, b) == 3
    rows = torch.arange(20, device=device)
    band = torch.ones(20, 20, device=device).triu().tril(1).log()[None]
    assert count(band + 60.0 * rows[:, None], band - 3.0 * rows) == 0  # entries without a path


def test_tf32_rounds_each_factor_once_and_keeps_nan(device):
    a, b = batch(dense, (1,), (17, 20, 17), F32, device)
    broken = a.clone()
    broken[0, 1, 2] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(F32)  # as devices write it
    torch.set_float32_matmul_precision("high")
    try:
        out, nan = matmul.forward(a, b)[0], matmul.forward(broken, b)[0].isnan()
    finally:
        torch.set_float32_matmul_precision("highest")
    wide = [operand.double().cpu().numpy() for operand in (a, b)]
    expected = reference.matmul(*wide)
    bound = value_bound(expected, 2, 20, depth(*wide, expected), dtype=F32, k=TENSOR_CORES)
    assert out.dtype == F32
    assert_values(out, expected, bound + 2 * 2.0**-11)
    assert (out != matmul.forward(a, b)[0]).any()
    assert nan[0, 1].all() and nan.sum() == 17


@pytest.mark.parametrize("offset", [0.0077, 0.005, -0.0077])
def test_maxima_are_added_without_loss(offset, device):
    """Their sum has a coarser grain than what is left of it."""
    a = torch.tensor([2.0**17, 2.0**17 - 3], device=device).view(1, 1, 2)
    b = torch.tensor([offset - 3, offset], device=device).view(1, 2, 1)
    exact = oracle.matmul(a.double().cpu().numpy(), b.double().cpu().numpy())[0].item()
    assert abs(matmul.forward(a, b)[0].item() - exact) <= 2.0**-8 + 1e-5  # half of its own grain


@pytest.mark.parametrize(("name", "function"), [("left_to_right", stacks.BOTH[0]), ("misaligned", stacks.BOTH[1])])
def test_several_tiles_keep_contract(name, function, kernels):
    stacks.assert_contract(stacks.draw(name, 2, 17)[-1:], function, device=kernels)


def test_product_in_place_by_temporaries_is_the_same(kernels, monkeypatch):
    monkeypatch.setattr("logchain.kernels.gpu.product._ENTRIES", 1)
    stack = stacks.draw("dense", 4, 17).to(kernels)
    assert torch.equal(logchain.matrix_product(stack.clone(), inplace=True), logchain.matrix_product(stack))


def test_nan_stays_in_its_stack(kernels):
    stack = stacks.draw("dense", 3, 3).to(kernels)
    expected = gradients(stack)
    stack[1, 1, 0, 0] = torch.nan
    for clean, dirty in zip(expected, gradients(stack), strict=True):
        assert torch.equal(dirty[0], clean[0]) and dirty[1].isnan().any()


def test_entries_of_stacks_that_underflow_are_counted(kernels):
    for stack, count in (
        (stacks.draw("dense", 5, 3), 0),
        (stacks.draw("dead", 5, 3), 0),
        (torch.tensor([[[0.0, -200.0]] * 2, [[-200.0, -400.0], [0.0, -200.0]], [[-200.0] * 2, [0.0] * 2]]), 8),
    ):
        for function in stacks.BOTH:
            with logchain.rescues() as seen:
                function(stack.to(kernels))
            assert seen.outputs == count
