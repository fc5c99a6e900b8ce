"""One step of the forward or the backward recursion: messages times a transition matrix, in logarithms.

    u(j) = log sum_k exp(message(k)) P(k, j)

for a block of BLOCK_S sequences that share `P` (c, c), linear or logarithms. The backward recursion exchanges the
strides of `P`. Messages are float32 (float64 for float64) logarithms with a maximum of 0, so their exponentials need no
shift; columns of `P` are divided by their levels, see `chain_matrix`. Sums are float32, their logarithms float64,
because x_i is added to them and may cancel.

A sum below TRUSTED that has a nonzero term is recomputed by log-sum-exp, in the same kernel. Whether it has one is
found by a product of zeros and ones, computed only in tiles with such a sum.
"""

import triton
import triton.language as tl

from .chain_matrix import level_of, load_matrix, log_entry, log_level, log_wide, lowered, scaled
from .tiles import TRUSTED, any_of, exp, far, finite, log, operand


@triton.jit
def _multiply(weights, matrix, sums, DOT: tl.constexpr, PRECISION: tl.constexpr):
    if DOT:
        left, right = operand(weights, PRECISION), operand(matrix, PRECISION)
        return tl.dot(left, right, sums, input_precision=PRECISION, out_dtype=sums.dtype)
    else:
        return sums + tl.sum(tl.trans(weights) * matrix, 0)[None, :]


@triton.jit
def load_message(message_ptr, members, states, inside, c):
    """The entries `states` of the messages in rows `members`, -inf outside of the message."""
    mask = inside[:, None] & (states < c)[None, :]
    return tl.load((message_ptr + members * c)[:, None] + states[None, :], mask=mask, other=float("-inf"))


@triton.jit
def step(
    message_ptr, new_ptr, members, inside, matrix, top, matrix_ptr, stride_k, stride_j, wanted, c, rescued_ptr,
    LOG_PARAMS: tl.constexpr, DTYPE: tl.constexpr, DOT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The logarithms `u` (BLOCK_S, BLOCK_C) in float64; those that are not `wanted` may have any value.

    Messages are read at `message_ptr` (BLOCK_S, c), in rows `members`: in registers they would be held once for each
    layout in which they are used. The memory of the new messages, at `new_ptr`, is scratch until they are stored. `top`
    (BLOCK_C): the maxima of the columns of `P`; not read if neither DOT nor WHOLE, where they are found on the way.
    WHOLE: `matrix` is all of `P`, its columns divided by their levels.
    """
    columns = tl.arange(0, BLOCK_C)
    sums = tl.zeros((BLOCK_S, BLOCK_C), DTYPE)
    if WHOLE:
        sums = _multiply(exp(load_message(message_ptr, members, columns, inside, c)), matrix, sums, DOT, PRECISION)
    elif DOT:
        level = level_of(top, LOG_PARAMS)
        for start in tl.range(0, c, BLOCK_K):
            rows = start + tl.arange(0, BLOCK_K)
            weights = exp(load_message(message_ptr, members, rows, inside, c))
            p = load_matrix(matrix_ptr, stride_k, stride_j, rows, columns, c, LOG_PARAMS, DTYPE)
            sums = _multiply(weights, scaled(p, level, LOG_PARAMS), sums, DOT, PRECISION)
    else:
        top = tl.full((BLOCK_C,), float("-inf") if LOG_PARAMS else 0.0, DTYPE)
        for start in tl.range(0, c, BLOCK_K):
            rows = start + tl.arange(0, BLOCK_K)
            weights = exp(load_message(message_ptr, members, rows, inside, c))
            p = load_matrix(matrix_ptr, stride_k, stride_j, rows, columns, c, LOG_PARAMS, DTYPE)
            new_top = tl.maximum(top, tl.max(p, 0))
            sums = lowered(sums, top, new_top, LOG_PARAMS)
            top = new_top
            sums = _multiply(weights, scaled(p, level_of(top, LOG_PARAMS), LOG_PARAMS), sums, DOT, PRECISION)
    small = (sums < TRUSTED) & wanted & (top > (float("-inf") if LOG_PARAMS else 0.0))[None, :]
    if any_of(small):
        # all sums are stored in scratch meanwhile, to have registers free
        scratch = (new_ptr + members * c)[:, None] + columns[None, :]
        mask = inside[:, None] & (columns < c)[None, :]
        tl.store(scratch, tl.where(small, -1.0, sums), mask=mask)
        tl.debug_barrier()
        _redo(
            message_ptr, new_ptr, members, inside, matrix_ptr, stride_k, stride_j, c, rescued_ptr,
            LOG_PARAMS, DTYPE, DOT, BLOCK_S, min(BLOCK_C, 32), min(BLOCK_C, 64),
        )  # fmt: skip
        tl.debug_barrier()
        sums = tl.load(scratch, mask=mask, other=0.0)
        tl.debug_barrier()
    # a recomputed sum is a logarithm already
    u = log_wide(tl.where(small, 1.0, sums)) + log_level(level_of(top, LOG_PARAMS), LOG_PARAMS)[None, :]
    return tl.where(small, sums.to(tl.float64), u)


@triton.jit
def _redo(
    message_ptr, new_ptr, members, inside, matrix_ptr, stride_k, stride_j, c, rescued_ptr,
    LOG_PARAMS: tl.constexpr, DTYPE: tl.constexpr, DOT: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Replace each -1 at `new_ptr` by its `u`, in tiles small enough not to spill registers."""
    for first in tl.range(0, c, BLOCK_C):
        columns = first + tl.arange(0, BLOCK_C)
        scratch = (new_ptr + members * c)[:, None] + columns[None, :]
        small = tl.load(scratch, mask=inside[:, None] & (columns < c)[None, :], other=0.0) == -1.0
        if any_of(small):
            reached = small & _reached(
                message_ptr, members, inside, matrix_ptr, stride_k, stride_j, columns, c,
                LOG_PARAMS, DTYPE, DOT, BLOCK_S, BLOCK_K, BLOCK_C,
            )  # fmt: skip
            u = tl.full((BLOCK_S, BLOCK_C), float("-inf"), DTYPE)
            if any_of(reached):
                redone = _pairwise(
                    message_ptr, members, inside, matrix_ptr, stride_k, stride_j, columns, c,
                    LOG_PARAMS, DTYPE, BLOCK_S, BLOCK_C,
                )  # fmt: skip
                u = tl.where(reached, redone, u)
                if rescued_ptr is not None:
                    tl.atomic_add(rescued_ptr, tl.sum(reached.to(tl.int32)).to(tl.int64))
            tl.store(scratch, u, mask=small)


@triton.jit
def _reached(
    message_ptr, members, inside, matrix_ptr, stride_k, stride_j, columns, c,
    LOG_PARAMS: tl.constexpr, DTYPE: tl.constexpr, DOT: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Whether a sum has a nonzero term (BLOCK_S, BLOCK_C)."""
    count = tl.zeros((BLOCK_S, BLOCK_C), tl.float32)
    for start in tl.range(0, c, BLOCK_K):
        rows = start + tl.arange(0, BLOCK_K)
        message = load_message(message_ptr, members, rows, inside, c)
        p = load_matrix(matrix_ptr, stride_k, stride_j, rows, columns, c, LOG_PARAMS, DTYPE)
        possible = (message > float("-inf")).to(tl.float16)
        nonzero = (p > (float("-inf") if LOG_PARAMS else 0.0)).to(tl.float16)
        if DOT:
            count = tl.dot(possible, nonzero, count)
        else:
            count += tl.max(tl.trans(possible).to(tl.float32) * nonzero.to(tl.float32), 0)[None, :]
    return count > 0


@triton.jit
def _pairwise(
    message_ptr, members, inside, matrix_ptr, stride_k, stride_j, columns, c,
    LOG_PARAMS: tl.constexpr, DTYPE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The logarithms `u` by log-sum-exp, one term of every sum at a time."""
    top = tl.full((BLOCK_S, BLOCK_C), float("-inf"), DTYPE)
    for k in range(0, c):
        pairs = _pairs(message_ptr, members, inside, matrix_ptr, k, stride_k, stride_j, columns, c, LOG_PARAMS, DTYPE)
        top = tl.maximum(top, pairs)
    shift = finite(top)
    sums = tl.zeros((BLOCK_S, BLOCK_C), DTYPE)
    for k in range(0, c):
        pairs = _pairs(message_ptr, members, inside, matrix_ptr, k, stride_k, stride_j, columns, c, LOG_PARAMS, DTYPE)
        sums += exp(pairs - shift)
    return top + log(sums)


@triton.jit
def _pairs(
    message_ptr, members, inside, matrix_ptr, k, stride_k, stride_j, columns, c,
    LOG_PARAMS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    message = tl.load(message_ptr + members * c + k, mask=inside, other=float("-inf"))
    row = matrix_ptr + far(k, stride_k) + columns.to(tl.int64) * stride_j
    p = tl.load(row, mask=columns < c, other=float("-inf") if LOG_PARAMS else 0.0).to(DTYPE)
    return message[:, None] + log_entry(p, LOG_PARAMS)[None, :]


@triton.jit
def normalised(total, DTYPE: tl.constexpr):
    """Float64 logarithms (BLOCK_S, BLOCK_C) less the maxima of their rows, as a message, and these maxima."""
    shift = tl.max(total, 1)
    return (total - finite(shift)[:, None]).to(DTYPE), shift
