"""Which matrices a product tree multiplies when, and where each result lies: integers only.

The s matrices of a stack are the leaves. Results overwrite operands, so a level of the tree is a regular slice of
slots, and an odd last node is carried up by being where the next level looks for it: it is never copied or padded.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """Products of the nodes in the slots `left` and `right`, all of which can be made at once.

    `left_at` and `right_at` serve the layouts in which every node stays: how far from its slot an operand lies there,
    None where it is a leaf.
    """

    left: slice
    right: slice
    left_at: int | None
    right_at: int | None


def reduction(s: int) -> Iterator[Step]:
    """The levels of one product of s matrices, each result over its left operand: the whole is in slot 0 at last.

    Node j of level l is in slot `j 2^l`. In the layout in which every node stays, a product is in the slot that its
    right operand had, which is different for each.
    """
    count, width = s, 1
    while count > 1:
        stop = count // 2 * 2 * width
        last = stop - width
        inner = width // 2 or None
        behind = _behind(last, width, s)
        if behind == inner:
            yield Step(slice(0, stop, 2 * width), slice(width, stop, 2 * width), inner, inner)
        else:  # the last right operand was carried up
            before = last - width
            if before > 0:
                yield Step(slice(0, before, 2 * width), slice(width, before, 2 * width), inner, inner)
            yield Step(slice(before, before + 1, 1), slice(last, last + 1, 1), inner, behind)
        count, width = count - count // 2, 2 * width


def _behind(slot: int, width: int, s: int) -> int | None:
    """How far behind its slot the last node of a level stays: by the largest right half that it has."""
    while width > 1:
        width //= 2
        if slot + width < s:
            return width
    return None


def upward(s: int) -> Iterator[Step]:
    """The first sweep of all prefix products, each result over its right operand.

    Then slot `j 2^l - 1`, for odd j, holds the product of the `2^l` matrices that end there. In the layout in which
    every node stays, a product is in the slot that its left operand had.
    """
    width = 1
    while 2 * width <= s:
        stop, inner = s // (2 * width) * 2 * width, -(width // 2) or None
        yield Step(slice(width - 1, stop, 2 * width), slice(2 * width - 1, stop, 2 * width), inner, inner)
        width *= 2


def downward(s: int) -> Iterator[Step]:
    """The second sweep: each slot's product is multiplied with the prefix before it, and becomes a prefix itself.

    `right_at` refers to the layout of `upward`; the left operand, a prefix, is in its slot.
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
    """Even slots, counted among the even ones."""
    return slice(slots.start // 2, (slots.stop + 1) // 2, max(1, slots.step // 2))


def shifted(slots: slice, by: int) -> slice:
    """As many slots, further on."""
    return slice(slots.start + by, slots.stop + by, slots.step)
