"""`logchain.matrix_product` and `prefix_products` keep the contract: values and gradients of any stack."""

import itertools
import re

import pytest
import torch

import logchain
from logchain import reference
from logchain.kernels.plain import product as arithmetic
from tests.contract import assert_values, poisoned_memory, value_bound
from tests.stacks import FAMILIES, assert_contract, assert_nothing_is_lost, depths, draw

F32, F64 = torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")

# every number of factors, and every number of states, in both dtypes
SIZES = [((1, 2, 5)[s % 3], s, F32) for s in range(1, 10)] + [((1, 2, 5)[(s + 1) % 3], s, F64) for s in range(1, 10)]


@pytest.mark.parametrize(("c", "s", "dtype"), SIZES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_keeps_the_contract(name, c, s, dtype):
    assert_contract(draw(name, s, c, dtype, seed=s), logchain.matrix_product, logchain.prefix_products)


@pytest.mark.parametrize("name", ["dense", "misaligned", "left_to_right", "offsets", "dead"])
@pytest.mark.parametrize(("s", "c"), [(17, 33), (33, 17)], ids=str)
def test_larger_sizes_against_the_reference(name, s, c):
    stack = draw(name, s, c)
    truth = reference.prefix_products(stack)
    below = 0.0 if name == "dense" else depths(stack.double().numpy())
    bound = value_bound(truth, s, c, below, dtype=F32)
    assert_values(logchain.matrix_product(stack), truth[:, -1], bound[:, -1])
    assert_values(logchain.prefix_products(stack), truth, bound)


@pytest.mark.parametrize("other", [0.0, 10.0, 40.0, 60.0])
@pytest.mark.parametrize("near", [10.0, 60.0, 80.0, 100.0])
@pytest.mark.parametrize("far", [90.0, 110.0, 116.0, 125.0, 150.0])
def test_what_linear_numbers_lose_is_found(far, near, other):
    assert_nothing_is_lost(far, near, other)


@pytest.mark.parametrize("held", [1, 40, 2**18])
@pytest.mark.parametrize("name", ["dense", "sharp", "mixed", "left_to_right"])
def test_blocks_of_any_size_give_the_same(name, held, monkeypatch):
    stack = draw(name, 13, 4)
    expected = gradients(stack)
    monkeypatch.setattr(arithmetic, "_HELD", held)
    for found, truth in zip(gradients(stack), expected, strict=True):
        torch.testing.assert_close(found, truth, rtol=2.0**-21, atol=2e-5)


def gradients(stack):
    """Both functions' values and gradients."""
    found = []
    for function in (logchain.matrix_product, logchain.prefix_products):
        leaf = stack.detach().requires_grad_()
        out = function(leaf)
        out.backward(torch.arange(out.numel(), dtype=out.dtype).sin().view(out.shape))
        found += [out.detach(), leaf.grad]
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["dense", "misaligned", "left_to_right", "dead"])
def test_half_types_are_exact_on_their_rounded_inputs(name, dtype):
    stack = draw(name, 7, 5, dtype)
    for found, expected in zip(gradients(stack), gradients(stack.float()), strict=True):
        assert found.dtype in (F32, dtype)
        # to a few roundings: they are not taken out of memory by the same code
        torch.testing.assert_close(found, expected.to(found.dtype), rtol=4 * torch.finfo(found.dtype).eps, atol=0)


@pytest.mark.parametrize("name", ["dense", "misaligned", "left_to_right", "mixed"])
@pytest.mark.parametrize("s", [1, 2, 7, 12])
def test_strange_strides(name, s):
    stack = draw(name, s, 5)
    expected = gradients(stack)
    wide = torch.full((2, 2 * s, 7, 10), NAN)
    wide[:, ::2, 1:6, ::2] = stack
    swapped = stack.transpose(0, 1).contiguous().transpose(0, 1)
    for view in (stack.mT.contiguous().mT, wide[:, ::2, 1:6, ::2], swapped, stack.permute(3, 1, 0, 2).contiguous()):
        view = view if view.shape == stack.shape else view.permute(2, 1, 3, 0)
        for found, value in zip(gradients(view), expected, strict=True):
            torch.testing.assert_close(found, value, rtol=2.0**-21, atol=2e-5)


@pytest.mark.parametrize("name", ["dense", "misaligned", "left_to_right"])
def test_batch_axes(name):
    stack = torch.stack([draw(name, 6, 3, seed=seed) for seed in range(3)])  # (3, 2, 6, 3, 3)
    single = [logchain.matrix_product(part) for part in stack.flatten(0, 1)]
    torch.testing.assert_close(logchain.matrix_product(stack).flatten(0, 1), torch.stack(single), rtol=0, atol=2e-5)
    permuted = logchain.matrix_product(stack.transpose(0, 1)).transpose(0, 1)
    torch.testing.assert_close(permuted, logchain.matrix_product(stack), rtol=0, atol=2e-5)
    assert logchain.matrix_product(stack[0, 0]).shape == (3, 3)
    assert logchain.prefix_products(stack[0, 0]).shape == (6, 3, 3)


@pytest.mark.parametrize("function", [logchain.matrix_product, logchain.prefix_products])
def test_an_expanded_stack_gets_a_gradient_of_its_own_shape(function):
    one = draw("dense", 5, 3)[:1]
    leaf, repeated = one.clone().requires_grad_(), one.repeat(4, 1, 1, 1).requires_grad_()
    out, expected = function(leaf.expand(4, 5, 3, 3)), function(repeated)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    out.backward(weights)
    expected.backward(weights)
    torch.testing.assert_close(leaf.grad, repeated.grad.sum(0, keepdim=True), rtol=0, atol=1e-5)
    homogeneous = one[:, :1].clone().requires_grad_()
    function(homogeneous.expand(1, 5, 3, 3)).sum().backward()
    assert homogeneous.grad.shape == (1, 1, 3, 3)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("s", [1, 7])
def test_poisoned_memory(name, s):
    stack = draw(name, s, 5)
    expected = gradients(stack)
    with poisoned_memory():
        for found, value in zip(gradients(stack), expected, strict=True):
            torch.testing.assert_close(found, value, rtol=0, atol=0)


def test_inputs_stay_as_they_are():
    for name in FAMILIES:
        stack = draw(name, 6, 4)
        before = stack.clone()
        gradients(stack)
        assert torch.equal(stack, before)


def test_nan_stays_in_its_sequence():
    for name in ("dense", "left_to_right"):
        stack = draw(name, 6, 4)
        clean = gradients(stack)
        stack[1, 3, 0, 0] = NAN
        for found, expected in zip(gradients(stack), clean, strict=True):
            torch.testing.assert_close(found[0], expected[0], rtol=2.0**-22, atol=1e-5)
        for function in (logchain.matrix_product, logchain.prefix_products):
            out = function(stack)
            assert out[1].isnan().any() and not out[0].isnan().any()
    assert logchain.prefix_products(stack)[1, :3].isnan().sum() == 0


def test_posteriors_are_good_on_a_large_scale():
    """Entries of 1e4 in hundreds of factors: the result is in the millions, gradients are posteriors all the same."""
    stack = draw("dense", 300, 4).double()
    expected = stack.clone().requires_grad_()
    logchain.matrix_product(expected)[..., 0, 0].sum().backward()
    leaf = (stack.float() + 1e4).requires_grad_()
    rounded = leaf.detach().double().requires_grad_()
    out = logchain.matrix_product(leaf)
    assert (out > 2.9e6).all()
    out[..., 0, 0].sum().backward()
    logchain.matrix_product(rounded)[..., 0, 0].sum().backward()
    torch.testing.assert_close(leaf.grad.double(), rounded.grad, rtol=0, atol=1e-5)
    torch.testing.assert_close(leaf.grad.sum((-2, -1)), torch.ones(2, 300), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 3, 2, 2), (2, 3, 0, 0), (0, 1, 0, 0)], ids=str)
def test_empty_sizes(shape):
    leaf = torch.zeros(shape, requires_grad=True)
    for function, expected in ((logchain.matrix_product, shape[:1] + shape[2:]), (logchain.prefix_products, shape)):
        out = function(leaf)
        assert out.shape == expected
        (grad,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
        assert grad.shape == shape
        torch.autograd.grad(grad.sum(), leaf, allow_unused=True)
    assert logchain.matrix_product(torch.zeros(shape), inplace=True).shape == shape[:1] + shape[2:]


def test_the_count_of_what_was_computed_again():
    with logchain.rescues() as seen:
        logchain.matrix_product(draw("dense", 33, 5))
        logchain.matrix_product(draw("offsets", 33, 5))
        logchain.matrix_product(draw("left_to_right", 2, 5) * 0.0)
    assert seen.outputs == 0
    with logchain.rescues() as seen:
        logchain.matrix_product(torch.tensor([[[0.0, -200.0]] * 2, [[-200.0] * 2, [0.0] * 2]]))
    assert seen.outputs == 4


@pytest.mark.parametrize(
    ("stack", "options", "error", "message"),
    [
        ([[1.0]], {}, TypeError, "stack: expected a torch.Tensor, got list"),
        (
            torch.ones(2, 3, 3, dtype=torch.int64),
            {},
            TypeError,
            "stack: expected float32, float64, bfloat16 or float16",
        ),
        (torch.ones(3, 3), {}, ValueError, "stack: expected at least 3 axes, got shape [3, 3]"),
        (
            torch.ones(4, 3, 2),
            {},
            ValueError,
            "stack: expected at least one square matrix [..., s, c, c], got [4, 3, 2]",
        ),
        (torch.ones(2, 0, 3, 3), {}, ValueError, "stack: expected at least one square matrix [..., s, c, c], got"),
        (torch.ones(2, 3, 3), {"inplace": 1}, TypeError, "inplace: expected True or False, got 1"),
        (
            torch.ones(2, 3, 3).requires_grad_(),
            {"inplace": True},
            ValueError,
            "inplace: expected a stack that needs no",
        ),
        (
            torch.ones(1, 3, 3).expand(2, 3, 3),
            {"inplace": True},
            ValueError,
            "inplace: expected a stack of its own memory",
        ),
        (
            torch.ones(2, 3, 3).half(),
            {"inplace": True},
            ValueError,
            "inplace: expected a float32 or float64 stack, got",
        ),
        (
            torch.ones(4, 5, 2, 3, 3).transpose(0, 1),
            {"inplace": True},
            ValueError,
            "inplace: expected batch axes that can be joined without a copy",
        ),
    ],
)
def test_wrong_arguments_are_refused(stack, options, error, message):
    with pytest.raises(error, match="^" + re.escape(message)):
        logchain.matrix_product(stack, **options)
    if not options:
        with pytest.raises(error, match="^" + re.escape(message)):
            logchain.prefix_products(stack)


@pytest.mark.parametrize(
    ("function", "weight"),
    [
        *itertools.product((logchain.matrix_product, logchain.prefix_products), (1e-30, 1e14, 1e30)),
        (logchain.matrix_product, 3e38),  # that of two prefixes would be infinite
    ],
)
def test_gradients_scale_with_the_weight(function, weight):
    """A large weight over a small sum is no overflow."""
    stack = torch.tensor([[[0.0, -60.0], [0.0, -60.0]], [[-60.0, -60.0], [0.0, 0.0]]], requires_grad=True)
    one, many = (torch.autograd.grad(function(stack).sum(), stack, torch.tensor(w))[0] for w in (1.0, weight))
    assert one.isfinite().all()
    torch.testing.assert_close(many / weight, one, rtol=1e-6, atol=1e-6)
