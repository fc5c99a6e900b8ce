"""The log-partition of few long chains of few states, cut into segments, on the Triton kernels.

One launch computes all; a second one computes sequences in which a sum may have underflowed again, in logarithms, step
by step. Nothing waits for the device.
"""

import math

from torch import Tensor

from ..chain import Chain
from . import chain_exact, chain_long
from .forward import operands_of
from .segment_product import fits

__all__ = ["fits", "log_norm"]


def log_norm(chain: Chain, segments: int) -> tuple[Tensor, Tensor]:
    """The log-partitions (g, m) in float64, and which were computed again, bool; `segments` at most."""
    operands = operands_of(chain)
    v, g, m, c = operands.shape
    found, doubt = chain_long.log_norm(operands, segments)
    chain_exact.forward(operands, chain.new(min(v, 2), g, m, c), found, doubt)
    if chain.ends is not None:
        found.masked_fill_(((chain.ends < 1) | (chain.ends > v))[..., 0], math.nan)
    return found, doubt
