"""`kernels.plain.backward` on the Triton kernels. Nothing waits for the device.

The kernels know no entering message: the transitions out of it are counted behind them.
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
    """See `kernels.plain.backward`."""
    v, g, m, c = chain.v, chain.g, chain.m, chain.c
    x, bulk = chain.x.reshape(v, g, m, c), chain.bulk.reshape(len(chain.bulk), g, c, c)
    into = None if grad_bulk is None else grad_bulk.view(len(grad_bulk), g, c, c)
    behind, into_behind, messages = bulk, into, kept.messages[:v]
    if kept.entered:
        messages = kept.messages[1 : v + 1]
        if len(bulk) > 1:
            behind, into_behind = bulk[1:], None if into is None else into[1:]
    if kept.entered or following is not None:  # messages of a stretch do not say that a sequence is impossible
        weight = weight.masked_fill(kept.log_norm == -torch.inf, 0.0)
    ends = None if chain.ends is None else chain.ends.reshape(g, m)
    if kept.entered and ends is not None:
        weight = weight.masked_fill(ends < 1, 0.0)
    flat_x = None if grad_x is None else grad_x.reshape(x.shape)
    grad_start, r = backward_chain.backward(
        x, behind, None if ends is None else ends.clamp(1, v), messages, kept.log_norm.contiguous(), weight,
        log_params=chain.log_params, grad_x=flat_x, want_r=into is not None,
        final=None if following is None else following.to(chain.dtype).contiguous(),
    )  # fmt: skip
    if into_behind is not None and r is not None and not (kept.entered and v == 1):
        count_transitions(chain, messages, r, weight, behind, into_behind)
    if kept.entered:
        copy_if_apart(flat_x, grad_x)
        return _preceding(chain, kept, weight, following, grad_start, into)
    return written(chain, grad_start, flat_x, grad_x)


def _preceding(
    chain: Chain, kept: Kept, weight: Tensor, following: Tensor | None, grad_start: Tensor, into: Tensor | None
) -> Tensor:
    """The backward message of the step that entered; its transitions are added to their gradient."""
    entering, logs = kept.messages[0].double(), first_logs(chain)
    if into is not None:
        counts = matmul.backward(grad_start.double(), entering, logs, False, True)[1]
        assert counts is not None
        if not (chain.log_params or chain.by_log):
            first = chain.bulk[0].reshape(counts.shape).double()
            counts = (counts / first).masked_fill_((counts == 0) | (first == 0), 0.0)
        if len(into) > 1 or chain.v == 1:
            into[0] = counts
        else:
            into[0] += counts
    nothing = weight[..., None] == 0
    share = (grad_start.double() / weight[..., None]).masked_fill_((grad_start == 0) | nothing, 0.0).log_()
    arrived = matmul.forward(entering, logs)[0]
    behind = torch.where(share == -torch.inf, share, share - arrived)
    last = torch.zeros_like(entering) if following is None else following
    return torch.where(nothing, last, matmul.forward(behind, logs.mT)[0])


def count_transitions(chain: Chain, messages: Tensor, r: Tensor, weight: Tensor, bulk: Tensor, out: Tensor) -> None:
    """Write the gradient with respect to matrices, or to their logarithms where the chain says so."""
    by_log = chain.by_log and not chain.log_params
    bulk = bulk.to(chain.dtype).log() if by_log else bulk
    transitions.gradient(messages, r, weight, bulk, out, log_params=chain.log_params or by_log)


def copy_if_apart(flat_x: Tensor | None, grad_x: Tensor | None) -> None:
    """Put the gradient of x where it belongs, if its axes do not fold into sets and members."""
    if grad_x is not None and flat_x is not None and flat_x.data_ptr() != grad_x.data_ptr():
        grad_x.copy_(flat_x.view(grad_x.shape))


def written(chain: Chain, grad_start: Tensor, flat_x: Tensor | None, grad_x: Tensor | None) -> Tensor:
    """The gradient with respect to p0, from that of its logarithms (g, m, c); that of x is where it belongs."""
    copy_if_apart(flat_x, grad_x)
    grad_p0 = grad_start.double().view(*chain.lead, chain.c)
    if chain.log_params or chain.by_log:
        return grad_p0
    return (grad_p0 / chain.p0.double()).masked_fill_(chain.p0 == 0, 0.0)
