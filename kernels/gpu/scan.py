"""Forward and backward messages of chains, and their posteriors: one scan in two directions.

    forward     u_0 = start            u_i = S_{i-1} P_i          S_i = u_i exp(x_i)        a = S
    backward    u_{v-1} = final        u_i = P_{i+1} S_{i+1}      S_i = u_i exp(x_i)        w = S
    posterior_i = u_i other_i / nu_i                nu_i = sum_k u_i(k) other_i(k)
    expected count of (k, j) into step i = a_{i-1}(k) P_i(k, j) w_i(j) / nu

`other` are the messages of the other direction. A backward scan is a forward scan by transposed matrices from the end
of a sequence, so both are one source. A scan with weights also divides its previous message by nu: counts are then one
matrix product over all sequences, or an outer product, see `counts`.

x (v, g, m, c), of any float type and strides; P (v - 1 or 1, g, c, c), linear or logarithms, one matrix for m sequences
of each of g sets; ends (g, m) int64, the steps of a sequence, at least 1; messages (slots, g, m, c), contiguous, step i
in slot i % slots, or with weights the forward message of step i in slot i + 2. With ENTERED, step 0 is that whose
message entered: x_0 is 0 and not in memory.

One program scans M sequences of one set through all their steps: 16, by `tl.dot`, or one that has its own matrices. Its
last message is in registers where a block of the matrix holds all states, and otherwise in memory that no other program
reads. No program waits for another one. Numerics: `scaled`; flagged sequences are recomputed by `exact`.
"""

import triton  # noqa: I001
import triton.language as tl

from .scaled import (
    LN2, exp_over_power, exp_split, exponent, finite, log_times_power, multiply, numbers, power, times_power,
    whole_bits,
)  # fmt: skip  # isort: skip

# the exponents of 0, and of a sum that may be inexact
ZERO, INEXACT = tl.constexpr(-1073741824), tl.constexpr(1073741824)

# the directions of a launch: forward, backward, or both at once
FORWARD, BACKWARD, BOTH = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def load_block(p_ptr, k, j, STRIDE_K: tl.constexpr, STRIDE_J: tl.constexpr, C: tl.constexpr, LOG: tl.constexpr):
    """A block of a matrix, weight 0 outside of it."""
    mask = (k < C)[:, None] & (j < C)[None, :]
    at = p_ptr + k[:, None] * STRIDE_K + j[None, :] * STRIDE_J
    return tl.load(at, mask=mask, other=float("-inf") if LOG else 0.0)


@triton.jit
def _top_exponent(p, LOG: tl.constexpr):
    """The exponent of a block's largest entry, or about the least there is where all have weight 0."""
    top = tl.max(p)
    if LOG:
        return whole_bits(top)
    else:
        return exponent(top)


@triton.jit
def _positive(p, LOG: tl.constexpr):
    """The positive weights of a block, infinity elsewhere."""
    return tl.where(p > (float("-inf") if LOG else 0.0), p, float("inf"))


@triton.jit
def _lowness(k, least, LOG: tl.constexpr):
    """Of a matrix with exponent k: 0; 1 if it is `low`, see `scaled`; 2 if no sum of its products is exact."""
    LOWEST: tl.constexpr = numbers(least.dtype).low
    if LOG:
        return (least < (k + LOWEST).to(least.dtype) * LN2).to(tl.int32)
    else:
        # sums are divided by 2^k after them
        low = (least < power(LOWEST + tl.maximum(k, 0), least.dtype)).to(tl.int32)
        return low + (low & (k < LOWEST // 2 - 1)).to(tl.int32)


@triton.jit(do_not_specialize=["matrices", "g", "m"])
def prepare_kernel(
    p_ptr, bound_ptr, linear_ptr, start_ptr, message_ptr, taken_ptr, flag_ptr, matrices, g, m, p_strides,
    start_strides, STRIDE_K: tl.constexpr, STRIDE_J: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
    N: tl.constexpr, LOG: tl.constexpr, START_LOG: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The first programs prepare one shared matrix each, the others the first message of one sequence each."""
    if bound_ptr is not None:
        if tl.program_id(0) < matrices:
            matrix, j = tl.program_id(0).to(tl.int64), tl.arange(0, N)
            p_ptr += matrix // g * p_strides[0] + matrix % g * p_strides[1]
            top = tl.full((BLOCK, N), float("-inf") if LOG else 0.0, DTYPE)
            least = tl.full((BLOCK, N), float("inf"), DTYPE)
            for first in tl.range(0, C, BLOCK):
                p = load_block(p_ptr, first + tl.arange(0, BLOCK), j, STRIDE_K, STRIDE_J, C, LOG).to(DTYPE)
                top = tl.maximum(top, p)
                least = tl.minimum(least, _positive(p, LOG))
            k = _top_exponent(top, LOG)
            tl.store(bound_ptr + matrix, 4 * k + _lowness(k, tl.min(least), LOG))
            if linear_ptr is not None:
                for first in tl.range(0, C, BLOCK):
                    rows = first + tl.arange(0, BLOCK)
                    p = load_block(p_ptr, rows, j, STRIDE_K, STRIDE_J, C, LOG).to(DTYPE)
                    out = linear_ptr + matrix * C * C + rows[:, None] * C + j[None, :]
                    tl.store(out, exp_over_power(p, k) if LOG else p, mask=(rows < C)[:, None] & (j < C)[None, :])
            return
    if message_ptr is not None:
        sequence, j = (tl.program_id(0) - matrices).to(tl.int64), tl.arange(0, N)
        start_ptr += sequence // m * start_strides[0] + sequence % m * start_strides[1]
        start = tl.load(start_ptr + j * start_strides[2], mask=j < C, other=float("-inf") if START_LOG else 0.0)
        message, k = _scaled_start(start, START_LOG, DTYPE)
        tl.store(message_ptr + sequence * C + j, message, mask=j < C)
        if taken_ptr is not None:
            tl.store(taken_ptr + sequence, (k - numbers(DTYPE).target).to(tl.int64))
            tl.store(taken_ptr + (tl.num_programs(0) - matrices) + sequence, tl.zeros((), tl.int64))
            tl.store(flag_ptr + sequence, tl.zeros((), tl.int8))


@triton.jit
def _scaled_start(start, LOG: tl.constexpr, DTYPE: tl.constexpr):
    """A message and k of initial weights or their logarithms: `message 2^(k - TARGET)`."""
    if LOG:
        logs = start.to(tl.float64)
        k = whole_bits(finite(tl.max(logs, 0)))
        message = exp_over_power(logs, k).to(DTYPE)
    else:
        weight = start.to(DTYPE)
        k = exponent(tl.max(weight, 0))
        message = weight * power(-k, DTYPE)
    message *= 2.0 ** numbers(DTYPE).target
    raised = tl.maximum(message, numbers(DTYPE).floor, propagate_nan=tl.PropagateNan.ALL)
    zero = start == (float("-inf") if LOG else 0.0)
    weight = tl.where(message < 0.0, float("nan"), raised)
    return tl.where(zero, 0.0, weight), k


@triton.jit
def _add_product(a, p, u, k, least, LOG: tl.constexpr, PRECISION: tl.constexpr):
    """`u + a P`; of a single row it is divided by 2^k if P is logarithms, and k and least are of all blocks."""
    if a.shape[0] > 1:
        return multiply(a, p, u, PRECISION), k, least
    else:
        new = tl.maximum(k, _top_exponent(p, LOG))
        least = tl.minimum(least, tl.min(_positive(p, LOG)))
        if LOG:
            u *= power(tl.maximum(k - new, -1000), u.dtype)
            p = exp_over_power(p, new)
        return u + tl.sum(tl.trans(a) * p, 0, keep_dims=True), new, least


@triton.jit
def _scan(
    x_ptr, p_ptr, bound_ptr, product_ptr, start_ptr, ends_ptr, message_ptr, other_ptr, weight_ptr, posterior_ptr,
    taken_ptr, taken_other_ptr, log_norm_ptr, flag_ptr, first, steps, v, g, m, slots, matrices, x_strides, p_strides,
    posterior_strides, ENTERED: tl.constexpr, REVERSE: tl.constexpr, SHIFT: tl.constexpr, STRIDE_K: tl.constexpr,
    STRIDE_J: tl.constexpr, C: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, LOG: tl.constexpr,
    DIVIDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The scan of M sequences from step `first` on, `steps` steps. STRIDE_K belongs to the index that is summed over.

    The message before the first step is in its slot. `product_ptr`: holds the products u of the only step. Without
    `other_ptr` only messages are written.
    """
    DTYPE: tl.constexpr = message_ptr.dtype.element_ty
    NUMBERS: tl.constexpr = numbers(DTYPE)
    TARGET: tl.constexpr = NUMBERS.target
    FLOOR: tl.constexpr = NUMBERS.floor
    HELD: tl.constexpr = K >= C  # messages stay in registers
    DIRECTION: tl.constexpr = -1 if REVERSE else 1
    group = tl.program_id(0)
    blocks = tl.cdiv(m, M)
    z, row = (group // blocks).to(tl.int64), group % blocks * M + tl.arange(0, M)
    inside, j = row < m, tl.arange(0, N)
    sequence = z * m + row
    here = sequence[:, None] * C + j[None, :]
    there = inside[:, None] & (j < C)[None, :]
    pitch = g.to(tl.int64) * m * C
    x_ptr += z * x_strides[1] + row.to(tl.int64)[:, None] * x_strides[2] + j[None, :] * x_strides[3]
    p_ptr += z * p_strides[1]
    if ends_ptr is None:
        ends = tl.zeros((M,), tl.int32) + v
    else:
        ends = tl.load(ends_ptr + sequence, mask=inside, other=1).to(tl.int32)
    origin = ends - 1 if REVERSE else ends * 0
    flagged = row < 0
    taken, k_taken, low = tl.zeros((M,), tl.int64), tl.zeros((M,), tl.int32), 0
    if taken_ptr is not None:
        taken = tl.load(taken_ptr + sequence, mask=inside, other=0)

    previous = first - DIRECTION
    begun = (previous >= 0) & (previous < v)
    message = tl.zeros((M, N), DTYPE)
    if HELD and product_ptr is None:
        message = tl.load(message_ptr + (previous + SHIFT) % slots * pitch + here, mask=there & begun, other=0.0)
        p_at = p_ptr + tl.where(begun, tl.minimum(first, previous), 0).to(tl.int64) * p_strides[0]
        p = load_block(p_at, tl.arange(0, K), j, STRIDE_K, STRIDE_J, C, LOG).to(DTYPE)
    for t in tl.range(0, steps):
        i = first + t * DIRECTION
        previous = i - DIRECTION
        begun = (previous >= 0) & (previous < v)
        matrix = tl.where(begun, tl.minimum(i, previous), 0)
        active, begins = inside & (i < ends), inside & (i == origin)
        here_now = there & active[:, None]
        at = message_ptr + (i + SHIFT) % slots * pitch + here
        previous_ptr = message_ptr + (previous + SHIFT) % slots * pitch
        x_at = x_ptr + (i - ENTERED).to(tl.int64) * x_strides[0]
        x = tl.load(x_at, mask=here_now & (i >= ENTERED), other=float("-inf")).to(DTYPE)
        if ENTERED:
            x = tl.where(here_now & (i == 0), 0.0, x)
        # the product
        u = tl.zeros((M, N), DTYPE)
        k = tl.full((), -536870912 if LOG else -1022, tl.int32)
        least = tl.full((), float("inf"), DTYPE)
        if product_ptr is not None:
            u = tl.load(product_ptr + here, mask=there & begun, other=0.0)
        elif HELD:
            u, k, least = _add_product(message, p, u, k, least, LOG, PRECISION)
            after = tl.minimum(tl.maximum(tl.minimum(i, i + DIRECTION), 0), tl.maximum(v - 2, 0))
            p_at = p_ptr + after.to(tl.int64) * p_strides[0]
            p = load_block(p_at, tl.arange(0, K), j, STRIDE_K, STRIDE_J, C, LOG).to(DTYPE)
        else:
            tl.debug_barrier()  # other threads of this program stored the message
            p_at = p_ptr + matrix.to(tl.int64) * p_strides[0]
            for block in tl.range(0, tl.where(begun, C, 0), K):
                source = block + tl.arange(0, K)
                mask = inside[:, None] & (source < C)[None, :]
                a = tl.load(previous_ptr + sequence[:, None] * C + source[None, :], mask=mask, other=0.0)
                p = load_block(p_at, source, j, STRIDE_K, STRIDE_J, C, LOG).to(DTYPE)
                u, k, least = _add_product(a, p, u, k, least, LOG, PRECISION)
            if M > 1:
                # through memory, all that follows has the layout of loads: nothing else is converted
                tl.store(at, u, mask=here_now)
                tl.debug_barrier()
                u = tl.load(at, mask=here_now, other=0.0)
            elif weight_ptr is not None:
                tl.debug_barrier()  # other threads of this program read the message that is divided below
        if M > 1 or product_ptr is not None:
            bound = tl.load(bound_ptr + (matrix % matrices).to(tl.int64) * g + z)
            k, low = bound >> 2, bound & 3
        else:
            low = _lowness(k, least, LOG)
            if weight_ptr is not None:
                tl.store(bound_ptr + (matrix % matrices).to(tl.int64) * g + z, 4 * k)
        if not (LOG and M == 1 or DIVIDED):
            u *= power(-k, DTYPE)
        k_taken = tl.zeros((M,), tl.int32) + k
        if start_ptr is None:
            u = tl.where(begins[:, None], 2.0**TARGET, u)
            k_taken = tl.where(begins, -TARGET, k_taken)
        else:
            u = tl.where(begins[:, None], tl.load(start_ptr + here, mask=there & begins[:, None], other=0.0), u)
            k_taken = tl.where(begins, 0, k_taken)
        # u f 2^n, of which sums that may be inexact show in the row's largest exponent
        f, n = exp_split(x)
        new = u * f
        limit = tl.where(low == 1, tl.full((M,), N, DTYPE), tl.full((M,), float("inf"), DTYPE))
        limit = tl.where(low == 0, tl.full((M,), N * NUMBERS.trusted, DTYPE), limit)
        limit = tl.where(begins, tl.full((M,), 2 * FLOOR, DTYPE), limit)[:, None]
        exact = (new >= limit) | ((u == 0.0) & (new == 0.0) & ((low == 0) | begins)[:, None])
        if other_ptr is not None:
            other = tl.load(other_ptr + i % slots * pitch + here, mask=here_now, other=0.0)
            exact |= other == 0.0
        q = tl.where(u > 0.0, exponent(new) + n, ZERO)
        q = tl.where(exact & (new < float("inf")), q, INEXACT)
        top = tl.max(tl.where(x == float("-inf"), ZERO, q), 1)
        flagged |= top == INEXACT
        top = tl.where(top == ZERO, 0, top)
        # the message, its largest entry between 2^TARGET and twice that
        new = tl.maximum(times_power(new, n - top[:, None] + TARGET), FLOOR)
        new = tl.where((u > 0.0) & (x > float("-inf")), new, 0.0)
        if other_ptr is not None:
            joint = other * 2.0**-TARGET * u
            nu = tl.sum(joint, 1)
            trust = (nu == 0.0) | ((nu >= N * N * NUMBERS.trusted_joint) & (nu < float("inf")))
            flagged |= active & (trust == 0)
            if weight_ptr is not None:
                weight = tl.load(weight_ptr + sequence, mask=inside, other=0.0).to(DTYPE)
                share = tl.where(nu > 0.0, weight / tl.where(nu > 0.0, nu, 1.0), 0.0)[:, None]
                g_at = posterior_ptr + i.to(tl.int64) * posterior_strides[0] + z * posterior_strides[1]
                g_at += row.to(tl.int64)[:, None] * posterior_strides[2] + j[None, :] * posterior_strides[3]
                tl.store(g_at, tl.where(share == 0.0, 0.0, joint * share), mask=there)
            if log_norm_ptr is not None:  # the two scans meet
                of_other = tl.load(taken_other_ptr + sequence, mask=inside, other=0)
                whole = taken + k_taken + of_other + TARGET
                total, error = log_times_power(nu, whole)
                tl.store(log_norm_ptr + sequence, total, mask=active)
                tl.store(log_norm_ptr + g.to(tl.int64) * m + sequence, error, mask=active)
        taken += tl.where(active, top - TARGET + k_taken, 0).to(tl.int64)
        # with fewer slots, a sequence's last message stays past its end
        tl.store(at, new, mask=here_now | (there & (slots >= v)))
        if weight_ptr is not None:
            if product_ptr is not None or not HELD:
                message = tl.load(previous_ptr + here, mask=there & begun, other=0.0)
            divided = tl.where(share == 0.0, 0.0, message * (share * 2.0**-TARGET))
            tl.store(previous_ptr + here, divided, mask=there & begun)
        message = new
    if taken_ptr is not None:
        tl.store(taken_ptr + sequence, taken, mask=inside)
    if log_norm_ptr is not None and other_ptr is None:
        tl.debug_barrier()
        last = tl.minimum(ends, first + steps) - 1
        at = message_ptr + (last % slots).to(tl.int64)[:, None] * pitch + here
        total = tl.sum(tl.load(at, mask=there & (last >= 0)[:, None], other=0.0), 1)
        flagged |= (total > 0.0) & ((total >= 2.0 ** (TARGET - 1)) == 0)
        total, error = log_times_power(total, taken)
        tl.store(log_norm_ptr + sequence, total, mask=inside)
        tl.store(log_norm_ptr + g.to(tl.int64) * m + sequence, error, mask=inside)
    tl.store(flag_ptr + sequence, tl.full((M,), 1, tl.int8), mask=inside & flagged)


@triton.jit(do_not_specialize=["first", "steps", "first_back", "steps_back", "v", "g", "m", "slots", "matrices"])
def scan_kernel(
    x_ptr, p_ptr, bound_ptr, product_ptr, start_ptr, final_ptr, ends_ptr, a_ptr, w_ptr, other_ptr, weight_ptr,
    posterior_ptr, taken_ptr, log_norm_ptr, flag_ptr, first, steps, first_back, steps_back, v, g, m, slots,
    matrices, x_strides, p_strides, posterior_strides, ENTERED: tl.constexpr, DIRECTIONS: tl.constexpr,
    SHIFT: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_J: tl.constexpr, C: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, LOG: tl.constexpr, DIVIDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program scans M sequences in one direction; `a` and `w` are the forward and the backward messages."""
    taken_back_ptr = taken_ptr
    if taken_ptr is not None:
        taken_back_ptr = taken_ptr + g.to(tl.int64) * m
    if DIRECTIONS == FORWARD or (DIRECTIONS == BOTH and tl.program_id(1) == 0):
        _scan(
            x_ptr, p_ptr, bound_ptr, product_ptr, start_ptr, ends_ptr, a_ptr, other_ptr, weight_ptr, posterior_ptr,
            taken_ptr, taken_back_ptr, log_norm_ptr, flag_ptr, first, steps, v, g, m, slots, matrices, x_strides,
            p_strides, posterior_strides, ENTERED, False, SHIFT, STRIDE_K, STRIDE_J, C, M, N, K, LOG, DIVIDED,
            PRECISION,
        )  # fmt: skip
    else:
        _scan(
            x_ptr, p_ptr, bound_ptr, product_ptr, final_ptr, ends_ptr, w_ptr, other_ptr, weight_ptr, posterior_ptr,
            taken_back_ptr, taken_ptr, log_norm_ptr if DIRECTIONS == BACKWARD else None, flag_ptr, first_back,
            steps_back, v, g, m, slots, matrices, x_strides, p_strides, posterior_strides, ENTERED, True, 0, STRIDE_J,
            STRIDE_K, C, M, N, K, LOG, DIVIDED, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["slots"])
def clear_kernel(flag_ptr, message_ptr, slots, C: tl.constexpr, N: tl.constexpr):
    """The messages of one sequence become zeros if it is flagged, so that it has no part in matrix products."""
    sequence, j = tl.program_id(0).to(tl.int64), tl.arange(0, N)
    if tl.load(flag_ptr + sequence) != 0:
        for i in tl.range(0, slots):
            at = message_ptr + (i * tl.num_programs(0).to(tl.int64) + sequence) * C + j
            tl.store(at, tl.zeros((N,), message_ptr.dtype.element_ty), mask=j < C)
