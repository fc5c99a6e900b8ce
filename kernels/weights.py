"""Weights that are no logarithms: which of them are read, and the error of one below 0."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# entries that are read at a time, since a memory-mapped tensor may exceed the memory
_READ = 2**20


class Weights(NamedTuple):
    """Weights that are no logarithms: an argument's name and values, and which of its first entries are read or None.

    `read` has the first axes of `values`, or all, each of its size or 1.
    """

    name: str
    values: Tensor
    read: Tensor | None = None

    def parts(self) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Parts of the entries: the axis that is cut, the start of the part, the part, and which entries are read."""
        values = self.values.detach()
        read = torch.ones((), dtype=torch.bool, device=values.device) if self.read is None else self.read
        read = read.to(values.device).view(*read.shape, *(1,) * (values.dim() - read.dim())).expand(values.shape)
        axis = max(range(values.dim()), key=values.shape.__getitem__)
        size = max(1, _READ * values.shape[axis] // max(1, values.numel()))
        for i, (part, mask) in enumerate(zip(values.split(size, axis), read.split(size, axis), strict=True)):
            yield axis, i * size, part, mask

    def first_negative(self) -> list[int] | None:
        """The indices of the first entry below 0 that is read, along all axes but the longest; None without one."""
        for axis, start, part, mask in self.parts():
            below = (part < 0) & mask
            if below.any():
                place: list[int] = below.nonzero()[0].tolist()
                place[axis] += start
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
