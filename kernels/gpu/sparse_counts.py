"""The gradient of the parameters of chains whose states have few transitions each, by one owner an entry.

    out(entry) += weight a_{i-1}(k) w_i(j) / nu_{i-1}          with respect to a linear parameter
    out(entry) += weight a_{i-1}(k) P_i w_i(j) / nu_{i-1}      with respect to its logarithm

k and j are the states of the entry's transition; a, w and nu are those of `sparse_forward` and `sparse_backward`. The
sum is over the sequences that share a parameter and, with one for all steps, over steps. Where the parameter is 0 the
gradient is exactly 0, and so it is for bands where no state is.

Cost: a few loads and products for each transition, sequence and step. A program owns BLOCK entries of one chunk of the
sum; the chunks, as many as fill the device, are added up in their order. No atomics: the same bits every time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..structured import Arcs
from . import launch
from .sparse_backward import Walked
from .sparse_forward import load
from .sparse_rows import Operands
from .tiles import far
from .wide import share, weight_of

_BLOCK = 256

# programs of a multiprocessor, and the least terms of a chunk's sum
_PROGRAMS = 8
_TERMS = 16


@triton.jit(do_not_specialize=["begin", "count", "v", "slots", "g", "m", "chunks", "steps"])
def _counts_kernel(
    p_ptr, place_ptr, member_ptr, mantissa_ptr, exponent_ptr, w_ptr, w_power_ptr, scale_ptr, scale_power_ptr,
    source_ptr, target_ptr, out_ptr, begin, count, v, slots, c, g, m, chunks, steps, entries,
    stride_pv, stride_pb, stride_pc,
    LOG_PARAMS: tl.constexpr, BY_LOG: tl.constexpr, SUMMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program adds one chunk to BLOCK entries of one parameter: transitions into `count` steps after `begin`."""
    DTYPE: tl.constexpr = mantissa_ptr.dtype.element_ty
    blocks = tl.cdiv(entries, BLOCK)
    entry = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    chunk = tl.program_id(0) // blocks % chunks
    set_and_step = tl.program_id(0) // blocks // chunks
    z = set_and_step if SUMMED else set_and_step // count
    own = 0 if SUMMED else begin + set_and_step % count
    member_ptr += far(z, m)
    p_ptr += tl.load(place_ptr + tl.load(member_ptr) * 3 + 1) + far(own, stride_pv)
    inside = entry < entries
    if source_ptr is None:  # bands: `target_ptr` are offsets
        target = entry % c
        source = target - tl.load(target_ptr + entry // c, mask=inside, other=0)
        inside = inside & (source >= 0) & (source < c)
        p_ptr += (entry // c).to(tl.int64) * stride_pb + target.to(tl.int64) * stride_pc
    else:
        source = tl.load(source_ptr + entry, mask=inside, other=0)
        target = tl.load(target_ptr + entry, mask=inside, other=0)
        p_ptr += entry.to(tl.int64) * stride_pc
    absent = float("-inf") if LOG_PARAMS else 0.0
    p = tl.load(p_ptr, mask=inside, other=absent).to(DTYPE)
    weight, power = weight_of(p, LOG_PARAMS)
    out_ptr += ((chunk * far(1, g) + z) * steps + own) * entries + entry
    found = tl.load(out_ptr, mask=inside, other=0.0)
    run = count if SUMMED else 1
    terms = m * run
    length = tl.cdiv(terms, chunks)
    for term in tl.range(chunk * length, tl.minimum((chunk + 1) * length, terms), loop_unroll_factor=4):
        sequence = tl.load(member_ptr + term // run)
        i = begin + 1 + term % run if SUMMED else own + 1
        scale = tl.load(scale_ptr + sequence * v + i)
        scale_power = tl.load(scale_power_ptr + sequence * v + i)
        wanted = inside & (entry < tl.where(scale == 0.0, 0, entries))
        before, now = (sequence * v + i - 1) * c, (sequence * slots + i % slots) * c
        a, a_power = load(mantissa_ptr + before, exponent_ptr + before, source, wanted)
        w, w_power = load(w_ptr + now, w_power_ptr + now, target, wanted)
        if BY_LOG:
            a, a_power = a * weight, a_power + power
        found += share(a * w, a_power + w_power, scale, scale_power)
    tl.store(out_ptr, tl.where(p == absent, 0.0, found), mask=inside)


class Counts:
    """The gradient of the parameter, found launch by launch, of so many steps each."""

    def __init__(self, chain: Operands, pattern: Arcs | Tensor, members: Tensor, count: int, *, by_log: bool) -> None:
        """`pattern`: arcs, or the offsets of bands (int32); `members` (g, m): the sequences of each parameter."""
        own = chain.parameter.shape[-2 if chain.banded else -1 :]
        self.chain, self.pattern, self.members, self.by_log = chain, pattern, members, by_log
        self.steps, self.entries = chain.parameter.shape[-len(own) - 1], own.numel()
        self.blocks = triton.cdiv(self.entries, _BLOCK)
        (g, m), several = members.shape, self.steps > 1
        programs = self.blocks * g * (count if several else 1)
        most = min(_PROGRAMS * launch.processors(chain.x) // max(1, programs), m * (1 if several else count) // _TERMS)
        self.parts = chain.x.new_zeros(max(1, most), g, self.steps, self.entries, dtype=chain.dtype)

    def add(self, kept: tuple[Tensor, ...], walked: Walked, begin: int, count: int) -> None:
        """Add the transitions into `count` steps after `begin`; see `sparse_backward`."""
        chain, (chunks, g, steps, entries) = self.chain, self.parts.shape
        _, v, c = chain.shape
        several = steps > 1
        ends = self.pattern if isinstance(self.pattern, Arcs) else (None, self.pattern)
        launch.run(
            _counts_kernel, (self.blocks * chunks * g * (count if several else 1),), chain.parameter, chain.places,
            self.members, *kept, walked.mantissas, walked.exponents, walked.scale, walked.scale_power, *ends,
            self.parts, begin, count, v, walked.mantissas.shape[1], c, g, self.members.shape[1], chunks, steps, entries,
            *chain.strides[2:], LOG_PARAMS=chain.log_params, BY_LOG=self.by_log, SUMMED=not several, BLOCK=_BLOCK,
            num_warps=4,
        )  # fmt: skip

    def total(self) -> Tensor:
        """The gradient in the shape of the parameter."""
        return torch.sum(self.parts, 0).view(self.chain.parameter.shape)
