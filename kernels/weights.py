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
        values = self.values.detach()
        if values.numel() == 0:
            return None
        read = torch.ones((), dtype=torch.bool, device=values.device) if self.read is None else self.read
        read = read.view(*read.shape, *(1,) * (values.dim() - read.dim()))
        for axis, stride in enumerate(values.stride()):
            if stride == 0:  # the same entries again
                values, read = values.narrow(axis, 0, 1), read.any(axis, keepdim=True)
        longest = max(range(values.dim()), key=lambda axis: values.shape[axis])
        size = max(1, _COMPARED * values.shape[longest] // values.numel())
        parts = zip(values.split(size, longest), read.expand(values.shape).split(size, longest), strict=True)
        for i, (part, mask) in enumerate(parts):
            below = (part < 0) & mask
            if below.any():
                place: list[int] = below.nonzero()[0].tolist()
                place[longest] += i * size
                return place
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
