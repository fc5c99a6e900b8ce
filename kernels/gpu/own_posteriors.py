"""What a step of `own_backward` computes beside its product: shares of nu, posteriors, and gradients of matrices."""

import triton
import triton.language as tl

from .own_step import nothing, tile
from .scaled import exponent_of, linear, power_of_two, target


@triton.jit
def entries_at(out_ptr, states, rows, C: tl.constexpr):
    """Pointers to entries (states, rows) of the gradient of a matrix, which lies by rows."""
    return out_ptr + rows.to(tl.int64)[None, :] * C + states[:, None]


@triton.jit
def publish(share_ptr, share, k, PARTS: tl.constexpr):
    """A part's share of nu 2^-k is stored."""
    if PARTS > 1:
        tl.store(share_ptr, share.to(tl.float64), cache_modifier=".cg")
        tl.store(share_ptr + 1, k.to(tl.float64), cache_modifier=".cg")


@triton.jit
def total_of(share_ptr, share, k, PARTS: tl.constexpr):
    """nu of all parts over the power of two of the largest exponent, and what a part's 2^k is of that."""
    if PARTS == 1:
        return share, tl.full((), 1.0, share.dtype)
    else:
        parts = tl.arange(0, triton.next_power_of_2(PARTS))
        there = parts < PARTS
        shares = tl.load(share_ptr + 2 * parts, mask=there, other=0.0, cache_modifier=".cg")
        exponents = tl.load(share_ptr + 2 * parts + 1, mask=there, other=-(2.0**40), cache_modifier=".cg")
        most = tl.max(exponents)
        nu = tl.sum(shares * ratio_of(exponents, most))
        return nu.to(share.dtype), ratio_of(k.to(tl.float64), most).to(share.dtype)


@triton.jit
def ratio_of(exponent, most):
    """2^(exponent - most)."""
    return power_of_two(tl.maximum(exponent - most, -1000.0).to(tl.int32), tl.float64)


@triton.jit
def small(nu, peak):
    """Whether nu is not exact, where b is at most `peak`; infinity and NaN are not."""
    if nu.dtype == tl.float64:
        least = tl.maximum(peak * 2.0**-842, 2.0**-900)
    else:
        least = tl.maximum(peak * 2.0**-96, 2.0**-90)
    return ((nu >= least) & (nu < float("inf"))) == 0


@triton.jit
def posterior(joint, ratio, nu, weight):
    """Shares of nu times the weight; 0 even if the weight is not finite."""
    return tl.where(joint == 0.0, 0.0, joint * ratio / nu * weight)


@triton.jit
def write_counts(out_ptr, p, a, w, nu, weight, k, ratio, states, rows, own, FORM: tl.constexpr):
    """The gradient of a tile of a matrix is stored; that of entries is larger by 2^-k."""
    left, right = a * 2.0 ** -target(a.dtype == tl.float64) * ratio * weight, w / nu
    if FORM.out == "entries":
        left *= power_of_two(-(k // 2), a.dtype)
        right *= power_of_two(k // 2 - k, a.dtype)
    counts = right[:, None] * left[None, :]
    if FORM.out == "logs":
        counts *= linear(p, k, FORM.log_params)
    counts = tl.where(p == nothing(FORM.log_params), 0.0, counts)
    mask = (states < FORM.c)[:, None] & own[None, :]
    tl.store(entries_at(out_ptr, states, rows, FORM.c), counts, mask=mask)


@triton.jit
def overflows(highest, nu, k, OUT: tl.constexpr):
    """Whether a column's factor in `write_counts` may, where the largest w has the exponent `highest`."""
    exponent = highest - exponent_of(nu)
    if OUT == "entries":
        exponent += k // 2 - k
    return exponent > (1021 if nu.dtype == tl.float64 else 125)


@triton.jit
def count(out_ptr, w_ptr, matrix_ptr, a, nu, weight, k, ratio, rows, own, FORM: tl.constexpr):
    """The gradient of a part's rows of a matrix is stored."""
    # no more than what registers hold beside a held matrix
    BLOCK: tl.constexpr = min(FORM.sources, max(16, 2048 // rows.shape[0]))
    for first in tl.range(0, FORM.c, BLOCK, num_stages=3):
        states = first + tl.arange(0, BLOCK)
        p = tile(matrix_ptr, states, rows, own, True, a.dtype, FORM)
        w = tl.load(w_ptr + states, mask=states < FORM.c, other=0.0)
        write_counts(out_ptr, p, a, w, nu, weight, k, ratio, states, rows, own, FORM)
