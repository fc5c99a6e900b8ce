"""Products of a stack keep the memory contract, and are differentiated twice, compiled and mapped."""

import math

import pytest
import torch

import logchain
from logchain.memory import peak_bytes
from tests.stacks import BOTH, FAMILIES, draw
from tests.stacks import room as room

F32, F64 = torch.float32, torch.float64
INF = float("inf")
OPS = torch.ops.logchain


CASES = [(1, F32), (2, F64), (8, F64), (13, F32)]
CASES = [(name, *CASES[i % 4]) for i, name in enumerate(FAMILIES)]


@pytest.mark.parametrize(("name", "s", "dtype"), CASES, ids=str)
def test_in_place_is_the_same(name, s, dtype, room):
    stack = draw(name, s, 4, dtype)
    expected = logchain.matrix_product(stack)
    for own in (stack.clone(), stack.mT.clone().mT, torch.stack([stack, stack], 2)[:, :, 1]):
        torch.testing.assert_close(logchain.matrix_product(own, inplace=True), expected, rtol=0, atol=0)


# one stack is 8 MB
SHAPE = 4, 512, 32, 32
STACK = 4 * math.prod(SHAPE)
WORKSPACE = 10 * 4 * 2**17


@pytest.mark.parametrize("lossy", [False, True])
def test_memory_of_the_product(lossy, room):
    stack = torch.randn(SHAPE)
    stack[1] *= 60.0 if lossy else 1.0
    extra = STACK // 2 + lossy * STACK // 4
    assert peak_bytes(lambda: [logchain.matrix_product(stack)]) <= extra + WORKSPACE
    assert peak_bytes(lambda: [logchain.matrix_product(stack.clone(), inplace=True)]) <= STACK + WORKSPACE


@pytest.mark.parametrize(("function", "stacks"), [(logchain.matrix_product, 1), (logchain.prefix_products, 2)])
def test_memory_of_the_gradient(function, stacks, room):
    leaf = torch.randn(SHAPE, requires_grad=True)
    assert stacks == 1 or peak_bytes(lambda: [function(leaf.detach())]) <= WORKSPACE
    out = function(leaf)
    weights = torch.ones_like(out)
    assert peak_bytes(lambda: torch.autograd.grad(out, leaf, weights)) <= stacks * STACK + WORKSPACE


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize(
    ("name", "s", "c"),
    [("dense", 1, 3), ("misaligned", 5, 2), ("abyss", 3, 2), ("sparse", 3, 2), ("dead", 3, 2), ("mixed", 3, 2)],
)
def test_finite_differences(function, name, s, c):
    stack = draw(name, s, c, F64, seed=3)[-1:]
    hard, possible = stack.isneginf(), function(stack).isfinite()

    def value(varied):
        return function(torch.where(hard, -INF, varied))[possible]

    varied = torch.where(hard, 0.0, stack).requires_grad_()
    if possible.any():
        assert torch.autograd.gradcheck(value, varied)
        assert torch.autograd.gradgradcheck(value, varied, fast_mode=True)


@pytest.mark.parametrize("function", BOTH)
def test_a_third_derivative_is_refused(function):
    leaf = draw("dense", 3, 2, F64).requires_grad_()
    (first,) = torch.autograd.grad(function(leaf).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="at most two derivatives"):
        torch.autograd.grad(second.square().sum(), leaf)


@pytest.mark.parametrize(("s", "prefixes"), [(1, False), (5, True)])
def test_opcheck(s, prefixes):
    stack = draw("mixed", s, 3, F64).requires_grad_()
    torch.library.opcheck(OPS.log_products.default, (stack, prefixes))
    torch.library.opcheck(OPS.log_product_.default, (stack.detach(),))
    grad = torch.randn_like(OPS.log_products(stack.detach(), prefixes)).requires_grad_()
    # its derivative is taken by autograd itself, which a trace does not see: hence no AOT test
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(OPS.log_products_backward.default, (grad, stack, prefixes), test_utils=checks)


@pytest.mark.parametrize("function", BOTH)
def test_compiled_in_one_graph(function):
    torch._dynamo.reset()
    compiled = torch.compile(lambda stack: function(stack * 0.5) + 1, fullgraph=True, backend="aot_eager")
    results = []
    for call in (compiled, lambda stack: function(stack * 0.5) + 1):
        leaf = draw("dense", 5, 3).requires_grad_()
        out = call(leaf)
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaf)])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("function", BOTH)
def test_transforms(function):
    stack = draw("dense", 5, 3, F64)
    for axis in (0, 1):
        mapped = torch.vmap(function, in_dims=axis)(stack.movedim(0, axis))
        torch.testing.assert_close(mapped, function(stack), rtol=1e-14, atol=0)
    gradient = torch.func.grad(lambda stack: function(stack).sin().sum())
    (expected,) = torch.autograd.grad(function(stack.requires_grad_()).sin().sum(), stack)
    torch.testing.assert_close(gradient(stack.detach()), expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(torch.vmap(gradient)(stack.detach()), expected, rtol=0, atol=1e-14)


def test_autocast_does_not_reach_in():
    stack = draw("dense", 5, 3)
    expected = logchain.matrix_product(stack)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(logchain.matrix_product(stack), expected)
