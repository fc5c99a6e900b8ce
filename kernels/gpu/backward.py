"""The gradients of chains' log-partition, as `kernels.plain.backward` defines them, by the Triton kernels.

Nothing waits for the device. The kernels begin at the first step of the chain: where a message entered, the gradient of
the first transition matrices and the backward message of the step before are computed by `matmul` afterwards.
"""

import torch
from torch import Tensor

from ..chain import Chain
from ..message import Kept, decoded
from ..plain.forward import transitions
from . import exact, matmul
from .chains import Chains, Scan
from .counts import Counts


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
    all_grads = None if grad_bulk is None else grad_bulk.reshape(len(grad_bulk), g, c, c)
    # the gradients of the matrices after the first step
    inner = all_grads if all_grads is None or not kept.entered or len(all_grads) == 1 else all_grads[1:]
    if kept.entered or following is not None:  # a sequence may be impossible because of another part of the chain
        weight = weight.masked_fill(kept.log_norm == -torch.inf, 0.0)
    if chain.ends is not None:
        outside = ((chain.ends < 1) | (chain.ends > v))[..., 0]
        weight = weight.masked_fill(outside & (weight != 0), 0.0 if kept.entered else torch.nan)
    in_place = grad_x is not None and grad_x.dtype == chain.dtype
    posterior = grad_x.reshape(v, g, m, c) if grad_x is not None and in_place else chain.new(v, g, m, c)
    first = _First(chain, kept) if kept.entered else None
    if posterior.numel():
        start = None if first is None else first.arrived
        _write(Chains.of(chain, start), kept, weight, following, posterior, inner, by_log=chain.by_log)
    before = None if first is None else first.backward(posterior[0], weight, following, all_grads)
    for flat, grad in ((posterior, grad_x), (all_grads, grad_bulk)):
        if flat is not None and grad is not None and flat.data_ptr() != grad.data_ptr():
            grad.copy_(flat.view(grad.shape))
    if before is not None:
        return before
    grad_p0 = posterior[0].double().view(*chain.lead, c)
    if chain.log_params or chain.by_log:
        return grad_p0
    return (grad_p0 / chain.p0.double()).masked_fill_(chain.p0 == 0, 0.0)


def _write(
    chains: Chains,
    kept: Kept,
    weight: Tensor,
    following: Tensor | None,
    posterior: Tensor,
    grad_bulk: Tensor | None,
    *,
    by_log: bool,
) -> None:
    """Write posteriors (v, g, m, c) times weights (g, m), and the gradient of the matrices (s, g, c, c)."""
    v = len(posterior)
    messages = kept.messages[int(kept.entered) :][:v]
    # a chain that did not come from the Triton kernels has no bounds
    scan = Scan(chains, kept.redone.view(torch.int8).clone(), kept.bound)
    weight, log_norm = weight.contiguous(), kept.log_norm.contiguous()
    final = None if following is None else following.double().contiguous()
    others = scan.backward(messages, weight, final, posterior, halved=kept.halved)
    counts = None
    if grad_bulk is not None:
        counts = Counts(scan, messages, others, v // 2 if kept.halved else v - 1, grad_bulk)
    recomputed = exact.backward(chains, scan.flags, log_norm, weight, final, posterior, others)
    if counts is not None:
        counts.finish(recomputed, by_log=by_log)


class _First:
    """The first transition of a chain that a message entered."""

    def __init__(self, chain: Chain, kept: Kept) -> None:
        self._chain, self._entering = chain, decoded(kept.messages[0])
        self._logs = transitions(chain, 0, 1)[0]
        self.arrived = matmul.forward(self._entering, self._logs)[0]

    def backward(self, posterior: Tensor, weight: Tensor, following: Tensor | None, grad_bulk: Tensor | None) -> Tensor:
        """The backward message of the step that entered; the gradient of the first matrices (s, g, c, c) is added.

        `posterior` (g, m, c) is that of the first step, times the weight.
        """
        chain, entering = self._chain, self._entering
        if grad_bulk is not None:
            counts = matmul.backward(posterior.double(), entering, self._logs, False, True)[1]
            assert counts is not None
            if not (chain.log_params or chain.by_log):
                first = chain.bulk[0].reshape(counts.shape).double()
                counts = (counts / first).masked_fill_((counts == 0) | (first == 0), 0.0)
            if len(grad_bulk) > 1:
                grad_bulk[0] = counts
            else:
                grad_bulk[0] += counts
        unweighted = weight[..., None] == 0
        share = (posterior.double() / weight[..., None]).masked_fill_((posterior == 0) | unweighted, 0.0).log_()
        # x_0 + b_0 up to a constant, because the posterior is proportional to exp(arrived + x_0 + b_0)
        message = torch.where(share == -torch.inf, share, share - self.arrived)
        last = torch.zeros_like(entering) if following is None else following
        return torch.where(unweighted, last, matmul.forward(message, self._logs.mT)[0])
