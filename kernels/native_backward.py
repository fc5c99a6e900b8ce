"""The gradients of `kernels.linear_chain` compiled for the CPU, from the forward messages alone.

With B_i = d log Z / d S_i and R_i = d log Z / d U_i:

    R_i = B_i exp(x_i - max x_i) up to a factor        B_{i-1} = R_i P_i^T
    d/dx_i = S_i B_i                                   d/dP_i = S_{i-1}^T R_i

The factor is the one with which S_{i-1} B_{i-1}, the posterior of a step, sums to 1: so nothing but the messages S has
been kept, and no error adds up along the chain. What no path enters has an R of any size, and no influence: it is
looked at where S is not zero. Counts of transitions that all steps share are summed in float64.

Shapes: messages (v, g, m, c), flat. Cost: 6 c^2 operations a step and sequence. Tested against `logchain.reference`
and `kernels.linear_chain`.
"""

from collections.abc import Callable
from functools import cache

import numba
import numpy as np
import torch
from torch import Tensor

from .chain import Chain
from .linear_chain import Kept
from .native import compiled, spread
from .native_chain import Array, Operands, block_of, flat, linear_matrix, operands, ranges, usable
from .native_steps import (
    count_four,
    count_one,
    emissions,
    ending,
    four_rows,
    multiply,
    one_row,
    posterior,
    pull,
    return_to,
    room,
    row_by_rows,
)
from .native_vectors import LANES, borrowed, load, store, where


def backward(chain: Chain, kept: Kept, weight: Tensor, grad_x: Tensor | None, grad_bulk: Tensor | None) -> Tensor:
    """See `kernels.linear_chain`; sequences with a weight of 0 are not looked at."""
    given, messages = operands(chain), kept.messages
    v, g, m, c = chain.v, chain.g, chain.m, chain.c
    counted, one = grad_bulk is not None and v > 1, len(given.scale) > 0
    into_x, strides = messages.new_empty(0), [0, 0, 0]
    if grad_x is not None:
        into_x = grad_x if _walkable(grad_x, chain) else messages.new_empty(v, *chain.lead, c)
        strides = list(into_x.view(v, g, m, c).stride()[:3])
    into_bulk = grad_bulk if counted and not one and grad_bulk is not None else messages.new_empty(0, 1, 1, 1)
    # a matrix's counts are one thread's, but for those that all sequences share: there each thread has its own
    shared = g == 1 and one
    spans = ranges(chain, whole_sets=counted and not shared)
    counts = np.zeros((len(spans) if shared else 1, g * c * c if counted and one else 0))
    jobs = [(*span, counts[i if shared else 0]) for i, span in enumerate(spans)]
    weights = weight.double().reshape(-1).contiguous().numpy()
    slots, begun = messages.view(-1).numpy(), np.zeros(g * m * c)
    turned = _transposed(chain, given) if one else given.matrix
    more = np.array([*strides, *into_bulk.stride()[:3], chain.by_log], np.int64)
    read = *given[:3], turned, given.initial, given.final, given.ends, more, weights, slots
    spread(_compiled(chain.dtype), jobs, *read, begun, flat(into_x), flat(into_bulk))
    if grad_bulk is not None and counted and one:
        _write_counts(chain, given, torch.from_numpy(counts).sum(0).view(g, c, c), grad_bulk[0])
    elif grad_bulk is not None and not counted:
        grad_bulk.zero_()
    if grad_x is not None and into_x is not grad_x:
        grad_x.copy_(into_x)
    return torch.from_numpy(begun).view(*chain.lead, c)


def _walkable(gradient: Tensor, chain: Chain) -> bool:
    if gradient.dtype != chain.dtype or (gradient.stride(-1) != 1 and chain.c > 1):
        return False
    try:
        gradient.view(chain.v, chain.g, chain.m, chain.c)
    except RuntimeError:
        return False
    return True


def _transposed(chain: Chain, given: Operands) -> Array:
    """The matrices that all steps share, with states after first."""
    g, c = chain.g, chain.c
    turned: Array = torch.from_numpy(given.matrix).view(g, c, c).mT.reshape(-1).numpy()
    return turned


def _write_counts(chain: Chain, given: Operands, counts: Tensor, out: Tensor) -> None:
    """From d/dP of the linear matrices (g, c, c) the gradient of what the caller passed; 0 at an exact zero."""
    g, c = chain.g, chain.c
    matrix = torch.from_numpy(given.matrix).view(g, c, c)
    if chain.log_params or chain.by_log:
        zero = counts == 0  # a matrix that no step used may hold NaN
        out.copy_((counts * matrix).masked_fill_(zero, 0.0))
    else:
        scale = torch.from_numpy(np.exp(-given.scale)).view(g, 1, 1)
        out.copy_((counts * scale).masked_fill_(chain.bulk.reshape(g, c, c) == 0, 0.0))


@numba.njit(fastmath={"contract"}, forceinline=True)
def from_linear(out, o, times, counts, n, matrix, p, raw, at, stride, c, taken, by_log):
    """A row of counts, times a number, times the linear matrix or over what was taken out of it.

    It is 0 where nothing went, or at a zero of the matrix.
    """
    if by_log:
        for j in range(0, c, LANES):
            count = times * load(counts, n + j, c - j, 0.0)
            store(out, o + j, c - j, where(count, count * load(matrix, p + j, c - j, 0.0)))
        return
    factor = np.exp(-taken)
    if stride == 1:
        for j in range(0, c, LANES):
            count = times * load(counts, n + j, c - j, 0.0)
            store(out, o + j, c - j, where(load(raw, at + j, c - j, 0.0), count * factor))
    else:
        for j in range(c):
            out[o + j] = 0.0 if raw[at + j * stride] == 0 else times * counts[n + j] * factor


@numba.njit(fastmath={"contract"}, forceinline=True)
def _walk(rows, q, i, r, low, start, block, given, rooms, messages, counts, begun, into_x, into_bulk):
    """A block of steps of the q-th sequence, the r-th of the i-th set, or of four from there on."""
    sizes, x, raw, turned, initial, final, ends, more, weight = given
    source, ahead, shifts, emitted, linear, held, behind, nothing = rooms
    raw, turned, linear, final = borrowed(raw), borrowed(turned), borrowed(linear), borrowed(final)
    source, nothing, messages = borrowed(source), borrowed(nothing), borrowed(messages)
    g, m, c, log, one = sizes[1], sizes[2], sizes[3], sizes[4] != 0, sizes[5] != 0
    stride_x, stride_step, stride_from, stride_to = sizes[6], sizes[9], sizes[11], sizes[12]
    size, apart, steps = g * m * c, room(c), min(block, sizes[0] - start)
    by_log, each, shared = log or more[6] != 0, len(into_bulk) > 0, len(counts) > 0
    longest = 0
    for row in range(rows):
        p, at, to = q + row, start * stride_x + i * sizes[7] + (r + row) * sizes[8], i * more[1] + (r + row) * more[2]
        count = max(0, min(steps, ends[p] - start)) if weight[p] != 0 else 0
        longest = max(longest, count)
        emissions(x, at, stride_x, count, c, shifts, 0, emitted, row * block * c)
        source[row * apart : row * apart + c] = 0
        if start < ends[p] <= start + steps and count > 0:
            last, final_ = (ends[p] - 1) * size + p * c, final[p * c : (p + 1) * c]
            rest = ending(messages, last, final_, c)
            factor = 0.0 if rest == 0 else 1.0 / rest
            for j in range(c):
                behind[(p - low) * apart + j] = factor * (float(final_[j]) if len(final) > 0 else 1.0)
        if len(into_x):
            for step in range(start + count, start + steps):
                into = step * more[0] + to
                into_x[into : into + c] = 0
    if each and m > 1:
        longest = steps
    matrix, begin, width, taken, raw_at = turned, i * c * c, c, 0.0, 0
    for t in range(longest - 1, -1, -1):
        step = start + t
        now, before = step * size, (step - 1) * size
        for row in range(rows):
            p, part, back, here = q + row, row * apart, (q + row - low) * apart, (row * block + t) * c
            if weight[p] == 0 or step >= ends[p]:
                continue
            message, at = now + p * c, step * stride_x + i * sizes[7] + (r + row) * sizes[8]
            if len(into_x):
                into = step * more[0] + i * more[1] + (r + row) * more[2]
                posterior(messages, message, behind, back, weight[p], c, into_x, into)
            if step == 0:
                return_to(behind, back, initial, p * c, x, at, emitted, here, c, source, part)
                pull(initial, p * c, source, part, weight[p], c, behind, back)
                begun[p * c : (p + 1) * c] = behind[back : back + c]
            else:
                return_to(behind, back, messages, message, x, at, emitted, here, c, source, part)
        if step == 0:
            continue
        into = (step - 1) * more[3] + i * more[4]
        if each and m > 1 and r == 0:
            into_bulk[into : into + c * c] = 0
        if not one:
            raw_at = (step - 1) * stride_step + i * sizes[10]
            matrix, begin, width = raw, raw_at, stride_from
            if held[0] != step or held[1] != i:
                here, _ = usable(raw, begin, stride_from, stride_to, c, log)
                taken = 0.0
                if not here:
                    taken, _ = linear_matrix(raw, begin, stride_from, stride_to, c, log, linear)
                held[0], held[1], held[2], held[3] = step, i, here, taken
            taken = held[3]
            if held[2] == 0:
                matrix, begin, width = linear, 0, c
            for row in range(rows):
                row_by_rows(source, row * apart, matrix, begin, width, c, ahead, row * apart)
        elif rows == 4:
            four_rows(source, matrix, begin, width, c, ahead)
        else:
            one_row(source, matrix, begin, width, c, ahead)
        for row in range(rows):
            p = q + row
            if weight[p] != 0 and step < ends[p]:
                factor = pull(messages, before + p * c, ahead, row * apart, 1.0, c, behind, (p - low) * apart)
                multiply(source, row * apart, c, factor * weight[p])
        if shared:
            _count(rows, messages, before, weight, q, nothing, source, c, counts, i * c * c)
        elif each and m > 1:
            _count(rows, messages, before, weight, q, nothing, source, c, into_bulk, into)
        if each and r + rows == m:
            for k in range(c):
                gradient, linear_at, at = into + k * c, begin + k * width, raw_at + k * stride_from
                place = matrix, linear_at, raw, at, stride_to, c, taken, by_log
                if m > 1:
                    from_linear(into_bulk, gradient, 1.0, into_bulk, gradient, *place)
                else:
                    from_linear(into_bulk, gradient, messages[before + q * c + k], source, 0, *place)
    if each and m == 1:
        for step in range(max(start, start + longest, 1), start + steps):
            into = (step - 1) * more[3] + i * more[4]
            into_bulk[into : into + c * c] = 0


def _backward(
    low, high, counts, sizes, x, raw, turned, initial, final, ends, more, weight, messages, begun, into_x, into_bulk
):
    """The sequences from `low` to before `high`."""
    v, m, c, block = sizes[0], sizes[2], sizes[3], block_of(sizes)
    source, ahead = np.empty(4 * room(c), messages.dtype), np.empty(4 * room(c), messages.dtype)
    # the step and the set whose matrix was looked at last, whether it is used where it lies, what was taken out of it
    linear, held = np.empty(0 if sizes[5] else c * c, messages.dtype), np.full(4, -1.0)
    behind, nothing = np.empty((high - low) * room(c)), np.zeros(c, messages.dtype)
    given = sizes, x, raw, turned, initial, final, ends, more, weight
    rooms = source, ahead, np.empty(block), np.empty(4 * block * c), linear, held, behind, nothing
    for start in range((v - 1) // block * block, -1, -block):
        q = low
        while q < high:
            i, r = q // m, q % m
            # the number is known where the loop is compiled, twice, but not a type of its own
            if r + 4 <= m and q + 4 <= high:
                rows = np.int64(4)
                _walk(rows, q, i, r, low, start, block, given, rooms, messages, counts, begun, into_x, into_bulk)
            else:
                rows = np.int64(1)
                _walk(rows, q, i, r, low, start, block, given, rooms, messages, counts, begun, into_x, into_bulk)
            q += rows


walk_back = numba.njit(inline="always")(_backward)


@numba.njit(fastmath={"contract"}, forceinline=True)
def _count(rows, messages, before, weight, q, nothing, source, c, counts, at):
    """`counts[at:]` (c, c) += the messages before, transposed, times `source` (rows, c)."""
    # a sequence that is left out may hold anything
    from0 = nothing if weight[q] == 0 else messages[before + q * c : before + (q + 1) * c]
    if rows == 4:
        from1 = nothing if weight[q + 1] == 0 else messages[before + (q + 1) * c : before + (q + 2) * c]
        from2 = nothing if weight[q + 2] == 0 else messages[before + (q + 2) * c : before + (q + 3) * c]
        from3 = nothing if weight[q + 3] == 0 else messages[before + (q + 3) * c : before + (q + 4) * c]
        count_four(from0, from1, from2, from3, source, c, counts, at)
    else:
        count_one(from0, source, c, counts, at)


@cache
def _compiled(dtype: torch.dtype) -> Callable[..., None]:
    real = numba.float64 if dtype == torch.float64 else numba.float32
    many, wide, size, whole = real[::1], numba.float64[::1], numba.int64, numba.int64[::1]
    operands = whole, many, many, many, wide, many, whole, whole
    return compiled(_backward, numba.void(size, size, wide, *operands, wide, many, wide, many, many))
