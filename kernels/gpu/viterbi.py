"""`kernels.plain.viterbi` on the Triton kernels. Nothing here waits for the device."""

from torch import Tensor

from ..chain import Chain
from ..plain.viterbi import unknown
from . import backtrack, forward_chain
from .forward import operands


def paths(chain: Chain, steps: int) -> tuple[Tensor, Tensor]:
    """See `kernels.plain.viterbi`; the states of a sequence with a length out of range are -1 too.

    The chain has all its `steps`: lengths are not looked at on the host.
    """
    assert chain.v == steps
    x, bulk, start, ends = operands(chain)
    _, messages = forward_chain.forward(
        x, bulk, start, ends, log_params=chain.log_params, keep=True, dtype=chain.dtype, semiring="max"
    )
    assert messages is not None
    states = backtrack.paths(messages, bulk, ends, log_params=chain.log_params)
    if chain.ends is not None:
        states.masked_fill_((chain.ends < 1) | (chain.ends > steps), -1)
    return states, unknown(chain)
