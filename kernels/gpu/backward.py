"""The gradients of chains' log-partition, as `kernels.plain.backward` defines them, on the Triton kernels.

Nothing waits for the device. The kernels begin at the first step of the chain: where a message entered, the gradient of
the first transition matrices and the backward message of the step before are computed by `matmul` afterwards.
"""

from functools import partial

import torch
from torch import Tensor

from ..chain import Chain
from ..message import Kept
from ..plain.forward import transitions
from . import chain_backward, chain_counts, chain_exact, chain_exact_counts, chain_forward, chain_own, matmul
from .chains import Operands, found_in, room
from .forward import kernel_of


def backward(
    chain: Chain,
    kept: Kept,
    weight: Tensor,
    following: Tensor | None,
    grad_x: Tensor | None,
    grad_bulk: Tensor | None,
) -> Tensor:
    """The gradient of p0, or the backward message of the step that entered; see `kernels.plain.backward`."""
    v, g, m, c = chain.v, chain.g, chain.m, chain.c
    bulk = chain.bulk.reshape(len(chain.bulk), g, c, c)
    all_grads = None if grad_bulk is None else grad_bulk.reshape(len(grad_bulk), g, c, c)
    # the matrices after the first step, and the memory for their gradients
    inner, inner_grads, messages = bulk, all_grads, kept.messages[:v]
    if kept.entered:
        messages = kept.messages[1 : v + 1]
        if len(bulk) > 1:
            inner, inner_grads = bulk[1:], None if all_grads is None else all_grads[1:]
    if kept.entered or following is not None:  # a sequence may be impossible because of another stretch
        weight = weight.masked_fill(kept.log_norm == -torch.inf, 0.0)
    ends = None if chain.ends is None else chain.ends.reshape(g, m)
    if kept.entered and ends is not None:
        weight = weight.masked_fill(ends < 1, 0.0)
    flat_x = None if grad_x is None else grad_x.reshape(v, g, m, c)
    grad_start = chain.new(g, m, c)
    if grad_start.numel():
        operands = Operands(
            chain.x.reshape(v, g, m, c), inner, grad_start, None if ends is None else ends.clamp(1, v).contiguous(),
            chain.log_params, chain.dtype,
        )  # fmt: skip
        final = None if following is None else following.to(chain.dtype).contiguous()
        walk(operands, messages, kept, weight, final, flat_x, grad_start, inner_grads, by_log=chain.by_log)
    before = _preceding(chain, kept, weight, following, grad_start, all_grads) if kept.entered else None
    for flat, grad in ((flat_x, grad_x), (all_grads, grad_bulk)):
        if flat is not None and grad is not None and flat.data_ptr() != grad.data_ptr():
            grad.copy_(flat.view(grad.shape))
    if before is not None:
        return before
    grad_p0 = grad_start.double().view(*chain.lead, c)
    if chain.log_params or chain.by_log:
        return grad_p0
    return (grad_p0 / chain.p0.double()).masked_fill_(chain.p0 == 0, 0.0)


def walk(
    chain: Operands,
    messages: Tensor,
    kept: Kept,
    weight: Tensor,
    final: Tensor | None,
    grad_x: Tensor | None,
    grad_start: Tensor,
    grad_bulk: Tensor | None,
    *,
    by_log: bool,
) -> None:
    """Write the gradients of x (v, g, m, c), of start (g, m, c) and of bulk (s, g, c, c)."""
    log_norm, redone = kept.log_norm.contiguous(), kept.redone.contiguous()
    counted = grad_bulk is not None and len(messages) > 1
    r = torch.empty_like(messages) if counted else None
    exponent = torch.empty(messages.shape[:3], dtype=torch.int32, device=messages.device) if counted else None
    kernel, bound = kernel_of(*chain.shape[2:]), None
    # the gradient of matrices of each sequence's own is written while they are in registers
    at_once = kernel is chain_own and len(chain.bulk) == len(messages) - 1
    if at_once and r is not None:
        doubt = chain_own.backward(
            chain, messages, redone, log_norm, weight, grad_x=grad_x, grad_start=grad_start, r=None, final=final,
            grad_bulk=grad_bulk, by_log=by_log,
        )  # fmt: skip
    else:
        if kernel is chain_forward:
            bound, level = room(chain, 0)[:2] if kept.found is None else found_in(chain, kept.found)
            backward = partial(chain_backward.backward, bound=bound, level=level)
        else:
            backward = kernel.backward
        doubt = backward(
            chain, messages, redone, log_norm, weight, grad_x=grad_x, grad_start=grad_start, r=r, final=final
        )
    marked = redone | doubt
    chain_exact.backward(
        chain, messages, redone, marked, log_norm, weight, grad_x=grad_x, grad_start=grad_start, r=r, exponent=exponent,
        final=final,
    )  # fmt: skip
    if grad_bulk is None or r is None or exponent is None:
        if grad_bulk is not None:  # one step, into which no matrix leads
            grad_bulk.zero_()
        return
    if not at_once:
        chain_counts.gradient(chain, messages, r, weight, marked, grad_bulk, by_log=by_log, bound=bound)
    chain_exact_counts.counts(chain, messages, redone, marked, r, exponent, weight, grad_bulk, by_log=by_log)


def _preceding(
    chain: Chain, kept: Kept, weight: Tensor, following: Tensor | None, grad_start: Tensor, grad_bulk: Tensor | None
) -> Tensor:
    """The backward message of the step that entered; the gradient of the matrices that lead out of it is added.

    `grad_start` (g, m, c) is the first step's posterior times the weight; `grad_bulk` is (s, g, c, c) or None.
    """
    entering, logs = kept.messages[0].double(), transitions(chain, 0, 1)[0]
    if grad_bulk is not None:
        counts = matmul.backward(grad_start.double(), entering, logs, False, True)[1]
        assert counts is not None
        if not (chain.log_params or chain.by_log):
            first = chain.bulk[0].reshape(counts.shape).double()
            counts = (counts / first).masked_fill_((counts == 0) | (first == 0), 0.0)
        if len(grad_bulk) > 1 or chain.v == 1:
            grad_bulk[0] = counts
        else:
            grad_bulk[0] += counts
    unweighted = weight[..., None] == 0
    log_posterior = (grad_start.double() / weight[..., None]).masked_fill_((grad_start == 0) | unweighted, 0.0).log_()
    arrived = matmul.forward(entering, logs)[0]
    # x_0 + b_0 up to a constant, since the posterior is proportional to exp(arrived + x_0 + b_0)
    message = torch.where(log_posterior == -torch.inf, log_posterior, log_posterior - arrived)
    last = torch.zeros_like(entering) if following is None else following
    return torch.where(unweighted, last, matmul.forward(message, logs.mT)[0])
