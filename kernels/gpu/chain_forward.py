"""The forward recursion of chains that share their matrices, in linear messages, by programs that meet once a step.

    S_0 = start exp(x_0)        S_i = (S_{i-1} P_i) exp(x_i)        log_norm = log sum_j S_{v-1}(j)

Operands: `chains`. Numerics: `scaled`. A sequence with a sum that may be inexact is doubtful, and its results mean
nothing.

Cost: g m (v - 1) c^2 multiply-adds and v dependent steps. Sixteen sequences are a group, which PARTS programs share:
each has some columns of every matrix, loads whole messages, and writes its part of them. The matrix and x of the next
step are loaded while this step's sums are formed, and halved while programs meet; what one step waits for of the one
before is a meeting, the load of the message, the product, and one multiplication. Messages pass through memory: that in
which they are kept, or two slots in turn.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .chains import Operands, room
from .fragments import largest, load_matrix, load_message, product, sharing, tile_of
from .meeting import arrive, counter_of, part_of, take_ticket, wait, words
from .scaled import (
    below,
    doubtful,
    factors_of,
    halves,
    level_of,
    linear,
    log_scaled,
    next_shift,
    power_of_two,
    started,
    target,
    weighed,
)
from .tiles import at, far, log, multiple, multiples

# sequences of a group
GROUP = tl.constexpr(16)


@triton.jit(do_not_specialize=["v", "g", "m", "slots"])
def _forward_kernel(
    x_ptr, bulk_ptr, bound_ptr, level_ptr, start_ptr, ends_ptr, message_ptr, log_norm_ptr, error_ptr, leaving_ptr,
    doubt_ptr,
    counters_ptr,
    v, g, m, slots, stride_xv, stride_xg, stride_xm, stride_xc, stride_bv, stride_bg,
    STRIDE_BK: tl.constexpr, STRIDE_BJ: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr, LOG_PARAMS: tl.constexpr,
    PRECISION: tl.constexpr, WIDTH_X: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program computes a part of the columns of GROUP sequences."""
    DTYPE: tl.constexpr = message_ptr.dtype.element_ty
    DOUBLE: tl.constexpr = DTYPE == tl.float64
    PART: tl.constexpr = part_of(C, PARTS)
    N: tl.constexpr = tile_of(PART)
    W: tl.constexpr = sharing(C, PRECISION)
    stride_xv, stride_xg, stride_xm = multiples(stride_xv, stride_xg, stride_xm, WIDTH_X)
    stride_bv, stride_bg = multiple(stride_bv, WIDTH), multiple(stride_bg, WIDTH)
    stride_kv = tl.where(stride_bv == 0, 0, g)

    ticket = take_ticket(counters_ptr)
    part, group = ticket % PARTS, ticket // PARTS
    counter_ptr = counter_of(counters_ptr, group)
    blocks = tl.cdiv(m, GROUP)
    z, first = (group // blocks).to(tl.int64), (group % blocks).to(tl.int64) * GROUP
    sequence = z * m + first
    members = tl.arange(0, GROUP)
    rows = tl.minimum(m - first, GROUP).to(tl.int32)
    inside = members < rows
    states = tl.arange(0, tile_of(C))
    # the part's columns, from its first on: what is known of their number makes offsets constants
    columns = tl.arange(0, N)
    end = tl.minimum(PART, C - part * PART)
    own = inside[:, None] & (columns < end)[None, :]
    whole = inside[:, None] & (states < C)[None, :]
    tile = members[:, None] * C + columns[None, :]

    pitch = g.to(tl.int64) * m * C
    message_ptr += sequence * C
    part_ptr = message_ptr + part * PART
    start_ptr += sequence * C
    if leaving_ptr is not None:
        leaving_ptr += sequence * C
    log_norm_ptr += sequence + members
    x_ptr += z * stride_xg + first * stride_xm
    level_ptr += sequence
    bulk_ptr += z * stride_bg + part.to(tl.int64) * (PART * STRIDE_BJ)
    bound_ptr += z
    if ends_ptr is None:
        ends = tl.full((GROUP,), 0, tl.int32) + v
    else:
        ends = tl.load(ends_ptr + sequence + members, mask=inside, other=1).to(tl.int32)
    last = tl.max(ends)

    # the first message
    start = tl.load(start_ptr + members[:, None] * C + states[None, :], mask=whole, other=float("-inf"))
    start_level, level = level_of(tl.max(start, 1)), tl.load(level_ptr + members, mask=inside, other=0)
    first_logs = _first(start_ptr, x_ptr, members, states, whole, start_level, level, stride_xm, stride_xc, C)
    top = level_of(tl.max(first_logs, 1))
    x_ptr += part.to(tl.int64) * PART * stride_xc
    start_ptr += part * PART
    first_logs = _first(start_ptr, x_ptr, members, columns, own, start_level, level, stride_xm, stride_xc, C)
    tl.store(part_ptr + tile, started(first_logs, top[:, None], DTYPE), mask=own, cache_modifier=".cg")
    arrive(counter_ptr, PARTS)
    taken = start_level.to(tl.int64) + level + top - target(DOUBLE)
    shift = tl.zeros((GROUP,), tl.int32)
    doubt = own & (tl.zeros_like(columns) > 0)[None, :]

    first_x_ptr, first_level_ptr = x_ptr, level_ptr
    x_ptr += stride_xv
    final = tl.zeros((GROUP, N), DTYPE)
    nothing: tl.constexpr = float("-inf") if LOG_PARAMS else 0.0
    bound = tl.load(bound_ptr, mask=last > 1, other=0)
    p = load_matrix(bulk_ptr, tl.where(last > 1, end, 0), STRIDE_BK, STRIDE_BJ, WIDTH, C, N, W, nothing, DTYPE)
    level_ptr += pitch // C
    level, x = _potentials(
        level_ptr, x_ptr, members, columns, own & (last > 1), inside & (last > 1), stride_xm, stride_xc, DTYPE
    )
    if W > 1:
        p, p_rest = halves(linear(p, bound >> 1, LOG_PARAMS), PRECISION)
    for i in tl.range(1, last):
        active = inside if ends_ptr is None else inside & (i < ends)
        k, low = bound >> 1, bound & 1
        exponent, scale = level + shift, power_of_two(-shift, DTYPE)[:, None]
        factor, rest = factors_of(x, level[:, None])
        if W > 1:
            p_high, p_low = p, p_rest
        else:
            p_high, p_low = halves(linear(p, k, LOG_PARAMS), PRECISION)
        wait(counter_ptr, PARTS * i, PARTS)
        before = message_ptr + far((i - 1) % slots, pitch)
        a = load_message(before, rows, C, W)
        more = i + 1 < last
        x_ptr += tl.where(more, stride_xv, 0)
        level_ptr += tl.where(more, pitch // C, 0)
        bulk_ptr += tl.where(more, stride_bv, 0)
        bound_ptr += tl.where(more, stride_kv, 0)
        bound = tl.load(bound_ptr)
        p = load_matrix(bulk_ptr, end, STRIDE_BK, STRIDE_BJ, WIDTH, C, N, W, nothing, DTYPE)
        admitted = x != float("-inf")
        level, x = _potentials(level_ptr, x_ptr, members, columns, own, inside, stride_xm, stride_xc, DTYPE)

        u = product(a, p_high, p_low, PRECISION)
        if leaving_ptr is not None:
            final = tl.where(active[:, None], u, final)
        new, written = weighed(u, scale, factor, rest, admitted), own
        if ends_ptr is not None:
            new = tl.where(active[:, None], new, 0.0)
            written = own & (active | (slots == v))[:, None]
        tl.store(part_ptr + far(i % slots, pitch) + tile, new, mask=written, cache_modifier=".cg")
        arrive(counter_ptr, PARTS)
        doubt |= doubtful(u, own & active[:, None] & admitted, low)
        taken += tl.where(active, exponent + k, 0).to(tl.int64)
        shift = next_shift(largest(a), shift)
        if W > 1:  # while others arrive; there are no registers for halves beside those that are multiplied
            p, p_rest = halves(linear(p, bound >> 1, LOG_PARAMS), PRECISION)
    if slots == v:
        for i in tl.range(last, v):
            tl.store(part_ptr + far(i, pitch) + tile, tl.zeros((GROUP, N), DTYPE), mask=own)

    if leaving_ptr is not None:
        # nothing has been raised in the logarithms of sums
        x = tl.load(
            at(first_x_ptr, members, columns, stride_xm, stride_xc) + ((ends - 1).to(tl.int64) * stride_xv)[:, None],
            mask=own, other=float("-inf"),
        )  # fmt: skip
        level = tl.load(first_level_ptr + members + (ends - 1).to(tl.int64) * (pitch // C), mask=inside, other=0)
        logs = log(final * 2.0 ** -target(DOUBLE)).to(tl.float64) + below(x, level[:, None])
        logs = tl.where((ends == 1)[:, None], below(first_logs, top[:, None]), logs)
        tl.store(leaving_ptr + part * PART + tile, logs.to(DTYPE), mask=own)

    lost = tl.max(doubt.to(tl.int32), 1) > 0
    if part == 0:
        wait(counter_ptr, PARTS * last, PARTS)
        at_end = message_ptr + (((ends - 1) % slots).to(tl.int64) * pitch + members * C)[:, None] + states[None, :]
        sums = tl.sum(tl.load(at_end, mask=whole, other=0.0, cache_modifier=".cg"), 1)
        lost |= doubtful(sums, inside, 0)
        log_norm, error = log_scaled(sums, taken)
        tl.store(log_norm_ptr, log_norm, mask=inside)
        if error_ptr is not None:
            tl.store(error_ptr + sequence + members, error, mask=inside)
    tl.store(doubt_ptr + sequence + members, tl.full((GROUP,), 1, tl.int8), mask=inside & lost)


@triton.jit
def _first(start_ptr, x_ptr, members, states, mask, start_level, level, stride_xm, stride_xc, C: tl.constexpr):
    """log(start exp(x_0)) less both levels, in float64."""
    start = tl.load(start_ptr + members[:, None] * C + states[None, :], mask=mask, other=float("-inf"))
    x = tl.load(at(x_ptr, members, states, stride_xm, stride_xc), mask=mask, other=float("-inf"))
    return below(start, start_level[:, None]) + below(x, level[:, None])


@triton.jit
def _potentials(level_ptr, x_ptr, members, columns, own, inside, stride_xm, stride_xc, DTYPE: tl.constexpr):
    """The levels of x, and the part's columns."""
    x = tl.load(at(x_ptr, members, columns, stride_xm, stride_xc), mask=own, other=float("-inf")).to(DTYPE)
    return tl.load(level_ptr + members, mask=inside, other=0), x


def warps_of(c: int, precision: str) -> int:
    """The warps of a program that computes a part of c states."""
    return 4 if sharing(c, precision) == 4 else launch.warps(c)


def parts_of(chain: Operands) -> int:
    """The programs that share sixteen sequences; one where they run one after the other, in the interpreter."""
    if chain.x.device.type != "cuda":
        return 1
    wide = 32 if chain.double else 64
    return triton.cdiv(chain.shape[3], wide)


def forward(
    chain: Operands,
    messages: Tensor,
    log_norm: Tensor,
    leaving: Tensor | None = None,
    error: Tensor | None = None,
    *,
    found: Tensor | None = None,
    parts: int | None = None,
    programs: int | None = None,
) -> Tensor:
    """Which sequences are doubtful (g, m), after messages and the log-partitions (g, m) of the others are written.

    `messages` (v or min(v, 2), g, m, c), contiguous: with v slots all messages are kept, and are 0 after a sequence's
    end. `leaving` (g, m, c), contiguous, receives the last messages as logarithms up to a constant, exact to rounding
    where messages may have been raised. `error` (g, m) receives the rounding errors of the log-partitions. `found`:
    memory for what `chain_backward` needs too, see `chains.room`. `parts` share sixteen sequences; `programs` are
    started, for a test that starts one at a time.
    """
    v, g, m, c = chain.shape
    parts = parts_of(chain) if parts is None else parts
    groups = g * triton.cdiv(m, GROUP.value)
    bound, level, doubt, counters = room(chain, words(groups), found=found)
    launch.run(
        _forward_kernel, (programs or groups * parts,), chain.x, chain.bulk, bound, level, chain.start, chain.ends,
        messages, log_norm, error, leaving, doubt, counters, v, g, m, len(messages), *chain.strides[:6],
        **constants(chain, parts),
    )  # fmt: skip
    return doubt


def constants(chain: Operands, parts: int) -> dict[str, Any]:
    """The compile-time arguments of the kernel, with its warps and stages."""
    c = chain.shape[3]
    return {
        "C": c, "PARTS": parts, "LOG_PARAMS": chain.log_params, "PRECISION": chain.precision,
        "WIDTH_X": launch.common_width(c, *chain.x.stride()[:-1]), "WIDTH": max(launch.widths(chain.bulk)),
        "STRIDE_BK": chain.bulk.stride(2), "STRIDE_BJ": chain.bulk.stride(3),
        "num_stages": 1,
    } | launch.all_registers(warps_of(c, chain.precision))  # fmt: skip
