"""Marked sequences walked again from one end to the other, in logarithms, see `chain_exact`; others are left alone.

Nothing waits for the device: without a mark, a walk is one load in each program.
"""

import torch
from torch import Tensor

from ..chain import Chain
from . import chain_exact
from .forward import operands_of


def forward(chain: Chain, marked: Tensor, log_norm: Tensor, messages: Tensor | None) -> None:
    """Write the log-partitions (g, m) of marked sequences, and their messages (v, g, m, c) as logarithms, if wanted."""
    start, top = chain.relative_log_p0()
    found = torch.empty_like(log_norm)
    slots = chain.room(min(chain.v, 2)) if messages is None else messages
    chain_exact.forward(operands_of(chain, start), slots, found, marked)
    torch.where(marked, found + top[..., 0], log_norm, out=log_norm)


def backward_messages(chain: Chain, marked: Tensor, log_norm: Tensor) -> Tensor:
    """x_i + b_i of marked sequences (v, g, m, c), each up to a constant, -inf after a sequence's end; not for i = 0.

    Forward messages would only divide these by a number. Without any, that is with zeros, one tensor is enough: step i
    reads the message of i, and writes i + 1.
    """
    operands = operands_of(chain)
    messages = chain.room(chain.v).zero_()
    exponent = torch.empty(messages.shape[:3], dtype=torch.int32, device=messages.device)
    chain_exact.backward(
        operands, messages, marked, marked, log_norm.contiguous(), torch.zeros_like(log_norm),
        grad_x=None, grad_start=torch.empty_like(messages[0]), r=messages, exponent=exponent, final=None,
    )  # fmt: skip
    return messages
