"""What a step of the backward recursion leaves: posteriors, r, and shares of their sum nu, which all parts add up.

The formulas and what makes nu exact are in `chain_backward`. A step's shares are numbers 2^-TARGET of nu, one of each
part, and beside them the parts' largest w.
"""

import triton
import triton.language as tl

from .fragments import tile_of
from .scaled import exp_scaled, target
from .tiles import at, exp, far, finite

# a step's shares of nu are overwritten after so many steps: two may be read while a third is written
SHARES = tl.constexpr(4)


@triton.constexpr_function
def trusted(double):
    """The least exact nu 2^-TARGET, where w is at most 1."""
    return 2.0**-820 if double else 2.0**-56


@triton.constexpr_function
def most(double):
    """The largest entry of a message for which `trusted` holds; only where `scaled` cut a shift is one larger."""
    return 2.0 ** (target(double) + 20)


@triton.jit
def factor_of(x, exponent, a):
    """`exp x / 2^exponent`, but 0 where no path leads."""
    return tl.where(a == 0.0, 0.0, exp_scaled(x, exponent[:, None]))


@triton.jit
def share_of(a):
    """`a / 2^TARGET`; infinite where a message is too large to be trusted."""
    DOUBLE: tl.constexpr = a.dtype == tl.float64
    return tl.where(a > most(DOUBLE), float("inf"), a * 2.0 ** -target(DOUBLE))


@triton.jit
def publish(share_ptr, share, largest, part, inside, pitch, PARTS: tl.constexpr):
    """The part's share of nu and its largest w are stored for the others."""
    if PARTS > 1:
        tl.store(share_ptr + part, share, mask=inside, cache_modifier=".cg")
        tl.store(share_ptr + pitch // 2 + part, largest, mask=inside, cache_modifier=".cg")


@triton.jit
def gather(share_ptr, share, largest, inside, pitch, PARTS: tl.constexpr):
    """nu 2^-TARGET of a step, and its largest w, from all parts."""
    if PARTS > 1:
        parts = share_ptr[:, None] + tl.arange(0, triton.next_power_of_2(PARTS))[None, :]
        mask = inside[:, None] & (tl.arange(0, triton.next_power_of_2(PARTS)) < PARTS)[None, :]
        share = tl.sum(tl.load(parts, mask=mask, other=0.0, cache_modifier=".cg"), 1)
        largest = tl.max(tl.load(parts + pitch // 2, mask=mask, other=0.0, cache_modifier=".cg"), 1)
    return share, largest


@triton.jit
def exact(nu, top):
    """Whether nu 2^-TARGET is exact beside the largest w of the step after."""
    return (nu >= tl.maximum(top, 1.0) * trusted(nu.dtype == tl.float64)) & (nu < float("inf"))


@triton.jit
def finish(
    joint, w, nu, scale, i, v, members, columns, own, pitch,
    grad_ptr, r_ptr, stride_dv, stride_dm, stride_dc, C: tl.constexpr,
):  # fmt: skip
    """The posteriors of step i times their scale; they and the r of the step after are stored."""
    DTYPE: tl.constexpr = joint.dtype
    inverse = tl.where(nu == 0.0, 0.0, 1.0 / nu)
    gamma = joint * inverse[:, None] * scale[:, None]
    if grad_ptr is not None:
        grad = at(grad_ptr + far(i, stride_dv), members, columns, stride_dm, stride_dc)
        tl.store(grad, gamma.to(grad_ptr.dtype.element_ty), mask=own)
    if r_ptr is not None:
        r = tl.where(w == 0.0, 0.0, (w * inverse[:, None]) * 2.0 ** -target(DTYPE == tl.float64))
        tl.store(r_ptr + far(i + 1, pitch) + members[:, None] * C + columns[None, :], r, mask=own & (i + 1 < v))
    return gamma


@triton.jit
def following(
    final_ptr, message_ptr, ends, members, columns, inside, own, pitch, C: tl.constexpr
):  # fmt: skip
    """The part's b of each sequence's last step, whose largest, of states that a path reaches, is 1."""
    states = tl.arange(0, tile_of(C))
    whole = inside[:, None] & (states < C)[None, :]
    at_end = message_ptr + ((ends - 1).to(tl.int64) * pitch + members * C)[:, None] + states[None, :]
    reached = tl.load(at_end, mask=whole, other=0.0) > 0.0
    final = tl.load(final_ptr + members[:, None] * C + states[None, :], mask=reached, other=float("-inf"))
    top = finite(tl.max(final, 1))
    final = tl.load(final_ptr + members[:, None] * C + columns[None, :], mask=own, other=float("-inf"))
    below = final - top[:, None]
    return exp(tl.where(below > 0.0, 0.0, below))


@triton.jit(do_not_specialize=["count", "m", "cleared", "stride_g", "stride_m"])
def scale_kernel(
    weight_ptr, log_norm_ptr, redone_ptr, scale_ptr, room_ptr, count, m, cleared, stride_g, stride_m,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The factors of gradients: NaN for a log-partition that is, 0 for -inf and for sequences that are left out.

    So many int32 words of zeros are written too.
    """
    sequence = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = sequence < count
    weight = tl.load(weight_ptr + sequence // m * stride_g + sequence % m * stride_m, mask=inside, other=0.0)
    log_norm = tl.load(log_norm_ptr + sequence, mask=inside, other=0.0)
    redone = tl.load(redone_ptr + sequence, mask=inside, other=0)
    weight = weight.to(scale_ptr.dtype.element_ty)
    scale = tl.where((log_norm == log_norm) | (weight == 0.0), weight, float("nan"))
    tl.store(scale_ptr + sequence, tl.where((redone != 0) | (log_norm == float("-inf")), 0.0, scale), mask=inside)
    for first in tl.range(tl.program_id(0) * BLOCK, cleared, tl.num_programs(0) * BLOCK):
        words = first + tl.arange(0, BLOCK)
        tl.store(room_ptr + words, tl.zeros((BLOCK,), tl.int32), mask=words < cleared)
