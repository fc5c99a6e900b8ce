"""Stacks of small matrices that a compiled loop multiplies keep the contract, and those that it cannot hold do, too."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import logchain
from logchain import kernels as devices
from logchain import reference
from logchain.kernels import native
from logchain.schedules.tree import product, product_gradient
from tests.contract import assert_values, gradient_bound, poisoned_memory, value_bound
from tests.stacks import Truth, draw

native_product = pytest.importorskip("logchain.kernels.native_product", exc_type=ImportError)

F32, F64 = torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")

SIZES = [(s, c) for s in (2, 3, 25, 200) for c in (1, 2, 3, 5, 8, 17, 20, 31, 32, 64) if s * c**3 <= 2**20]


def normal(*shape, dtype=F32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def bound(truth, s, dtype):
    return value_bound(truth, s, truth.shape[-1], dtype=dtype)


def uses(stack, weights):
    """Of positive weights [c, c] of the product's entries, what each entry of a finite stack [s, c, c] receives."""
    prefixes = reference.prefix_products(stack)
    suffixes = reference.prefix_products(stack.flip(0).mT)[::-1].swapaxes(-1, -2)
    share = np.log(weights) - prefixes[-1]
    found = np.broadcast_to(share, stack.shape)
    behind = np.concatenate([found[:-1], found[-1:]])
    behind[:-1] = reference.matmul(found[:-1], suffixes[1:].swapaxes(-1, -2))
    behind[1:] = reference.matmul(prefixes[:-1].swapaxes(-1, -2), behind[1:])
    return np.exp(behind + stack.double().numpy())


def exact(stack, weights):
    """Products and gradients of stacks (g, s, c, c): by the reference, or in decimals where float64 is to be judged."""
    weights = weights.double().numpy()
    if stack.dtype == F32:
        parts = zip(stack, weights, strict=True)
        return reference.matrix_product(stack), np.stack([uses(*part) for part in parts])
    truths, received = [Truth(part) for part in stack.numpy()], np.zeros(stack.shape)
    received[:, -1] = weights
    gradients = [truth.uses(weight) for truth, weight in zip(truths, received, strict=True)]
    return np.stack([truth.values[-1] for truth in truths]), np.stack(gradients)


def check(stack):
    """Values and gradients of stacks (g, s, c, c), and that the loop made them."""
    g, s, c, _ = stack.shape
    out = torch.full((g, c, c), NAN, dtype=stack.dtype)
    assert native_product.product(stack, out) is None
    weights = 0.1 + normal(g, c, c, dtype=stack.dtype, seed=1).abs()
    leaf = stack.clone().requires_grad_()
    with poisoned_memory():
        found = logchain.matrix_product(leaf)
        found.backward(weights)
    truth, expected = exact(stack, weights)
    assert_values(found, truth, bound(truth, s, stack.dtype))
    assert torch.equal(found, out)
    for number in range(g):
        error = np.abs(leaf.grad[number].double().numpy() - expected[number])
        assert (error <= gradient_bound(expected[number], s, c, dtype=stack.dtype, terms=c * c)).all()


@pytest.mark.parametrize(
    ("s", "c", "dtype"),
    [(*size, F32) for size in SIZES] + [(s, c, F64) for s, c in SIZES if s * c**3 <= 2**17],
    ids=str,
)
def test_values_and_gradients(s, c, dtype):
    check(normal(2, s, c, c, dtype=dtype))


@pytest.mark.parametrize("c", [1, 5, 32])
def test_one_matrix_is_itself(c):
    stack = normal(2, 1, c, c)
    assert not native_product.folds(stack)
    leaf = stack.clone().requires_grad_()
    out = logchain.matrix_product(leaf)
    weights = normal(2, c, c, seed=1)
    out.backward(weights)
    assert torch.equal(out, stack[:, 0]) and torch.equal(leaf.grad[:, 0], weights)


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("fall", [0.0, 12.0, 30.0])
@pytest.mark.parametrize("c", [2, 5, 9])
def test_rows_keep_their_own_scale(c, fall, dtype):
    """Rows fall to 2^-40 and below of each other at once, and in the long run without limit."""
    stack = normal(2, 60, c, c, dtype=dtype) - fall * torch.arange(c)[:, None] / (c - 1)
    check(stack)


def test_diagonals_part_rows_without_limit():
    """What leads from a state to itself is likelier by 5 nats a step for the first than for the last."""
    off = torch.full((4, 4), -10.0) + torch.diag(10.0 - 5.0 * torch.arange(4) / 3)
    check(off + 0.1 * normal(2, 10, 4, 4))


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
def test_growing_products(dtype):
    check(0.01 * normal(2, 150, 8, 8, dtype=dtype))


@pytest.mark.parametrize("offset", [1e6, -1e6])
def test_huge_offsets(offset):
    stack = normal(3, 25, 5, 5) + offset * (1 + torch.arange(25) % 2)[:, None, None]
    truth = reference.matrix_product(stack)
    assert_values(logchain.matrix_product(stack), truth, bound(truth, 25, F32))
    check(stack)


def test_float64_keeps_what_sums_of_offsets_lose():
    steps = torch.tensor([1e15, 0.3, -1e15] * 40, dtype=F64)
    stack = steps[:, None, None].expand(1, 120, 3, 3)
    expected = 40 * 0.3 + 119 * np.log(3.0)
    assert (logchain.matrix_product(stack) - expected).abs().max() <= 2.0**-40


def test_a_sum_of_offsets_beyond_the_range_is_left_to_the_tree():
    stack = torch.full((2, 4, 2, 2), 1e308, dtype=F64)
    stack[1] = 0.0
    lossy = native_product.product(stack, torch.empty(2, 2, 2, dtype=F64))
    assert lossy.tolist() == [True, False]
    assert torch.equal(logchain.matrix_product(stack)[1], logchain.matrix_product(stack[1]))


def one_bad(g, s, c, value):
    """Stacks of which the second, and only it, is not for the loop."""
    stack = normal(g, s, c, c)
    if value == "far":
        stack[1, 0], stack[1, 1] = 0.0, 0.0
        stack[1, 0, :, 1:], stack[1, 1, 0, :] = -200.0, -200.0
    elif value == "row":
        stack[1, s // 2, 0] = -INF
    else:
        stack[1, s // 2, c - 1, 0] = value
    return stack


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("value", ["far", "row", -INF, INF, NAN, -NAN], ids=str)
@pytest.mark.parametrize("g", [2, 3, 9])
def test_one_stack_alone_goes_to_the_tree(g, value, inplace, monkeypatch):
    stack = one_bad(g, 6, 3, value)
    others = [number for number in range(g) if number != 1]
    lossy = native_product.product(stack, torch.empty(g, 3, 3))
    assert lossy.nonzero().tolist() == [[1]]
    lossy = native_product.gradient(torch.ones(g, 3, 3), stack, torch.empty_like(stack))
    assert lossy.nonzero().tolist() == [[1]]

    def both(part):
        leaf = part.clone().requires_grad_()
        with logchain.rescues() as seen, poisoned_memory():
            out = logchain.matrix_product(part.clone(), inplace=True) if inplace else logchain.matrix_product(leaf)
        again = logchain.matrix_product(leaf)
        (gradient,) = torch.autograd.grad(again, leaf, torch.ones_like(out))
        return out.detach(), gradient, seen.outputs

    alone, rest, found = both(stack[1:2]), both(stack[others]), both(stack)
    assert rest[2] == 0 and found[2] == alone[2] and (value != "far" or found[2] > 0)
    for whole, one, other in zip(found[:2], alone, rest, strict=False):
        assert torch.equal(whole[others], other)
        torch.testing.assert_close(whole[1:2], one, rtol=0, atol=0, equal_nan=True)
    if value in ("far", "row", -INF):
        truth = reference.matrix_product(stack)
        assert_values(found[0], truth, bound(truth, 6, F32) + 2.0**-15)
        assert (found[1][stack == -INF] == 0).all() and found[1].isfinite().all()
    elif np.isnan(value):
        assert found[0][1].isnan().any() and found[0][others].isfinite().all() and found[1][others].isfinite().all()


@pytest.mark.parametrize("inplace", [False, True])
def test_many_stacks_go_to_the_tree(inplace):
    stack = normal(11, 5, 4, 4)
    bad = [0, 1, 3, 4, 5, 6, 8, 9, 10]
    stack[bad, 2, 1] = -INF
    leaf = stack.clone().requires_grad_()
    truth = reference.matrix_product(stack)
    out = logchain.matrix_product(stack.clone(), inplace=True) if inplace else logchain.matrix_product(leaf)
    assert_values(out, truth, bound(truth, 5, F32))
    logchain.matrix_product(leaf).exp().sum().backward()
    expected = stack.double().requires_grad_()
    linear = expected.exp()
    total = linear[:, 0]
    for i in range(1, 5):
        total = total @ linear[:, i]
    total.sum().backward()
    scale = total.detach().sum((1, 2), keepdim=True)[:, None]
    assert ((leaf.grad - expected.grad).abs() <= 1e-5 * scale).all()


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
def test_any_layout(dtype):
    stack = normal(4, 7, 9, 9, dtype=dtype)
    out, gradient = both_of(stack)
    wide = torch.full((4, 14, 11, 20), NAN, dtype=dtype)
    wide[:, ::2, 1:10, 1:19:2] = stack
    views = [wide[:, ::2, 1:10, 1:19:2], stack.mT.contiguous().mT, stack.movedim(0, 2).contiguous().movedim(2, 0)]
    views.append(stack.view(2, 2, 7, 9, 9).transpose(0, 1).contiguous().transpose(0, 1))
    for view in views:
        for found, expected in zip(both_of(view), (out, gradient), strict=True):
            torch.testing.assert_close(found.reshape(expected.shape), expected, rtol=0, atol=0)


@pytest.mark.parametrize("c", [3, 65], ids=["loop", "tree"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("how", ["transposed", "moved", "every other"])
def test_what_is_left_to_the_tree_may_lie_in_any_layout(how, inplace, c):
    stack = normal(3, 5, c, c)
    stack[1, 1, 2, 0] = -INF  # not for the loop
    if how == "transposed":
        view = stack.mT.contiguous().mT
    elif how == "moved":
        view = stack.movedim(1, 3).contiguous().movedim(3, 1)
    else:
        view = stack.new_zeros(3, 5, c, 2 * c)[..., ::2].copy_(stack)
    expected = torch.from_numpy(reference.matrix_product(stack)).float()
    torch.testing.assert_close(logchain.matrix_product(view, inplace=inplace), expected, rtol=0, atol=2e-5)


def both_of(stack):
    """The product and its gradient, as operators see them."""
    out, rescued = product(stack, inplace=False)
    assert rescued == 0
    return out, product_gradient(torch.arange(out.numel(), dtype=out.dtype).cos().view(out.shape), stack)


def test_a_matrix_repeated_and_a_batch_repeated():
    one = normal(3, 7, 5, 5)
    for view in (one[:, :1].expand(3, 7, 5, 5), one[:1].expand(3, 7, 5, 5), one[:1, :1].expand(3, 7, 5, 5)):
        for found, expected in zip(both_of(view), both_of(view.contiguous()), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads(threads, monkeypatch):
    stack = one_bad(5, 12, 6, -INF)
    expected = both_of(stack)
    monkeypatch.setattr(native_product, "_SHARE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    ranges = []
    monkeypatch.setattr(
        native_product,
        "spread",
        lambda function, parts, *args: ranges.append(parts) or native.spread(function, parts, *args),
    )
    for found, one in zip(both_of(stack), expected, strict=True):
        assert torch.equal(found, one)
    assert [len(parts) for parts in ranges] == [threads, threads]


@pytest.mark.parametrize("shape", [(0, 3, 2, 2), (2, 3, 0, 0)], ids=str)
def test_nothing_to_multiply(shape):
    leaf = torch.zeros(shape, requires_grad=True)
    out = logchain.matrix_product(leaf)
    out.sum().backward()
    assert out.shape == shape[:1] + shape[2:] and leaf.grad.shape == shape


def test_what_is_left_to_the_tree_altogether(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 9)
    assert devices.fold_kernels(normal(2, 3, 64, 64)) is native_product
    assert devices.fold_kernels(normal(2, 3, 65, 65)) is None
    assert devices.fold_kernels(normal(1, 1, 1, 1).expand(2, 80, 64, 64)) is None
    assert devices.fold_kernels(normal(1, 1, 1, 1).expand(3, 80, 64, 64)) is native_product
    assert devices.fold_kernels(normal(2, 3, 4, 4).half()) is None
    monkeypatch.setattr(devices, "_numba", lambda: False)
    assert devices.fold_kernels(normal(2, 3, 64, 64)) is None


def test_second_derivatives():
    leaf = draw("dense", 3, 2, F64).requires_grad_()
    assert torch.autograd.gradgradcheck(logchain.matrix_product, leaf)


def test_rooms_live_as_long_as_their_loop():
    """Where each room is a mapping of its own (glibc), one that is given back too early ends the process."""
    code = (
        "import torch, logchain; logchain.matrix_product(torch.randn(1, 99, 16, 16).requires_grad_()).sum().backward()"
    )
    alone = os.environ | {"MALLOC_MMAP_THRESHOLD_": "512", "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=alone, check=False).returncode == 0
