"""The order of a tree's products: neighbours, each node once, no more levels than the tree is deep."""

import math

from hypothesis import given
from hypothesis import strategies as st

from logchain.kernels import order as tree


def slots(part, s):
    """The slots of a slice, all within the stack."""
    assert part.stop - part.step < s
    return range(part.start, part.stop, part.step)


@given(st.integers(1, 70))
def test_the_reduction_multiplies_neighbours_in_order(s):
    """Words stand for matrices: of the slots, of every second slot, and of the layout in which all nodes stay."""
    leaves = [(i,) for i in range(s)]
    over, half, kept = list(leaves), [None] * (s // 2), [None] * s
    for step in tree.reduction(s):
        lefts, rights = slots(step.left, s), slots(step.right, s)
        for k, (a, b) in enumerate(zip(lefts, rights, strict=True)):
            to = slots(tree.halved(step.left), s // 2)[k]
            over[a] += over[b]
            left = leaves[a] if step.left_at is None else half[to]
            half[to] = left + (leaves[b] if step.right_at is None else half[slots(tree.halved(step.right), s // 2)[k]])
            assert kept[b] is None, "a node is lost"
            left = leaves[a] if step.left_at is None else kept[slots(tree.shifted(step.left, step.left_at), s)[k]]
            right = leaves[b] if step.right_at is None else kept[slots(tree.shifted(step.right, step.right_at), s)[k]]
            kept[b] = left + right
            assert kept[b] == half[to] == over[a]
    assert over[0] == tuple(range(s))


@given(st.integers(1, 200))
def test_the_reduction_takes_no_more_steps_than_the_tree_is_deep_and_the_odd_ones(s):
    deep = math.ceil(math.log2(s))
    assert deep <= sum(1 for _ in tree.reduction(s)) <= 2 * deep
    assert sum(len(slots(step.left, s)) for step in tree.reduction(s)) == s - 1


@given(st.integers(1, 70))
def test_the_sweeps_give_all_prefixes(s):
    leaves = [(i,) for i in range(s)]
    over, kept = list(leaves), [None] * s
    for step in tree.upward(s):
        for a, b in zip(slots(step.left, s), slots(step.right, s), strict=True):
            left = leaves[a] if step.left_at is None else kept[a + step.left_at]
            right = leaves[b] if step.right_at is None else kept[b + step.right_at]
            assert kept[a] is None, "a node is lost"
            kept[a] = over[b] = over[a] + over[b]
            assert kept[a] == left + right
    for step in tree.downward(s):
        for a, b in zip(slots(step.left, s), slots(step.right, s), strict=True):
            assert over[b] == (leaves[b] if step.right_at is None else kept[b + step.right_at])
            over[b] = over[a] + over[b]
    assert over == [tuple(range(i + 1)) for i in range(s)]
