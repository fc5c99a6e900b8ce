"""Products of a stack keep the memory contract, in place and beside it."""

import math

import pytest
import torch

import logchain
from logchain import kernels as devices
from logchain.kernels.plain import product as arithmetic
from logchain.memory import peak_bytes
from tests.stacks import FAMILIES, draw
from tests.test_memory import Allocations

F32, F64 = torch.float32, torch.float64


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("s", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
def test_in_place_is_the_same(name, s, dtype):
    stack = draw(name, s, 4, dtype)
    expected = logchain.matrix_product(stack)
    for own in (stack.clone(), stack.mT.clone().mT, torch.stack([stack, stack], 2)[:, :, 1]):
        assert torch.equal(logchain.matrix_product(own, inplace=True), expected)


@pytest.fixture(params=["loop", "compiled tree", "tree"])
def schedule(request, monkeypatch):
    """The one loop of small stacks, or the tree that has the others, with passes of numba's or torch's."""
    if request.param != "tree":
        pytest.importorskip("numba")
    if request.param != "loop":
        monkeypatch.setattr(devices, "fold_kernels", lambda whole: None)
    if request.param == "tree":
        monkeypatch.setattr(devices, "tree_kernels", lambda tensor: arithmetic)


# one stack is 8 MB
SHAPE = 4, 128, 64, 64
STACK = 4 * math.prod(SHAPE)
WORKSPACE = 10 * 4 * 2**17


@pytest.mark.usefixtures("schedule")
def test_memory_of_the_product():
    stack = torch.randn(SHAPE)
    assert peak_bytes(lambda: [logchain.matrix_product(stack)]) <= STACK // 2 + WORKSPACE
    assert peak_bytes(lambda: [logchain.matrix_product(stack, inplace=True)]) <= WORKSPACE
    longer = torch.randn(4, 129, 64, 64)
    assert peak_bytes(lambda: [logchain.matrix_product(longer)]) <= STACK // 2 + WORKSPACE


@pytest.mark.usefixtures("schedule")
@pytest.mark.parametrize(("function", "stacks"), [(logchain.matrix_product, 1), (logchain.prefix_products, 2)])
def test_memory_of_the_gradient(function, stacks):
    leaf = torch.randn(SHAPE, requires_grad=True)
    out = function(leaf)
    weights = torch.ones_like(out)
    assert peak_bytes(lambda: torch.autograd.grad(out, leaf, weights)) <= stacks * STACK + WORKSPACE


def test_memory_of_all_prefixes():
    stack = torch.randn(SHAPE)
    assert peak_bytes(lambda: [logchain.prefix_products(stack)]) <= WORKSPACE


@pytest.mark.parametrize("name", ["dense", "offsets", "left_to_right"])
@pytest.mark.parametrize("function", [logchain.matrix_product, logchain.prefix_products])
def test_allocations_do_not_grow_with_s(function, name, monkeypatch):
    monkeypatch.setattr(arithmetic, "_HELD", 8 * 9)

    def count(s):
        leaf = draw(name, s, 3)
        leaf = (leaf * 0.0 if name == "left_to_right" else leaf).requires_grad_()
        with Allocations() as seen, logchain.rescues() as rescued:
            function(leaf).sum().backward()
        assert rescued.outputs == 0
        return seen.count

    assert count(32) == count(256)


def test_a_stack_that_overlaps_itself_is_not_overwritten():
    view = torch.randn(60).as_strided((6, 3, 3), (2, 3, 1))
    with pytest.raises(ValueError, match="inplace: expected a stack of its own memory"):
        logchain.matrix_product(view, inplace=True)
