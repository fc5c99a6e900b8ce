"""The backward recursion of chains whose states have few transitions each, in wide numbers, and posteriors.

    b_{v-1} = 1        w_i = b_i exp(x_i - peak_i) / 2^shift_i        b_{i-1}(k) = sum_j P_i(k, j) w_i(j)
    gamma_i(j) = weight a_i(j) b_i(j) / nu_i        nu_i = sum_j a_i(j) b_i(j)

Operands: `sparse_rows`; `a` is what `sparse_forward` keeps. Steps `begin` to `stop`, from the last to the first, are
one launch; w passes from step to step, and from launch to launch, in `slots` slots, where `sparse_counts` reads it.
Each step divides by its own sum, so errors of the recursions do not add up in posteriors.

A sequence that is impossible, or of weight 0, has gradients of exactly 0; with a log-partition of NaN it has NaN.

Cost: as the forward recursion, with another look at both messages; three barriers a step. Not measured on a device yet.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .chain_exact import end_of
from .sparse_forward import fold, load, peak_of, states_of
from .sparse_rows import Operands, Rows, sizes
from .tiles import far
from .wide import LEAST, NOTHING, normal, plus, potential, share, times, total


class Walked(NamedTuple):
    """What the backward recursion works with; b of one step (n, c) lies behind w, and the scales behind that.

    Attributes:
        mantissas: w (n, slots, c), step i in slot i % slots: two, or more than a launch has steps if w is to be read.
        exponents: likewise, int32.
        scale: weight / nu_{i-1} (n, v) of the transition into step i; 0 where none is.
        scale_power: the exponent that is missing in nu_{i-1}, int32 (n, v).
    """

    mantissas: Tensor
    exponents: Tensor
    scale: Tensor
    scale_power: Tensor

    @classmethod
    def new(cls, n: int, slots: int, v: int, c: int, like: Tensor) -> "Walked":
        """Memory of a dtype and on a device; no transition has a share yet."""
        sizes = n * slots * c, n * c, n * v
        w, _, scale = like.new_empty(sum(sizes)).split(sizes)
        w_power, _, scale_power = like.new_empty(sum(sizes), dtype=torch.int32).split(sizes)
        scales = scale.zero_().view(n, v), scale_power.zero_().view(n, v)
        return cls(w.view(n, slots, c), w_power.view(n, slots, c), *scales)


@triton.jit(do_not_specialize=["begin", "stop", "v", "slots", "bands"])
def _backward_kernel(
    x_ptr, p_ptr, place_ptr, ends_ptr, mantissa_ptr, exponent_ptr, weight_ptr, w_ptr, w_power_ptr, grad_x_ptr,
    grad_p0_ptr, order_ptr, first_ptr, degree_ptr, other_ptr, entry_ptr, begin, stop, v, slots, c, bands,
    stride_xv, stride_xc, stride_pv, stride_pb, stride_pc,
    LOG_PARAMS: tl.constexpr, BY_LOG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program computes one sequence."""
    DTYPE: tl.constexpr = mantissa_ptr.dtype.element_ty
    sequence = tl.program_id(0).to(tl.int64)
    x_ptr += tl.load(place_ptr + sequence * 3)
    p_ptr += tl.load(place_ptr + sequence * 3 + 1)
    kept, ring = sequence * v * c, sequence * slots * c
    behind = tl.num_programs(0) * far(slots, c)
    b_ptr, b_power_ptr = w_ptr + behind + sequence * c, w_power_ptr + behind + sequence * c
    behind += tl.num_programs(0) * far(1, c)
    scale_ptr, scale_power_ptr = w_ptr + behind, w_power_ptr + behind
    end = end_of(ends_ptr, sequence, v)
    weight = tl.load(weight_ptr + sequence).to(DTYPE)
    # nothing is taken out of the first step of a launch, so that launches of single steps would run out of exponents
    shift = tl.zeros((), tl.int32)
    for back in tl.range(0, tl.minimum(stop, end) - begin):
        i = tl.minimum(stop, end) - 1 - back
        # other threads stored w, and have read the sums
        tl.debug_barrier()
        after = ring + far((i + 1) % slots, c)
        a_ptr, a_power_ptr = mantissa_ptr + kept + far(i, c), exponent_ptr + kept + far(i, c)
        m, e = tl.zeros((BLOCK,), DTYPE), tl.full((BLOCK,), NOTHING, tl.int32)
        for start in tl.range(0, c, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            inside = rows < c
            states = states_of(order_ptr, rows, inside)
            if i == end - 1:
                b, power = tl.full((BLOCK,), 1.0, DTYPE), tl.zeros((BLOCK,), tl.int32)
            else:
                b, power = fold(
                    w_ptr + after, w_power_ptr + after, p_ptr + far(i, stride_pv), first_ptr, degree_ptr, other_ptr,
                    entry_ptr, rows, states, c, bands, stride_pb, stride_pc, LOG_PARAMS, True, order_ptr is None,
                )  # fmt: skip
            tl.store(b_ptr + states, b, mask=inside)
            tl.store(b_power_ptr + states, power, mask=inside)
            a, a_power = load(a_ptr, a_power_ptr, states, inside)
            joint, joint_power = times(a, a_power, b, power)
            m, e = plus(m, e, joint, joint_power)
        nu, nu_power = total(m, e)
        scale = weight / tl.where(nu == 0.0, 1.0, nu)
        scale = tl.where(weight == 0.0, 0.0, scale).to(DTYPE)
        tl.store(scale_ptr + sequence * v + i + 1, scale, mask=i + 1 < end)
        tl.store(scale_power_ptr + sequence * v + i + 1, nu_power, mask=i + 1 < end)
        x_row = x_ptr + far(i, stride_xv)
        peak = peak_of(x_row, stride_xc, c, DTYPE, BLOCK)
        tl.debug_barrier()
        top = tl.full((BLOCK,), LEAST, tl.int32)
        for start in tl.range(0, c, BLOCK):
            states = start + tl.arange(0, BLOCK).to(tl.int64)
            inside = states < c
            b, power = load(b_ptr, b_power_ptr, states, inside)
            a, a_power = load(a_ptr, a_power_ptr, states, inside)
            factor, x_power = potential(
                tl.load(x_row + states * stride_xc, mask=inside, other=float("-inf")).to(DTYPE), peak
            )
            joint, joint_power = times(a, a_power, b, power)
            gamma = share(joint, joint_power, scale, nu_power)
            if grad_x_ptr is not None:
                tl.store(grad_x_ptr + kept + far(i, c) + states, gamma, mask=inside)
            if grad_p0_ptr is not None:
                if not BY_LOG:
                    gamma = share(b * factor, power + x_power, scale, nu_power)
                tl.store(grad_p0_ptr + sequence * c + states, gamma, mask=inside & (i == 0))
            w, w_power = normal(b * factor, power + x_power - shift)
            now = ring + far(i % slots, c) + states
            tl.store(w_ptr + now, w, mask=inside)
            tl.store(w_power_ptr + now, w_power, mask=inside)
            top = tl.maximum(top, w_power)
        shift = tl.max(top, 0)


def backward(
    chain: Operands,
    outgoing: Rows,
    kept: tuple[Tensor, ...],
    weight: Tensor,
    walked: Walked,
    grad_x: Tensor | None,
    grad_p0: Tensor | None,
    steps: tuple[int, int],
    *,
    by_log: bool,
) -> None:
    """The gradients of x (n, v, c) before a sequence's end, of p0 (n, c), and `walked` are written for these steps.

    All are contiguous; `weight` (n) is float64, NaN for a sequence that is. `by_log`: the gradient of p0 is that of its
    logarithm.
    """
    n, v, c = chain.shape
    launch.run(
        _backward_kernel, (n,), chain.x, chain.parameter, chain.places, chain.ends, *kept, weight, *walked[:2],
        grad_x, grad_p0, *outgoing.tensors, *steps, v, walked.mantissas.shape[1], c, outgoing.bands, *chain.strides,
        LOG_PARAMS=chain.log_params, BY_LOG=by_log, **sizes(c, chain.dtype),
    )  # fmt: skip
