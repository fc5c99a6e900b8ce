"""Product trees whose passes numba compiles keep the contract, and agree with those that torch makes."""

import math

import pytest
import torch

import logchain
from logchain import kernels as devices
from logchain.kernels.numbers import FLUSH
from logchain.kernels.plain import product as tree
from logchain.kernels.plain.nodes import Nodes
from tests.contract import poisoned_memory
from tests.stacks import FAMILIES, assert_contract, assert_nothing_is_lost, draw

native_tree = pytest.importorskip("logchain.kernels.native_tree", exc_type=ImportError)

F32, F64 = torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def _no_folds(monkeypatch):
    """Small stacks would not come to a tree."""
    monkeypatch.setattr(devices, "fold_kernels", lambda whole: None)


@pytest.fixture(params=[tree, native_tree], ids=["torch", "numba"])
def kernels(request, monkeypatch):
    monkeypatch.setattr(devices, "tree_kernels", lambda tensor: request.param)
    return request.param


def test_a_table_of_exponentials():
    for dtype, error in ((F32, 2.0**-23), (F64, 2.0**-51)):
        depth = torch.cat([torch.linspace(0, -2, 40_000, dtype=F64), torch.linspace(0, -900, 100_001, dtype=F64)])
        leaf = depth.to(dtype)[: 374**2].view(1, 1, 374, 374).contiguous()
        arithmetic = native_tree.Arithmetic(374, 1, dtype, torch.device("cpu"))
        room, top = arithmetic._buffers[0].unflatten(0, (1, 1)), torch.empty(1, 1, dtype=dtype)
        (block,) = Nodes.leaves(leaf).blocks(1, 1)
        found = arithmetic._linear(block, room, top).flatten().double()
        exact = leaf.double().exp().flatten()
        kept = exact > 2 * FLUSH[dtype] * 64
        assert top == 0 and ((found - exact).abs()[kept] <= error * exact[kept]).all()
        assert (found[exact < FLUSH[dtype] / 2] == 0).all() and found.min() == 0.0


@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.parametrize("s", [2, 5, 8])
@pytest.mark.parametrize("c", [1, 2, 5])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.usefixtures("kernels")
def test_every_family_keeps_the_contract(name, c, s, dtype):
    assert_contract(draw(name, s, c, dtype, seed=s), logchain.matrix_product, logchain.prefix_products)


@pytest.mark.parametrize("other", [0.0, 40.0])
@pytest.mark.parametrize("near", [10.0, 80.0, 100.0])
@pytest.mark.parametrize("far", [90.0, 110.0, 116.0, 125.0, 150.0])
@pytest.mark.usefixtures("kernels")
def test_what_linear_numbers_lose_is_found(far, near, other):
    assert_nothing_is_lost(far, near, other)


@pytest.mark.parametrize("value", [NAN, -NAN, INF])
@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
@pytest.mark.usefixtures("kernels")
def test_what_is_no_number_stays_in_its_stack(dtype, value):
    stack = torch.randn(3, 8, 17, 17, dtype=dtype)
    clean = logchain.matrix_product(stack)
    stack[1, 5, 3, 4] = math.copysign(value, value)
    found = logchain.matrix_product(stack)
    assert not found[1].isfinite().all() and found.isfinite().flatten(1).all(1).tolist() == [True, False, True]
    torch.testing.assert_close(found[::2], clean[::2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("how", ["contiguous", "transposed", "sliced", "expanded", "halves"])
@pytest.mark.parametrize("dtype", [F32, F64], ids=["float32", "float64"])
def test_both_agree_on_any_layout(dtype, how, monkeypatch):
    stack = torch.randn(3, 7, 33, 33, dtype=dtype)
    if how == "transposed":
        stack = stack.mT
    elif how == "sliced":
        stack = torch.full((3, 15, 40, 33), NAN, dtype=dtype)[:, 1::2, 5:38].copy_(stack)
    elif how == "expanded":
        stack = stack[:, :1].expand(3, 7, 33, 33)
    elif how == "halves":
        stack = stack.half()
    weight = torch.randn(3, 33, 33, dtype=dtype)
    found = {}
    for module in (tree, native_tree):
        monkeypatch.setattr(devices, "tree_kernels", lambda tensor, module=module: module)
        leaf = stack.detach().requires_grad_()
        with poisoned_memory(), logchain.rescues() as seen:
            out = logchain.matrix_product(leaf)
            (gradient,) = torch.autograd.grad(out, leaf, weight.to(out.dtype))
        assert seen.outputs == 0
        found[module] = out.detach(), gradient
    atol = 1e-12 if dtype == F64 and how != "halves" else 1e-5
    for one, other in zip(found[tree], found[native_tree], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3 if one.dtype == torch.float16 else 0, atol=atol)


def test_dense_products_are_compiled(monkeypatch):
    """The passes that torch makes would do as well, unseen."""
    monkeypatch.setattr(devices, "tree_kernels", lambda tensor: native_tree)
    leaves, finish = native_tree._compiled(F32)
    done = []
    passes = leaves, lambda *args: done.append(finish(*args)) or done[-1]
    monkeypatch.setattr(native_tree, "_compiled", lambda dtype: passes)
    logchain.matrix_product(torch.randn(2, 8, 16, 16))
    assert len(done) == 3 and all(done)


@pytest.mark.usefixtures("kernels")
def test_nothing_is_possible():
    assert (logchain.matrix_product(torch.full((1, 3, 4, 4), -INF)) == -INF).all()
