"""One max-plus step of the forward recursion: `chain_step.step` with the largest term in place of the sum.

    u(j) = max_k (message(k) + log P(k, j))

As there, messages are float32 (float64 for float64) logarithms with maximum 0, and columns of `P` are divided by their
levels before logarithms are rounded, so that the numbers added to messages are small near the maximum. Without
exponentials nothing underflows. -inf is exact; a NaN in a message or a matrix makes `u` NaN, although tl.max ignores
NaN.

Cost: one addition and one maximum for each entry and sequence, and for linear matrices a logarithm of each entry, in
each block of sequences. Tiles: from a model of registers, checked by compiling, not measured yet.
"""

import triton
import triton.language as tl

from .chain_matrix import level_of, load_matrix, log_level, log_wide, split
from .chain_step import load_message
from .chain_tiles import Tiles
from .tiles import far, log


def max_tiles(choice: Tiles) -> Tiles:
    """The tiles of a max-plus step where `choice` are those of the sum.

    Blocks of sequences read the matrix row by row. Without tensor cores they need not be sixteen, so more programs run.
    """
    return choice._replace(whole=False, block_s=8) if choice.dot else choice


@triton.jit
def logs_below(p, level, LOG_PARAMS: tl.constexpr):
    """The logarithms of a tile of `P` less the levels of its columns, -inf for zero; entries may be denormal.

    The level of a linear column is an exponent and is subtracted from exponents as an integer, without rounding.
    """
    if LOG_PARAMS:
        return p - level[None, :]
    elif p.dtype == tl.float64:
        return log(p) - log_level(level, LOG_PARAMS)[None, :]
    else:
        tiny = p < 1e-30
        exponent, mantissa = split(tl.where(tiny, p * 1.2676506002282294e30, p))
        value = (exponent - tl.where(tiny, 100, 0) - level[None, :]).to(tl.float32) * 0.6931471805599453
        special = tl.where(p == 0.0, float("-inf"), float("nan"))
        return tl.where((p > 0.0) & (p < float("inf")), value + tl.log(mantissa), special)


@triton.jit
def wide_entry(p, LOG_PARAMS: tl.constexpr):
    """The logarithms of entries of `P`, which may be denormal, in float64."""
    if LOG_PARAMS:
        return p.to(tl.float64)
    else:
        tiny = p < 1e-30
        value = log_wide(tl.where(tiny, p * 1.2676506002282294e30, p))
        # tl.where of two constants would be float32
        return tl.where(tiny, value - 69.31471805599453, value)


@triton.jit
def whole_logs(matrix_ptr, stride_k, stride_j, c, LOG_PARAMS: tl.constexpr, DTYPE: tl.constexpr, BLOCK_C: tl.constexpr):
    """The logarithms of the matrix as one tile, less the levels of its columns, and the maxima of the columns."""
    columns = tl.arange(0, BLOCK_C)
    p = load_matrix(matrix_ptr, stride_k, stride_j, columns, columns, c, LOG_PARAMS, DTYPE)
    top = tl.max(p, 0)
    return logs_below(p, level_of(top, LOG_PARAMS), LOG_PARAMS), top


@triton.jit
def _best(message, logs, level, LOG_PARAMS: tl.constexpr):
    """The largest of a tile of terms (1, BLOCK_C) in float64, +inf for NaN, which tl.max would ignore."""
    terms = tl.trans(message) + logs
    best = tl.max(tl.where(terms == terms, terms, float("inf")), 0)
    lifted = best.to(tl.float64) + log_level(level, LOG_PARAMS)
    return tl.where(best == float("inf"), float("inf"), lifted)[None, :]


@triton.jit
def max_step(
    message_ptr, members, inside, matrix, top, matrix_ptr, stride_k, stride_j, c,
    LOG_PARAMS: tl.constexpr, DTYPE: tl.constexpr, WHOLE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The logarithms `u` (BLOCK_S, BLOCK_C) in float64.

    Messages are read at `message_ptr` (BLOCK_S, c), in rows `members`. WHOLE: there is one sequence, and `matrix` holds
    all logarithms of `P`. Otherwise one sequence reads `P` in tiles, several read it row by row, for which `top`
    (BLOCK_C) holds the maxima of columns.
    """
    columns = tl.arange(0, BLOCK_C)
    if WHOLE:
        message = load_message(message_ptr, members, columns, inside, c)
        u = _best(message, matrix, level_of(top, LOG_PARAMS), LOG_PARAMS)
    elif BLOCK_S == 1:
        u = tl.full((1, BLOCK_C), float("-inf"), tl.float64)
        for start in tl.range(0, c, BLOCK_K):
            rows = start + tl.arange(0, BLOCK_K)
            message = load_message(message_ptr, members, rows, inside, c)
            p = load_matrix(matrix_ptr, stride_k, stride_j, rows, columns, c, LOG_PARAMS, DTYPE)
            level = level_of(tl.max(p, 0), LOG_PARAMS)
            u = tl.maximum(u, _best(message, logs_below(p, level, LOG_PARAMS), level, LOG_PARAMS))
    else:
        level = level_of(top, LOG_PARAMS)
        best = tl.full((BLOCK_S, BLOCK_C), float("-inf"), DTYPE)
        for k in tl.range(0, c, loop_unroll_factor=4):
            message = tl.load(message_ptr + members * c + k, mask=inside, other=float("-inf"))
            row = matrix_ptr + far(k, stride_k) + columns.to(tl.int64) * stride_j
            p = tl.load(row, mask=columns < c, other=float("-inf") if LOG_PARAMS else 0.0).to(DTYPE)
            terms = message[:, None] + logs_below(p[None, :], level, LOG_PARAMS)
            best = tl.maximum(best, terms, propagate_nan=tl.PropagateNan.ALL)
        u = best.to(tl.float64) + log_level(level, LOG_PARAMS)[None, :]
    return tl.where(u == float("inf"), float("nan"), u)
