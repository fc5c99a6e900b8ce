"""`logchain.matrix_product` and `prefix_products`: the contract, memory, second derivatives, and transforms."""

import itertools
import math
import re

import numpy as np
import pytest
import torch

import logchain
from logchain import reference
from logchain.kernels.cpu import arguments
from logchain.kernels.cpu import product as loops
from logchain.kernels.plain import product as plain_product
from logchain.memory import peak_bytes
from tests.backends import on, parameter
from tests.contract import assert_values, gradient_bound, poisoned_memory, value_bound
from tests.layouts import STRANGE, relaid
from tests.stacks import BOTH, FAMILIES, Truth, assert_contract, draw, normal

F32, F64, HALF = torch.float32, torch.float64, torch.bfloat16
INF, NAN, LN2 = float("inf"), float("nan"), math.log(2)
OPS = torch.ops.logchain

# every number of factors, and numbers of states below and beyond a vector's, in both dtypes
SIZES = [((1, 2, 5, 9)[s % 4], s, (F32, F64)[s % 2]) for s in range(1, 9)] + [(3, 3, F32), (2, 5, F64), (17, 4, F32)]

# every family meets four of them in C, two by torch operations, and one by Triton
CASES = [("cpu", name, *SIZES[(4 * i + k) % len(SIZES)]) for i, name in enumerate(FAMILIES) for k in range(4)]
CASES += [
    (backend, name, *size)
    for name in FAMILIES
    for backend, size in (("plain", (2, 6, F32)), ("plain", (3, 3, F64)), ("gpu", (2, 5, F32)))
]
CASES += [("cpu", "misaligned", 5, 7, HALF), ("cpu", "dead", 5, 7, torch.float16), ("gpu", "misaligned", 2, 5, HALF)]
CASES += [("gpu", "offsets", 2, 5, F64), *(("gpu", "mixed", 2, s, F32) for s in (1, 2, 7))]


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def threads(request, monkeypatch):
    """Whether stacks are cut for threads, however few multiply-adds they are."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    monkeypatch.setattr(arguments, "WORTH_A_THREAD", 1)
    monkeypatch.setattr(loops, "_SHORTEST", 2)
    return request.param


def gradients(stack):
    results = []
    for function in BOTH:
        leaf = stack.detach().requires_grad_()
        out = function(leaf)
        out.backward(torch.arange(out.numel(), dtype=out.dtype).sin().view(out.shape))
        results += [out.detach(), leaf.grad]
    return results


def assert_near_reference(stack, below, product=None, prefixes=None):
    """Both functions, or the results that are given, keep the contract where terms lie `below` the largest."""
    *_, s, c, _ = stack.shape
    truth = reference.prefix_products(stack)
    # the reference rounds, too
    bound = value_bound(truth, s, c, below, dtype=stack.dtype) + (2.0**-48 if stack.dtype == F64 else 0.0)
    assert_values(logchain.prefix_products(stack) if prefixes is None else prefixes, truth, bound)
    assert_values(
        logchain.matrix_product(stack) if product is None else product, truth[..., -1, :, :], bound[..., -1, :, :]
    )


def lossy(stack):
    """The sets of which the loops lose something; of prefixes, whose rows are cut, the same."""
    c = stack.shape[-1]
    with logchain.rescues() as seen:
        for part in stack:
            logchain.matrix_product(part)
    assert seen.outputs % c**2 == 0
    return seen.outputs // c**2


@pytest.mark.parametrize(("backend", "name", "c", "s", "dtype"), [parameter(*row) for row in CASES])
def test_every_family_keeps_the_contract(backend, name, c, s, dtype, monkeypatch):
    monkeypatch.setattr(plain_product, "_HELD", 8)
    stack = draw(name, s, c, dtype, seed=s)[-1 if backend == "gpu" else 0 :]
    before = stack.clone()
    with on(backend) as device, poisoned_memory():
        assert_contract(stack, *BOTH, device=device)
    assert torch.equal(stack, before)


@pytest.mark.parametrize("name", ["dense", "mixed", "left_to_right", "dead"])
def test_threads_share_stacks(name, threads):
    assert_contract(draw(name, 7, 3), *BOTH)
    assert_contract(draw(name, 4, 9, F64)[-1:], *BOTH)


@pytest.mark.parametrize(
    ("s", "c", "g", "fall"),
    [(200, 3, 2, 30.0), (150, 8, 2, 0.0), (20, 20, 3, 30.0), (9, 64, 1, 30.0), (3, 150, 1, 0.0)],
)
def test_long_and_large_stacks(s, c, g, fall, threads):
    """Rows that fall further and further apart keep scales of their own: none is recomputed."""
    stack = normal(g, s, c, c) - fall * torch.arange(c)[:, None] / (c - 1)
    with logchain.rescues() as seen, poisoned_memory():
        value, gradient, prefixes, _ = gradients(stack)
    assert seen.outputs == 0
    assert_near_reference(stack, 0.0, value, prefixes)
    weights, leaf = torch.arange(value.numel(), dtype=F64).sin().view(value.shape), stack.double().requires_grad_()
    with logchain.kernels.use("plain", "cpu"):
        out = logchain.matrix_product(leaf)
        exact, sizes = (torch.autograd.grad(out, leaf, w, retain_graph=True)[0] for w in (weights, weights.abs()))
    bound = gradient_bound(sizes.numpy(), s, c, dtype=F32, terms=c * c)
    assert ((gradient.double() - exact).abs().numpy() <= bound).all()


DEPTHS = itertools.product([60.0, 90.0, 110.0, 125.0, 150.0], [10.0, 60.0, 80.0, 100.0], [0.0, 10.0, 40.0, 60.0])
# stacks, and how many nats terms that count lie below the largest
HARD = {
    "terms that are flushed beside smaller ones that are not": (
        [[[[0, 0], [-near, -far]], [[-other, -other], [0, 0]], [[0, 0]] * 2] for far, near, other in DEPTHS], 150.0, LN2
    ),
    **{
        f"a sum of 2^-{near} beside an exponential that is too small, in a later matrix": (
            [[[0, 0]] * 2, [[0, -150], [0, -near]], [[0, -150], [-INF, 0]]], near, LN2
        )
        for near in (60, 80, 90, 94, 96, 98, 107)
    },
    "one far path is the sum": (
        [[[-INF, -77], [-INF, 132]], [[197, -706], [-INF, -256]], [[-146, 277], [-343, -INF]], [[359, 70], [-INF] * 2]],
        1200.0, 1.0,
    ),
    "rows fall beyond all exponents": ([[[-1e6, -INF], [0, 0]]] * 20, 2e7, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", HARD)
def test_hard_stacks_keep_the_contract(name):
    stack, below, unit = HARD[name]
    for dtype in (F32, F64):
        stacks = unit * torch.tensor(stack, dtype=F64)
        assert_near_reference(stacks.to(dtype).view(-1, *stacks.shape[-3:]), below)


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
def test_what_no_path_reaches_may_grow(dtype):
    """State 0 loses 30 nats a step; the state that it cannot reach keeps all, without a trace in gradients."""
    stack = torch.tensor([[-30.0, -INF], [0.0, 0.0]], dtype=dtype).expand(1, 60, 2, 2)
    assert lossy(stack) == 0
    assert_contract(stack.clone(), *BOTH)


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
def test_a_search_for_false_verdicts(dtype):
    """Entries on all scales, some of them -inf: what is recomputed is right, and so is the rest."""
    generator, far = torch.Generator().manual_seed(0), 1.0 if dtype == F32 else 8.0
    for c, s in itertools.product((1, 2, 3, 9), (2, 3, 6)):
        shape = 60, s, c, c
        scale = torch.tensor([1.0, 10.0, 25.0, 40.0, 80.0])[torch.randint(5, (60, s, 1, 1), generator=generator)] * far
        stack = (torch.randn(shape, generator=generator) * scale).to(dtype)
        stack.masked_fill_(torch.rand(shape, generator=generator) < 0.3, -INF)
        below = 2 * abs(stack.masked_fill(stack == -INF, 0.0)).numpy().max((1, 2, 3))[:, None, None, None]
        assert_near_reference(stack, below)


STACKS = [(backend, *sizes) for backend in ("cpu", "plain") for sizes in (("dense", 1, 5), ("mixed", 4, 20))]
STACKS += [("cpu", "left_to_right", 7, 5), ("gpu", "mixed", 3, 3)]


@pytest.mark.parametrize(("backend", "name", "s", "c"), [parameter(*row) for row in STACKS], indirect=["backend"])
@pytest.mark.parametrize("how", [*STRANGE, "swapped"])
def test_strange_strides(name, s, c, how, backend):
    stack = draw(name, s, c)
    view = stack.transpose(0, 1).contiguous().transpose(0, 1) if how == "swapped" else relaid(stack, how)
    torch.testing.assert_close(gradients(view.to(backend)), gradients(stack.to(backend)), rtol=0, atol=0)


PLACES = [(1, F32), (2, F64), (8, F64), (13, F32)]
IN_PLACE = [("cpu", name, *PLACES[i % 4]) for i, name in enumerate(FAMILIES)]
IN_PLACE += [("plain", name, *PLACES[(i + 1) % 4]) for i, name in enumerate(FAMILIES)]
IN_PLACE += [("gpu", "misaligned", 5, F32), ("gpu", "dead", 2, F32)]


@pytest.mark.parametrize(("backend", "name", "s", "dtype"), [parameter(*row) for row in IN_PLACE], indirect=["backend"])
def test_product_in_place_is_the_same(name, s, dtype, backend):
    stack = draw(name, s, 4, dtype).to(backend)
    expected = logchain.matrix_product(stack)
    for over in (stack.clone(), stack.mT.clone().mT, torch.stack([stack, stack], 2)[:, :, 1]):
        torch.testing.assert_close(logchain.matrix_product(over, inplace=True), expected, rtol=0, atol=0)


def test_batch_axes(backend):
    stack = torch.stack([draw("mixed", 6, 3, seed=seed) for seed in range(3)])  # (3, 2, 6, 3, 3)
    for function in BOTH:
        single = torch.stack([function(part) for part in stack.flatten(0, 1)])
        torch.testing.assert_close(function(stack).flatten(0, 1), single, rtol=0, atol=2e-5)
        permuted = function(stack.transpose(0, 1)).transpose(0, 1)
        torch.testing.assert_close(permuted, function(stack), rtol=0, atol=2e-5)


@pytest.mark.parametrize("function", BOTH)
def test_an_expanded_stack_gets_a_gradient_of_its_shape(function, backend):
    one = draw("dense", 5, 3)[:1]
    for leaf in (one, one[:, :1]):
        leaf, own = leaf.clone().requires_grad_(), leaf.expand(4, 5, 3, 3).clone().requires_grad_()
        out, expected = function(leaf.expand(4, 5, 3, 3)), function(own)
        torch.testing.assert_close(out, expected, rtol=2.0**-22, atol=0)
        out.cos().sum().backward()
        expected.cos().sum().backward()
        torch.testing.assert_close(leaf.grad, own.grad.sum_to_size(leaf.shape), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("value", "inplace"), [("far", False), ("far", True), ("row", True), (INF, False), (NAN, True), (-NAN, False)]
)
def test_one_stack_alone_is_recomputed(value, inplace, threads):
    """What is wrong with one stack, or too far apart in it, leaves no trace in the others."""
    stack = normal(5, 6, 3, 3)
    clean = gradients(stack)
    if value == "far":
        stack[1, :2] = 0.0
        stack[1, 0, :, 1:] = stack[1, 1, 0, :] = -200.0
    else:
        stack[1, 3, 0] = -INF if value == "row" else value
    others, dirty = [0, 2, 3, 4], gradients(stack)
    assert lossy(stack) == (value != "row")
    for found, expected in zip(dirty, clean, strict=True):
        assert torch.equal(found[others], expected[others])
    own = logchain.matrix_product(stack.clone(), inplace=True) if inplace else dirty[0]
    torch.testing.assert_close(own, dirty[0], rtol=0, atol=0, equal_nan=True)
    if value in ("far", "row"):
        truth = reference.prefix_products(stack)
        assert_values(dirty[2], truth, value_bound(truth, 6, 3, 200.0, dtype=F32))
        uses = np.zeros((6, 3, 3))
        uses[-1] = torch.arange(45.0).view(5, 3, 3)[1].sin().numpy()
        assert (abs(dirty[1][1].numpy() - Truth(stack[1].double().numpy()).uses(uses)) <= 2e-5).all()
    elif np.isnan(value):
        assert dirty[0][1].isnan().any() and dirty[2][1, 3:].isnan().any()
        torch.testing.assert_close(dirty[2][1, :3], clean[2][1, :3], rtol=2.0**-21, atol=2e-5)


@pytest.mark.parametrize("c", [1, 3, 20])
@pytest.mark.parametrize("place", range(5))
def test_nan_in_any_matrix_reaches_results(place, c):
    stack = torch.zeros(1, 5, c, c)
    stack[0, place, 0, c // 2] = NAN
    product, gradient, prefixes, others = gradients(stack)
    assert product.isnan().any() and gradient.isnan().any() and others.isnan().any()
    assert prefixes.isnan().any((0, 2, 3)).tolist() == [i >= place for i in range(5)]


@pytest.mark.parametrize("backend", [parameter(name) for name in ("cpu", "plain", "gpu")], indirect=True)
def test_float64_keeps_what_sums_of_offsets_lose(threads, backend):
    steps = torch.tensor([1e15, 0.3, -1e15] * 40, dtype=F64, device=backend)
    stack = steps[:, None, None].expand(1, 120, 3, 3)
    assert (logchain.matrix_product(stack) - (40 * 0.3 + 119 * np.log(3.0))).abs().max() <= 2.0**-40


def test_a_sum_of_offsets_beyond_the_range_is_infinite():
    stack = torch.full((2, 4, 2, 2), 1e308, dtype=F64)
    stack[1] = 0.0
    out = logchain.matrix_product(stack)
    assert (out[0] == INF).all() and torch.equal(out[1], logchain.matrix_product(stack[1]))


def test_posteriors_are_good_on_a_large_scale(backend):
    """Entries of 1e4 in hundreds of factors: the result is in the millions, gradients are posteriors all the same."""
    leaf = (draw("dense", 300, 4) + 1e4).requires_grad_()
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
    for function, expected in zip(BOTH, (shape[:1] + shape[2:], shape), strict=True):
        out = function(leaf)
        assert out.shape == expected
        (grad,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
        assert grad.shape == shape
        torch.autograd.grad(grad.sum(), leaf, allow_unused=True)
    assert logchain.matrix_product(torch.zeros(shape), inplace=True).shape == shape[:1] + shape[2:]


def test_stacks_that_are_recomputed_are_counted():
    assert lossy(draw("dense", 33, 5)) == lossy(draw("offsets", 33, 5)) == lossy(draw("dead", 7, 5)) == 0
    stack = draw("sharp", 5, 4)[:1].repeat(11, 1, 1, 1)
    stack[[2, 7]] = normal(2, 5, 4, 4)
    assert lossy(stack) == 9
    for out in (logchain.matrix_product(stack), logchain.matrix_product(stack.clone(), inplace=True)):
        assert_near_reference(stack, 2 * np.abs(stack.numpy()).max(), out)


SQUARE = "stack: expected at least one square matrix [..., s, c, c], got "
ONES = torch.ones(2, 3, 3)
WRONG = [
    ([[1.0]], {}, TypeError, "stack: expected a torch.Tensor, got list"),
    (ONES.long(), {}, TypeError, "stack: expected float32, float64, bfloat16 or float16"),
    (ONES[0], {}, ValueError, "stack: expected at least 3 axes, got shape [3, 3]"),
    (ONES[..., :2], {}, ValueError, f"{SQUARE}[2, 3, 2]"),
    (torch.ones(2, 0, 3, 3), {}, ValueError, SQUARE),
    (ONES, {"inplace": 1}, TypeError, "inplace: expected True or False, got 1"),
    (ONES.clone().requires_grad_(), {"inplace": True}, ValueError, "inplace: expected a stack that needs no"),
    (ONES[:1].expand(2, 3, 3), {"inplace": True}, ValueError, "inplace: expected a stack of its own memory"),
    (torch.randn(60).as_strided((6, 3, 3), (2, 3, 1)), {"inplace": True}, ValueError, "inplace: expected a stack of"),
    (ONES.half(), {"inplace": True}, ValueError, "inplace: expected a float32 or float64 stack, got"),
    (torch.ones(4, 5, 2, 3, 3).transpose(0, 1), {"inplace": True}, ValueError, "inplace: expected batch axes that can"),
]


@pytest.mark.parametrize(("stack", "options", "error", "message"), WRONG)
def test_invalid_arguments_are_refused(stack, options, error, message):
    for function in BOTH[: 1 if options else 2]:
        with pytest.raises(error, match="^" + re.escape(message)):
            function(stack, **options)


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize("weight", [1e-30, 1e14, 1e30, 1.5e38])
def test_gradients_scale_with_the_weight(function, weight, backend):
    stack = torch.tensor([[[0.0, -60.0], [0.0, -60.0]], [[-60.0, -60.0], [0.0, 0.0]]], requires_grad=True)
    out = function(stack).view(-1, 2, 2)[-1]
    one, many = (torch.autograd.grad(out.sum(), stack, torch.tensor(w), retain_graph=True)[0] for w in (1.0, weight))
    assert one.isfinite().all()
    torch.testing.assert_close(many / weight, one, rtol=1e-6, atol=1e-6)


# one stack is 8 MB
SHAPE = 4, 512, 32, 32
STACK = 4 * math.prod(SHAPE)
WORKSPACE = 10 * 4 * 2**17


@pytest.mark.parametrize("lossy", [False, True])
def test_memory_of_the_product(lossy, backend):
    stack = torch.randn(SHAPE)
    stack[1] *= 60.0 if lossy else 1.0
    extra = STACK // 2 + lossy * STACK // 4
    assert peak_bytes(lambda: [logchain.matrix_product(stack)]) <= extra + WORKSPACE
    assert peak_bytes(lambda: [logchain.matrix_product(stack.clone(), inplace=True)]) <= STACK + WORKSPACE


@pytest.mark.parametrize(("function", "stacks"), [(logchain.matrix_product, 1), (logchain.prefix_products, 2)])
def test_memory_of_the_gradient(function, stacks, backend):
    leaf = torch.randn(SHAPE, requires_grad=True)
    assert stacks == 1 or peak_bytes(lambda: [function(leaf.detach())]) <= WORKSPACE
    out = function(leaf)
    weights = torch.ones_like(out)
    assert peak_bytes(lambda: torch.autograd.grad(out, leaf, weights)) <= stacks * STACK + WORKSPACE


def pair(stack):
    return logchain.matmul(stack[:, 0], stack[:, -1])


def broadcast_pairs(stack):
    return logchain.matmul(stack[:, :1], stack[0])


SMALL = [("dense", 1, 3), ("misaligned", 5, 2), ("abyss", 3, 2), ("sparse", 3, 2), ("dead", 3, 2), ("mixed", 3, 2)]
DIFFERENTIATED = [("cpu", function, *row) for function in (*BOTH, pair, broadcast_pairs) for row in SMALL]
DIFFERENTIATED += [("plain", function, *row) for function in (pair, broadcast_pairs) for row in SMALL[1:]]


@pytest.mark.parametrize(("backend", "function", "name", "s", "c"), DIFFERENTIATED, indirect=["backend"])
def test_finite_differences(function, name, s, c, backend):
    stack = draw(name, s, c, F64, seed=3)[-1:]
    hard, possible = stack.isneginf(), function(stack).isfinite()

    def value(varied):
        return function(torch.where(hard, -INF, varied))[possible]

    varied = torch.where(hard, 0.0, stack).requires_grad_()
    if possible.any():
        assert torch.autograd.gradcheck(value, varied)
        assert torch.autograd.gradgradcheck(value, varied)


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
    grad = torch.randn_like(OPS.log_products(stack.detach(), prefixes)).requires_grad_()
    # its derivative is taken by autograd itself, which a trace does not see: hence no AOT test
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(OPS.log_products_backward.default, (grad, stack, prefixes), test_utils=checks)
