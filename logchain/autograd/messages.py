"""Forward and backward messages as an operator of torch: natural logarithms, which can be differentiated once."""

from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..arguments import check_lengths
from ..internals import autograd_in_operators
from ..operands import arithmetic_dtype, chain_of
from ..transitions.dense import Dense
from .operator import (
    Final,
    Saving,
    apply,
    as_one,
    call,
    if_needed,
    of_each,
    operator,
    transform,
    with_batch_first,
)
from .scan import Steps, both_messages


def messages(
    x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward and backward messages [*B, v, c], -inf after a sequence's end, and the log-partition [*B].

    All have the dtype of the arithmetic; on other devices than a CPU, that is done in float64.
    """
    ahead, behind, log_norm = apply(_Messages, _messages, x, bulk, p0, lengths, log_params)
    return ahead, behind, log_norm


class _Messages(Saving):
    """x, bulk, p0, lengths, log_params -> forward messages, backward messages, log-partition."""

    @staticmethod
    def backward(ctx: Any, *along: Tensor) -> tuple[Tensor | None, ...]:
        gradients = call(_Gradient, *along, *ctx.saved_tensors, *ctx.options)
        return (*if_needed(gradients, ctx.needs_input_grad[:3]), None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, int, int]]:
        operands = with_batch_first(info.batch_size, in_dims, *args[:4])
        return call(_Messages, *operands, args[4]), (0, 0, 0)


class _Gradient(Final):
    """A gradient for each output of `_Messages`, x, bulk, p0, lengths, log_params -> gradients of x, bulk and p0."""

    refusal = "logchain: expected at most one derivative of messages, got a second"

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, int, int]]:
        operands = of_each(info.batch_size, "x x grad x bulk p0 lengths", in_dims, args)
        gradients = call(_Gradient, *operands, args[7])
        return as_one(info.batch_size, gradients, in_dims[3:6], args[3:6], [True] * 3), (0, 0, 0)


def _forward(
    x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool
) -> tuple[Tensor, Tensor, Tensor]:
    ahead, behind, norm = _shapes(x, bulk, p0)
    if x.numel() == 0:
        return ahead, behind, norm
    if not kernels.in_c(x):
        if lengths is not None and not kernels.on_gpu(x):
            check_lengths(lengths, x.shape[-2])
        results = both_messages(Steps(x, Dense(bulk), p0, lengths, log_params), lengths)
        first, last, log_norm = (one.to(norm.dtype).contiguous() for one in results)
        return first, last, log_norm
    layout, chain = chain_of(x, bulk, p0, lengths, log_params)
    first, last = layout.steps_first(ahead), layout.steps_first(behind)
    first[chain.v :] = last[chain.v :] = -torch.inf
    log_norm = kernels.load("cpu.messages").messages(chain, first[: chain.v], last[: chain.v])
    norm.copy_(layout.batched(log_norm))
    return ahead, behind, norm


def _shapes(x: Tensor, bulk: Tensor, p0: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    messages = x.new_empty(x.shape, dtype=arithmetic_dtype(x, bulk, p0))
    return messages, torch.empty_like(messages), messages.new_empty(x.shape[:-2])


def _backward(
    along_forward: Tensor,
    along_backward: Tensor,
    along_norm: Tensor,
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    lengths, log_params = options
    operands = x, bulk, p0
    if x.numel() == 0:
        return torch.zeros_like(x), torch.zeros_like(bulk), torch.zeros_like(p0)
    with autograd_in_operators(), torch.enable_grad():
        leaves = x, bulk, p0 = [operand.detach().requires_grad_() for operand in operands]
        outputs = both_messages(Steps(x, Dense(bulk), p0, lengths, log_params), lengths)
        tangents = along_forward, along_backward, along_norm
        # the backward messages of a single variable are constant
        used = [pair for pair in zip(outputs, tangents, strict=True) if pair[0].requires_grad]
        along = [torch.where(output == -torch.inf, 0.0, tangent).double() for output, tangent in used]
        gradients = torch.autograd.grad([output for output, _ in used], leaves, along, materialize_grads=True)
    by_x, by_bulk, by_p0 = (gradient.contiguous() for gradient in gradients)
    return by_x, by_bulk, by_p0


def _gradient_shapes(*args: Any) -> tuple[Tensor, ...]:
    return tuple(operand.new_empty(operand.shape) for operand in args[3:6])


_OPERANDS = "Tensor x, Tensor bulk, Tensor p0, Tensor? lengths, bool log_params"
_messages = operator(f"messages({_OPERANDS}) -> (Tensor, Tensor, Tensor)", _forward, _shapes)
_messages_backward = operator(
    f"messages_backward(Tensor along_forward, Tensor along_backward, Tensor along_norm, {_OPERANDS})"
    " -> (Tensor, Tensor, Tensor)",
    _backward,
    _gradient_shapes,
)
transform("messages", _Messages)
transform("messages_backward", _Gradient)
