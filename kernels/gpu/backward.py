"""The gradients of chains' log-partition, as `kernels.plain.backward` defines them, on the Triton kernels.

Nothing waits for the device. The kernels begin at the first step of the chain: where a message entered, the gradient of
the first transition matrices and the backward message of the step before are computed by `matmul` afterwards.
"""

import torch
from torch import Tensor

from ..chain import Chain
from ..message import Kept
from . import backward_chain, matmul, transitions
from .forward import first_logs


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
    x, bulk = chain.x.reshape(v, g, m, c), chain.bulk.reshape(len(chain.bulk), g, c, c)
    all_grads = None if grad_bulk is None else grad_bulk.view(len(grad_bulk), g, c, c)
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
    flat_x = None if grad_x is None else grad_x.reshape(x.shape)
    grad_start, r = backward_chain.backward(
        x, inner, None if ends is None else ends.clamp(1, v), messages, kept.log_norm.contiguous(), weight,
        log_params=chain.log_params, grad_x=flat_x, want_r=all_grads is not None,
        final=None if following is None else following.to(chain.dtype).contiguous(),
    )  # fmt: skip
    if inner_grads is not None and r is not None and not (kept.entered and v == 1):
        transitions_gradient(chain, messages, r, weight, inner, inner_grads)
    copy_if_apart(flat_x, grad_x)
    if kept.entered:
        return _preceding(chain, kept, weight, following, grad_start, all_grads)
    return p0_gradient(chain, grad_start)


def _preceding(
    chain: Chain, kept: Kept, weight: Tensor, following: Tensor | None, grad_start: Tensor, grad_bulk: Tensor | None
) -> Tensor:
    """The backward message of the step that entered; the gradient of the matrices that lead out of it is added.

    `grad_start` (g, m, c) is the first step's posterior times the weight; `grad_bulk` is (s, g, c, c) or None.
    """
    entering, logs = kept.messages[0].double(), first_logs(chain)
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


def transitions_gradient(chain: Chain, messages: Tensor, r: Tensor, weight: Tensor, bulk: Tensor, out: Tensor) -> None:
    """Write to `out` the gradient of matrices, or of their logarithms if the chain asks for that.

    Arguments as those of `transitions.gradient`.
    """
    by_log = chain.by_log and not chain.log_params
    bulk = bulk.to(chain.dtype).log() if by_log else bulk
    transitions.gradient(messages, r, weight, bulk, out, log_params=chain.log_params or by_log)


def copy_if_apart(flat_x: Tensor | None, grad_x: Tensor | None) -> None:
    """Copy the gradient of x from (v, g, m, c) to (v, *lead, c), unless the former is a view of the latter."""
    if flat_x is not None and grad_x is not None and flat_x.data_ptr() != grad_x.data_ptr():
        grad_x.copy_(flat_x.view(grad_x.shape))


def p0_gradient(chain: Chain, grad_start: Tensor) -> Tensor:
    """The gradient of p0 (*lead, c), or of its logarithms if the chain asks for that, from the latter's (g, m, c)."""
    grad_p0 = grad_start.double().view(*chain.lead, chain.c)
    if chain.log_params or chain.by_log:
        return grad_p0
    return (grad_p0 / chain.p0.double()).masked_fill_(chain.p0 == 0, 0.0)
