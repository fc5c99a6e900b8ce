"""Parameters as numbers to compute with, and numbers to be taken over as parameters."""

import torch
from torch import Tensor

from .checks import check_is_tensor


def arithmetic(parameter: Tensor) -> Tensor:
    """At least float32, which half parameters are computed in."""
    return parameter.float() if parameter.dtype in (torch.float16, torch.bfloat16) else parameter


def broadcast(name: str, value: Tensor, shape: torch.Size) -> Tensor:
    """A tensor to be taken over as parameters of a shape, in float64."""
    check_is_tensor(name, value)
    try:
        return value.double().expand(shape)
    except RuntimeError:
        raise ValueError(f"{name}: expected what broadcasts to {list(shape)}, got {list(value.shape)}") from None
