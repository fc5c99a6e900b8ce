"""The forward recursion of chains in the max-plus semiring: messages of best paths, for `backtrack`.

    a_0 = start + x_0        a_i(j) = max_k (a_{i-1}(k) + log P_i(k, j)) + x_i(j)

Operands: `chains`. Messages (v, g, m, c) are in the dtype of the arithmetic, each less its largest entry, and -inf
after a sequence's end.

Numerics: columns of a tile of `P` are divided by their levels, numbers near their largest entries, before logarithms
are rounded, so that the numbers added to messages are small near the maximum. Without exponentials nothing underflows.
-inf is exact; a NaN in a message or a matrix makes all that it could reach NaN, although tl.max ignores it.

Cost: g m (v - 1) c^2 additions and maxima, and for linear matrices a logarithm of each entry in each block of
sequences; v dependent steps. A program computes all steps of BLOCK_S sequences, which share the matrix's loads and
logarithms; one small matrix for all steps stays in registers. Messages pass through memory. Tiles: from a model of
registers, checked by compiling, not measured yet.
"""

import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .chains import Operands
from .logs import logs_below
from .scaled import exponent_of
from .tiles import at, finite, load

_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["v", "g", "m"])
def _max_kernel(
    x_ptr, bulk_ptr, start_ptr, ends_ptr, message_ptr, v, g, m, stride_xv, stride_xg, stride_xm, stride_xc,
    stride_bv, stride_bg, stride_bk, stride_bj,
    C: tl.constexpr, LOG_PARAMS: tl.constexpr, HELD: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_S sequences of one set. HELD: the only matrix is one tile."""
    DTYPE: tl.constexpr = message_ptr.dtype.element_ty
    BLOCK_C: tl.constexpr = triton.next_power_of_2(C)
    blocks = tl.cdiv(m, BLOCK_S)
    z = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_S
    members = tl.arange(0, BLOCK_S)
    columns = tl.arange(0, BLOCK_C)
    inside = members < m - first
    mask = inside[:, None] & (columns < C)[None, :]
    tile = members[:, None] * C + columns[None, :]
    sequence = z * m + first
    pitch = g.to(tl.int64) * m * C
    x_ptr += z * stride_xg + first * stride_xm
    bulk_ptr += z * stride_bg
    message_ptr += sequence * C
    if ends_ptr is None:
        ends = tl.full((BLOCK_S,), 0, tl.int32) + v
    else:
        ends = tl.load(ends_ptr + sequence + members, mask=inside, other=1).to(tl.int32)
    last = tl.max(ends)

    u = tl.load(start_ptr + sequence * C + tile, mask=mask, other=float("-inf"))
    _store(message_ptr + tile, u, at(x_ptr, members, columns, stride_xm, stride_xc), mask, ends > 0, DTYPE)
    if HELD:
        held, held_level = _matrix(bulk_ptr, stride_bk, stride_bj, 0, C, LOG_PARAMS, DTYPE, BLOCK_K, BLOCK_C)
    for i in tl.range(1, last):
        x_ptr += stride_xv
        # other threads stored the last message
        tl.debug_barrier()
        u = tl.full((BLOCK_S, BLOCK_C), float("-inf"), tl.float64)
        for start in tl.range(0, C, BLOCK_K):
            if HELD:
                logs, level = held, held_level
            else:
                logs, level = _matrix(bulk_ptr, stride_bk, stride_bj, start, C, LOG_PARAMS, DTYPE, BLOCK_K, BLOCK_C)
            best = _best(message_ptr, members, start + tl.arange(0, BLOCK_K), inside, logs, level, C)
            u = tl.maximum(u, best, propagate_nan=tl.PropagateNan.ALL)
        message_ptr += pitch
        bulk_ptr += stride_bv
        _store(message_ptr + tile, u, at(x_ptr, members, columns, stride_xm, stride_xc), mask, i < ends, DTYPE)
    for _ in tl.range(last, v):
        message_ptr += pitch
        tl.store(message_ptr + tile, tl.full((BLOCK_S, BLOCK_C), float("-inf"), DTYPE), mask=mask)


@triton.jit
def _matrix(
    matrix_ptr, stride_k, stride_j, first, C: tl.constexpr, LOG_PARAMS: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The logarithms of some rows of a matrix less the levels of their columns, and these in float64, NaN for a NaN."""
    rows, columns = first + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_C)
    p = load(matrix_ptr, rows, columns, C, C, stride_k, stride_j, DTYPE, float("-inf") if LOG_PARAMS else 0.0)
    top = tl.max(p, 0)
    if LOG_PARAMS:
        level = finite(top)
        wide = level.to(tl.float64)
    else:
        level = exponent_of(top)
        wide = level.to(tl.float64) * _LN2
    logs = logs_below(p, level, LOG_PARAMS)
    return logs, wide + _spoilt(logs, 0)


@triton.jit
def _best(message_ptr, members, rows, inside, logs, level, C: tl.constexpr):
    """The largest of terms (BLOCK_S, BLOCK_C) in float64."""
    mask = inside[:, None] & (rows < C)[None, :]
    message = tl.load(message_ptr + members[:, None] * C + rows[None, :], mask=mask, other=float("-inf"))
    best = tl.max(message[:, :, None] + logs[None, :, :], 1).to(tl.float64)
    return best + level[None, :] + _spoilt(message, 1)[:, None]


@triton.jit
def _spoilt(values, axis: tl.constexpr):
    """NaN where there is one along an axis, otherwise 0, in float64."""
    found = tl.max((values != values).to(tl.int32), axis) > 0
    return tl.where(found, float("nan"), 0.0).to(tl.float64)


@triton.jit
def _store(message_ptr, u, x_ptr, mask, active, DTYPE: tl.constexpr):
    """The message `u + x` of sequences that are active is stored, -inf for others."""
    x = tl.load(x_ptr, mask=mask & active[:, None], other=float("-inf")).to(tl.float64)
    total = u + (x - finite(tl.max(x, 1))[:, None])
    message = (total - finite(tl.max(total, 1))[:, None]).to(DTYPE)
    tl.store(message_ptr, tl.where(active[:, None], message, float("-inf")), mask=mask)


def tiles(c: int, m: int, double: bool) -> tuple[int, int, int]:
    """The sequences and the rows of a matrix that a program computes with at a time, and its warps."""
    block_c = triton.next_power_of_2(c)
    room = 4096 if double else 8192
    warps = 4 if c <= 64 else 8 if c <= 1024 else 16
    if m == 1:
        return 1, block_c if c <= 64 else max(1, room // 2 // block_c), warps
    block_k = block_c if c <= 64 else max(1, min(8, room // 4 // block_c))
    return max(1, min(8, room // (block_c * block_k))), block_k, warps


def forward(chain: Operands, messages: Tensor) -> None:
    """All messages (v, g, m, c), contiguous, are written."""
    v, g, m, c = chain.shape
    assert messages.shape == chain.x.shape and messages.is_contiguous()
    block_s, block_k, warps = tiles(c, m, chain.double)
    launch.run(
        _max_kernel, (g * triton.cdiv(m, block_s),), chain.x, chain.bulk, chain.start, chain.ends, messages, v, g, m,
        *chain.strides, C=c, LOG_PARAMS=chain.log_params, HELD=len(chain.bulk) == 1 and c <= 64, BLOCK_S=block_s,
        BLOCK_K=block_k, **launch.all_registers(warps),
    )  # fmt: skip
