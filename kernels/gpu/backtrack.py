"""The best path of each chain, from its last state back through the max-plus forward messages.

    z_{v-1} = argmax_k a_{v-1}(k)        z_{i-1} = argmax_k (a_{i-1}(k) + log P_i(k, z_i))

`messages` (v, g, m, c) as `chain_max` writes them, contiguous, float32 or float64. `bulk` (v - 1 or 1, g, c, c)
linear or logarithms, any strides. `ends` (g, m) int64, the steps of each sequence, or None. Result: states (g, m, v)
int64, -1 after a sequence's end, and everywhere if the last message is -inf or holds a NaN.

Numerics: candidates are compared in float64, so that only the stored messages are rounded; the lowest state wins a tie.

Cost: v dependent steps of c additions; each reads one column of a matrix, and the message of the step before it in
advance. A program computes one sequence, or as many as fill a warp. Tiles: from a model, not measured yet.

Definition: `logchain.reference.viterbi`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .launch import arithmetic
from .logs import log_entry
from .tiles import far


@triton.jit(do_not_specialize=["v", "m", "sequences"])
def _backtrack_kernel(
    message_ptr, bulk_ptr, ends_ptr, state_ptr, v, m, sequences, c, stride_bv, stride_bg, stride_bk, stride_bj,
    stride_mv,
    LOG_PARAMS: tl.constexpr, DTYPE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_S sequences, of any sets."""
    sequence = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    inside = sequence < sequences
    states = tl.arange(0, BLOCK_C)
    tile = inside[:, None] & (states < c)[None, :]
    if ends_ptr is None:
        ends = tl.full((BLOCK_S,), 0, tl.int32) + v
    else:
        ends = tl.load(ends_ptr + sequence, mask=inside, other=0).to(tl.int32)
    messages = (message_ptr + far(v - 1, stride_mv) + sequence * c)[:, None] + states[None, :]
    rows = (bulk_ptr + far(v - 1, stride_bv) + sequence // m * stride_bg)[:, None] + (states.to(tl.int64) * stride_bk)[
        None, :
    ]
    state_ptr += sequence * v
    state = tl.full((BLOCK_S,), -1, tl.int32)
    ahead = tl.load(messages, mask=tile, other=float("-inf"))
    for back in tl.range(0, v):
        i = v - 1 - back
        message = ahead
        messages -= stride_mv
        ahead = tl.load(messages, mask=tile & (i > 0), other=float("-inf"))
        # the transition from step i into the state at step i + 1
        entered = state >= 0
        column = rows + (tl.maximum(state, 0).to(tl.int64) * stride_bj)[:, None]
        nothing = float("-inf") if LOG_PARAMS else 0.0
        p = tl.load(column, mask=tile & entered[:, None], other=nothing).to(DTYPE)
        last = i == ends - 1
        terms = message.to(tl.float64) + tl.where(last[:, None], 0.0, log_entry(p, LOG_PARAMS))
        # tl.max would ignore NaN
        terms = tl.where(terms == terms, terms, float("inf"))
        best = tl.max(terms, 1)
        lowest = tl.min(tl.where(terms == best[:, None], states[None, :], BLOCK_C), 1)
        possible = (best > float("-inf")) & (best < float("inf"))
        state = tl.where(possible, lowest, -1)
        tl.store(state_ptr + i, state.to(tl.int64), mask=inside)
        rows -= stride_bv


def tiles(c: int) -> tuple[int, int, int]:
    """The sequences of a program, the least power of two that is not below c, and the warps of a program."""
    block_c = triton.next_power_of_2(c)
    return max(1, 32 // block_c), block_c, min(16, max(1, block_c // 128))


def paths(messages: Tensor, bulk: Tensor, ends: Tensor | None, *, log_params: bool) -> Tensor:
    """The states (g, m, v) int64 of the best paths; operands as above."""
    v, g, m, c = messages.shape
    assert bulk.shape[1:] == (g, c, c) and len(bulk) in (1, v - 1) and messages.is_contiguous()
    assert ends is None or (ends.is_contiguous() and ends.shape == (g, m))
    states = torch.empty(g, m, v, dtype=torch.int64, device=messages.device)
    if states.numel():
        block_s, block_c, warps = tiles(c)
        launch.run(
            _backtrack_kernel, (triton.cdiv(g * m, block_s),), messages, bulk, ends, states, v, m, g * m, c,
            bulk.stride(0) if len(bulk) == v - 1 > 1 else 0, *bulk.stride()[1:], g * m * c,
            LOG_PARAMS=log_params, DTYPE=arithmetic(messages.dtype), BLOCK_S=block_s, BLOCK_C=block_c, num_warps=warps,
        )  # fmt: skip
    return states
