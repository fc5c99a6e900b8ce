"""The forward and backward messages of a batch of chains, and filtered posteriors."""

import torch
from torch import Tensor

from .. import kernels
from ..autograd.operator import operator
from ..autograd.scan import both_messages, filtered_messages
from ..internals import is_transformed
from ..operands import arithmetic_dtype, chain_of, differentiated
from ..transitions.dense import Dense
from .operands import Operands

Messages = tuple[Tensor, Tensor, Tensor]


def messages(operands: Operands) -> Messages:
    """Forward and backward messages [*B, v, c], -inf after a sequence's end, and the log-partition [*B].

    They have the dtype of the arithmetic, and where gradients are needed are those of the scan.
    """
    if differentiated(*operands.tensors) or (torch.is_grad_enabled() and is_transformed()):
        return _by_scan(operands)
    results = _messages(*operands.dense) if operands.is_dense else operands.in_c("messages")
    if results is None:
        return _by_scan(operands)
    forward, backward, log_norm = (each.to(operands.dtype) for each in results)
    return forward, backward, log_norm


def _by_scan(operands: Operands) -> Messages:
    operands = operands.with_checked_lengths()
    results = both_messages(operands.steps(), operands.lengths)
    forward, backward, log_norm = (each.to(operands.dtype).contiguous() for each in results)
    return forward, backward, log_norm


def _of_dense(x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool) -> Messages:
    forward, backward, log_norm = _shapes(x, bulk, p0)
    if x.numel() == 0:
        return forward, backward, log_norm
    if not kernels.in_c(x):
        return _by_scan(Operands(x, Dense(bulk), p0, lengths, log_params))
    layout, chain = chain_of(x, bulk, p0, lengths, log_params)
    first, last = layout.steps_first(forward), layout.steps_first(backward)
    first[chain.v :] = last[chain.v :] = -torch.inf
    log_norm.copy_(layout.batched(kernels.load("cpu.messages").messages(chain, first[: chain.v], last[: chain.v])))
    return forward, backward, log_norm


def _shapes(x: Tensor, bulk: Tensor, p0: Tensor, *_: object) -> Messages:
    messages = x.new_empty(x.shape, dtype=arithmetic_dtype(x, bulk, p0))
    return messages, torch.empty_like(messages), messages.new_empty(x.shape[:-2])


# without derivatives, which are those of the scan
_messages = operator(
    "messages(Tensor x, Tensor bulk, Tensor p0, Tensor? lengths, bool log_params) -> (Tensor, Tensor, Tensor)",
    _of_dense,
    _shapes,
)


def filtered(operands: Operands) -> tuple[Tensor, Tensor]:
    """Forward messages [*B, v, c] with sum 1, or 0 if impossible or after an end, and the log-partition [*B]."""
    results = None if differentiated(*operands.tensors) else operands.in_c("filtered")
    if results is None:
        operands = operands.with_checked_lengths()
        results = filtered_messages(operands.steps(), operands.lengths)
    states, log_norm = (each.to(operands.dtype) for each in results)
    return states, log_norm
