"""Checks of the values of a chain's operands."""

import torch
from torch import Tensor

from .arguments import Lengths, check_values
from .chain import Chain
from .kernels.weights import Weights, check_weights
from .transitions import Transition


def check(
    x: Tensor,
    bulk: Tensor | Transition,
    p0: Tensor,
    *,
    log_params: bool = False,
    lengths: Lengths | None = None,
    cu_seqlens: Tensor | None = None,
) -> None:
    """Raise ValueError if operands hold NaN, +inf or a negative weight before a sequence's end.

    Other functions check kinds and sizes, and on a CPU for negative weights in `p0`, and in `bulk` if one matrix serves
    all steps. Beyond that, NaN in an operand makes the result of its sequence NaN, and so does a negative sum.

    `x` `[*B, v, c]` in nats, `bulk` `[*B or ones, v-1 or 1, c, c]`, `p0` `[*B or ones, c]` and the options are those of
    `logchain.product`. Values after a sequence's end, and matrices into the first rows of concatenated sequences, are
    not checked.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together, a length is out of range, or a value is NaN, +inf or negative; the message
            names the operand, and says how many values are wrong, or a negative weight and its place.

    Cost: four passes over the operands, a few steps at a time, which wait for a GPU.

    >>> check(torch.zeros(3, 2), torch.tensor([[[0.9, 0.1], [0.2, -0.8]]]), torch.ones(2))
    Traceback (most recent call last):
    ...
    ValueError: bulk: expected non-negative weights, got -0.8 at [0, 1, 1]; pass log_params=True for logarithms
    """
    chain = Chain.of(x, bulk, p0, log_params, lengths, cu_seqlens)
    v, ends, weights = x.shape[-2], chain.operands.lengths, chain.weights()
    inside = None if ends is None else torch.arange(v, device=ends.device) < ends[..., None]
    check_values(Weights("x", x, inside), *weights)
    if not log_params:
        check_weights(*weights)
