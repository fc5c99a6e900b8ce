"""A log-semiring matrix product in pieces: shifted exponentials, their product s, and the entries that underflowed.

    s = exp(a - row maximum) exp(b - column maximum)

is one matrix product. An entry with a tiny s may have lost terms: it underflowed if any of its terms is finite, which a
product of zeros and ones tells, computed only if some s is tiny. Operands are (*batch, m, k) and (*batch, k, n) with
any strides, float32 or float64, of one dtype; a batch axis of size 1 in one of them is broadcast without a copy. Large
products are computed in pieces, so that no copy of a large operand or result is made.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..numbers import FLUSH, exp_shifted, finite

# pairwise terms held at a time
_PAIRS = 2**15

# a piece has at most _ENTRIES entries of operands and result, or 1 / _PART of all where that is more
_ENTRIES = 3 * 2**15
_PART = 128

# least size of a piece, if cut, on the product's shorter axis and on its longer one: the longer side's exponentials are
# computed again for every piece of the shorter, and products of few rows are slow
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
        (*left, m, _), (*right, _, n) = a.shape, b.shape
        axes = range(len(left))
        if left == right:
            return cls(tuple(axes), (), (), (*left, m, n))
        sets = tuple(axis for axis in axes if left[axis] == right[axis])
        rows = tuple(axis for axis in axes if left[axis] != right[axis] == 1)
        columns = tuple(axis for axis in axes if right[axis] != left[axis] == 1)
        return cls(sets, rows, columns, (*torch.broadcast_shapes(left, right), m, n))

    @property
    def aligned(self) -> bool:
        """Whether both operands have all batch axes, so that the views below are the tensors themselves."""
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
        first = len(self.sets) + len(self.rows)
        return a if self.aligned else a.permute(self.left_order).flatten(first, -2)

    def right(self, b: Tensor) -> Tensor:
        """A tensor of the shape of `b`, as a view (*sets, k, *columns)."""
        first = len(self.sets)
        return b if self.aligned else b.permute(self.right_order).flatten(first, first + len(self.rows))

    def joint(self, c: Tensor) -> Tensor:
        """A tensor of the shape of the product, as a view (*sets, *rows, *columns)."""
        return c if self.aligned else c.permute(self.right_order)


Slices = tuple[slice, ...]
Indices = tuple[Tensor, Tensor, Tensor]


class Cut(NamedTuple):
    """The slices of views by `Groups.left`, `right` and `joint` that make a piece."""

    left: Slices
    right: Slices
    joint: Slices


class Piece(NamedTuple):
    """`exp(a - row)` (g, m, k), `exp(b - column)` (g, k, n) and their product `s` for some sets, rows and columns.

    `small` marks entries whose s is too small to be trusted, None if there are none; `underflowed` are the indices
    (z, i, j), in chunks, of those with a finite term.
    """

    cut: Cut
    a: Tensor
    b: Tensor
    row: Tensor
    ea: Tensor
    column: Tensor
    eb: Tensor
    s: Tensor
    small: Tensor | None
    underflowed: list[Indices]

    def divide(self, by_s: Tensor) -> Tensor:
        """`by_s / s`, and 0 where s is too small to be trusted."""
        quotient = by_s / self.s
        return quotient if self.small is None else quotient.masked_fill_(self.small, 0.0)

    def terms(self) -> Iterator[tuple[Indices, Tensor]]:
        """The indices of entries that underflowed, and their terms a_ik + b_kj (f, k) in float64."""
        for z, i, j in self.underflowed:
            yield (z, i, j), self.a[z, i].double() + self.b[z, :, j].double()

    def left(self, a: Tensor) -> Tensor:
        """The piece (g, m, k) of a view by `Groups.left`."""
        return a[self.cut.left].reshape(self.ea.shape)

    def right(self, b: Tensor) -> Tensor:
        """The piece (g, k, n) of a view by `Groups.right`."""
        return b[self.cut.right].reshape(self.eb.shape)

    def joint(self, c: Tensor) -> Tensor:
        """The piece (g, m, n) of a view by `Groups.joint`."""
        return c[self.cut.joint].reshape(self.s.shape)


def add_to(into: Tensor, cut: Slices, part: Tensor) -> None:
    """Add a piece to its part of a view."""
    total = into[cut]
    total.add_(part.reshape(total.shape))


def pieces(groups: Groups, a: Tensor, b: Tensor, depth: torch.dtype) -> Iterator[Piece]:
    """The pieces of a product one after the other; `depth` as in `matmul.forward`."""
    first, k = len(groups.sets), a.shape[-1]
    # a term has lost less than FLUSH times its larger factor
    threshold = 2 * k * FLUSH[depth] / torch.finfo(depth).eps
    left, right = groups.left(a), groups.right(b)
    last: Cut | None = None
    for cut in _cuts(left.shape[:first], left.shape[first:-1], right.shape[first + 1 :], k):
        if last is None or last.left != cut.left:
            a = left[cut.left]
            a = a.reshape(math.prod(a.shape[:first]), -1, k)
            rows = _exponentials(a, -1)
        if last is None or last.right != cut.right:
            b = right[cut.right].reshape(a.shape[0], k, -1)
            columns = _exponentials(b, -2)
        last = cut
        s = torch.bmm(rows[1], columns[1])
        yield Piece(cut, a, b, *rows, *columns, s, *_underflowed(a, b, s, threshold))


def _underflowed(a: Tensor, b: Tensor, s: Tensor, threshold: float) -> tuple[Tensor | None, list[Indices]]:
    """Which entries are too small to be trusted, and the indices of those with a finite term."""
    if s.numel() == 0 or s.amin().item() >= threshold:
        return None, []
    small = s < threshold
    possible = torch.bmm((a > -math.inf).to(s.dtype), (b > -math.inf).to(s.dtype)) > 0
    indices = possible.logical_and_(small).nonzero(as_tuple=True)
    size = max(1, _PAIRS // a.shape[-1])
    chunks = zip(*(index.split(size) for index in indices), strict=True)
    return small, list(chunks) if len(indices[0]) else []


def _cuts(sets: Sequence[int], rows: Sequence[int], columns: Sequence[int], k: int) -> Iterator[Cut]:
    """The slices of all pieces: many small sets in each, or a part of a large set's rows and columns."""
    m, n = math.prod(rows), math.prod(columns)
    set_entries = m * k + k * n + m * n
    whole = math.prod(sets) * set_entries
    if 0 < whole <= _ENTRIES:
        yield Cut((), (), ())
        return
    entries = max(_ENTRIES, whole // _PART)
    most = [m, n]
    if set_entries > entries:
        held = min(m, n, max(_KEPT, entries // (2 * k)))
        passing = max(_PASSING, (entries - k * held) // (k + held))
        most = [held, passing] if m < n else [passing, held]
    row_cuts, column_cuts = _parts(rows, most[0]), _parts(columns, most[1])
    # the exponentials of the side that is held are those of the outer loop
    order = [(i, j) for i in row_cuts for j in column_cuts]
    if m >= n:
        order = [(i, j) for j in column_cuts for i in row_cuts]
    for z in _parts(sets, max(1, entries // set_entries)):
        for i, j in order:
            yield Cut((*z, *i), (*z, slice(None), *j), (*z, *i, *j))


def _parts(sizes: Sequence[int], most: int) -> list[Slices]:
    """Slices of axes of these sizes, with at most so many entries, or one, in each."""
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
    return shift, exp_shifted(t, shift)
