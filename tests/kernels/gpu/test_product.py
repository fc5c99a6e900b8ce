"""`logchain.matrix_product` and `prefix_products` by Triton: tiles, memory and counts; cf. `test_matrix_product`."""

import pytest
import torch

import logchain
from tests.contract import TENSOR_CORES
from tests.stacks import BOTH, assert_contract, draw
from tests.test_matrix_product import gradients


@pytest.mark.parametrize(("name", "function"), [("left_to_right", BOTH[0]), ("misaligned", BOTH[1])])
def test_several_tiles_keep_contract(name, function, kernels, small_tiles):
    assert_contract(draw(name, 2, 17)[-1:], function, device=kernels, k=TENSOR_CORES)


def test_product_in_place_by_temporaries_is_the_same(kernels, small_tiles, monkeypatch):
    monkeypatch.setattr("logchain.kernels.gpu.product._ENTRIES", 1)
    stack = draw("dense", 4, 17).to(kernels)
    assert torch.equal(logchain.matrix_product(stack.clone(), inplace=True), logchain.matrix_product(stack))


def test_nan_stays_in_its_sequence(kernels):
    stack = draw("dense", 3, 3).to(kernels)
    expected = gradients(stack)
    stack[1, 1, 0, 0] = torch.nan
    for clean, dirty in zip(expected, gradients(stack), strict=True):
        assert torch.equal(dirty[0], clean[0]) and dirty[1].isnan().any()


def test_entries_that_underflow_are_counted(kernels):
    for stack, count in (
        (draw("dense", 5, 3), 0),
        (draw("dead", 5, 3), 0),
        (torch.tensor([[[0.0, -200.0]] * 2, [[-200.0, -400.0], [0.0, -200.0]], [[-200.0] * 2, [0.0] * 2]]), 8),
    ):
        for function in BOTH:
            with logchain.rescues() as seen:
                function(stack.to(kernels))
            assert seen.outputs == count
