"""One step of a vector chain: what the forward and the backward recursion do alike.

    u(j) = log sum_k exp(message(k)) P(k, j)

for a block of BLOCK_S sequences that share `P` (c, c), linear or logarithms. The backward recursion passes `P`
transposed, that is its strides exchanged. Messages are float32 (float64 for float64) logarithms with a maximum of
0, so their exponentials need no shift; `P` is scaled as in `chain_matrix`. Sums are float32, their
logarithms float64: what is added to them may cancel, and only what is stored is rounded.

A sum below TRUSTED although a term is there is redone by the pairwise maximum, in the same kernel. Whether a term is
there at all is asked by a product of zeros and ones, and only where finite_terms sum is small.
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
    """The entries `states` of the messages in rows `members`, -inf outside."""
    mask = inside[:, None] & (states < c)[None, :]
    return tl.load((message_ptr + members * c)[:, None] + states[None, :], mask=mask, other=float("-inf"))


@triton.jit
def step(
    message_ptr, new_ptr, members, inside, matrix, top, matrix_ptr, stride_k, stride_j, wanted, c, rescued_ptr,
    LOG_PARAMS: tl.constexpr, DTYPE: tl.constexpr, DOT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The logarithms `u` (BLOCK_S, BLOCK_C) in float64; those that are not `wanted` may be anything.

    From the messages at `message_ptr` (BLOCK_S, c) in memory, in rows `members`. Kept in registers, they would be held,
    and computed, once for each layout that they are used in. Where the new messages will go (`new_ptr`) is room for
    notes until then. `top` (BLOCK_C) holds the columns' maxima, unless they are found on the way;
    WHOLE: `matrix` is all of `P`, scaled.
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
        # all sums are put aside, so that little is in registers meanwhile
        notes = (new_ptr + members * c)[:, None] + columns[None, :]
        mask = inside[:, None] & (columns < c)[None, :]
        tl.store(notes, tl.where(small, -1.0, sums), mask=mask)
        tl.debug_barrier()
        _redo(
            message_ptr, new_ptr, members, inside, matrix_ptr, stride_k, stride_j, c, rescued_ptr,
            LOG_PARAMS, DTYPE, DOT, BLOCK_S, min(BLOCK_C, 32), min(BLOCK_C, 64),
        )  # fmt: skip
        tl.debug_barrier()
        sums = tl.load(notes, mask=mask, other=0.0)
        tl.debug_barrier()
    # what was redone is a logarithm already
    u = log_wide(tl.where(small, 1.0, sums)) + log_level(level_of(top, LOG_PARAMS), LOG_PARAMS)[None, :]
    return tl.where(small, sums.to(tl.float64), u)


@triton.jit
def _redo(
    message_ptr, new_ptr, members, inside, matrix_ptr, stride_k, stride_j, c, rescued_ptr,
    LOG_PARAMS: tl.constexpr, DTYPE: tl.constexpr, DOT: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Replace each -1 at `new_ptr` by its `u`, in tiles small enough to keep in registers beside all else."""
    for first in tl.range(0, c, BLOCK_C):
        columns = first + tl.arange(0, BLOCK_C)
        notes = (new_ptr + members * c)[:, None] + columns[None, :]
        small = tl.load(notes, mask=inside[:, None] & (columns < c)[None, :], other=0.0) == -1.0
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
            tl.store(notes, u, mask=small)


@triton.jit
def _reached(
    message_ptr, members, inside, matrix_ptr, stride_k, stride_j, columns, c,
    LOG_PARAMS: tl.constexpr, DTYPE: tl.constexpr, DOT: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Where a sum has a term at all."""
    count = tl.zeros((BLOCK_S, BLOCK_C), tl.float32)
    for start in tl.range(0, c, BLOCK_K):
        rows = start + tl.arange(0, BLOCK_K)
        message = load_message(message_ptr, members, rows, inside, c)
        p = load_matrix(matrix_ptr, stride_k, stride_j, rows, columns, c, LOG_PARAMS, DTYPE)
        finite_terms = (message > float("-inf")).to(tl.float16)
        nonzero = (p > (float("-inf") if LOG_PARAMS else 0.0)).to(tl.float16)
        if DOT:
            count = tl.dot(finite_terms, nonzero, count)
        else:
            count += tl.max(tl.trans(finite_terms).to(tl.float32) * nonzero.to(tl.float32), 0)[None, :]
    return count > 0


@triton.jit
def _pairwise(
    message_ptr, members, inside, matrix_ptr, stride_k, stride_j, columns, c,
    LOG_PARAMS: tl.constexpr, DTYPE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The same logarithms by maximum and sum over pairs, one term of every output at a time."""
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
    """Float64 logarithms (BLOCK_S, BLOCK_C) as a message with maximum 0, and what was taken out; -inf stays."""
    shift = tl.max(total, 1)
    return (total - finite(shift)[:, None]).to(DTYPE), shift
