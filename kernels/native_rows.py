"""Rows times a matrix, one row or four together, for the loops that numba compiles.

Arrays are flat and contiguous, and a row is told by where it begins. Rows are taken in vectors (`native_vectors`), four
together with two vectors of a matrix's columns, or one in float64, so that all sums stay in registers. Terms are of the
rows' dtype.
"""

from .native import inlined
from .native_vectors import LANES, entry, everywhere, is_wide, load, store, total, turned, wide

# so many terms are added one after the other in the dtype of the rows
_TERMS = 32


@inlined
def room(c):
    """How far apart rows lie in a room of our own, where whole vectors are written.

    What has been written under a mask is slow to read at once.
    """
    return -(-c // (2 * LANES)) * 2 * LANES


@inlined
def without_diagonal(matrix, p, c, others, o, diagonal, d):
    """A matrix (c, c) that begins at `p` as its `diagonal[d:]`, a room, and what is beside it, `others[o:]`."""
    for k in range(c):
        copy(matrix, p + k * c, c, others, o + k * c)
        diagonal[d + k], others[o + k * c + k] = matrix[p + k * c + k], 0.0


@inlined
def rows_times(rows, a, matrix, p, width, c, diagonal, d, out):
    """`out` (rows, c) = `a` (rows, c) times the matrix (c, c) that begins at `p`, for one row or four; both rooms.

    The matrix's rows lie `width` apart. What becomes of some terms is added in float64, and so is what becomes of a
    diagonal, a room, since states tend to stay: behind a large term small ones would be lost, in each step the same.
    """
    j = 0
    if is_wide(a):
        while j < c:
            _column(rows, a, matrix, p, width, c, diagonal, d, out, j)
            j += LANES
    while j + 2 * LANES <= c:
        _columns(rows, a, matrix, p, width, c, diagonal, d, out, j, LANES, LANES)
        j += 2 * LANES
    if j < c:
        _columns(rows, a, matrix, p, width, c, diagonal, d, out, j, c - j, c - j - LANES)


@inlined
def _columns(rows, a, matrix, p, width, c, diagonal, d, out, j, n, rest):
    """The columns of two vectors from the j-th on, with `n` and `rest` entries at most."""
    if rows == 4:
        _four_columns(a, matrix, p, width, c, diagonal, d, out, j, n, rest)
    else:
        _one_columns(a, matrix, p, width, c, diagonal, d, out, j, n, rest)


@inlined
def _four_columns(a, matrix, p, width, c, diagonal, d, out, j, n, rest):
    """Four rows at once: a matrix is read once for them."""
    apart, zero, at, k = len(a) // 4, everywhere(a, 0.0), p + j, 0
    left, right = load(diagonal, d + j, LANES, 0.0), load(diagonal, d + j + LANES, LANES, 0.0)
    _begin(a, 0, left, right, out, j)
    _begin(a, apart, left, right, out, j)
    _begin(a, 2 * apart, left, right, out, j)
    _begin(a, 3 * apart, left, right, out, j)
    while k < c:
        s00 = s01 = s10 = s11 = s20 = s21 = s30 = s31 = zero
        for _ in range(min(_TERMS, c - k)):
            left, right = load(matrix, at, n, 0.0), load(matrix, at + LANES, rest, 0.0)
            a0, a1, a2, a3 = entry(a, k), entry(a, k + apart), entry(a, k + 2 * apart), entry(a, k + 3 * apart)
            s00, s01, s10, s11 = s00 + a0 * left, s01 + a0 * right, s10 + a1 * left, s11 + a1 * right
            s20, s21, s30, s31 = s20 + a2 * left, s21 + a2 * right, s30 + a3 * left, s31 + a3 * right
            k, at = k + 1, at + width
        _add(s00, s01, out, j)
        _add(s10, s11, out, apart + j)
        _add(s20, s21, out, 2 * apart + j)
        _add(s30, s31, out, 3 * apart + j)


@inlined
def _one_columns(a, matrix, p, width, c, diagonal, d, out, j, n, rest):
    """One row, four terms at a time, so that none waits for another's sum."""
    zero, at, k = everywhere(a, 0.0), p + j, 0
    left, right = load(diagonal, d + j, LANES, 0.0), load(diagonal, d + j + LANES, LANES, 0.0)
    _begin(a, 0, left, right, out, j)
    while k < c:
        s0 = s1 = t0 = t1 = u0 = u1 = v0 = v1 = zero
        for _ in range(min(_TERMS, (c - k) // 4)):
            x, y, z, w, second, third = a[k], a[k + 1], a[k + 2], a[k + 3], at + width, at + 2 * width
            fourth = third + width
            s0, s1 = s0 + x * load(matrix, at, n, 0.0), s1 + x * load(matrix, at + LANES, rest, 0.0)
            t0, t1 = t0 + y * load(matrix, second, n, 0.0), t1 + y * load(matrix, second + LANES, rest, 0.0)
            u0, u1 = u0 + z * load(matrix, third, n, 0.0), u1 + z * load(matrix, third + LANES, rest, 0.0)
            v0, v1 = v0 + w * load(matrix, fourth, n, 0.0), v1 + w * load(matrix, fourth + LANES, rest, 0.0)
            k, at = k + 4, fourth + width
        while c - 4 < k < c:
            x = a[k]
            s0, s1 = s0 + x * load(matrix, at, n, 0.0), s1 + x * load(matrix, at + LANES, rest, 0.0)
            k, at = k + 1, at + width
        _add((wide(s0) + t0) + (wide(u0) + v0), (wide(s1) + t1) + (wide(u1) + v1), out, j)


@inlined
def _begin(a, row, left, right, out, j):
    """Two vectors of a row of `out` = a diagonal's share."""
    store(out, row + j, LANES, load(a, row + j, LANES, 0.0) * wide(left))
    store(out, row + j + LANES, LANES, load(a, row + j + LANES, LANES, 0.0) * wide(right))


@inlined
def _add(left, right, out, at):
    store(out, at, LANES, load(out, at, LANES, 0.0) + left)
    store(out, at + LANES, LANES, load(out, at + LANES, LANES, 0.0) + right)


@inlined
def _column(rows, a, matrix, p, width, c, diagonal, d, out, j):
    """The columns of one vector from the j-th on."""
    if rows == 4:
        _four_column(a, matrix, p, width, c, diagonal, d, out, j)
    else:
        _one_column(a, matrix, p, width, c, diagonal, d, out, j)


@inlined
def _four_column(a, matrix, p, width, c, diagonal, d, out, j):
    apart, at, n = len(a) // 4, p + j, c - j
    s0 = s1 = s2 = s3 = wide(everywhere(a, 0.0))
    for k in range(c):
        row = wide(load(matrix, at, n, 0.0))
        s0, s1 = s0 + entry(a, k) * row, s1 + entry(a, k + apart) * row
        s2, s3 = s2 + entry(a, k + 2 * apart) * row, s3 + entry(a, k + 3 * apart) * row
        at += width
    last = wide(load(diagonal, d + j, LANES, 0.0))
    store(out, j, LANES, s0 + load(a, j, LANES, 0.0) * last)
    store(out, apart + j, LANES, s1 + load(a, apart + j, LANES, 0.0) * last)
    store(out, 2 * apart + j, LANES, s2 + load(a, 2 * apart + j, LANES, 0.0) * last)
    store(out, 3 * apart + j, LANES, s3 + load(a, 3 * apart + j, LANES, 0.0) * last)


@inlined
def _one_column(a, matrix, p, width, c, diagonal, d, out, j):
    at, n, k = p + j, c - j, 0
    s = t = u = v = wide(everywhere(a, 0.0))
    while k + 4 <= c:
        second, third = at + width, at + 2 * width
        fourth = third + width
        s, t = s + a[k] * wide(load(matrix, at, n, 0.0)), t + a[k + 1] * wide(load(matrix, second, n, 0.0))
        u, v = u + a[k + 2] * wide(load(matrix, third, n, 0.0)), v + a[k + 3] * wide(load(matrix, fourth, n, 0.0))
        k, at = k + 4, fourth + width
    while k < c:
        s = s + a[k] * wide(load(matrix, at, n, 0.0))
        k, at = k + 1, at + width
    store(out, j, LANES, (s + t) + (u + v) + load(a, j, LANES, 0.0) * wide(load(diagonal, d + j, LANES, 0.0)))


@inlined
def turn(matrix, p, width, c, out, o):
    """`out[o:]` (c, c) = the transpose of the matrix that begins at `p`, with rows `width` apart."""
    for k in range(0, c, LANES):
        for j in range(0, c, LANES):
            at, n = p + k * width + j, c - j
            row0, row1 = load(matrix, at, n, 0.0), load(matrix, at + width, n if k + 1 < c else 0, 0.0)
            at, left = at + 2 * width, c - k
            row2, row3 = (
                load(matrix, at, n if left > 2 else 0, 0.0),
                load(matrix, at + width, n if left > 3 else 0, 0.0),
            )
            at += 2 * width
            row4, row5 = (
                load(matrix, at, n if left > 4 else 0, 0.0),
                load(matrix, at + width, n if left > 5 else 0, 0.0),
            )
            at += 2 * width
            row6, row7 = (
                load(matrix, at, n if left > 6 else 0, 0.0),
                load(matrix, at + width, n if left > 7 else 0, 0.0),
            )
            columns, into = turned((row0, row1, row2, row3, row4, row5, row6, row7)), o + j * c + k
            store(out, into, left, columns[0])
            store(out, into + c, left if n > 1 else 0, columns[1])
            store(out, into + 2 * c, left if n > 2 else 0, columns[2])
            store(out, into + 3 * c, left if n > 3 else 0, columns[3])
            store(out, into + 4 * c, left if n > 4 else 0, columns[4])
            store(out, into + 5 * c, left if n > 5 else 0, columns[5])
            store(out, into + 6 * c, left if n > 6 else 0, columns[6])
            store(out, into + 7 * c, left if n > 7 else 0, columns[7])


@inlined
def row_by_rows(a, begin, matrix, p, width, c, out, into):
    """`out[into:]` (c) = `a[begin:]` (c) times the matrix's transpose."""
    zero = everywhere(a, 0.0)
    k, at = 0, p
    while k + 4 <= c:
        s0 = s1 = s2 = s3 = zero
        for j in range(0, c, LANES):
            n, row, place = c - j, load(a, begin + j, c - j, 0.0), at + j
            s0 = s0 + row * load(matrix, place, n, 0.0)
            s1 = s1 + row * load(matrix, place + width, n, 0.0)
            s2 = s2 + row * load(matrix, place + 2 * width, n, 0.0)
            s3 = s3 + row * load(matrix, place + 3 * width, n, 0.0)
        here = into + k
        out[here], out[here + 1], out[here + 2], out[here + 3] = total(s0), total(s1), total(s2), total(s3)
        k, at = k + 4, at + 4 * width
    while k < c:
        s0 = zero
        for j in range(0, c, LANES):
            s0 = s0 + load(a, begin + j, c - j, 0.0) * load(matrix, at + j, c - j, 0.0)
        out[into + k] = total(s0)
        k, at = k + 1, at + width


@inlined
def copy(row, r, c, out, o):
    """`out[o:]` = a row."""
    for j in range(0, c, LANES):
        store(out, o + j, c - j, load(row, r + j, c - j, 0.0))


@inlined
def scaled(row, r, c, factor, out, o):
    """`out[o:]` = a row times a factor, both in rooms."""
    for j in range(0, c, LANES):
        store(out, o + j, LANES, wide(load(row, r + j, LANES, 0.0)) * factor)
