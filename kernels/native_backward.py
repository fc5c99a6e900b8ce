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
from .native_chain import Array, Operands, flat, linear_matrix, operands, ranges, usable
from .native_steps import dot, four_rows, one_row, return_to, row_by_rows


def backward(chain: Chain, kept: Kept, weight: Tensor, grad_x: Tensor | None, grad_bulk: Tensor | None) -> Tensor:
    """See `kernels.linear_chain`; sequences with a weight of 0 are not looked at."""
    given, messages = operands(chain), kept.messages
    v, g, m, c = chain.v, chain.g, chain.m, chain.c
    one, counted = len(given.scale) > 0, grad_bulk is not None and v > 1
    into_x, strides = messages.new_empty(0), [0, 0, 0]
    if grad_x is not None:
        into_x = grad_x if _walkable(grad_x, chain) else messages.new_empty(v, *chain.lead, c)
        strides = list(into_x.view(v, g, m, c).stride()[:3])
    into_bulk = grad_bulk if counted and not one and grad_bulk is not None else messages.new_empty(0, 1, 1, 1)
    spans = ranges(chain, whole_sets=len(into_bulk) > 0 and g > 1)
    if len(into_bulk) and g == 1 and m > 1:
        spans = [(0, m)]
    parts = len(spans) if g == 1 else 1
    spans = spans if parts == len(spans) or not (counted and one) else ranges(chain, whole_sets=True)
    counts = np.zeros((parts, g, c, c) if counted and one else (0, 1, 1, 1))
    weights = weight.double().reshape(-1).contiguous().numpy()
    slots, behind, source = messages.view(-1).numpy(), np.zeros(g * m * c), np.zeros(g * m * c)
    turned = _transposed(chain, given) if one else given.matrix
    more = np.array([*strides, *into_bulk.stride()[:3], chain.by_log], np.int64)
    shared = (*given[:3], turned, *given[4:7], given.final, given.ends, more, weights, slots, behind, source)
    outputs = flat(into_x), flat(into_bulk)
    room = counts.reshape(parts, -1) if len(counts) else np.empty((1, 0))
    jobs = [(low, high, v - 1, -1, room[min(i, len(room) - 1)]) for i, (low, high) in enumerate(spans)]
    spread(_compiled(chain.dtype), jobs, *shared, *outputs)
    if len(counts) and grad_bulk is not None:
        _write_counts(chain, given, torch.from_numpy(counts).sum(0), grad_bulk[0])
    if grad_x is not None and into_x is not grad_x:
        grad_x.copy_(into_x)
    if grad_bulk is not None and not counted:
        grad_bulk.zero_()
    return torch.from_numpy(source).view(*chain.lead, c)


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
def finish(out, matrix, taken, by_log):
    """Times the linear matrix, or over what was taken out of it; exactly 0 at its zeros and where nothing went."""
    factor = np.exp(-taken)
    for e in range(len(out)):
        found = out[e]
        other = found * matrix[e] if by_log else found * factor
        gone = found == 0 if by_log else matrix[e] == 0
        out[e] = 0.0 if gone else other


def _backward(
    low, high, first, stop, counts, sizes, x, raw, turned, scale, top, initial, final, ends, more, weight, messages,
    behind, start, into_x, into_bulk,
):  # fmt: skip
    """The steps from `first` down to after `stop` of the sequences from `low` to before `high`."""
    g, m, c, log, one = sizes[1], sizes[2], sizes[3], sizes[4] != 0, len(scale) > 0
    stride_step, stride_set, stride_from, stride_to = sizes[9], sizes[10], sizes[11], sizes[12]
    by_log, each = log or more[6] != 0, len(into_bulk) > 0
    ahead, weights = np.empty(4 * c, messages.dtype), np.empty(c)
    source, nothing = np.empty(4 * c, messages.dtype), np.zeros(c, messages.dtype)
    room = np.empty(0 if one else c * c, messages.dtype)
    first_set, first_member = low // m, low % m
    for step in range(first, stop, -1):
        now, before = step * g * m * c, (step - 1) * g * m * c
        held, q, i, r = -1, low, first_set, first_member
        matrix, begin, width, taken, by_rows = turned, 0, c, 0.0, False
        while q < high:
            rows = 4 if r + 4 <= m and q + 4 <= high else 1
            if step > 0 and i != held:
                held = i
                if one:
                    begin = i * c * c
                else:
                    by_rows, taken, width = True, 0.0, stride_from
                    begin = (step - 1) * stride_step + i * stride_set
                    fits, most = usable(raw, begin, stride_from, stride_to, c, log)
                    matrix = raw
                    if not fits:
                        taken, most = linear_matrix(raw, begin, stride_from, stride_to, c, log, room)
                        matrix, begin, width = room, 0, c
                    if each:
                        into = (step - 1) * more[3] + i * more[4]
                        gradient = into_bulk[into : into + c * c]
                        if m > 1:
                            gradient[:] = 0
            for row in range(rows):
                p, part = q + row, source[row * c : (row + 1) * c]
                message = messages[now + p * c : now + (p + 1) * c]
                back = behind[p * c : (p + 1) * c]
                if weight[p] == 0 or step >= ends[p]:
                    if len(into_x):
                        at = step * more[0] + i * more[1] + (r + row) * more[2]
                        into_x[at : at + c] = 0
                    part[:] = 0
                    continue
                if step == ends[p] - 1:
                    rest = 0.0
                    for j in range(c):
                        rest += float(message[j]) * (float(final[p * c + j]) if len(final) > 0 else 1.0)
                    factor = 0.0 if rest == 0 else 1.0 / rest
                    for j in range(c):
                        back[j] = factor * (float(final[p * c + j]) if len(final) > 0 else 1.0)
                if len(into_x):
                    at = step * more[0] + i * more[1] + (r + row) * more[2]
                    posterior = into_x[at : at + c]
                    for j in range(c):
                        posterior[j] = 0.0 if message[j] == 0 else message[j] * back[j] * weight[p]
                at = step * sizes[6] + i * sizes[7] + (r + row) * sizes[8]
                if step == 0:
                    begun = initial[p * c : (p + 1) * c]
                    return_to(back, begun, x[at : at + c], weights, part)
                    _pull(begun, part, weight[p], start[p * c : (p + 1) * c])
                else:
                    return_to(back, message, x[at : at + c], weights, part)
            if step > 0:
                if by_rows:
                    for row in range(rows):
                        part = slice(row * c, (row + 1) * c)
                        row_by_rows(source[part], matrix, begin, width, c, ahead[part])
                elif rows == 4:
                    four_rows(source, 0, matrix, begin, width, c, ahead)
                else:
                    one_row(source, 0, matrix, begin, width, c, ahead)
                for row in range(rows):
                    p, part = q + row, source[row * c : (row + 1) * c]
                    if weight[p] == 0 or step >= ends[p]:
                        continue
                    message = messages[before + p * c : before + (p + 1) * c]
                    found = ahead[row * c : (row + 1) * c]
                    factor = weight[p] * _pull(message, found, 1.0, behind[p * c : (p + 1) * c])
                    for j in range(c):
                        part[j] *= factor
                # a sequence that is left out may hold anything
                from0 = nothing if weight[q] == 0 else messages[before + q * c : before + (q + 1) * c]
                from1 = from2 = from3 = nothing
                if rows == 4:
                    from1 = nothing if weight[q + 1] == 0 else messages[before + (q + 1) * c : before + (q + 2) * c]
                    from2 = nothing if weight[q + 2] == 0 else messages[before + (q + 2) * c : before + (q + 3) * c]
                    from3 = nothing if weight[q + 3] == 0 else messages[before + (q + 3) * c : before + (q + 4) * c]
                if len(counts):
                    total = counts[i * c * c : (i + 1) * c * c]
                    if rows == 4:
                        _count_four(from0, from1, from2, from3, source, total)
                    else:
                        _count_one(from0, source, total)
                elif each:
                    if rows == 4:
                        _count_four(from0, from1, from2, from3, source, gradient)
                    elif m > 1:
                        _count_one(from0, source, gradient)
                    else:
                        _write_one(from0, source, gradient)
                    if r + rows == m:
                        for k in range(c):
                            at = begin + k * width
                            finish(gradient[k * c : (k + 1) * c], matrix[at : at + c], taken, by_log)
            q, r = q + rows, r + rows
            if r == m:
                i, r = i + 1, 0


walk_back = numba.njit(fastmath={"contract"})(_backward)


@numba.njit(fastmath={"contract"}, forceinline=True)
def _pull(message, ahead, weight, behind):
    """`behind` B, so that the posterior sums to the weight; the factor that does it. 0 where nothing comes back."""
    found = dot(message, ahead)
    factor = 0.0 if found == 0 else weight / found
    for j in range(len(message)):
        behind[j] = ahead[j] * factor
    return factor


@numba.njit(fastmath={"contract"}, forceinline=True)
def _count_four(a0, a1, a2, a3, b, total):
    """`total` (c, c) += the transposed rows a (4, c) times `b` (4, c)."""
    c = len(a0)
    b0, b1, b2, b3 = b[:c], b[c : 2 * c], b[2 * c : 3 * c], b[3 * c : 4 * c]
    for k in range(c):
        x0, x1, x2, x3 = a0[k], a1[k], a2[k], a3[k]
        row = total[k * c : (k + 1) * c]
        for j in range(c):
            row[j] += x0 * b0[j] + x1 * b1[j] + x2 * b2[j] + x3 * b3[j]


@numba.njit(fastmath={"contract"}, forceinline=True)
def _count_one(a, b, total):
    c = len(a)
    for k in range(c):
        x0, row, b0 = a[k], total[k * c : (k + 1) * c], b[:c]
        for j in range(c):
            row[j] += x0 * b0[j]


@numba.njit(fastmath={"contract"}, forceinline=True)
def _write_one(a, b, total):
    c = len(a)
    for k in range(c):
        x0, row, b0 = a[k], total[k * c : (k + 1) * c], b[:c]
        for j in range(c):
            row[j] = x0 * b0[j]


@cache
def _compiled(dtype: torch.dtype) -> Callable[..., None]:
    real = numba.float64 if dtype == torch.float64 else numba.float32
    many, wide, size, whole = real[::1], numba.float64[::1], numba.int64, numba.int64[::1]
    operands = whole, many, many, many, wide, wide, wide, many, whole, whole
    return compiled(_backward, numba.void(*(size,) * 4, wide, *operands, wide, many, wide, wide, many, many))
