"""Expected counts of transitions: how those of a step are added up, and what gradient they are.

Arrays are flat, as in `native_steps`.
"""

import numba
import numpy as np

from .native_vectors import LANES, load, store, where

_inlined = numba.njit(fastmath={"contract"}, forceinline=True)


@_inlined
def add_counts(rows, messages, before, weight, q, nothing, source, c, counts, at):
    """`counts[at:]` (c, c) += the messages before, transposed, times `source` (rows, c)."""
    # a sequence that is left out may hold anything
    from0 = nothing if weight[q] == 0 else messages[before + q * c : before + (q + 1) * c]
    if rows == 4:
        from1 = nothing if weight[q + 1] == 0 else messages[before + (q + 1) * c : before + (q + 2) * c]
        from2 = nothing if weight[q + 2] == 0 else messages[before + (q + 2) * c : before + (q + 3) * c]
        from3 = nothing if weight[q + 3] == 0 else messages[before + (q + 3) * c : before + (q + 4) * c]
        _count_four(from0, from1, from2, from3, source, c, counts, at)
    else:
        _count_one(from0, source, c, counts, at)


@_inlined
def from_linear(out, o, times, counts, n, matrix, p, raw, at, stride, c, taken, by_log):
    """A row of counts, times a number, times the linear matrix or over what was taken out of it.

    It is 0 where nothing went, or at a zero of the matrix.
    """
    if by_log:
        for j in range(0, c, LANES):
            some = times * load(counts, n + j, c - j, 0.0)
            store(out, o + j, c - j, where(some, some * load(matrix, p + j, c - j, 0.0)))
        return
    factor = np.exp(-taken)
    if stride == 1:
        for j in range(0, c, LANES):
            some = times * load(counts, n + j, c - j, 0.0)
            store(out, o + j, c - j, where(load(raw, at + j, c - j, 0.0), some * factor))
    else:
        for j in range(c):
            out[o + j] = 0.0 if raw[at + j * stride] == 0 else times * counts[n + j] * factor


@_inlined
def _count_four(a0, a1, a2, a3, b, c, counts, at):
    """`counts[at:]` (c, c) += the transposed rows a (4, c) times `b` (4, c)."""
    apart = len(b) // 4
    b0, b1, b2, b3 = b[:c], b[apart : apart + c], b[2 * apart : 2 * apart + c], b[3 * apart : 3 * apart + c]
    for k in range(c):
        x0, x1, x2, x3 = a0[k], a1[k], a2[k], a3[k]
        row = counts[at + k * c : at + (k + 1) * c]
        for j in range(c):
            row[j] += x0 * b0[j] + x1 * b1[j] + x2 * b2[j] + x3 * b3[j]


@_inlined
def _count_one(a, b, c, counts, at):
    """The same for one row."""
    for k in range(c):
        x, row = a[k], at + k * c
        for j in range(0, c, LANES):
            count = x * load(b, j, c - j, 0.0)
            store(counts, row + j, c - j, count + load(counts, row + j, c - j, 0.0))
