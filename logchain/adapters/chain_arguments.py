"""The arguments that every adapter returns, and helpers of adapters."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..transitions import Transition


class ChainArguments(NamedTuple):
    """The arguments of every function of a chain, as in `product(**arguments._asdict())`.

    Attributes:
        x: `[*B, v, c]` in nats.
        bulk: `[*B or less, v-1 or 1, c, c]` as `[from, to]`, or a structure of `logchain.transitions`.
        p0: `[*B or less, c]`.
        log_params: whether `bulk` and `p0` are logarithms.
        lengths: the lengths of the sequences, where they differ.
    """

    x: Tensor
    bulk: Tensor | Transition
    p0: Tensor
    log_params: bool = False
    lengths: Tensor | None = None


def check_attributes(name: str, value: object, expected: str, *attributes: str) -> None:
    """Check that an object of another package has the attributes that its adapter reads."""
    missing = [attribute for attribute in attributes if not hasattr(value, attribute)]
    if missing:
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__} without {', '.join(missing)}")


def float64(array: Any) -> Tensor:
    """A float64 tensor with a copy of an array."""
    return torch.from_numpy(np.array(array, np.float64))
