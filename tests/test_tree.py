"""A tree multiplies neighbours in order, and `strategy="tree"` keeps the contracts, in one piece and in many."""

import functools
import math

import numpy as np
import pytest
import torch

import logchain
from logchain import demo, reference
from logchain import kernels as devices
from logchain.autograd import tree_operators
from logchain.kernels import order
from logchain.kernels.plain import product as plain
from logchain.memory import peak_bytes
from logchain.operands import Operands
from logchain.schedules import tree_leaves
from tests.contract import (
    assert_contract,
)
from tests.families import FAMILIES, FAR, Chain, Draw, dense, far_from_one

F32, F64 = torch.float32, torch.float64

SLACK = 10_000_000

contract = functools.partial(assert_contract, strategy="tree")


@pytest.fixture(params=["whole", "pieces"])
def cut(request, monkeypatch):
    """Either all leaves fit, or a few transitions of a few sequences do."""
    if request.param == "pieces":
        monkeypatch.setattr(tree_leaves, "_LEAST", 0)
        monkeypatch.setattr(tree_leaves, "_SHORT", 3)
    return request.param


def test_few_transitions_of_few_sequences_are_pieces(cut):
    leaves = tree_leaves.Leaves(Operands(*dense(F32)[:3], None, False))
    blocks = sum(len(members) for _, members in leaves.cut.blocks(leaves.g, leaves.m))
    many = cut == "pieces"
    assert (len(leaves.cut.pieces(17)) > 3) == many and (blocks > 2) == many
    assert [i for first, stop in leaves.cut.pieces(17) for i in range(first, stop)] == list(range(1, 17))


def test_counts_of_one_matrix_are_added_in_float64(monkeypatch):
    monkeypatch.setattr(tree_operators, "HELD", 64)
    draw = Draw(0, 1, 1, 10_001, 2, False)
    chain = Chain(draw.x(), draw.bulk()[..., :1, :, :], draw.p0()).to(F32)
    truth = reference.marginals(*chain[:3]).transitions.sum(-3, keepdims=True)
    bulk = chain.bulk.requires_grad_()
    logchain.product(*chain[:3], strategy="tree").sum().backward()
    counts = (bulk.grad * bulk).detach().double().numpy()
    np.testing.assert_allclose(counts, truth, rtol=2.0**-22)


def test_scales_of_products_are_kept_apart(cut):
    """Where x gains 60 nats, transitions lose them: the product of all is far from 0, and no path is the only one."""
    x, bulk, p0, _ = FAMILIES["dense"](F64, v=257, n=1, t=2, c=4).logs()
    x[..., ::2, :2] += 60.0
    bulk[..., 1::2, :, :2] -= 60.0
    contract(Chain(x, bulk, p0, True).to(F32))


@FAR
@pytest.mark.parametrize("part", ["bulk", "p0"])
def test_gradients_have_the_digits_of_weights_that_are_far_from_1(part, far, log, cut):
    contract(far_from_one(part, far, log, v=7, n=2, t=2, c=4, each=True))


def test_products_wait_for_each_other_as_often_as_the_tree_is_deep(monkeypatch):
    calls, multiply = [], plain.Arithmetic.multiply
    monkeypatch.setattr(devices, "stack_kernels", lambda tensor: plain)
    monkeypatch.setattr(plain.Arithmetic, "multiply", lambda *args: calls.append(1) or multiply(*args))
    logchain.product(*dense(F32, n=1, t=1, v=1025, c=2)[:3], strategy="tree")
    assert len(calls) == 10


@pytest.mark.parametrize("sizes", [(50, 40, 64), (1, 40_000, 8), (4, 1000, 32)], ids=str)
def test_memory_is_two_messages(sizes):
    chain = demo.dense_chain(*sizes)
    x, bulk, p0 = (tensor.clone().requires_grad_() for tensor in chain)

    def both():
        return torch.autograd.grad(logchain.product(x, bulk, p0, strategy="tree").sum(), (x, bulk, p0))

    messages = x.numel() * 4
    assert peak_bytes(both) <= 2 * messages + SLACK
    with torch.no_grad():
        assert peak_bytes(lambda: [logchain.product(x, bulk, p0, strategy="tree")]) <= 2 * messages + SLACK


def slots(part, s):
    """The slots of a slice, all within the stack."""
    assert part.stop - part.step < s
    return range(part.start, part.stop, part.step)


@pytest.mark.parametrize("s", range(1, 71))
def test_the_reduction_multiplies_neighbours_in_order(s):
    """Words stand for matrices: of the slots, of every second slot, and of the layout in which all nodes stay."""
    leaves = [(i,) for i in range(s)]
    over, half, kept = list(leaves), [None] * (s // 2), [None] * s
    for step in order.reduction(s):
        lefts, rights = slots(step.left, s), slots(step.right, s)
        for k, (a, b) in enumerate(zip(lefts, rights, strict=True)):
            to = slots(order.halved(step.left), s // 2)[k]
            over[a] += over[b]
            left = leaves[a] if step.left_at is None else half[to]
            half[to] = left + (leaves[b] if step.right_at is None else half[slots(order.halved(step.right), s // 2)[k]])
            assert kept[b] is None, "a node is lost"
            left = leaves[a] if step.left_at is None else kept[slots(order.shifted(step.left, step.left_at), s)[k]]
            right = leaves[b] if step.right_at is None else kept[slots(order.shifted(step.right, step.right_at), s)[k]]
            kept[b] = left + right
            assert kept[b] == half[to] == over[a]
    assert over[0] == tuple(range(s))


@pytest.mark.parametrize("s", range(1, 201))
def test_the_reduction_takes_no_more_steps_than_the_tree_is_deep_and_the_odd_ones(s):
    deep = math.ceil(math.log2(s))
    assert deep <= sum(1 for _ in order.reduction(s)) <= 2 * deep
    assert sum(len(slots(step.left, s)) for step in order.reduction(s)) == s - 1


@pytest.mark.parametrize("s", range(1, 71))
def test_the_sweeps_give_all_prefixes(s):
    leaves = [(i,) for i in range(s)]
    over, kept = list(leaves), [None] * s
    for step in order.upward(s):
        for a, b in zip(slots(step.left, s), slots(step.right, s), strict=True):
            left = leaves[a] if step.left_at is None else kept[a + step.left_at]
            right = leaves[b] if step.right_at is None else kept[b + step.right_at]
            assert kept[a] is None, "a node is lost"
            kept[a] = over[b] = over[a] + over[b]
            assert kept[a] == left + right
    for step in order.downward(s):
        for a, b in zip(slots(step.left, s), slots(step.right, s), strict=True):
            assert over[b] == (leaves[b] if step.right_at is None else kept[b + step.right_at])
            over[b] = over[a] + over[b]
    assert over == [tuple(range(i + 1)) for i in range(s)]
