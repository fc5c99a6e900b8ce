"""A log-semiring matrix product in pieces: shifted exponentials, their product s, and the entries that underflowed.

    s = exp(a - row maximum) exp(b - column maximum)

is one matrix product. An entry with a tiny s may have lost terms: it underflowed if any of its terms is finite, which a
product of zeros and ones tells, computed only if some s is tiny. Operands are (*batch, m, k) and (*batch, k, n) with
any strides, float32 or float64, of one dtype; a batch axis of size 1 in one of them is broadcast without a copy. Large
products are computed in pieces, so that no copy of a large operand or result is made.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..numbers import exp_shifted, finite, trusted_sum

# pairwise terms held at a time
_PAIRS = 2**15

# a piece has at most _ENTRIES entries of operands and result, or 1 / _PART of all where that is more
_ENTRIES = 3 * 2**15
_PART = 128

# least size of a piece, if cut, on the product's shorter axis and on its longer one: the longer side's exponentials are
# computed anew for every piece of the shorter, and products of few rows are slow
_KEPT = 1024
_PASSING = 512


class Groups(NamedTuple):
    """The batch axes of a product: those that both operands have (sets), only `a` (rows), and only `b` (columns).

    Axes of `a` alone can be joined with its rows, and axes of `b` alone with its columns.
    """

    sets: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, a: Tensor, b: Tensor) -> "Groups":
        """The groups of operands (*batch, m, k) and (*batch, k, n), and the shape of their product."""
        *left, m, _ = a.shape
        *right, _, n = b.shape
        axes = range(len(left))
        if left == right:
            return cls(tuple(axes), (), (), (*left, m, n))
        assert len(left) == len(right)
        rows = tuple(axis for axis in axes if right[axis] == 1)
        columns = tuple(axis for axis in axes if left[axis] == 1 and axis not in rows)
        sets = tuple(axis for axis in axes if axis not in rows and axis not in columns)
        return cls(sets, rows, columns, (*torch.broadcast_shapes(left, right), m, n))

    @property
    def plain(self) -> bool:
        """Whether both operands have all axes, so that `left`, `right` and `joint` return the tensor itself."""
        return not self.rows and not self.columns

    @property
    def left_order(self) -> tuple[int, ...]:
        """The axes of `a` in the order of the groups, columns (all of size 1) with the rows."""
        m = len(self.shape) - 2
        return (*self.sets, *self.rows, *self.columns, m, m + 1)

    @property
    def right_order(self) -> tuple[int, ...]:
        """The axes of the product, or of `b` whose rows are of size 1, in the order of the groups."""
        m = len(self.shape) - 2
        return (*self.sets, *self.rows, m, *self.columns, m + 1)

    def left(self, a: Tensor) -> Tensor:
        """A tensor of the shape of `a`, as a view (*sets, *rows, k)."""
        return a if self.plain else a.permute(self.left_order).flatten(len(self.sets) + len(self.rows), -2)

    def right(self, b: Tensor) -> Tensor:
        """A tensor of the shape of `b`, as a view (*sets, k, *columns)."""
        first = len(self.sets)
        return b if self.plain else b.permute(self.right_order).flatten(first, first + len(self.rows))

    def joint(self, c: Tensor) -> Tensor:
        """A tensor of the shape of the product, as a view (*sets, *rows, *columns)."""
        return c if self.plain else c.permute(self.right_order)


Slices = tuple[slice, ...]
Outputs = tuple[Tensor, Tensor, Tensor]


class _Cut(NamedTuple):
    """The slices of operands and product that make a piece; whether no piece before it had its rows, or its columns."""

    left: Slices
    right: Slices
    joint: Slices
    opens_rows: bool
    opens_columns: bool


@dataclass
class Piece:
    """`exp(a - row)` (g, m, k), `exp(b - column)` (g, k, n) and their product `s` for some sets, rows and columns.

    `cut` says which, None if the operands have three axes and are one piece. `small` marks entries whose s is too small
    to be trusted, None if there are none; `rescues` are the indices (z, i, j), in chunks, of those with a finite term.
    """

    cut: _Cut | None
    a: Tensor
    b: Tensor
    ea: Tensor
    eb: Tensor
    row: Tensor
    column: Tensor
    s: Tensor
    small: Tensor | None
    rescues: list[Outputs]

    def divide(self, by_s: Tensor) -> Tensor:
        """`by_s / s`, and 0 where s is too small to be trusted."""
        quotient = by_s / self.s
        return quotient if self.small is None else quotient.masked_fill_(self.small, 0.0)

    def left(self, a: Tensor) -> Tensor:
        """The piece (g, m, k) of a view by `Groups.left`."""
        return a if self.cut is None else a[self.cut.left].reshape(self.ea.shape)

    def right(self, b: Tensor) -> Tensor:
        """The piece (g, k, n) of a view by `Groups.right`."""
        return b if self.cut is None else b[self.cut.right].reshape(self.eb.shape)

    def joint(self, c: Tensor) -> Tensor:
        """The piece (g, m, n) of a view by `Groups.joint`."""
        return c if self.cut is None else c[self.cut.joint].reshape(self.s.shape)

    def put_left(self, part: Tensor, into: Tensor) -> None:
        """Write to a view by `Groups.left`, or add if a piece of other columns has written these rows."""
        _put(part, into if self.cut is None else into[self.cut.left], self.cut is None or self.cut.opens_rows)

    def put_right(self, part: Tensor, into: Tensor) -> None:
        """Write to a view by `Groups.right`, or add if a piece of other rows has written these columns."""
        _put(part, into if self.cut is None else into[self.cut.right], self.cut is None or self.cut.opens_columns)

    def put_joint(self, part: Tensor, into: Tensor) -> None:
        """Write to a view by `Groups.joint`."""
        _put(part, into if self.cut is None else into[self.cut.joint], True)


def _put(part: Tensor, into: Tensor, first: bool) -> None:
    part = part if part.shape == into.shape else part.reshape(into.shape)
    if first:
        into.copy_(part)
    else:
        into.add_(part)


def pieces(groups: Groups, a: Tensor, b: Tensor, depth: torch.dtype) -> Iterator[Piece]:
    """The pieces of a product one after the other; `depth` as in `matmul.forward`."""
    threshold = 2 * trusted_sum(depth, a.shape[-1])
    whole = a.numel() + b.numel() + math.prod(groups.shape)
    if whole <= _ENTRIES and len(groups.sets) == 1 == a.dim() - 2:
        yield _piece(None, a, b, *_exponentials(a, -1), *_exponentials(b, -2), threshold)
        return
    first, k = len(groups.sets), a.shape[-1]
    left, right = groups.left(a), groups.right(b)
    seen_left = seen_right = None
    for cut in _cuts(left.shape[:first], left.shape[first:-1], right.shape[first + 1 :], k):
        if seen_left != cut.left:
            seen_left, a = cut.left, left[cut.left]
            a = a.reshape(math.prod(a.shape[:first]), -1, k)
            row, ea = _exponentials(a, -1)
        if seen_right != cut.right:
            seen_right, b = cut.right, right[cut.right]
            b = b.reshape(a.shape[0], k, -1)
            column, eb = _exponentials(b, -2)
        yield _piece(cut, a, b, row, ea, column, eb, threshold)


def _piece(
    cut: _Cut | None, a: Tensor, b: Tensor, row: Tensor, ea: Tensor, column: Tensor, eb: Tensor, threshold: float
) -> Piece:
    s = torch.bmm(ea, eb)
    if s.numel() == 0 or s.amin().item() >= threshold:
        return Piece(cut, a, b, ea, eb, row, column, s, None, [])
    small = s < threshold
    possible = torch.bmm((a > -math.inf).to(s.dtype), (b > -math.inf).to(s.dtype)) > 0
    indices = possible.logical_and_(small).nonzero(as_tuple=True)
    size = max(1, _PAIRS // a.shape[-1])
    rescues = list(zip(*(index.split(size) for index in indices), strict=True)) if len(indices[0]) else []
    return Piece(cut, a, b, ea, eb, row, column, s, small, rescues)


def _cuts(sets: Sequence[int], rows: Sequence[int], columns: Sequence[int], k: int) -> Iterator[_Cut]:
    """The slices of all pieces: many small sets in each, or a part of a large set's rows and columns."""
    m, n = math.prod(rows), math.prod(columns)
    set_entries = m * k + k * n + m * n
    entries = max(_ENTRIES, math.prod(sets) * set_entries // _PART)
    at_once = max(1, entries // set_entries)
    most = [m, n]
    if set_entries > entries:
        held = min(m, n, max(_KEPT, entries // (2 * k)))
        passing = max(_PASSING, (entries - k * held) // (k + held))
        most = [held, passing] if m < n else [passing, held]
    row_cuts, column_cuts = _parts(rows, most[0]), _parts(columns, most[1])
    # the exponentials of the side that is held are those of the outer loop
    order = (
        [(i, j) for i in row_cuts for j in column_cuts] if m < n else [(i, j) for j in column_cuts for i in row_cuts]
    )
    for z in _parts(sets, at_once):
        for i, j in order:
            left, right, joint = (*z, *i), (*z, slice(None), *j), (*z, *i, *j)
            yield _Cut(left, right, joint, j is column_cuts[0], i is row_cuts[0])


def _parts(sizes: Sequence[int], most: int) -> list[Slices]:
    """The slices that cut an array of these sizes into parts of at most `most` entries, of about equal size."""
    if not sizes:
        return [()]
    if 0 in sizes:
        return []
    inner = math.prod(sizes[1:])
    step = -(-sizes[0] // -(-sizes[0] // max(1, most // inner)))
    inner_parts = _parts(sizes[1:], most)
    return [(slice(start, start + step), *part) for start in range(0, sizes[0], step) for part in inner_parts]


def _exponentials(t: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """The maxima along an axis, and the exponentials of the entries less these."""
    shift = finite(t.amax(axis, keepdim=True))
    return shift, exp_shifted(t, shift, torch.empty_like(t), torch.empty_like(t))


def pairs(piece: Piece, z: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """The terms a_ik + b_kj (f, k) of the entries with indices z, i, j (f), in float64."""
    return piece.a[z, i].double() + piece.b[z, :, j].double()
