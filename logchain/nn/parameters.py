"""Conversions of parameters to the dtype of arithmetic, and of values and masks to shapes."""

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


def fill(values: Tensor, known: Tensor) -> Tensor:
    """Values with 0 where the mask `known`, of their first axes, is False."""
    return values.masked_fill(~over(known, values.shape), 0)


def over(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Values expanded to a shape with further axes on the right."""
    return values[(..., *(None,) * (len(shape) - values.dim()))].expand(shape)
