"""Weights that are no logarithms: which of them are read, and the error of one below 0."""

from typing import NamedTuple

import torch
from torch import Tensor

# entries that are compared with 0 at a time, since a memory-mapped tensor may exceed the memory
_COMPARED = 2**22


class Weights(NamedTuple):
    """Weights that are no logarithms: an argument's name and values, and which of its first entries are read or None.

    `read` has the first axes of `values`, or all, each of its size or 1.
    """

    name: str
    values: Tensor
    read: Tensor | None = None

    def first_negative(self) -> list[int] | None:
        """The place of an entry below 0 that is read, the first along all axes but the longest."""
        values, read = self.values.detach(), self.read
        if values.numel() == 0:
            return None
        if read is not None:
            read = read.view(*read.shape, *(1,) * (values.dim() - read.dim())).expand(values.shape)
        for axis, stride in enumerate(values.stride()):
            if stride == 0:  # the same entries again
                values, read = values.narrow(axis, 0, 1), read if read is None else read.any(axis, keepdim=True)
        longest = max(range(values.dim()), key=lambda axis: values.shape[axis])
        size = max(1, _COMPARED * values.shape[longest] // values.numel())
        for start in range(0, values.shape[longest], size):
            length = min(size, values.shape[longest] - start)
            below = values.narrow(longest, start, length) < 0
            if read is not None:
                below &= read.narrow(longest, start, length)
            if below.any():
                place = torch.unravel_index(below.flatten().to(torch.uint8).argmax(), below.shape)
                return [int(index) + start * (axis == longest) for axis, index in enumerate(place)]
        return None


def has_negative(values: Tensor) -> bool:
    """Whether an entry is below 0; its values are read."""
    return values.numel() > 0 and values.detach().amin().item() < 0


def check_weights(*weights: Weights) -> None:
    """Raise ValueError for the first weight below 0 of those that are read."""
    for weight in weights:
        place = weight.first_negative()
        if place is not None:
            expected = f"expected non-negative weights, got {weight.values[tuple(place)].item():g} at {place}"
            raise ValueError(f"{weight.name}: {expected}; pass log_params=True for logarithms")
