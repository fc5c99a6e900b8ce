"""Conversions of parameters to the dtype of arithmetic, and of values to the shape of parameters."""

import torch
from torch import Tensor

from ..arguments import check_is_tensor


def arithmetic(parameter: Tensor) -> Tensor:
    """A parameter in float32 at least."""
    return parameter.float() if parameter.dtype in (torch.float16, torch.bfloat16) else parameter


def broadcast(name: str, value: Tensor, shape: torch.Size) -> Tensor:
    """A value expanded to the shape of parameters, in float64."""
    check_is_tensor(name, value)
    try:
        return value.double().expand(shape)
    except RuntimeError:
        raise ValueError(f"{name}: expected what broadcasts to {list(shape)}, got {list(value.shape)}") from None
