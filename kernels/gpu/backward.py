"""The gradients of chains' log-partition, as `kernels.plain.backward` defines them, by the Triton kernels.

Nothing waits for the device. A message that entered has a posterior too, from which its backward message follows.
"""

import torch
from torch import Tensor

from ..chain import Chain
from ..message import Residuals
from . import counts, exact
from .chains import Chains, Scan


def backward(
    chain: Chain,
    residuals: Residuals,
    weight: Tensor,
    following: Tensor | None,
    grad_x: Tensor | None,
    grad_bulk: Tensor | None,
) -> Tensor:
    """The gradient of p0, or the backward message of the step that entered; see `kernels.plain.backward`."""
    g, m, c, entered = chain.g, chain.m, chain.c, int(residuals.entered)
    matrices = None if grad_bulk is None else grad_bulk.reshape(len(grad_bulk), g, c, c)
    entering = residuals.logs(0) if entered else None
    if entered or following is not None:  # a sequence may be impossible because of another part of the chain
        weight = weight.masked_fill(residuals.log_norm == -torch.inf, 0.0)
    if chain.ends is not None:
        outside = ((chain.ends < 1) | (chain.ends > chain.v))[..., 0]
        weight = weight.masked_fill(outside & (weight != 0), 0.0 if entered else torch.nan)
    v = chain.v + entered
    in_place = grad_x is not None and grad_x.dtype == chain.dtype and not entered
    posterior = grad_x.reshape(v, g, m, c) if grad_x is not None and in_place else chain.new(v, g, m, c)
    if posterior.numel():
        chains, messages = Chains.of(chain, entering), residuals.messages[:v]
        middle = v // 2 if residuals.halved else v - 1
        scan = Scan(chains, residuals.recomputed.view(torch.int8).clone(), residuals.bound)
        weight, log_norm = weight.contiguous(), residuals.log_norm.contiguous()
        final = None if following is None else following.double().contiguous()
        others = scan.backward(messages, weight, final, posterior, halved=residuals.halved)
        if matrices is not None:
            counts.multiply(scan, messages, others, middle, matrices)
        size = exact.backward(chains, scan.flags, log_norm, weight, final, posterior, others)
        if matrices is not None:
            counts.write(scan, messages, others, posterior, size, middle, matrices, by_log=chain.by_log)
    for flat, grad in ((posterior[entered:], grad_x), (matrices, grad_bulk)):
        if flat is not None and grad is not None and flat.data_ptr() != grad.data_ptr():
            grad.copy_(flat.view(grad.shape))
    if entering is not None:
        # the posterior is that message times `entering`; a sequence without a step here is followed by none
        message = (posterior[0].double() / weight[..., None]).log() - entering
        message = message.masked_fill((posterior[0] == 0) | (entering == -torch.inf), -torch.inf)
        return message.masked_fill(weight[..., None] == 0, 0.0)
    grad_p0 = posterior[0].double().view(*chain.lead, c)
    if chain.log_params or chain.by_log:
        return grad_p0
    return (grad_p0 / chain.p0.double()).masked_fill_(chain.p0 == 0, 0.0)
