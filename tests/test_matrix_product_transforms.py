"""Products of a stack are differentiated twice, compiled and mapped."""

import pytest
import torch

import logchain
from tests.stacks import draw

F64 = torch.float64
INF = float("inf")


@pytest.mark.parametrize("function", [logchain.matrix_product, logchain.prefix_products])
@pytest.mark.parametrize(
    ("name", "s", "c"),
    [
        *((name, 3, 2) for name in ("dense", "misaligned", "abyss", "sparse", "dead", "mixed")),
        *((name, 2, 3) for name in ("dense", "sparse", "dead")),
        ("dense", 1, 3),
        ("misaligned", 5, 2),
        ("mixed", 5, 2),
    ],
)
def test_finite_differences(function, name, s, c):
    stack = draw(name, s, c, F64, seed=3)[-1:]
    hard = stack.isneginf()
    possible = function(stack).isfinite()

    def value(varied):
        return function(torch.where(hard, -INF, varied))[possible]

    varied = torch.where(hard, 0.0, stack).requires_grad_()
    if possible.any():
        assert torch.autograd.gradcheck(value, varied)
        assert torch.autograd.gradgradcheck(value, varied)


@pytest.mark.parametrize("function", [logchain.matrix_product, logchain.prefix_products])
def test_a_third_derivative_is_refused(function):
    leaf = draw("dense", 3, 2, F64).requires_grad_()
    (first,) = torch.autograd.grad(function(leaf).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="at most two derivatives"):
        torch.autograd.grad(second.square().sum(), leaf)


OPS = torch.ops.logchain


@pytest.mark.parametrize("prefixes", [False, True])
@pytest.mark.parametrize("s", [1, 5])
def test_opcheck(s, prefixes):
    stack = draw("mixed", s, 3, F64).requires_grad_()
    torch.library.opcheck(OPS.log_products.default, (stack, prefixes))
    torch.library.opcheck(OPS.log_product_.default, (stack.detach(),))
    grad = torch.randn_like(OPS.log_products(stack.detach(), prefixes)).requires_grad_()
    # its derivative is taken by autograd itself, which a trace does not see: hence no AOT test
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(OPS.log_products_backward.default, (grad, stack, prefixes), test_utils=checks)


@pytest.mark.parametrize("function", [logchain.matrix_product, logchain.prefix_products])
def test_compiled_in_one_graph(function):
    torch._dynamo.reset()
    compiled = torch.compile(lambda stack: function(stack * 0.5) + 1, fullgraph=True, backend="aot_eager")
    found, expected = [], []
    for kept, call in ((found, compiled), (expected, lambda stack: function(stack * 0.5) + 1)):
        leaf = draw("dense", 5, 3).requires_grad_()
        out = call(leaf)
        kept += [out, *torch.autograd.grad(out.sin().sum(), leaf)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("function", [logchain.matrix_product, logchain.prefix_products])
def test_transforms(function):
    stack = draw("dense", 5, 3, F64)
    for axis in (0, 1):
        found = torch.vmap(function, in_dims=axis)(stack.movedim(0, axis))
        torch.testing.assert_close(found, function(stack), rtol=1e-14, atol=0)
    gradient = torch.func.grad(lambda stack: function(stack).sin().sum())
    (expected,) = torch.autograd.grad(function(stack.requires_grad_()).sin().sum(), stack)
    torch.testing.assert_close(gradient(stack.detach()), expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(torch.vmap(gradient)(stack.detach()), expected, rtol=0, atol=1e-14)


def test_autocast_does_not_reach_in():
    stack = draw("dense", 5, 3)
    expected = logchain.matrix_product(stack)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(logchain.matrix_product(stack), expected)
