"""The forward and backward messages of a batch of chains, and filtered posteriors."""

from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..internals import autograd_in_operators, is_transformed
from ..kernels.chain import arithmetic_dtype
from ..kernels.structured import MESSAGES
from ..operands import Operands
from ..tensors import differentiated, empty_gradients
from ..transitions.dense import Dense
from .operator import Final, Saving, if_needed, operator
from .scan import Steps, both_messages, filtered_messages


def messages(operands: Operands) -> tuple[Tensor, ...]:
    """Forward and backward messages [*B, v, c], -inf after a sequence's end, and the log-partition [*B].

    They have the dtype of the arithmetic. With gradients the scan computes them, except in torch.compile, which would
    take minutes for the operations of its steps.
    """
    with_gradients = differentiated(*operands.tensors) or (torch.is_grad_enabled() and is_transformed())
    if with_gradients and not (operands.is_dense and torch.compiler.is_compiling()):
        return _by_scan(operands)
    if operands.lengths is None:  # dense chains with lengths are computed in float64 too
        operands = operands.cheapest(MESSAGES)
    if operands.packed:
        with kernels.arithmetic_on(operands.x):
            results: Any = _in_c(operands)
    else:
        results = _messages(*operands.dense) if operands.is_dense else operands.in_c("messages")
    if results is None:
        return _by_scan(operands)
    return tuple(result.to(operands.dtype) for result in results)


def _by_scan(operands: Operands) -> tuple[Tensor, ...]:
    operands = operands.with_checked_lengths()
    return tuple(result.to(operands.dtype).contiguous() for result in both_messages(operands.steps()))


def _of_dense(x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool) -> tuple[Tensor, ...]:
    operands = Operands(x, Dense(bulk), p0, lengths, log_params)
    if x.numel() == 0:
        return _shapes(x, bulk, p0)
    return _in_c(operands) if kernels.in_c(x) else _by_scan(operands)


def _in_c(operands: Operands) -> tuple[Tensor, ...]:
    """The results for dense matrices on a CPU."""
    chain = operands.dense_chain()
    forward, backward = (chain.new(*operands.x.shape) for _ in range(2))
    in_order = (chain.layout.steps_first(messages) for messages in (forward, backward))
    log_norm = chain.layout.batched(kernels.load("cpu.dense").messages(chain, *in_order))
    return forward, backward, log_norm.to(chain.dtype).contiguous()


def _shapes(x: Tensor, bulk: Tensor, p0: Tensor, *_: object) -> tuple[Tensor, ...]:
    messages = x.new_empty(x.shape, dtype=arithmetic_dtype(x, bulk, p0))
    return messages, torch.empty_like(messages), messages.new_empty(x.shape[:-2])


class _Messages(Saving):
    """x, bulk, p0, lengths, log_params -> forward messages, backward messages, log-partition."""

    @staticmethod
    def backward(ctx: Any, *along: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _messages_backward(*along, *ctx.saved_tensors, *ctx.options)
        return (*if_needed(gradients, ctx.needs_input_grad[:3]), None, None)


class _Gradient(Final):
    """A gradient for each output of `_Messages`, x, bulk, p0, lengths, log_params -> gradients of x, bulk and p0."""

    refusal = "forward_backward: expected one derivative inside torch.compile, got a second"


def _backward(*args: Any) -> tuple[Tensor, ...]:
    along, operands, (lengths, log_params) = args[:3], args[3:6], args[6:]
    if operands[0].numel() == 0:
        return tuple(torch.zeros_like(operand) for operand in operands)
    with autograd_in_operators(), torch.enable_grad():
        leaves = x, bulk, p0 = [operand.detach().requires_grad_() for operand in operands]
        outputs = both_messages(Steps(x, Dense(bulk), p0, lengths, log_params))
        # the backward messages of a single variable are constant
        used = [pair for pair in zip(outputs, along, strict=True) if pair[0].requires_grad]
        tangents = [torch.where(output == -torch.inf, 0.0, tangent).double() for output, tangent in used]
        gradients = torch.autograd.grad([output for output, _ in used], leaves, tangents, materialize_grads=True)
    return tuple(gradient.contiguous() for gradient in gradients)


_OPERANDS = "Tensor x, Tensor bulk, Tensor p0, Tensor? lengths, bool log_params"
_messages = operator(f"messages({_OPERANDS}) -> (Tensor, Tensor, Tensor)", _of_dense, _shapes, _Messages)
_messages_backward = operator(
    f"messages_backward(Tensor along_forward, Tensor along_backward, Tensor along_norm, {_OPERANDS})"
    " -> (Tensor, Tensor, Tensor)",
    _backward,
    lambda *args: empty_gradients(args[3:6]),
    _Gradient,
    gradients=True,
)


def filtered(operands: Operands) -> tuple[Tensor, Tensor]:
    """Forward messages [*B, v, c] with sum 1, or 0 if impossible or after an end, and the log-partition [*B]."""
    results = None if differentiated(*operands.tensors) else operands.in_c("filtered")
    if results is None:
        results = filtered_messages(operands.with_checked_lengths().steps())
    states, log_norm = (result.to(operands.dtype) for result in results)
    return states, log_norm
