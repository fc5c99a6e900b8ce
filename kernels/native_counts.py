"""Expected counts of transitions: how those of a step are added up, and what gradient they are.

Arrays are flat, as in `native_rows`.
"""

import numpy as np

from .native import inlined
from .native_vectors import LANES, entry, everywhere, load, store, where


@inlined
def count_transitions(
    rows, terms, messages, m, message_row, message_term, source, s, source_row, source_term, c, add, counts, at
):
    """`counts[at:]` (c, c) = the messages, transposed, times the sources, or more by that much.

    Both are (rows, terms, c), from `m` and `s` on, with strides for rows and terms; `terms` has those of each row.
    """
    for k in range(0, c, 4):
        # behind the last state the last one is taken once more, and written nowhere
        k1, k2, k3 = min(k + 1, c - 1), min(k + 2, c - 1), min(k + 3, c - 1)
        for j in range(0, c, 2 * LANES):
            s00 = s01 = s10 = s11 = s20 = s21 = s30 = s31 = everywhere(source, 0.0)
            for row in range(rows):
                e, o = m + row * message_row, s + row * source_row + j
                for _ in range(terms[row]):
                    left, right = load(source, o, LANES, 0.0), load(source, o + LANES, LANES, 0.0)
                    a0, a1 = entry(messages, e + k), entry(messages, e + k1)
                    a2, a3 = entry(messages, e + k2), entry(messages, e + k3)
                    s00, s01, s10, s11 = s00 + a0 * left, s01 + a0 * right, s10 + a1 * left, s11 + a1 * right
                    s20, s21, s30, s31 = s20 + a2 * left, s21 + a2 * right, s30 + a3 * left, s31 + a3 * right
                    e, o = e + message_term, o + source_term
            here, n = at + k * c + j, c - j
            _put(s00, s01, add, counts, here, n)
            if k + 1 < c:
                _put(s10, s11, add, counts, here + c, n)
            if k + 2 < c:
                _put(s20, s21, add, counts, here + 2 * c, n)
            if k + 3 < c:
                _put(s30, s31, add, counts, here + 3 * c, n)


@inlined
def _put(left, right, add, counts, at, n):
    if add:
        store(counts, at, n, left + load(counts, at, n, 0.0))
        store(counts, at + LANES, n - LANES, right + load(counts, at + LANES, n - LANES, 0.0))
    else:
        store(counts, at, n, left)
        store(counts, at + LANES, n - LANES, right)


@inlined
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
