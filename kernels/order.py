"""The order in which a tree multiplies s matrices, and the slot of each result: integers only.

Leaf i of the tree is matrix i, in slot i. A product overwrites the slot of one of its operands, so that the nodes of a
level lie in a regular slice of slots, and an odd last node needs no copy and no padding: its slot is that of the next
level already. Where all nodes are kept, they have memory of their own beside the leaves, in another layout of slots.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """Products of the nodes in the slots `left` with those in the slots `right`, which do not depend on each other.

    `left_at` and `right_at` are for layouts in which all nodes are kept: the distance of an operand there from its slot
    here, None where the operands are leaves.
    """

    left: slice
    right: slice
    left_at: int | None
    right_at: int | None


def reduction(s: int) -> Iterator[Step]:
    """The levels of the product of s matrices, each result in the slot of its left operand, and the last in slot 0.

    Node j of level l is in slot `j 2^l`. Where all nodes are kept, a product is in the slot of its right operand, which
    is that of no other product.
    """
    count, width = s, 1
    while count > 1:
        stop = count // 2 * 2 * width
        last = stop - width
        inner = width // 2 or None
        distance = _distance(last, width, s)
        if distance == inner:
            yield Step(slice(0, stop, 2 * width), slice(width, stop, 2 * width), inner, inner)
        else:  # the last right operand has fewer matrices than the others, and is kept at another distance
            before = last - width
            if before > 0:
                yield Step(slice(0, before, 2 * width), slice(width, before, 2 * width), inner, inner)
            yield Step(slice(before, before + 1, 1), slice(last, last + 1, 1), inner, distance)
        count, width = count - count // 2, 2 * width


def _distance(slot: int, width: int, s: int) -> int | None:
    """The distance from its slot to that of its right operand, where a level's last node is kept; None for a leaf."""
    while width > 1:
        width //= 2
        if slot + width < s:
            return width
    return None


def upward(s: int) -> Iterator[Step]:
    """The first of two sweeps that compute all prefix products, each result in the slot of its right operand.

    Slot `j 2^l - 1`, for odd j, then holds the product of the `2^l` matrices that end there. Where all nodes are kept,
    a product is in the slot of its left operand.
    """
    width = 1
    while 2 * width <= s:
        stop, inner = s // (2 * width) * 2 * width, -(width // 2) or None
        yield Step(slice(width - 1, stop, 2 * width), slice(2 * width - 1, stop, 2 * width), inner, inner)
        width *= 2


def downward(s: int) -> Iterator[Step]:
    """The second sweep: each slot's product is multiplied by the prefix before it from the left, and is a prefix then.

    `right_at` refers to the layout in which `upward` keeps all nodes; the left operand, a prefix, is in its slot.
    """
    width = 1
    while 4 * width <= s:
        width *= 2
    while width:
        if 3 * width <= s:
            steps = (s - width) // (2 * width)
            left = slice(2 * width - 1, 2 * width - 1 + steps * 2 * width, 2 * width)
            yield Step(left, shifted(left, width), 0, -(width // 2) or None)
        width //= 2


def halved(slots: slice) -> slice:
    """Even slots as numbered among the even slots only."""
    return slice(slots.start // 2, (slots.stop + 1) // 2, max(1, slots.step // 2))


def shifted(slots: slice, by: int) -> slice:
    """The slots moved by a distance."""
    return slice(slots.start + by, slots.stop + by, slots.step)
