"""The forward recursion of sequences with matrices of their own, in linear messages, at the pace of memory.

    S_0 = start exp(x_0)        S_i = (S_{i-1} P_i) exp(x_i)        log_norm = log sum_j S_{v-1}(j)

Operands: `chains`, with m = 1. Numerics: `scaled` and `own_step`. A sequence with a sum that may be inexact is
doubtful, and its results mean nothing.

Cost: g (v - 1) c^2 multiply-adds and as many entries of matrices, each read once; one matrix for all steps is held if
it fits. Up to 64 states a program has a sequence: its message and a matrix stay in registers, and the next matrix is
on its way. Above, PARTS programs with some columns each share a sequence where there are fewer sequences than
processors, and meet once a step. What a program has of a matrix is one tile, loaded a step ahead, or a sequence of
tiles, loaded asynchronously.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .chains import Operands, Room, room
from .meeting import arrive, counter_of, refresh, take_ticket, wait, words
from .own_step import foreseen, held, inexact, part_of, product, started, tile, weighed
from .scaled import doubtful, exponent_of, linear, log_scaled, target
from .tiles import far, finite, multiple, multiples

# states up to which a program has a sequence, with messages in registers
NARROW = 64

# the entries of the largest tile that is held, and of one of several, by whether they are float64
_HELD = {False: 16384, True: 8192}
_TILE = {False: 4096, True: 2048}


@triton.jit(do_not_specialize=["v", "g", "slots"])
def _forward_kernel(
    x_ptr, bulk_ptr, bound_ptr, level_ptr, start_ptr, ends_ptr, message_ptr, log_norm_ptr, doubt_ptr, counters_ptr,
    v, g, slots, stride_xv, stride_xg, stride_xc, stride_bv, stride_bg, stride_bk, stride_bj,
    C: tl.constexpr, PARTS: tl.constexpr, SAME: tl.constexpr, LOG_PARAMS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_J: tl.constexpr, WIDTH_X: tl.constexpr, WIDTH_K: tl.constexpr, WIDTH_J: tl.constexpr,
):  # fmt: skip
    """One program computes a part of the columns of a sequence."""
    DTYPE: tl.constexpr = message_ptr.dtype.element_ty
    DOUBLE: tl.constexpr = DTYPE == tl.float64
    PART: tl.constexpr = part_of(C, PARTS)
    WHOLE: tl.constexpr = triton.next_power_of_2(C)
    HELD: tl.constexpr = BLOCK_K == WHOLE
    ALONE: tl.constexpr = HELD and PARTS == 1
    stride_xv, stride_xg = multiples(stride_xv, stride_xg, 0, WIDTH_X)[:2]
    stride_bv, stride_bg = multiples(stride_bv, stride_bg, 0, WIDTH_K * WIDTH_J)[:2]
    stride_bk, stride_bj = multiple(stride_bk, WIDTH_K), multiple(stride_bj, WIDTH_J)

    program = tl.program_id(0)
    if PARTS > 1:
        program = take_ticket(counters_ptr)
    z, part = (program // PARTS).to(tl.int64), program % PARTS
    counter_ptr = counter_of(counters_ptr, z)
    states = tl.arange(0, WHOLE)
    local = tl.arange(0, BLOCK_J)
    columns = part * PART + local
    own = (local < PART) & (columns < C)
    pitch = g.to(tl.int64) * C
    message_ptr += z * C
    start_ptr += z * C
    x_ptr += z * stride_xg
    level_ptr += z
    bulk_ptr += z * stride_bg
    last = v
    if ends_ptr is not None:
        last = tl.load(ends_ptr + z).to(tl.int32)
    bound = tl.full((), 0, tl.int32)
    if bound_ptr is not None:
        bound = tl.load(bound_ptr + z)

    total = tl.load(start_ptr + states, mask=states < C, other=float("-inf"))
    total += tl.load(x_ptr + states.to(tl.int64) * stride_xc, mask=states < C, other=float("-inf")).to(tl.float64)
    top = finite(tl.max(total))
    total = tl.load(start_ptr + columns, mask=own, other=float("-inf"))
    total += tl.load(x_ptr + columns.to(tl.int64) * stride_xc, mask=own, other=float("-inf")).to(tl.float64)
    new = started(total, top, DTYPE)
    tl.store(message_ptr + columns, new, mask=own, cache_modifier=".cg")
    if not ALONE:
        arrive(counter_ptr, PARTS)
    taken = tl.full((), -target(DOUBLE), tl.int64)
    # of the step before: the exponent of its message, its shift, and what k adds to that
    before, shift, base = tl.full((), target(DOUBLE), tl.int32), bound >> 1, bound >> 1
    doubt = total != total

    x_ptr += stride_xv
    level_ptr += g
    level, x = _potentials(level_ptr, x_ptr, columns, own, stride_xc, last > 1, DTYPE)
    if HELD:
        p = tile(bulk_ptr, states, columns, own, stride_bk, stride_bj, last > 1, C, LOG_PARAMS, DTYPE)
        k, low = bound >> 1, (bound & 1) != 0
        if SAME:
            p = linear(p, k, LOG_PARAMS)
    for i in tl.range(1, last):
        if HELD and not SAME:
            p, k, low = held(p, LOG_PARAMS)
        if not ALONE:
            wait(counter_ptr, PARTS * i, PARTS)
            if not HELD:
                refresh(counter_ptr, PARTS)
        before_ptr = message_ptr + far((i - 1) % slots, pitch)
        if ALONE:
            a = new
        else:
            a = tl.load(before_ptr + states, mask=states < C, other=0.0, cache_modifier=".cg")
            tl.debug_barrier()  # no load of the next step may overtake that of the message
        more = i + 1 < last
        admitted, level_now, x_now = x != float("-inf"), level, x
        x_ptr += tl.where(more, stride_xv, 0)
        level_ptr += tl.where(more, g, 0)
        matrix_ptr = bulk_ptr
        bulk_ptr += tl.where(more, stride_bv, 0)
        level, x = _potentials(level_ptr, x_ptr, columns, own, stride_xc, True, DTYPE)
        if HELD:
            scaled = p
            if not SAME:
                p = tile(bulk_ptr, states, columns, own, stride_bk, stride_bj, True, C, LOG_PARAMS, DTYPE)
            u = tl.sum(a[:, None] * scaled, 0)
        else:
            u, k, low = product(
                before_ptr, matrix_ptr, bound, columns, own, stride_bk, stride_bj,
                C, SAME, LOG_PARAMS, DTYPE, BLOCK_K, 3,
            )  # fmt: skip
        highest = exponent_of(tl.max(a))
        shift = foreseen(highest, before, shift - base, DOUBLE)
        if PARTS == 1:
            base = k
        shift += base
        before = highest
        new = weighed(u, x_now, level_now + shift - k, admitted)
        tl.store(message_ptr + far(i % slots, pitch) + columns, new, mask=own, cache_modifier=".cg")
        if not ALONE:
            arrive(counter_ptr, PARTS)
        doubt |= inexact(u, own & admitted, low, highest) | (own & (x_now != x_now))
        taken += level_now + shift
    if slots == v:
        for i in tl.range(last, v):
            tl.store(message_ptr + far(i, pitch) + columns, tl.zeros((BLOCK_J,), DTYPE), mask=own)

    lost = tl.max(doubt.to(tl.int32)) > 0
    if part == 0:
        if ALONE:
            sums = tl.sum(new)
        else:
            wait(counter_ptr, PARTS * last, PARTS)
            at_end = message_ptr + far((last - 1) % slots, pitch) + states
            sums = tl.sum(tl.load(at_end, mask=states < C, other=0.0, cache_modifier=".cg"))
        lost |= doubtful(sums, True, 0)
        tl.store(log_norm_ptr + z, top + log_scaled(sums, taken))
    if lost:
        tl.store(doubt_ptr + z, 1)


@triton.jit
def _potentials(level_ptr, x_ptr, columns, own, stride_xc, there, DTYPE: tl.constexpr):
    """The level of a step's x, and the part's columns of it."""
    x = tl.load(x_ptr + columns.to(tl.int64) * stride_xc, mask=own & there, other=float("-inf")).to(DTYPE)
    return tl.load(level_ptr, mask=there, other=0), x


def parts_of(chain: Operands) -> int:
    """The programs that share a sequence; one where they run one after the other, in the interpreter."""
    c = chain.shape[3]
    if chain.x.device.type != "cuda" or c <= NARROW:
        return 1
    most, fewest = triton.cdiv(c, 16), triton.cdiv(c, 256)
    return max(fewest, min(most, launch.processors(chain.x) // chain.shape[1]))


def prepared(chain: Operands, parts: int, *, end: bool = False) -> tuple[Room, Tensor | None]:
    """Room for a launch, and the bounds of matrices that it needs.

    Of one matrix for all steps these are its bounds. With several parts, those of some rows of the first matrix, or of
    the last one if `end`, tell how much a first step grows a message.
    """
    if len(chain.bulk) == 1:
        bulk = chain.bulk
    else:
        bulk = chain.bulk[-1:] if end else chain.bulk[:1]
        bulk = bulk[:, :, :: max(1, chain.shape[3] // 64)] if parts > 1 else bulk[:0]
    ready = room(chain, words(chain.shape[1]), bulk=bulk)
    return ready, ready.bound if len(bulk) else None


def forward(
    chain: Operands, messages: Tensor, log_norm: Tensor, *, parts: int | None = None, programs: int | None = None
) -> Tensor:
    """Which sequences are doubtful (g, 1), after messages and the log-partitions (g, 1) of the others are written.

    `messages` (v or min(v, 2), g, 1, c), contiguous: with v slots all messages are kept, and are 0 after a sequence's
    end. `parts` share a sequence; `programs` are started, for a test that starts one at a time.
    """
    v, g, m, c = chain.shape
    assert m == 1
    parts = parts_of(chain) if parts is None else parts
    ready, bound = prepared(chain, parts)
    xv, xg, _, xc, *strides = chain.strides
    launch.run(
        _forward_kernel, (programs or g * parts,), chain.x, chain.bulk, bound, ready.level, chain.start, chain.ends,
        messages, log_norm, ready.doubt, ready.counters, v, g, len(messages), xv, xg, xc, *strides,
        **constants(chain, parts),
    )  # fmt: skip
    return ready.doubt


def constants(chain: Operands, parts: int) -> dict[str, Any]:
    """The compile-time arguments of a kernel, with its warps and stages."""
    rows, columns = launch.widths(chain.bulk)
    return tiles(chain.shape[3], parts, chain.double) | {
        "PARTS": parts, "SAME": len(chain.bulk) == 1, "LOG_PARAMS": chain.log_params,
        "WIDTH_X": launch.common_width(*chain.x.stride()[:2]), "WIDTH_K": rows, "WIDTH_J": columns,
    }  # fmt: skip


def tiles(c: int, parts: int, double: bool) -> dict[str, int]:
    """The tile of a matrix with c states, with the warps and stages of its program."""
    whole, columns = triton.next_power_of_2(c), triton.next_power_of_2(part_of(c, parts))
    if parts == 1:
        columns = whole
    entries = whole * columns
    if entries <= _HELD[double]:
        warps = 1 if entries <= 1024 else 4 if entries <= 4096 else 8
        return {"C": c, "BLOCK_K": whole, "BLOCK_J": columns, "num_warps": warps, "num_stages": 1}
    rows = max(1, min(whole // 2, _TILE[double] // columns))
    return {"C": c, "BLOCK_K": rows, "BLOCK_J": columns, "num_warps": 4, "num_stages": 3}
