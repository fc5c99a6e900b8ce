"""The forward messages of `kernels.linear_chain` compiled for the CPU: a loop over steps, and over sequences in fours.

    U_i = S_{i-1} P_i        W_i = U_i exp(x_i - max x_i)        z_i = max W_i        S_i = W_i / z_i

A sequence is lossy where some U_i(j) that a path reaches is smaller than what may have been lost of it. W, z and the
exponentials are float64: emissions, however sharp, lose nothing but entries of S, which are looked for in U.

Shapes: messages (slots, g, m, c), flat. Cost: c^2 multiply-adds a step and sequence. Tested against
`logchain.reference.product` and `kernels.linear_chain`.
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
from .native_chain import linear_matrix, operands, ranges, usable
from .native_steps import emit, four_rows, one_row


def forward(chain: Chain, kept: Kept) -> tuple[Tensor, Tensor | None]:
    """See `kernels.linear_chain`; the backward pass needs no scales, and those kept are 1."""
    given, messages = operands(chain), kept.messages
    kept.scales.fill_(1.0)
    rests = kept.total.fill_(0.0).view(-1).numpy()
    g, m, c, slots = chain.g, chain.m, chain.c, messages.view(-1).numpy()
    found, lossy = np.zeros(g * m), np.zeros(g * m, np.bool_)
    state = np.zeros(3 * g * m), np.empty(2 * g * m * c, np.bool_), np.full(2 * g * m, -1)
    outputs = slots, rests, found, lossy
    spread(_compiled(chain.dtype), ranges(chain), 0, chain.v, len(messages), *given, *outputs, *state)
    marked = torch.from_numpy(lossy).view(g, m) if lossy.any() else None
    return torch.from_numpy(found).view(g, m), marked


@numba.njit(inline="always")
def _add(total, lost, q, term):
    """Add a term, and what the sum's rounding loses of it to the losses (D. E. Knuth's two-sum)."""
    found = total[q] + term
    if np.isfinite(found):
        part = found - total[q]
        lost[q] += (total[q] - (found - part)) + (term - part)
    total[q] = found


@numba.njit
def _enters(step, q, low, high, sizes, x, raw, initial, sums, threshold, reach, reached):
    """Whether some path reaches a state whose sum is below the threshold.

    First those of any sequence of the set are asked for, whatever x forbids, which is done once for all of them.
    """
    m, c, size = sizes[2], sizes[3], len(reached) // 2
    first = max(low, q // m * m)
    _advance(step, first, min(high, (q // m + 1) * m), sizes, x[:0], raw, initial, reach, reached)
    found = False
    for j in range(c):
        found |= sums[j] < threshold and reach[first * c + j]
    if not found:
        return False
    _advance(step, q, q + 1, sizes, x, raw, initial, reach[size * c :], reached[size:])
    for j in range(c):
        if sums[j] < threshold and reach[(size + q) * c + j]:
            return True
    return False


@numba.njit
def _advance(step, first, last, sizes, x, raw, initial, reach, reached):
    """Which states any of some sequences of a set can be in at a step: `reach` and `reached` of the first of them."""
    m, c, zero = sizes[2], sizes[3], -np.inf if sizes[4] else 0.0
    i, r = first // m, first % m
    alive = reach[first * c : (first + 1) * c]
    before = np.empty(c, np.bool_)
    while reached[first] < step:
        now = reached[first] + 1
        if now == 0:
            alive[:] = False
            for q in range(first, last):
                for j in range(c):
                    alive[j] |= initial[q * c + j] > 0
        else:
            before[:] = alive
            alive[:] = False
            begin = sizes[9] * (now - 1) + sizes[10] * i
            for k in range(c):
                if before[k]:
                    if sizes[12] == 1:
                        row = raw[begin + k * sizes[11] : begin + k * sizes[11] + c]
                        for j in range(c):
                            alive[j] |= row[j] > zero
                    else:
                        for j in range(c):
                            alive[j] |= raw[begin + k * sizes[11] + j * sizes[12]] > zero
        if len(x):
            at = now * sizes[6] + i * sizes[7] + r * sizes[8]
            for j in range(c):
                alive[j] &= x[at + j] > -np.inf
        reached[first] = now


def _forward(
    low, high, first, stop, slots, sizes, x, raw, matrix, scale, top, initial, log_top, faint, final, ends, limits,
    messages, rests, found, lossy, state, reach, reached,
):  # fmt: skip
    """The steps from `first` to before `stop` of the sequences from `low` to before `high`."""
    g, m, c, log, one = sizes[1], sizes[2], sizes[3], sizes[4] != 0, len(scale) > 0
    stride_x, stride_xg, stride_xm = sizes[6], sizes[7], sizes[8]
    stride_step, stride_set, stride_from, stride_to = sizes[9], sizes[10], sizes[11], sizes[12]
    trusted, flush, shallow = limits
    total, lost, product = state[: g * m], state[g * m : 2 * g * m], state[2 * g * m :]
    sums, weights = np.empty(4 * c, messages.dtype), np.empty(c)
    room = np.empty(0 if one else c * c, messages.dtype)
    # divisions take longer than the rest of a small step
    first_set, first_member = low // m, low % m
    size = g * m * c
    ahead = (first - 1) % slots * size
    for step in range(first, stop):
        behind, ahead = ahead, ahead + size
        if ahead == slots * size:
            ahead = 0
        held, q, i, r = -1, low, first_set, first_member
        source, begin, width, taken, most = matrix, 0, c, 0.0, 1.0
        while q < high:
            rows = 4 if r + 4 <= m and q + 4 <= high else 1
            if step > 0 and i != held:
                held = i
                if one:
                    begin, taken, most = i * c * c, scale[i], top[i]
                else:
                    begin = (step - 1) * stride_step + i * stride_set
                    here, most = usable(raw, begin, stride_from, stride_to, c, log)
                    if here:
                        source, width, taken = raw, stride_from, 0.0
                    else:
                        taken, most = linear_matrix(raw, begin, stride_from, stride_to, c, log, room)
                        source, begin, width = room, 0, c
            if step > 0:
                if rows == 4:
                    four_rows(messages, behind + q * c, source, begin, width, c, sums)
                else:
                    one_row(messages, behind + q * c, source, begin, width, c, sums)
            for row in range(rows):
                here = ahead + q * c
                message = messages[here : here + c]
                if step >= ends[q]:
                    message[:] = 0
                else:
                    at = step * stride_x + i * stride_xg + r * stride_xm
                    potential = x[at : at + c]
                    if step == 0:
                        z, shift, least = emit(initial[q * c : (q + 1) * c], potential, flush, weights, message)
                        total[q], lost[q], product[q], least = log_top[q], 0.0, 1.0, np.inf
                        if faint[q]:
                            for j in range(c):
                                lossy[q] |= z < 2.0**-600 or potential[j] > shift
                    else:
                        sum_ = sums[row * c : (row + 1) * c]
                        z, shift, least = emit(sum_, potential, flush, weights, message)
                    threshold = trusted * (most if most > 1 else 1.0)
                    if least < threshold and not lossy[q]:
                        sum_ = sums[row * c : (row + 1) * c]
                        room_ = reach, reached
                        lossy[q] = _enters(step, q, low, high, sizes, x, raw, initial, sum_, threshold, *room_)
                    lossy[q] |= 0 < z < shallow * (most if step > 0 else 1.0)
                    product[q] *= z
                    _add(total, lost, q, shift)
                    if taken != 0:
                        _add(total, lost, q, taken)
                    if step & 7 == 7 or not 2.0**-800 < product[q] < 2.0**800:
                        _add(total, lost, q, np.log(product[q]))
                        product[q] = 1.0
                    if step == ends[q] - 1:
                        rest = 0.0
                        for j in range(c):
                            rest += float(message[j]) * (float(final[q * c + j]) if len(final) > 0 else 1.0)
                        if len(final) > 0 and 0 < rest < trusted:
                            lossy[q] = True
                        _add(total, lost, q, np.log(product[q]))
                        rests[q] = rest
                        _add(total, lost, q, np.log(rest))
                        found[q] = total[q] + lost[q]
                q += 1
                r += 1
            if r == m:
                i, r = i + 1, 0


walk = numba.njit(fastmath={"contract"})(_forward)


@cache
def _compiled(dtype: torch.dtype) -> Callable[..., None]:
    real = numba.float64 if dtype == torch.float64 else numba.float32
    many, wide, size, flags = real[::1], numba.float64[::1], numba.int64, numba.boolean[::1]
    whole = numba.int64[::1]
    operands = whole, many, many, many, wide, wide, wide, wide, flags, many, whole, wide
    return compiled(_forward, numba.void(*(size,) * 5, *operands, many, many, wide, flags, wide, flags, whole))
