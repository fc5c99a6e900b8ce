"""What the launchers ask of the device and of the sizes."""

import math

import torch
from torch import Tensor


def precision(like: Tensor) -> str:
    """How `tl.dot` is to multiply: "ieee", "tf32x3" (as exact, on tensor cores) or "tf32".

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
    """The largest of 1, 2 and 4 that divides all sizes and strides: so many elements can be loaded at once.

    The compiler learns it from `size // WIDTH * WIDTH`; by itself it only looks for multiples of 16.
    """
    return math.gcd(4, *sizes)


def chip(like: Tensor) -> str:
    """The compile target whose tiles fit the device: "sm_80" (99 KiB of shared memory will do), "sm_90" or "gfx942"."""
    if like.device.type != "cuda":
        return "sm_90"  # in the interpreter anything fits
    if torch.version.hip is not None:
        return "gfx942"
    return "sm_90" if torch.cuda.get_device_capability(like.device)[0] in (9, 10) else "sm_80"


def processors(like: Tensor) -> int:
    """How many programs can run at a time, one on each multiprocessor; 2 in the interpreter."""
    return torch.cuda.get_device_properties(like.device).multi_processor_count if like.device.type == "cuda" else 2


def pitches(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a tensor, 0 where an axis has one entry only."""
    return tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one in memory; tensors that merely begin at the same place are a mistake."""
    if a.data_ptr() != b.data_ptr() or not a.numel():
        return False
    assert (a.shape, pitches(a), a.dtype) == (b.shape, pitches(b), b.dtype)
    return True


def widths(matrices: Tensor) -> tuple[int, int]:
    """By how much the strides of rows and of columns can be known to divide, where the other one is 1; 1 elsewhere."""
    *batch, row, column = pitches(matrices)
    if column == 1:
        return common_width(*batch, row), 1
    return 1, common_width(*batch, column) if row == 1 else 1


def aligned(*matrices: Tensor) -> bool:
    """Whether all their rows, or all their columns, can be loaded in vectors of four entries."""
    for matrix in matrices:
        row, column = widths(matrix)
        if 4 not in (row, column) or matrix.shape[-1 if row == 4 else -2] % 4 or matrix.data_ptr() % 16:
            return False
    return True
