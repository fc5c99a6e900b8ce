"""The arguments that every adapter gives, and what adapters share."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class ChainArguments(NamedTuple):
    """The arguments of every function of a chain: `product(**arguments._asdict())`.

    `x` `[*B, v, c]` in nats, `bulk` `[*B or less, v-1 or 1, c, c]` as `[from, to]`, `p0` `[*B or less, c]`, whether
    `bulk` and `p0` are logarithms, and how many variables each sequence has, where they differ.
    """

    x: Tensor
    bulk: Tensor
    p0: Tensor
    log_params: bool = False
    lengths: Tensor | None = None


def check_attributes(name: str, value: object, expected: str, *attributes: str) -> None:
    """Raise TypeError where a foreign object lacks an attribute that its adapter reads."""
    missing = [attribute for attribute in attributes if not hasattr(value, attribute)]
    if missing:
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__} without {', '.join(missing)}")


def float64(array: Any) -> Tensor:
    """A float64 copy of an array; no other object writes to its memory."""
    return torch.from_numpy(np.array(array, np.float64))
