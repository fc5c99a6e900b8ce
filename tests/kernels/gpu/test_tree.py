"""`logchain.matrix_product` and `prefix_products` on the Triton kernels: on a device, or in the interpreter."""

import functools

import pytest
import torch

import logchain
from logchain import reference
from tests.contract import TENSOR_CORES, assert_values, poisoned_memory, value_bound
from tests.stacks import BOTH, FAMILIES, depths, draw
from tests.stacks import assert_contract as assert_stack

F32, F64 = torch.float32, torch.float64

assert_contract = functools.partial(assert_stack, k=TENSOR_CORES)


@pytest.fixture(params=["segments", "levels"])
def schedule(request, monkeypatch) -> str:
    """Small matrices are multiplied by segments or, as larger ones are, level by level."""
    from logchain.kernels.gpu import product as tree

    if request.param == "levels":
        monkeypatch.setattr(tree, "fits", lambda *_: False)
    return request.param


@pytest.mark.parametrize("name", FAMILIES)
def test_values(name, kernels, schedule):
    assert_contract(draw(name, 5, 5), logchain.matrix_product, device=kernels, gradient=False)


@pytest.mark.parametrize("s", [1, 2, 4, 11])
def test_any_number_of_factors(s, kernels, schedule):
    assert_contract(draw("mixed", s, 3), logchain.matrix_product, device=kernels, gradient=False)


@pytest.fixture
def many_tiles(kernels, monkeypatch) -> str:
    """Matrices of a few states are too large for segments, and for one tile of a product."""
    from logchain.kernels.gpu import log_matmul
    from logchain.kernels.gpu import product as tree
    from logchain.kernels.gpu.log_matmul_tiles import Tiles

    monkeypatch.setattr(tree, "fits", lambda *_: False)
    monkeypatch.setattr(log_matmul, "tiles", lambda *_, **__: Tiles(16, 16, 16, 1, 2))
    return kernels


@pytest.mark.parametrize("name", FAMILIES)
def test_values_of_many_tiles(name, many_tiles):
    assert_contract(draw(name, 4, 17)[-1:], *BOTH, device=many_tiles, gradient=False)


@pytest.mark.parametrize("name", ["dense", "misaligned", "left_to_right"])
def test_gradients_of_many_tiles(name, many_tiles):
    assert_contract(draw(name, 3, 17)[-1:], *BOTH, device=many_tiles)


@pytest.mark.parametrize("name", ["misaligned", "left_to_right", "offsets"])
def test_maxima_that_are_handed_on_are_those_that_products_find(name, many_tiles, monkeypatch):
    from logchain.kernels.gpu import product as tree

    stack = draw(name, 4, 17)[-1:].to(many_tiles)

    def found():
        return [function(stack) for function in BOTH] + [logchain.matrix_product(stack.clone(), inplace=True)]

    handed_on = found()
    monkeypatch.setattr(tree.Arithmetic, "lines", lambda *_: (1, 1))
    for value, expected in zip(handed_on, found(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=0)


@pytest.mark.parametrize("block", [16, 32], ids=["several tiles", "one tile"])
@pytest.mark.parametrize("function", BOTH)
def test_no_operand_is_read_for_maxima_alone(function, block, many_tiles, monkeypatch):
    """But the leaves, once."""
    from logchain.kernels.gpu import launch, line_maxima, log_matmul
    from logchain.kernels.gpu.log_matmul_tiles import Tiles

    launched, run = [], launch.run

    def watched(kernel, *arguments, **options):
        launched.append((kernel, options.get("MAXIMA")))
        run(kernel, *arguments, **options)

    monkeypatch.setattr(launch, "run", watched)
    monkeypatch.setattr(log_matmul, "tiles", lambda *_, **__: Tiles(block, block, 16, 1, 2))
    function(draw("dense", 5, 17).to(many_tiles))
    assert sum(kernel is line_maxima.maxima_kernel for kernel, _ in launched) == 1
    assert {how for kernel, how in launched if kernel is log_matmul.product_kernel} == {log_matmul._MEMORY.value}


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients(name, kernels):
    assert_contract(draw(name, 4, 3)[-1:], logchain.matrix_product, device=kernels)


@pytest.mark.parametrize("name", ["dense", "misaligned", "left_to_right", "offsets", "dead"])
@pytest.mark.parametrize("s", [1, 5])
def test_prefixes(name, s, kernels):
    assert_contract(draw(name, s, 3)[-1:], logchain.prefix_products, device=kernels)


@pytest.mark.parametrize(
    "c", [1, 16, 33, pytest.param(64, marks=pytest.mark.slow), pytest.param(70, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ["dense", "left_to_right"])
def test_sizes(name, c, kernels):
    stack = draw(name, 3, c)[:1]
    truth = reference.prefix_products(stack)
    bound = value_bound(truth, 3, c, depths(stack.double().numpy()), dtype=F32, k=TENSOR_CORES)
    assert_values(logchain.matrix_product(stack.to(kernels)), truth[:, -1], bound[:, -1])
    if c < 64:
        assert_values(logchain.prefix_products(stack.to(kernels)), truth, bound)


@pytest.mark.parametrize("name", ["misaligned", "offsets"])
@pytest.mark.parametrize("function", [logchain.matrix_product, logchain.prefix_products])
def test_float64(name, function, kernels):
    assert_contract(draw(name, 3, 3, F64)[-1:], function, device=kernels)


@pytest.mark.parametrize("name", ["misaligned", "offsets"])
def test_float64_values(name, kernels, schedule):
    assert_contract(draw(name, 9, 3, F64), logchain.matrix_product, device=kernels, gradient=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types(dtype, kernels, schedule):
    stack = draw("misaligned", 4, 3, dtype)
    assert_contract(stack, logchain.matrix_product, device=kernels, gradient=schedule == "levels")


@pytest.mark.parametrize("name", ["dense", "misaligned", "dead"])
@pytest.mark.parametrize("s", [2, 5])
def test_in_place_is_the_same(name, s, kernels, schedule):
    """Over the stack nothing else is in the way either: transposed matrices, every other set."""
    stack = draw(name, s, 4).to(kernels)
    expected = logchain.matrix_product(stack)
    for own in (stack.clone(), stack.mT.clone().mT, torch.stack([stack, stack], 2)[:, :, 1]):
        assert torch.equal(logchain.matrix_product(own, inplace=True), expected)


def gradients(stack, function=logchain.matrix_product):
    leaf = stack.detach().requires_grad_()
    out = function(leaf)
    out.backward(torch.arange(out.numel(), dtype=out.dtype, device=out.device).sin().view(out.shape))
    return out.detach(), leaf.grad


def test_strange_strides(kernels, schedule):
    stack = draw("mixed", 5, 3).to(kernels)
    expected = logchain.matrix_product(stack)
    wide = torch.full((2, 10, 5, 6), float("nan"), device=kernels)
    wide[:, ::2, 1:4, ::2] = stack
    for view in (stack.mT.contiguous().mT, wide[:, ::2, 1:4, ::2]):
        torch.testing.assert_close(logchain.matrix_product(view), expected, rtol=0, atol=0)
    one = stack[:1, :1].expand(2, 5, 3, 3)
    torch.testing.assert_close(logchain.matrix_product(one), logchain.matrix_product(one.contiguous()), rtol=0, atol=0)


def test_gradients_of_strange_strides(kernels):
    stack = draw("mixed", 3, 3).to(kernels)
    for found, value in zip(gradients(stack.mT.contiguous().mT), gradients(stack), strict=True):
        torch.testing.assert_close(found, value, rtol=0, atol=0)


@pytest.mark.parametrize("function", [logchain.matrix_product, logchain.prefix_products])
def test_poisoned_memory(function, kernels):
    stack = draw("dead", 3, 3).to(kernels)
    expected = gradients(stack, function)
    with poisoned_memory():
        for found, value in zip(gradients(stack, function), expected, strict=True):
            torch.testing.assert_close(found, value, rtol=0, atol=0)


def test_nan_stays_in_its_sequence(kernels, schedule):
    stack = draw("dead", 5, 3).flip(0).to(kernels)
    clean = logchain.matrix_product(stack)
    stack[1, 3, 0, 0] = float("nan")
    found = logchain.matrix_product(stack)
    torch.testing.assert_close(found[0], clean[0], rtol=0, atol=0)
    assert found[1].isnan().any()


@pytest.mark.parametrize("function", [logchain.matrix_product, logchain.prefix_products])
def test_nan_stays_in_the_gradient_of_its_sequence(function, kernels):
    stack = draw("dense", 3, 3).to(kernels)
    clean = gradients(stack, function)
    stack[1, 1, 0, 0] = float("nan")
    found = gradients(stack, function)
    for value, expected in zip(found, clean, strict=True):
        torch.testing.assert_close(value[0], expected[0], rtol=0, atol=0)
    assert found[0][1].isnan().any() and found[1][1].isnan().any()


def test_tensor_float_32_where_allowed(kernels, schedule):
    stack = draw("dense", 5, 20)
    truth = torch.from_numpy(reference.matrix_product(stack))
    torch.set_float32_matmul_precision("high")
    try:
        found = logchain.matrix_product(stack.to(kernels)).cpu().double()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert (found - truth).abs().max() <= 4 * 2.0**-10


def test_the_count_of_what_was_computed_again(kernels, schedule):
    with logchain.rescues() as seen:
        logchain.matrix_product(draw("dense", 5, 3).to(kernels))
    assert seen.outputs == 0
    with logchain.rescues() as seen:
        logchain.matrix_product(torch.tensor([[[0.0, -200.0]] * 2, [[-200.0] * 2, [0.0] * 2]], device=kernels))
    assert seen.outputs > 0


def test_many_levels_of_segments(kernels, monkeypatch):
    """As many programs as two processors have: segments of segments."""
    from logchain.kernels.gpu import product as tree

    monkeypatch.setattr(tree, "resident", lambda *_: 2)
    for s in (9, 15):
        assert_contract(draw("offsets", s, 2)[:1], logchain.matrix_product, device=kernels, gradient=False)


@pytest.fixture
def cuda(kernels) -> None:
    if kernels == "cpu":
        pytest.skip("needs a device")


@pytest.mark.parametrize("c", [16, 100])
@pytest.mark.parametrize("inplace", [False, True])
def test_captured_in_a_graph(c, inplace, cuda):
    stack = torch.randn(3, 37, c, c, device="cuda")
    expected = logchain.matrix_product(stack)
    own = stack.clone()
    logchain.matrix_product(own, inplace=inplace)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = logchain.matrix_product(own, inplace=inplace)
    own.copy_(stack)
    graph.replay()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("c", [64, 200])
def test_memory_on_a_device(c, cuda):
    stack = torch.randn(4, 1000, c, c, device="cuda")
    size = 4 * stack.numel()
    for inplace, allowed in ((False, 0.6 * size), (True, 2**26)):
        logchain.matrix_product(stack.clone(), inplace=inplace)
        own = stack.clone()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        logchain.matrix_product(own, inplace=inplace)
        assert torch.cuda.max_memory_allocated() - before <= allowed
