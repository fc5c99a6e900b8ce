"""Properties of the device, of sizes and of strides that launchers of kernels ask for."""

import math

import torch
import triton.language as tl
from torch import Tensor

from .held import run as run


def precision(like: Tensor) -> str:
    """The precision of `tl.dot`: "ieee", "tf32x3" (as exact, on tensor cores) or "tf32".

    `torch.get_float32_matmul_precision()` decides: "highest" is exact, "high" and "medium" are TF32.
    """
    if like.dtype == torch.float64:
        return "ieee"
    if (
        like.device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(like.device)[0] < 8
    ):
        return "ieee"  # no TF32 before Ampere
    if torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return "ieee" if torch.version.hip is not None else "tf32x3"


def common_width(*sizes: int) -> int:
    """The largest of 1, 2 and 4 that divides all sizes and strides, the number of elements that one load can take.

    Kernels pass it on to the compiler by `size // WIDTH * WIDTH`; by itself that only looks for multiples of 16.
    """
    return math.gcd(4, *sizes)


def chip(like: Tensor) -> str:
    """The compile target whose tiles fit the device: "sm_80" (99 KiB of shared memory will do), "sm_90" or "gfx942"."""
    if like.device.type != "cuda":
        return "sm_90"  # in the interpreter anything fits
    if torch.version.hip is not None:
        return "gfx942"
    return "sm_90" if torch.cuda.get_device_capability(like.device)[0] in (9, 10) else "sm_80"


def warps(c: int) -> int:
    """The warps of a program that has rows of c states and a block of a matrix in registers.

    Four on AMD, whose warps are twice as wide: a thread then has 512 registers, and needs more than 256.
    """
    return 4 if c <= 32 or torch.version.hip is not None else 8


def processors(like: Tensor) -> int:
    """The number of multiprocessors of the device; 2 in the interpreter."""
    return torch.cuda.get_device_properties(like.device).multi_processor_count if like.device.type == "cuda" else 2


def pitches(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a tensor, 0 for axes of size 1."""
    return tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def whole(*sizes: int) -> int:
    """The number of entries that hold parts of these sizes, each with those that fill it up to a multiple of four."""
    return sum(-(-size // 4) * 4 for size in sizes)


def parts(memory: Tensor, *sizes: int) -> list[Tensor]:
    """Parts of memory for `whole(*sizes)` entries, one behind the other, each at a multiple of 16 bytes.

    So the compiled kernel does not depend on their sizes.
    """
    pieces = memory.split([whole(size) for size in sizes])
    return [piece[:size] for piece, size in zip(pieces, sizes, strict=True)]


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same view of memory; other tensors must not begin at the same address."""
    if a.data_ptr() != b.data_ptr() or not a.numel():
        return False
    assert (a.shape, pitches(a), a.dtype) == (b.shape, pitches(b), b.dtype)
    return True


def widths(matrices: Tensor) -> tuple[int, int]:
    """The common width of row strides if rows are contiguous, and that of column strides if columns are; else 1."""
    *batch, row, column = pitches(matrices)
    if column == 1:
        return common_width(*batch, row), 1
    return 1, common_width(*batch, column) if row == 1 else 1


def aligned(*matrices: Tensor) -> bool:
    """Whether every matrix can be loaded in vectors of four entries, by rows or by columns."""
    for matrix in matrices:
        row, column = widths(matrix)
        if 4 not in (row, column) or matrix.shape[-1 if row == 4 else -2] % 4 or matrix.data_ptr() % 16:
            return False
    return True


def layout(a: Tensor, b: Tensor, *out: Tensor) -> str:
    """The axes of operands `a` and `b` with adjacent entries, if loads and stores may be of four; otherwise ""."""
    if not aligned(a, b, *out) or any(widths(matrix)[0] != 4 for matrix in out):
        return ""
    return ("ak" if widths(a)[0] == 4 else "am") + (" bn" if widths(b)[0] == 4 else " bk")


def arithmetic(dtype: torch.dtype) -> tl.dtype:
    """Triton's name for the dtype of the arithmetic."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def all_registers(warps: int) -> dict[str, int]:
    """Options of a launch: so many warps to a program, and as many registers to a thread as there are then.

    By itself ptxas spills some registers, to run more programs at once.
    """
    return {"num_warps": warps} | ({} if torch.version.hip else {"maxnreg": min(255, 2048 // warps)})
