"""The products of each L consecutive matrices of a stack of logarithms, in two launches, each matrix read once.

    (M_1 ... M_L)   (M_{L+1} ... M_{2 L})   ...

One program multiplies a segment in linear numbers with an exponent of two a row, so that no exponential stands between
its matrices. Segments with a sum that may be inexact are computed again from their logarithms, row by row, by programs
that return at once elsewhere: nothing waits for the device. Numerics: `scaled`. Cost: c^3 multiply-adds a matrix.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .scaled import LN2_HIGH, LN2_LOW, exponent_of, power_of_two
from .segment_product import block_of, registers, segment_product, warps
from .tiles import any_of, exp, far, finite, log, multiple


@triton.jit(do_not_specialize=["matrices", "g", "length"])
def _products_kernel(
    matrix_ptr, out_ptr, offset_ptr, arrived_ptr, matrices, g, length, stride_s, stride_g,
    STRIDE_K: tl.constexpr, STRIDE_J: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program multiplies a segment; `arrived` becomes 0 for those that are to be computed again, else -1."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    stride_s, stride_g = multiple(stride_s, WIDTH), multiple(stride_g, WIDTH)
    program = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(0) // g * length
    u, taken = segment_product(
        None, matrix_ptr + program % g * stride_g, begin, tl.minimum(begin + length, matrices), 0, 0, stride_s,
        STRIDE_K, STRIDE_J, C, False, True, PRECISION, DTYPE,
    )  # fmt: skip
    states = tl.arange(0, block_of(C))
    top = tl.max(u, 1)
    own = exponent_of(top)
    highest = tl.max(tl.where(top > 0.0, taken + own, -(2**62)))
    whole = tl.where(highest == -(2**62), 0, highest)
    below = (taken + own - whole).to(tl.float64)
    logs = log(u * power_of_two(-own, DTYPE)[:, None]).to(tl.float64) + (below * LN2_HIGH + below * LN2_LOW)[:, None]
    peak = finite(tl.max(logs))
    cells = states[:, None] * C + states[None, :]
    mask = (states < C)[:, None] & (states < C)[None, :]
    tl.store(out_ptr + program * C * C + cells, (logs - peak).to(DTYPE), mask=mask)
    tl.store(offset_ptr + program, whole.to(tl.float64) * LN2_HIGH + (whole.to(tl.float64) * LN2_LOW + peak))
    tl.store(arrived_ptr + program, tl.where(any_of((u != u) & mask), 0, -1))


@triton.jit(do_not_specialize=["matrices", "g", "length"])
def _again_kernel(
    matrix_ptr, out_ptr, offset_ptr, arrived_ptr, top_ptr, rescued_ptr, matrices, g, length, stride_s, stride_g,
    STRIDE_K: tl.constexpr, STRIDE_J: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One program computes a row of a segment's product; the last of them gives all rows one offset."""
    program = (tl.program_id(0) // C).to(tl.int64)
    if tl.load(arrived_ptr + program, volatile=True) < 0:
        return
    row = tl.program_id(0) % C
    states = tl.arange(0, block_of(C))
    inside = states < C
    matrix_ptr += program % g * stride_g
    begin = tl.program_id(0) // C // g * length
    a = tl.where(states == row, 0.0, float("-inf")).to(tl.float64)
    for i in tl.range(begin, tl.minimum(begin + length, matrices)):
        cells = states[:, None] * STRIDE_K + states[None, :] * STRIDE_J
        mask = inside[:, None] & inside[None, :]
        p = tl.load(matrix_ptr + far(i, stride_s) + cells, mask=mask, other=float("-inf"))
        terms = a[:, None] + p.to(tl.float64)
        peak = finite(tl.max(terms, 0))
        a = log(tl.sum(exp(terms - peak[None, :]), 0)) + peak
    out_ptr += program * C * C
    top_ptr += program * C
    top = finite(tl.max(a, 0))
    tl.store(out_ptr + row * C + states, (a - top).to(out_ptr.dtype.element_ty), mask=inside, cache_modifier=".cg")
    tl.store(top_ptr + row, tl.where(tl.max(a, 0) == float("-inf"), float("-inf"), top), cache_modifier=".cg")
    tl.debug_barrier()
    arrived = tl.atomic_add(arrived_ptr + program, 1, sem="acq_rel")
    tl.debug_barrier()
    if arrived == C - 1:
        tops = tl.load(top_ptr + states, mask=inside, other=float("-inf"), cache_modifier=".cg")
        highest = finite(tl.max(tops, 0))
        tl.store(offset_ptr + program, highest)
        tl.atomic_add(rescued_ptr, C * C, sem="relaxed")
        for other in tl.range(0, C):
            below = tl.load(top_ptr + other, cache_modifier=".cg") - highest
            logs = tl.load(out_ptr + other * C + states, mask=inside, other=float("-inf"), cache_modifier=".cg")
            logs = tl.where(logs == float("-inf"), logs.to(tl.float64), logs.to(tl.float64) + below)
            tl.store(out_ptr + other * C + states, logs.to(out_ptr.dtype.element_ty), mask=inside)


def products(matrices: Tensor, length: int, *, dtype: torch.dtype, rescued: Tensor) -> tuple[Tensor, Tensor]:
    """The products of each `length` of s matrices, and of a remainder, less their largest entries, and those.

    Args:
        matrices: logarithms (s, g, c, c), any strides, s and g at least 1, of states that `segment_product.fits`.
        length: the matrices of a segment, at least 1.
        dtype: of the arithmetic and of the products.
        rescued: (1), int64; the number of entries that are computed again is added.

    Returns:
        Logarithms (n, g, c, c) of `dtype` and their offsets (n, g) in float64; an impossible product is -inf, with
        offset 0.
    """
    s, g, c, _ = matrices.shape
    count = triton.cdiv(s, length)
    new = matrices.new_empty
    out, offset = new((count, g, c, c), dtype=dtype), new((count, g), dtype=torch.float64)
    arrived, tops = new((count, g), dtype=torch.int32), new((count, g, c), dtype=torch.float64)
    sizes = (s, g, length, *matrices.stride()[:2])
    strides = {"STRIDE_K": matrices.stride(2), "STRIDE_J": matrices.stride(3), "C": c}
    precision = launch.precision(out)
    launch.run(
        _products_kernel, (count * g,), matrices, out, offset, arrived, *sizes, **strides,
        PRECISION="ieee" if c <= 16 and precision == "tf32x3" else precision, WIDTH=max(launch.widths(matrices)),
        num_warps=warps(c, dtype == torch.float64), num_stages=1,
        **({} if torch.version.hip else {"maxnreg": registers(c)}),
    )  # fmt: skip
    launch.run(
        _again_kernel, (count * g * c,), matrices, out, offset, arrived, tops, rescued, *sizes, **strides,
        num_warps=1 if c <= 16 else 8, num_stages=1,
    )  # fmt: skip
    return out, offset
