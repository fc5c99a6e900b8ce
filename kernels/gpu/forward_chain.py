"""The forward recursion of many chains in one launch: log-partitions, and messages for the backward recursion.

    a_0 = start + x_0        a_i = log sum_k exp(a_{i-1}(k)) P_i(k, .) + x_i        log_norm = log sum_j exp a_{v-1}(j)

In the max-plus semiring each `log sum exp` is a maximum: the log-weight of the best path, and messages to backtrack.

`x` (v, g, m, c) float32, float64, bfloat16 or float16, any strides. `bulk` (v - 1 or 1, g, c, c) linear or logarithms,
one matrix for each of `g` sets of `m` sequences and each step; size 1 is one matrix for all steps. `start` (g, m, c)
logarithms. `ends` (g, m) int64, the steps of each sequence, or None.

Numerics: messages are float32 (float64 where an operand is) less their maxima, which are summed in two float64 numbers
for each sequence. A step is `chain_step.step`, which recomputes sums that underflow, or `max_step.max_step`. -inf and
zeros are exact, a NaN stays in its sequence. Half types are converted when loaded.

Cost: g m (v - 1) c**2 multiply-adds, v dependent steps. One program computes all steps of a block of sequences. With
one sequence to a set each matrix is read once, and the kernel is bound by memory; with more, every block of sixteen
reads it, and so does a launch before for the maxima of columns if c > 64. Messages pass from step to step through
memory: the output if they are kept, otherwise two slots in turn. Tiles: `chain_tiles.tiles`.

Definition: `logchain.reference.forward_backward`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chain_matrix import whole_matrix
from .chain_step import normalised, step
from .chain_tiles import Tiles, Widths, column_tops, constants, tiles
from .max_step import max_step, max_tiles, whole_logs
from .tiles import at, exact_sum, exp, far, finite, log, multiple, multiples


@triton.jit(do_not_specialize=["v", "m", "inner"])
def _forward_kernel(
    x_ptr, bulk_ptr, top_ptr, start_ptr, ends_ptr, message_ptr, final_ptr, offset_ptr, scale_ptr, log_norm_ptr,
    rescued_ptr, v, m, inner, c, stride_xv, stride_xg, stride_xh, stride_xm, stride_xc,
    stride_bv, stride_bg, stride_bh, stride_bk, stride_bj, stride_tv, stride_sg, stride_sm, stride_sc, stride_mv,
    LOG_PARAMS: tl.constexpr, HOMOGENEOUS: tl.constexpr, SEGMENT: tl.constexpr, KEEP: tl.constexpr,
    JOINT: tl.constexpr, MAX: tl.constexpr, DTYPE: tl.constexpr, DOT: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
    WIDTH_C: tl.constexpr, WIDTH: tl.constexpr, WIDTH_K: tl.constexpr, WIDTH_J: tl.constexpr, WIDTH_X: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_S sequences of one set.

    SEGMENT: the sequences start from the rows of the identity matrix, and step 0 has no x. JOINT: all sequences of a
    set have one offset. MAX: the max-plus semiring.
    """
    # tell the compiler that WIDTH divides these, so that it can load WIDTH elements at once
    c, stride_tv, stride_mv = multiples(c, stride_tv, stride_mv, WIDTH_C)
    stride_xv, stride_xg, stride_xm = multiples(stride_xv, stride_xg, stride_xm, WIDTH_X)
    stride_xh = multiple(stride_xh, WIDTH_X)
    stride_bv, stride_bg, stride_bh = multiples(stride_bv, stride_bg, stride_bh, WIDTH)
    stride_bk, stride_bj = multiple(stride_bk, WIDTH_K), multiple(stride_bj, WIDTH_J)

    # scalar pointers move from step to step; tiles of pointers are small offsets from them
    blocks = tl.cdiv(m, BLOCK_S)
    z = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_S
    rows = tl.arange(0, BLOCK_S)
    columns = tl.arange(0, BLOCK_C)
    inside = rows < m - first
    tile = inside[:, None] & (columns < c)[None, :]
    sequence = z * m + first
    message_ptr += sequence * c
    matrix_ptr = bulk_ptr + z // inner * stride_bg + z % inner * stride_bh
    if SEGMENT:
        total = tl.where((first + rows)[:, None] == columns[None, :], 0.0, float("-inf")).to(tl.float64)
    else:
        start = at(start_ptr + z * stride_sg + first * stride_sm, rows, columns, stride_sm, stride_sc)
        total = tl.load(start, mask=tile, other=float("-inf")).to(tl.float64)
    peak = tl.zeros((BLOCK_S,), tl.float64)
    if x_ptr is not None:
        x_ptr += z // inner * stride_xg + z % inner * stride_xh + first * stride_xm
        if not SEGMENT:
            x = tl.load(at(x_ptr, rows, columns, stride_xm, stride_xc), mask=tile, other=float("-inf")).to(DTYPE)
            peak = finite(tl.max(x, 1)).to(tl.float64)
            total += x.to(tl.float64) - peak[:, None]
            x_ptr += stride_xv
    message, shift = normalised(total, DTYPE)
    # scales are summed in memory: in registers, each of many threads would hold those of all rows
    scale_ptr += 2 * (sequence + rows)
    high, low = _add_exactly(peak, 0.0, finite(shift))
    tl.store(scale_ptr, high, mask=inside)
    tl.store(scale_ptr + 1, low, mask=inside)
    alive = shift != float("-inf")
    if ends_ptr is None:
        ends = tl.full((BLOCK_S,), 0, tl.int32) + v
        last = v
    else:
        ends = tl.load(ends_ptr + sequence + rows, mask=inside, other=0).to(tl.int32)
        last = tl.max(ends)
    current = message_ptr
    tl.store((current + rows * c)[:, None] + columns[None, :], message, mask=tile)

    if top_ptr is not None:
        top_ptr += z * c
    if HOMOGENEOUS:
        held, held_top = _whole(matrix_ptr, stride_bk, stride_bj, c, LOG_PARAMS, MAX, DTYPE, BLOCK_C)
    for i in tl.range(1, last):
        # adding i // v, always 0, makes pointers depend on i: recomputed at each step, they take no registers
        rows = tl.arange(0, BLOCK_S) + i // v
        active = inside
        if ends_ptr is not None:
            active = inside & (i < ends)
        mask = active[:, None] & (columns < c)[None, :]
        wanted = mask & alive[:, None]
        previous = current
        # without KEEP two slots in turn; the last message of a sequence stays in its slot
        current = current + stride_mv if KEEP else message_ptr + i % 2 * stride_mv
        if HOMOGENEOUS:
            matrix, top = held, held_top
        elif WHOLE:
            matrix, top = _whole(matrix_ptr, stride_bk, stride_bj, c, LOG_PARAMS, MAX, DTYPE, BLOCK_C)
        else:
            matrix, top = None, None
            if top_ptr is not None:
                top = tl.load(top_ptr + columns, mask=columns < c, other=float("-inf") if LOG_PARAMS else 0.0)
        if x_ptr is not None:
            x = tl.load(at(x_ptr, rows, columns, stride_xm, stride_xc), mask=mask, other=float("-inf")).to(DTYPE)
            wanted = wanted & (x > float("-inf"))
        # the messages of the last step were stored by other threads
        tl.debug_barrier()
        if MAX:
            total = max_step(
                previous, rows, active, matrix, top, matrix_ptr, stride_bk, stride_bj, c,
                LOG_PARAMS, DTYPE, WHOLE, BLOCK_S, BLOCK_K, BLOCK_C,
            )  # fmt: skip
        else:
            total = step(
                previous, current, rows, active, matrix, top, matrix_ptr, stride_bk, stride_bj, wanted, c,
                rescued_ptr, LOG_PARAMS, DTYPE, DOT, WHOLE, BLOCK_S, BLOCK_K, BLOCK_C, PRECISION,
            )  # fmt: skip
        high = tl.load(scale_ptr, mask=active, other=0.0)
        low = tl.load(scale_ptr + 1, mask=active, other=0.0)
        if x_ptr is not None:
            # x is loaded again rather than kept in registers during the step
            x = tl.load(at(x_ptr, rows, columns, stride_xm, stride_xc), mask=mask, other=float("-inf")).to(DTYPE)
            peak = finite(tl.max(x, 1)).to(tl.float64)
            total += x.to(tl.float64) - peak[:, None]
            high, low = _add_exactly(high, low, peak)
            x_ptr += stride_xv
        message, shift = normalised(total, DTYPE)
        high, low = _add_exactly(high, low, finite(shift))
        tl.store(scale_ptr, high, mask=active)
        tl.store(scale_ptr + 1, low, mask=active)
        alive = shift != float("-inf")
        if KEEP and ends_ptr is not None:
            message = tl.where(active[:, None], message, float("-inf"))
        tl.store((current + rows * c)[:, None] + columns[None, :], message, mask=tile if KEEP else mask)
        matrix_ptr += stride_bv
        if top_ptr is not None:
            top_ptr += stride_tv

    if KEEP and ends_ptr is not None:
        for _ in tl.range(last, v):
            current += stride_mv
            nothing = tl.full((BLOCK_S, BLOCK_C), float("-inf"), DTYPE)
            tl.store((current + rows * c)[:, None] + columns[None, :], nothing, mask=tile)
    tl.debug_barrier()
    slot = ends - 1 if KEEP else (ends - 1) % 2
    message = tl.load(
        (message_ptr + far(slot, stride_mv) + rows * c)[:, None] + columns[None, :], mask=tile, other=float("-inf")
    )
    high = tl.load(scale_ptr, mask=inside, other=0.0)
    low = tl.load(scale_ptr + 1, mask=inside, other=0.0)
    if log_norm_ptr is not None:
        if MAX:
            # tl.max ignores NaN, a sum does not
            plain_sum = tl.sum(message, 1)
            best = tl.where(plain_sum == plain_sum, tl.max(message, 1), plain_sum)
        else:
            best = log(tl.sum(exp(message), 1))
        norm = high + (low + best.to(tl.float64))
        tl.store(log_norm_ptr + sequence + rows, norm, mask=inside)
    if final_ptr is not None:
        # the rounding error of an offset is added to the message
        offset, error = exact_sum(high, low)
        if JOINT:
            joint = finite(tl.max(tl.where(tl.max(message, 1) > float("-inf"), offset, float("-inf")), 0))
            error += offset - joint
            tl.store(offset_ptr + z, joint)
        else:
            tl.store(offset_ptr + sequence + rows, offset, mask=inside)
        message = (message.to(tl.float64) + error[:, None]).to(DTYPE)
        tl.store((final_ptr + sequence * c + rows * c)[:, None] + columns[None, :], message, mask=tile)


@triton.jit
def _whole(
    matrix_ptr, stride_k, stride_j, c,
    LOG_PARAMS: tl.constexpr, MAX: tl.constexpr, DTYPE: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    if MAX:
        return whole_logs(matrix_ptr, stride_k, stride_j, c, LOG_PARAMS, DTYPE, BLOCK_C)
    else:
        return whole_matrix(matrix_ptr, stride_k, stride_j, c, LOG_PARAMS, DTYPE, BLOCK_C)


@triton.jit
def _add_exactly(high, low, term):
    """The two numbers of a sum, its value and its rounding error, with one more term."""
    total, error = exact_sum(high, term)
    return total, low + error


def forward(
    x: Tensor,
    bulk: Tensor,
    start: Tensor,
    ends: Tensor | None,
    *,
    log_params: bool,
    keep: bool,
    dtype: torch.dtype,
    rescued: Tensor | None = None,
    maximum: bool = False,
    out: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The log-partitions (g, m) in float64 and, with `keep`, the messages (v, g, m, c), in `out` if given.

    `maximum`: in the max-plus semiring, the log-weights of the best paths and their messages. `dtype` is that of the
    arithmetic and of the messages, which are -inf after a sequence's end. The number of recomputed sums is added to
    `rescued` (1), int64. `scale` (g, m, 2) receives the sums of the maxima subtracted from the messages, each with its
    rounding error.
    """
    v, g, m, c = x.shape
    assert bulk.shape[1:] == (g, c, c) and start.shape == (g, m, c)
    assert ends is None or ends.is_contiguous()
    log_norm = torch.empty(g, m, dtype=torch.float64, device=x.device)
    widths = Widths.of(bulk, x)
    choice = tiles(c, m, dtype, min(widths))
    choice = max_tiles(choice) if maximum else choice
    slots = v if keep else min(v, 2)
    messages = torch.empty(slots, g, m, c, dtype=dtype, device=x.device) if out is None else out
    launch(
        x[:, :, None], bulk[:, :, None], start, ends, messages, None, None, scale, log_norm, rescued, v, m, choice,
        widths, dtype, log_params=log_params, keep=keep, segment=False, maximum=maximum,
    )  # fmt: skip
    return log_norm, messages if keep else None


def launch(
    x: Tensor | None,  # (v, g1, g2, m, c), without step 0 for a segment
    bulk: Tensor,  # (s, g1, g2, c, c)
    start: Tensor | None,
    ends: Tensor | None,
    messages: Tensor | None,
    final: Tensor | None,
    offset: Tensor | None,
    scale: Tensor | None,
    log_norm: Tensor | None,
    rescued: Tensor | None,
    v: int,
    m: int,
    choice: Tiles,
    widths: Widths,
    dtype: torch.dtype,
    *,
    log_params: bool,
    keep: bool,
    segment: bool,
    maximum: bool = False,
) -> None:
    """Launch the kernel, which writes to those of `messages`, `final`, `offset` and `log_norm` that are given."""
    outer, inner, c = bulk.shape[1:4]
    if outer * inner * m == 0:
        return
    top = column_tops(bulk, choice, dtype, log_params=log_params)
    homogeneous = bulk.shape[0] == 1
    if scale is None:
        scale = torch.empty(outer, inner, m, 2, dtype=torch.float64, device=bulk.device)
    _forward_kernel[(outer * inner * triton.cdiv(m, choice.block_s),)](
        x, bulk, top, start, ends, messages, final, offset, scale, log_norm, rescued, v, m, inner, c,
        *((0,) * 5 if x is None else x.stride()),
        0 if homogeneous else bulk.stride(0), *bulk.stride()[1:],
        0 if homogeneous else outer * inner * c,
        *((0,) * 3 if start is None else start.stride()),
        outer * inner * m * c,
        LOG_PARAMS=log_params, SEGMENT=segment, KEEP=keep, MAX=maximum,
        JOINT=segment and choice.whole and choice.block_s >= m, **constants(choice, bulk, dtype, widths),
    )  # fmt: skip
