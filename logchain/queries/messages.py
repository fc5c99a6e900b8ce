"""The forward and backward messages of a batch of chains, and filtered posteriors."""

from torch import Tensor

from ..autograd.messages import messages as dense_messages
from ..autograd.scan import both_messages, filtered_messages
from ..operands import differentiated
from .operands import Operands


def messages(operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Forward and backward messages [*B, v, c], -inf behind a sequence's end, and the log-partition [*B].

    All are computed in float64, and of the dtype of the arithmetic.
    """
    if operands.dense is not None:
        return dense_messages(*operands.dense)
    found = None if differentiated(*operands.tensors) else operands.in_c("messages")
    if found is not None:
        first, second, value = (each.to(operands.dtype) for each in found)
        return first, second, value
    both = both_messages(operands.steps(), operands.lengths)
    first, second, value = (each.to(operands.dtype) for each in both)
    return first, second, value


def filtered(operands: Operands) -> tuple[Tensor, Tensor]:
    """Forward messages [*B, v, c] with sum 1, or 0 if impossible or after an end, and the log-partition [*B]."""
    found = None if differentiated(*operands.tensors) else operands.in_c("filtered")
    if found is None:
        found = filtered_messages(operands.steps(), operands.lengths)
    states, log_norm = (each.to(operands.dtype) for each in found)
    return states, log_norm
