"""The expected transitions of sequences that fast kernels have marked, in logarithms: what they add to a gradient.

    out_i(k, j) += weight exp(a_{i-1}(k) + r_i(j)) / 2^n_i                     for linear matrices
    out_i(k, j) += weight exp(a_{i-1}(k) + log P_i(k, j) + r_i(j)) / 2^n_i     for logarithms, or with respect to these

`a`, `r` and n are those of `chain_exact`; with one matrix for all steps its gradient is a sum over them. Nothing
is added where the matrix is 0, and nothing by sequences of weight 0, whatever they hold.

Cost: an exponential for each marked sequence and entry; without a mark, a look at all marks in each of some programs.
An entry has one owner, who adds sequences in their order: no atomics, the same bits every time.
"""

import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .chain_exact import end_of
from .chains import Operands
from .logs import apart, message_logs
from .scaled import below, level_of, times_power_of_two
from .tiles import at, exp, load

# rows and columns of a tile
_TILE = tl.constexpr(32)

# programs that look at the marks
_PROGRAMS = 512


@triton.constexpr_function
def _across(c):
    """The tiles in a row of the matrix."""
    return -(-c // _TILE.value)


@triton.jit(do_not_specialize=["v", "g", "m", "matrices"])
def _counts_kernel(
    bulk_ptr, ends_ptr, message_ptr, redone_ptr, marked_ptr, r_ptr, exponent_ptr, weight_ptr, out_ptr,
    v, g, m, matrices,
    stride_bv, stride_bg, stride_bk, stride_bj, stride_wg, stride_wm, stride_ov, stride_og, stride_ok, stride_oj,
    C: tl.constexpr, LOG_PARAMS: tl.constexpr, BY_LOG: tl.constexpr, SUMMED: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """One program adds to tiles of any matrices."""
    found = tl.zeros((1024,), tl.int32)
    for first in tl.range(0, g * m, 1024):
        sequences = first + tl.arange(0, 1024)
        found |= tl.load(marked_ptr + sequences, mask=sequences < g * m, other=0).to(tl.int32)
    if tl.max(found, 0) == 0:
        return
    DTYPE: tl.constexpr = message_ptr.dtype.element_ty
    NOTHING: tl.constexpr = float("-inf") if LOG_PARAMS else 0.0
    ACROSS: tl.constexpr = _across(C)
    pitch = (g + tl.zeros((), tl.int64)) * m * C
    for program in tl.range(tl.program_id(0), matrices * (ACROSS * ACROSS), tl.num_programs(0)):
        tile, matrix = program % (ACROSS * ACROSS), program // (ACROSS * ACROSS)
        step, z = (matrix // g).to(tl.int64), (matrix % g).to(tl.int64)
        k = tile // ACROSS * _TILE + tl.arange(0, _TILE)
        j = tile % ACROSS * _TILE + tl.arange(0, _TILE)
        matrix_ptr = bulk_ptr + step * stride_bv + z * stride_bg
        p = load(matrix_ptr, k, j, C, C, stride_bk, stride_bj, DTYPE, NOTHING)
        total = tl.zeros((_TILE, _TILE), DTYPE)
        visited = 0
        for y in tl.range(0, m):
            sequence = z * m + y
            weight = tl.load(weight_ptr + z * stride_wg + y * stride_wm).to(DTYPE)
            if tl.load(marked_ptr + sequence) != 0:
                redone = tl.load(redone_ptr + sequence) != 0
                end = tl.where(weight == 0.0, 0, end_of(ends_ptr, sequence, v))
                begin = 1 if SUMMED else step.to(tl.int32) + 1
                for i in tl.range(begin, end if SUMMED else tl.minimum(end, begin + 1)):
                    before = i * pitch + sequence * C
                    a = message_logs(message_ptr + before - pitch + k, k < C, redone)
                    r = tl.load(r_ptr + before + j, mask=j < C, other=float("-inf")).to(tl.float64)
                    n = tl.load(exponent_ptr + i * (pitch // C) + sequence)
                    joint = a[:, None] + r[None, :]
                    if BY_LOG:
                        logs, factors = apart(p, n, LOG_PARAMS)
                        share = weight * factors * exp((joint + logs).to(DTYPE))
                    else:
                        # a tiny one may stand beside an entry so tiny that it is divided by that
                        level = level_of(joint)
                        share = weight * exp(below(joint, level).to(DTYPE))
                        share = times_power_of_two(share, level.to(tl.int64) - n)
                    # without a path 0, even where the matrix is NaN
                    total += tl.where(joint == float("-inf"), 0.0, share)
                visited = 1
        if visited:
            out = at(out_ptr + step * stride_ov + z * stride_og, k, j, stride_ok, stride_oj)
            inside = (k < C)[:, None] & (j < C)[None, :]
            if ADDED:
                total += tl.load(out, mask=inside, other=0.0)
            tl.store(out, tl.where(p == NOTHING, 0.0, total), mask=inside)


def counts(
    chain: Operands,
    messages: Tensor,
    redone: Tensor,
    marked: Tensor,
    r: Tensor,
    exponent: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    by_log: bool = False,
) -> None:
    """What marked sequences add to the gradient `out` (s, g, c, c), of any strides and the dtype of the messages.

    Where a sequence has matrices of its own, their gradient is written, whatever is there.

    `messages` (v, g, m, c), `redone` (g, m), `r` (v, g, m, c), `exponent` (v, g, m) and `weight` (g, m) as in
    `chain_exact.backward`.
    `by_log`: the gradient is with respect to the logarithms of linear matrices.
    """
    v, g, m, c = chain.shape
    s = len(chain.bulk)
    assert out.shape == (s, g, c, c) and out.dtype == messages.dtype
    if v == 1:
        return
    tiles = s * g * triton.cdiv(c, _TILE.value) ** 2
    launch.run(
        _counts_kernel, (min(_PROGRAMS, tiles),), chain.bulk, chain.ends, messages, redone, marked, r, exponent, weight,
        out, v, g, m, s * g, *chain.strides[4:], *weight.stride(), *out.stride(), C=c, LOG_PARAMS=chain.log_params,
        BY_LOG=by_log or chain.log_params, SUMMED=s == 1, ADDED=m > 1 or s < v - 1, **launch.all_registers(4),
    )  # fmt: skip
