"""Products of stacks of small matrices in one compiled loop each, from the left, and their gradients.

    P_i = D_i P_(i-1) exp(M_i - top_i)        each row of P near 1: D_i are powers of two, and mostly 1

All rows of P go through the same matrices, four of them in registers at once. Nothing but these sums is rounded: powers
of two are counted in integers, tops are added in float64, each with what its sum loses. Backward, with G the gradient
of the linear P_s, the prefixes are made again, a stack of them for each thread:

    H = D_i G_i,      dM_i = (P_(i-1)^T H) exp(M_i - top_i),      G_(i-1) = H exp(M_i - top_i)^T

A stack of which an entry is not finite, or a sum too small to be trusted (`exponentials.trusted_sum`), is left to the
tree. Then no entry of G is larger than its weight over such a sum, and gradients lose no more than values do.
Cost: s c^3 multiply-adds and s c^2 exponentials, backward three times and once that. float32 and float64. Tested
against float64 pairwise log-sum-exp (`logchain.reference.matrix_product`).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from .native import compiled, cut, inlined, spread
from .native_exp import LN2, bits, exp, from_bits
from .native_vectors import LANES, borrowed, entry, everywhere, larger, largest, least, load, smaller, store, total
from .numbers import FLUSH, trusted_sum

# states up to which stacks come here: on an EPYC the tree takes 2.8 times as long with 32, 1.9 with 64, 1.6 with 128
_MOST = 64

# multiply-adds of a stack from which on, where stacks are fewer, four threads at a tree are faster than one here
_LONG = 2**24

# multiply-adds from which on another thread is worth its start
_SHARE = 2**21

Array = np.ndarray[Any, Any]

# as many numbers as may lie behind an address
MANY = 2**60

# between these, rows of P need no scale
_LOW, _HIGH = 2.0**-40, 2.0**40


def folds(whole: Tensor) -> bool:
    """Whether stacks (g, s, c, c) are multiplied here."""
    g, s, c, _ = whole.shape
    alone = s * c**3 > _LONG and torch.get_num_threads() > 4 * g
    return s > 1 and c <= _MOST and whole.dtype in FLUSH and not alone


def product(whole: Tensor, out: Tensor) -> Tensor | None:
    """Write the products (g, c, c) of stacks (g, s, c, c); returned is which stacks (g) are not done, None if all are.

    `out` is contiguous.
    """
    return _run(_products, whole, out.data_ptr(), 0)


def gradient(weight: Tensor, whole: Tensor, out: Tensor) -> Tensor | None:
    """Write the gradients (g, s, c, c) of `sum(weight * product)`; returned is what is not done, see `product`.

    `out` is contiguous, and so is `weight` (g, c, c), of the dtype of `whole`.
    """
    return _run(_gradients, whole, out.data_ptr(), weight.data_ptr())


def _run(function: Callable[..., Any], whole: Tensor, out: int, weight: int) -> Tensor | None:
    g, s, c, _ = whole.shape
    lossy = torch.empty(g, dtype=torch.bool, device="cpu")
    parts = max(1, min(torch.get_num_threads(), g, g * s * c**3 // _SHARE))
    sizes = np.array((s, c, *whole.stride()))
    addresses = whole.data_ptr(), weight, out, lossy.data_ptr()
    found = spread(_compiled(whole.dtype, function), cut(g, parts), *addresses, sizes, _limits(whole.dtype, c))
    return lossy if any(found) else None


@intrinsic
def _pointer(typing: Any, address: Any, like: Any) -> Any:
    """What lies at an address, numbers of the type of an array."""
    found = types.CPointer(like.dtype)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(found))

    return found(address, like), generate


@inlined
def at(address, size, like):
    """So many numbers at an address, of the type of an array."""
    return numba.carray(_pointer(address, like), (size,))


@inlined
def _largest_of(row, begin, c):
    """The largest entry; of NaNs nothing is known."""
    high = everywhere(row, -np.inf)
    for j in range(0, c, LANES):
        high = larger(high, load(row, begin + j, c - j, -np.inf))
    return largest(high)


@inlined
def _unit(z):
    """A power of two that brings z to between 1/2 and 1, and minus its exponent.

    For 0, infinity and NaN it is 0, 0 and NaN, and minus its exponent 0.
    """
    if 0 < z < np.inf:
        exponent = min((bits(z) >> np.int64(52)) - np.int64(1022), np.int64(1022))
        return from_bits((np.int64(1023) - exponent) << np.int64(52)), exponent
    return 1 / z if z != 0 else 0.0, np.int64(0)


@inlined
def _added(total, lost, term):
    """A sum, and what its roundings lost, with another term (D. E. Knuth's two-sum)."""
    found = total + term
    part = found - total
    rounded = (total - (found - part)) + (term - part)
    # infinity less infinity is no rounding
    return found, lost + rounded if np.isfinite(found) else lost


@cache
def _limits(dtype: torch.dtype, c: int) -> Array:
    """From where on an exponential is no zero, and a sum is trusted; of the dtype of the arithmetic."""
    kind = np.float64 if dtype == torch.float64 else np.float32
    return np.array([FLUSH[dtype] / 2, 2 * trusted_sum(dtype, c)], kind)


@inlined
def _times(x, first, over_rows, over_terms, y, width, c, out, into, apart):
    """`out[into:]` (c, c) with rows `apart` = x (c, c) with such strides times `y` (c, c) with rows `width` apart.

    Whole vectors are written, the last ones of rows first, so that what is behind a row may be the next one.
    """
    zero = everywhere(out, 0.0)
    for r in range(0, c, 4):
        r1, r2, r3 = min(r + 1, c - 1), min(r + 2, c - 1), min(r + 3, c - 1)
        p0, p1, p2, p3 = first + r * over_rows, first + r1 * over_rows, first + r2 * over_rows, first + r3 * over_rows
        o0, o1, o2, o3 = into + r * apart, into + r1 * apart, into + r2 * apart, into + r3 * apart
        j = width
        if j % (2 * LANES) != 0:
            j -= LANES
            s00 = s10 = s20 = s30 = zero
            for k in range(c):
                left, k_at = load(y, k * width + j, LANES, 0.0), k * over_terms
                s00 = s00 + entry(x, p0 + k_at) * left
                s10 = s10 + entry(x, p1 + k_at) * left
                s20 = s20 + entry(x, p2 + k_at) * left
                s30 = s30 + entry(x, p3 + k_at) * left
            store(out, o0 + j, LANES, s00)
            store(out, o1 + j, LANES, s10)
            store(out, o2 + j, LANES, s20)
            store(out, o3 + j, LANES, s30)
        while j > 0:
            j -= 2 * LANES
            s00 = s01 = s10 = s11 = s20 = s21 = s30 = s31 = zero
            for k in range(c):
                y_at, k_at = k * width + j, k * over_terms
                left, right = load(y, y_at, LANES, 0.0), load(y, y_at + LANES, LANES, 0.0)
                x0, x1, x2, x3 = entry(x, p0 + k_at), entry(x, p1 + k_at), entry(x, p2 + k_at), entry(x, p3 + k_at)
                s00, s01, s10, s11 = s00 + x0 * left, s01 + x0 * right, s10 + x1 * left, s11 + x1 * right
                s20, s21, s30, s31 = s20 + x2 * left, s21 + x2 * right, s30 + x3 * left, s31 + x3 * right
            store(out, o0 + j, LANES, s00)
            store(out, o0 + j + LANES, LANES, s01)
            store(out, o1 + j, LANES, s10)
            store(out, o1 + j + LANES, LANES, s11)
            store(out, o2 + j, LANES, s20)
            store(out, o2 + j + LANES, LANES, s21)
            store(out, o3 + j, LANES, s30)
            store(out, o3 + j + LANES, LANES, s31)


@inlined
def _linear(raw, begin, over_rows, over_columns, c, width, out):
    """`out` (c, width) = the exponentials of a matrix less its top, which is returned; NaN if not all are finite.

    Behind a row its last entry is repeated. The top is the largest entry.
    """
    high, off = everywhere(out, -np.inf), everywhere(out, 0.0)
    for k in range(c):
        row = begin + k * over_rows
        last = entry(raw, row + (c - 1) * over_columns)
        if over_columns == 1:
            for j in range(0, width, LANES):
                some = load(raw, row + j, c - j, last)
                high, off = larger(high, some), off + (some - some)
                store(out, k * width + j, LANES, some)
        else:
            for j in range(width):
                out[k * width + j] = entry(raw, row + min(j, c - 1) * over_columns)
            for j in range(0, width, LANES):
                some = load(out, k * width + j, LANES, 0.0)
                high, off = larger(high, some), off + (some - some)
    if total(off) != 0:  # NaN - NaN and inf - inf are NaN
        return np.nan
    top = largest(high)
    part = out[: c * width]
    for e in range(len(part)):
        part[e] = exp(part[e] - top)
    return np.float64(top)


@inlined
def _scaled(prefixes, p, before, c, trusted, scales, d, exponents):
    """Bring the rows of a prefix (c, c) that begins at p near 1; False where a sum is not to be trusted."""
    for r in range(c):
        row = p + r * c
        low = everywhere(prefixes, np.inf)
        for j in range(0, c, LANES):
            low = smaller(low, load(prefixes, row + j, c - j, np.inf))
        if not least(low) >= trusted * max(1.0, _largest_of(prefixes, before + r * c, c)):
            return False
        factor, exponent = _unit(np.float64(_largest_of(prefixes, row, c)))
        for j in range(c):
            prefixes[row + j] *= factor
        scales[d + r] = factor
        exponents[r] += exponent
    return True


@inlined
def _fold(z, raw, sizes, limits, matrix, width, prefixes, apart, scales, exponents, linear, keep):
    """The prefixes of stack z, one `apart` from the next or two in turn; whether it is done, and the sum of tops.

    Of the sum also what it lost. With `keep`, `scales` (s, c) and the `linear` matrices (s, c, c) are written.
    """
    s, c = sizes[0], sizes[1]
    high = low = 0.0
    exponents[:] = 0
    held = -1
    for i in range(s):
        begin = z * sizes[2] + i * sizes[3]
        if begin != held:
            top = _linear(raw, begin, sizes[4], sizes[5], c, width, matrix)
            held = begin
        if not np.isfinite(top):
            return False, high, low
        high, low = _added(high, low, top)
        if keep:
            for r in range(c):
                for j in range(0, c, LANES):
                    store(linear, (z * s + i) * c * c + r * c + j, c - j, load(matrix, r * width + j, LANES, 0.0))
        p = (i if keep else i % 2) * apart
        before = p if i == 0 else (i - 1 if keep else 1 - i % 2) * apart
        if i == 0:
            for r in range(c):
                for j in range(0, width, LANES):
                    store(prefixes, p + r * c + j, LANES, load(matrix, r * width + j, LANES, 0.0))
        else:
            _times(prefixes, before, c, 1, matrix, width, c, prefixes, p, c)
        few = many = everywhere(prefixes, 1.0)
        for e in range(0, c * c, LANES):
            some = load(prefixes, p + e, c * c - e, 1.0)
            few, many = smaller(few, some), larger(many, some)
        d = (i if keep else 0) * c
        if least(few) >= _LOW and largest(many) <= _HIGH:
            scales[d] = 0.0  # none
        elif not _scaled(prefixes, p, before, c, limits[min(i, 1)], scales, d, exponents):
            return False, high, low
    return np.isfinite(high), high, low


def _products(first, stop, raw_at, weight_at, out_at, lossy_at, sizes, limits):
    """The products of stacks `first` to before `stop`; whether some are not done."""
    s, c = sizes[0], sizes[1]
    width, apart = -(-c // LANES) * LANES, c * c + LANES
    raw, out, lossy = at(raw_at, MANY, limits), at(out_at, MANY, limits), at(lossy_at, MANY, np.empty(0, np.bool_))
    rooms = np.empty(c * width, limits.dtype), np.empty(2 * apart, limits.dtype), np.empty(c, limits.dtype)
    counts = np.empty(c, np.int64)
    some = False
    for z in range(first, stop):
        # here, so that the owner lives as long as the loop
        matrix, prefixes, scales = borrowed(rooms)
        done, high, low = _fold(z, raw, sizes, limits, matrix, width, prefixes, apart, scales, counts, raw, False)
        lossy[z] = not done
        some |= not done
        if done:
            p = (s - 1) % 2 * apart
            for r in range(c):
                whole, lost = _added(high, low, counts[r] * LN2[0])
                rest = lost + counts[r] * LN2[1]
                for j in range(c):
                    out[(z * c + r) * c + j] = whole + (rest + np.log(np.float64(prefixes[p + r * c + j])))
    return some


def _gradients(first, stop, raw_at, weight_at, out_at, lossy_at, sizes, limits):
    """The gradients of stacks `first` to before `stop`; whether some are not done."""
    s, c = sizes[0], sizes[1]
    width, apart = -(-c // LANES) * LANES, c * c
    raw, out, lossy = at(raw_at, MANY, limits), at(out_at, MANY, limits), at(lossy_at, MANY, np.empty(0, np.bool_))
    weight = at(weight_at, MANY, limits)
    rooms = (
        np.empty(c * width, limits.dtype), np.empty(s * apart + LANES, limits.dtype), np.empty(s * c, limits.dtype),
        np.zeros(c * width, limits.dtype), np.zeros(c * width, limits.dtype), np.zeros(c * width, limits.dtype),
    )  # fmt: skip
    counts = np.empty(c, np.int64)
    some = False
    for z in range(first, stop):
        # here, so that the owner lives as long as the loop
        matrix, prefixes, scales, ahead, behind, turned = borrowed(rooms)
        done, _, _ = _fold(z, raw, sizes, limits, matrix, width, prefixes, apart, scales, counts, out, True)
        lossy[z] = not done
        some |= not done
        if not done:
            continue
        for r in range(c):
            for j in range(c):
                e = r * c + j
                ahead[r * width + j] = weight[z * apart + e] / prefixes[(s - 1) * apart + e]
        for i in range(s - 1, -1, -1):
            slot = (z * s + i) * apart
            if scales[i * c] != 0:
                for r in range(c):
                    for j in range(c):
                        ahead[r * width + j] *= scales[i * c + r]
            if i > 0:
                _times(prefixes, (i - 1) * apart, 1, c, ahead, width, c, behind, 0, width)
            for k in range(c):
                for j in range(c):
                    turned[j * width + k] = out[slot + k * c + j]
            found = behind if i > 0 else ahead
            for k in range(c):
                for j in range(0, c, LANES):
                    there = slot + k * c + j
                    share = load(found, k * width + j, LANES, 0.0) * load(out, there, c - j, 0.0)
                    store(out, there, c - j, share)
            if i > 0:
                _times(ahead, 0, width, 1, turned, width, c, behind, 0, width)
                ahead, behind = behind, ahead
    return some


@cache
def _compiled(dtype: torch.dtype, function: Callable[..., Any]) -> Callable[..., Any]:
    """In float32 or float64, from numba's cache on disk where there is one."""
    real = numba.float64 if dtype == torch.float64 else numba.float32
    return compiled(function, numba.boolean(*(numba.int64,) * 6, numba.int64[::1], real[::1]))
