"""The log-semiring matrix product `c = log(exp(a) exp(b))`, its gradients and its second derivatives.

    c = log s + row maximum + column maximum        s = exp(a - row maximum) exp(b - column maximum)

s is one matrix product. An entry with a tiny s may have lost terms: it underflowed if any of its terms is finite, which
a product of zeros and ones tells, computed only if some s is tiny. Such entries are computed by log-sum-exp in float64,
forward and backward. Definition: `logchain.reference.matmul`.

Operands are (*batch, m, k) and (*batch, k, n) with any strides, float32 or float64, of one dtype; a batch axis of size
1 in one of them is broadcast without a copy. Large products are computed in pieces, so that no copy of a large operand
or result is made.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..numbers import FLUSH, exp_shifted, finite, near_one

# pairwise terms held at a time
_PAIRS = 2**15

# a piece has at most _ENTRIES entries of operands and result, or 1 / _PART of all where that is more
_ENTRIES = 3 * 2**15
_PART = 128

# least size of a piece on the product's shorter axis and on its longer one, if they are cut: the longer side's
# exponentials are computed again for every piece of the shorter, and products of few rows are slow
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


def forward(a: Tensor, b: Tensor, depth: torch.dtype = torch.float32) -> tuple[Tensor, int]:
    """`log(exp(a) exp(b))` (*batch, m, n), and the number of its entries that were recomputed.

    `depth` is the dtype whose exponent range decides how small an s is trusted. It is float32 for float64 operands too,
    because an entry D nats below its maxima has an error of D roundings; a caller whose contract allows that passes
    `torch.float64` and has fewer entries recomputed.
    """
    groups = Groups.of(a, b)
    out = a.new_empty(groups.shape)
    into, recomputed = groups.joint(out), 0
    for piece in _pieces(groups, a, b, depth):
        # row + column may be far larger than c, so that their sum needs float64
        c = (piece.row.double() + piece.column.double()).add_(piece.s.log_())
        for at, terms in piece.terms():
            c[at] = torch.logsumexp(terms, -1).to(c.dtype)
            recomputed += len(terms)
        into_piece = into[piece.cut.joint]
        into_piece.copy_(c.view(into_piece.shape))
    return out, recomputed


def backward(
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    need_a: bool,
    need_b: bool,
    depth: torch.dtype = torch.float32,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `sum(weight * c)`: `weight_ij exp(a_ik + b_kj - c_ij)` summed over j for a, and over i for b."""
    groups = Groups.of(a, b)
    grad_a, grad_b = torch.zeros_like(a) if need_a else None, torch.zeros_like(b) if need_b else None
    into_a = None if grad_a is None else groups.left(grad_a)
    into_b = None if grad_b is None else groups.right(grad_b)
    weights = groups.joint(weight)
    for piece in _pieces(groups, a, b, depth):
        weight, scale = near_one(piece.joint(weights))  # the quotient by a small sum must not overflow
        g = piece.divide(weight)
        part_a = torch.bmm(g, piece.eb.mT).mul_(piece.ea) if need_a else None
        part_b = torch.bmm(piece.ea.mT, g).mul_(piece.eb) if need_b else None
        for at, terms in piece.terms():
            _scatter(torch.softmax(terms, -1).mul_(weight[at][:, None]), part_a, part_b, at)
        for part, into, cut in ((part_a, into_a, piece.cut.left), (part_b, into_b, piece.cut.right)):
            if part is not None and into is not None:
                _add_to(into, cut, part if scale == 1.0 else part.mul_(scale))
    return grad_a, grad_b


def second(weight: Tensor, a: Tensor, b: Tensor, along_a: Tensor, along_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `sum(grad_a * along_a) + sum(grad_b * along_b)` with respect to the weight, `a` and `b`.

    With p_k = exp(a_ik + b_kj - c_ij), the share of term k in entry (i, j), and u_k = along_a_ik + along_b_kj, the
    first is the mean `sum p_k u_k`, and 0 where c is -inf; the other two sum `weight p_k (u_k - mean)`.
    """
    groups = Groups.of(a, b)
    out, grad_a, grad_b = a.new_zeros(groups.shape), torch.zeros_like(a), torch.zeros_like(b)
    into = groups.joint(out), groups.left(grad_a), groups.right(grad_b)
    weights, alongs_a, alongs_b = groups.joint(weight), groups.left(along_a), groups.right(along_b)
    for piece in _pieces(groups, a, b, torch.float32):
        weight, along_a, along_b = piece.joint(weights), piece.left(alongs_a), piece.right(alongs_b)
        mean = _mean(piece, along_a, along_b)
        g, ea, eb = piece.divide(weight), piece.ea, piece.eb
        ua, ub, h = ea * along_a, eb * along_b, g * mean
        part_a = torch.bmm(g, ub.mT).sub_(torch.bmm(h, eb.mT)).mul_(ea).add_(torch.bmm(g, eb.mT).mul_(ua))
        part_b = torch.bmm(ua.mT, g).sub_(torch.bmm(ea.mT, h)).mul_(eb).add_(torch.bmm(ea.mT, g).mul_(ub))
        for (z, i, j), terms in piece.terms():
            u = (along_a[z, i] + along_b[z, :, j]).double().sub_(mean[z, i, j, None])
            _scatter(torch.softmax(terms, -1).mul_(u.mul_(weight[z, i, j, None])), part_a, part_b, (z, i, j))
        cut = piece.cut
        for total, slices, part in zip(into, (cut.joint, cut.left, cut.right), (mean, part_a, part_b), strict=True):
            _add_to(total, slices, part)
    return out, grad_a, grad_b


def _mean(piece: Piece, along_a: Tensor, along_b: Tensor) -> Tensor:
    """The means `sum p_k u_k` of `second` for one piece (g, m, n)."""
    mean = piece.divide(torch.bmm(piece.ea * along_a, piece.eb).add_(torch.bmm(piece.ea, piece.eb * along_b)))
    for (z, i, j), terms in piece.terms():
        mean[z, i, j] = torch.softmax(terms, -1).mul_(along_a[z, i] + along_b[z, :, j]).sum(-1).to(mean.dtype)
    return mean


def _scatter(terms: Tensor, grad_a: Tensor | None, grad_b: Tensor | None, at: Indices) -> None:
    """Add terms (f, k) of entries with indices z, i, j (f) to row i of `grad_a` and to column j of `grad_b`."""
    z, i, j = at
    if grad_a is not None:
        grad_a.index_put_((z, i), terms.to(grad_a.dtype), accumulate=True)
    if grad_b is not None:
        grad_b.mT.index_put_((z, j), terms.to(grad_b.dtype), accumulate=True)


def _add_to(into: Tensor, cut: Slices, part: Tensor) -> None:
    """Add a piece to its part of a view."""
    total = into[cut]
    total.add_(part.reshape(total.shape))


def _pieces(groups: Groups, a: Tensor, b: Tensor, depth: torch.dtype) -> Iterator[Piece]:
    """The pieces of a product; `depth` as in `forward`."""
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
