"""The best path of each chain, as `kernels.plain.viterbi` defines it, on the Triton kernels.

Nothing waits for the device.
"""

from torch import Tensor

from ..chain import Chain
from ..plain.viterbi import unknown
from . import backtrack, chain_max
from .forward import operands_of


def paths(chain: Chain, steps: int) -> tuple[Tensor, Tensor]:
    """The states of the best paths, and `unknown` sequences, as by `kernels.plain.viterbi`; the chain has all `steps`.

    The states of a sequence whose length is outside 1..v are -1 too, for lengths are not checked before.
    """
    assert chain.v == steps
    operands = operands_of(chain)
    messages = chain.new(*operands.shape)
    if messages.numel():
        chain_max.forward(operands, messages)
    states = backtrack.paths(messages, operands.bulk, operands.ends, log_params=chain.log_params)
    if chain.ends is not None:
        states.masked_fill_((chain.ends < 1) | (chain.ends > steps), -1)
    return states, unknown(chain)
