"""What one step of a chain does, for the loops that numba compiles: messages times a matrix, emission, scale.

Arrays are flat and contiguous and are cut into rows here: an index that numba knows not to be negative needs no test,
and only a loop without tests becomes vectors. Maxima are those of bits as integers, which order non-negative floats as
they are, with NaN above all: maxima of floats, that must not lose NaN, do not become vectors.

Products are float32 or float64, as the messages; an emission's exponential and the weight that it gives are float64, so
that neither underflows where the message does not.
"""

import numba
import numpy as np

from .native_exp import bits, exp_for, from_bits, from_ordered, ordered

_inlined = numba.njit(fastmath={"contract"}, forceinline=True)

# sums over the states may be taken in any order
_dot = numba.njit(fastmath={"contract", "reassoc"}, forceinline=True)


@_inlined
def four_rows(a, begin, matrix, p, width, c, out):
    """`out` (4, c) = `a[begin:]` (4, c) times the matrix (c, c) that begins at `p`, with rows `width` apart."""
    out0, out1, out2, out3 = out[:c], out[c : 2 * c], out[2 * c : 3 * c], out[3 * c : 4 * c]
    a0, a1 = a[begin : begin + c], a[begin + c : begin + 2 * c]
    a2, a3 = a[begin + 2 * c : begin + 3 * c], a[begin + 3 * c : begin + 4 * c]
    out[: 4 * c] = 0
    k = 0
    while k + 4 <= c:
        a00, a01, a02, a03 = a0[k], a0[k + 1], a0[k + 2], a0[k + 3]
        a10, a11, a12, a13 = a1[k], a1[k + 1], a1[k + 2], a1[k + 3]
        a20, a21, a22, a23 = a2[k], a2[k + 1], a2[k + 2], a2[k + 3]
        a30, a31, a32, a33 = a3[k], a3[k + 1], a3[k + 2], a3[k + 3]
        at = p + k * width
        row0, row1 = matrix[at : at + c], matrix[at + width : at + width + c]
        row2, row3 = matrix[at + 2 * width : at + 2 * width + c], matrix[at + 3 * width : at + 3 * width + c]
        for j in range(c):
            p0, p1, p2, p3 = row0[j], row1[j], row2[j], row3[j]
            out0[j] += a00 * p0 + a01 * p1 + a02 * p2 + a03 * p3
            out1[j] += a10 * p0 + a11 * p1 + a12 * p2 + a13 * p3
            out2[j] += a20 * p0 + a21 * p1 + a22 * p2 + a23 * p3
            out3[j] += a30 * p0 + a31 * p1 + a32 * p2 + a33 * p3
        k += 4
    while k < c:
        a00, a10, a20, a30 = a0[k], a1[k], a2[k], a3[k]
        at = p + k * width
        row0 = matrix[at : at + c]
        for j in range(c):
            p0 = row0[j]
            out0[j] += a00 * p0
            out1[j] += a10 * p0
            out2[j] += a20 * p0
            out3[j] += a30 * p0
        k += 1


@_inlined
def one_row(a, begin, matrix, p, width, c, out):
    """The same for one row; eight states at a time, so that `out` is read and written once for eight."""
    out0, a0 = out[:c], a[begin : begin + c]
    out0[:] = 0
    k = 0
    while k + 8 <= c:
        x0, x1, x2, x3 = a0[k], a0[k + 1], a0[k + 2], a0[k + 3]
        x4, x5, x6, x7 = a0[k + 4], a0[k + 5], a0[k + 6], a0[k + 7]
        at = p + k * width
        row0, row1 = matrix[at : at + c], matrix[at + width : at + width + c]
        row2, row3 = matrix[at + 2 * width : at + 2 * width + c], matrix[at + 3 * width : at + 3 * width + c]
        at += 4 * width
        row4, row5 = matrix[at : at + c], matrix[at + width : at + width + c]
        row6, row7 = matrix[at + 2 * width : at + 2 * width + c], matrix[at + 3 * width : at + 3 * width + c]
        for j in range(c):
            first = x0 * row0[j] + x1 * row1[j] + x2 * row2[j] + x3 * row3[j]
            second = x4 * row4[j] + x5 * row5[j] + x6 * row6[j] + x7 * row7[j]
            out0[j] += first + second
        k += 8
    while k < c:
        x0, at = a0[k], p + k * width
        row0 = matrix[at : at + c]
        for j in range(c):
            out0[j] += x0 * row0[j]
        k += 1


@_dot
def row_by_rows(a, matrix, p, width, c, out):
    """`out` (c) = `a` (c) times the matrix's transpose."""
    zero = out.dtype.type(0)
    k = 0
    while k + 4 <= c:
        at = p + k * width
        row0, row1 = matrix[at : at + c], matrix[at + width : at + width + c]
        row2, row3 = matrix[at + 2 * width : at + 2 * width + c], matrix[at + 3 * width : at + 3 * width + c]
        s0, s1, s2, s3 = zero, zero, zero, zero
        for j in range(c):
            s0 += a[j] * row0[j]
            s1 += a[j] * row1[j]
            s2 += a[j] * row2[j]
            s3 += a[j] * row3[j]
        out[k], out[k + 1], out[k + 2], out[k + 3] = s0, s1, s2, s3
        k += 4
    while k < c:
        at = p + k * width
        row0, s0 = matrix[at : at + c], zero
        for j in range(c):
            s0 += a[j] * row0[j]
        out[k] = s0
        k += 1


@_dot
def dot(a, b):
    """The sum of the products of two rows, in float64."""
    found = 0.0
    for j in range(len(a)):
        found += float(a[j]) * float(b[j])
    return found


@_inlined
def emit(sums, x, flush, weights, message):
    """The message: `sums` U times `exp(x - shift)`, over its largest entry z. Returns z, the shift and the least U.

    The shift is the largest x, or, where that would be too far above the states that can be reached, the largest of
    those. Entries below `flush` are zero. `weights` is room for c numbers in float64.
    """
    c = len(sums)
    high, low = ordered(x.dtype.type(-np.inf)), bits(sums.dtype.type(np.inf))
    for j in range(c):
        value, sum_ = ordered(x[j]), bits(sums[j])
        high = value if value > high else high
        low = sum_ if sum_ < low else low
    shift = float(from_ordered(high))
    z = _weigh(sums, x, shift, weights)
    if z < 2.0**-24:
        high = ordered(x.dtype.type(-np.inf))
        for j in range(c):
            value = ordered(x[j])
            if sums[j] != 0 and value > high:
                high = value
        shift = float(from_ordered(high))
        z = _weigh(sums, x, shift, weights)
    factor = 1 / z if z > 0 else 0.0
    for j in range(c):
        weight = weights[j] * factor
        message[j] = 0.0 if weight < flush else weight
    return z, shift, from_bits(low)


@_inlined
def _weigh(sums, x, shift, weights):
    """`sums exp(x - shift)` and its largest entry; what lies above the shift cannot be reached."""
    away = 0.0 if shift == -np.inf else shift
    top = np.int64(0)
    for j in range(len(sums)):
        d = float(x[j]) - away
        weight = sums[j] * exp_for(0.0 if d > 0.0 else d, x[j])
        weights[j] = weight
        value = bits(weight)
        top = value if value > top else top
    return from_bits(top)


@_inlined
def return_to(behind, reached, x, weights, source):
    """`source` R = B exp(x - shift) over its largest entry, where `reached` is not zero.

    `behind` B (c) float64; what no path enters has a B of any size, and no influence.
    """
    c = len(source)
    high = ordered(x.dtype.type(-np.inf))
    for j in range(c):
        value = ordered(x[j])
        value = value if reached[j] != 0 else ordered(x.dtype.type(-np.inf))
        high = value if value > high else high
    shift = float(from_ordered(high))
    away = 0.0 if shift == -np.inf else shift
    top = np.int64(0)
    for j in range(c):
        d = float(x[j]) - away
        weight = behind[j] * exp_for(0.0 if d > 0.0 else d, x[j])
        weight = weight if reached[j] != 0 else 0.0
        weights[j] = weight
        value = bits(weight)
        top = value if value > top else top
    z = from_bits(top)
    factor = 1 / z if z > 0 else 0.0
    for j in range(c):
        source[j] = weights[j] * factor
