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
    if like.device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(like.device)[0] < 8:
        return "ieee"  # no TF32 before Ampere
    if torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return "ieee" if torch.version.hip is not None else "tf32x3"


def common_width(*sizes: int) -> int:
    """The largest of 1, 2 and 4 that divides all sizes and strides: so many elements can be loaded at once.

    The compiler learns it from `size // WIDTH * WIDTH`; by itself it only looks for multiples of 16.
    """
    return math.gcd(4, *sizes)
