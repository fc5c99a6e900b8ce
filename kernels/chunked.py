"""The log-partition of few long chains: products of segments side by side, then a vector through the products.

    w_s = w_{s-1} M_s        M_s = P_b D_b ... P_e D_e        b, e: the first and the last step of segment s

The first `rest + 1` variables are a head, so that what follows is `count` segments of `length` variables: views. Where
the backward pass is wanted, what enters each segment, w_{s-1} P_b, and the weights of the states it ends in,

    f_{s-1} = M_s f_s        f_{count-1} = 1

make it a chain of its own; all of them are one batch for the kernels of a sequential chain, forward and backward, and
so is the head. The w and f are float64. Where something that may matter underflows, be it in a product or between them,
the whole batch is left to the sequential schedule.

What a backward pass needs lies in `messages` and `scales`, as `kept_segments` has it. `redone` (2, g, m): which
sequences were redone in log space, and whether the schedule was sequential.
"""

from types import ModuleType

import torch
from torch import Tensor

from .between_segments import Between
from .chain import Chain
from .cut import Cut, count_of
from .kept_segments import MORE, Kept, as_kept, as_sequential, shapes
from .segments import products


def kept_shapes(v: int, g: int, m: int, c: int, segments: int, keep: bool) -> tuple[tuple[int, ...], ...]:
    """Those of `messages`, `scales` and `redone`, of which the first two are empty unless they are kept."""
    return (*(shapes(*count_of(v, segments), g, m, c) if keep else ((0,), (0,))), (2, g, m))


def forward(
    chain: Chain, kernels: ModuleType, *, keep: bool, steps: int, segments: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The log-partition (g, m) in float64; messages; scales; what was redone. `kernels`: those of `chain_kernels`.

    The memory is laid out for `steps`, which may be more than the chain has.
    """
    count, length = count_of(steps, segments)
    found = None
    if count < chain.v:
        found = _forward(Cut(chain, count), kernels, keep, length + MORE)
    if found is not None:
        redone = torch.zeros(2, chain.g, chain.m, dtype=torch.bool, device=found[0].device)
        return *found, redone
    log_norm, messages, scales, single = kernels.forward(
        chain, keep=keep, steps=(length + MORE) * count if keep else chain.v
    )
    redone = torch.stack([single, torch.ones_like(single)])
    if not keep:
        return log_norm, chain.new(0), chain.new(0), redone
    return log_norm, *as_kept(chain, count, length, messages, scales), redone


def backward(
    chain: Chain,
    kernels: ModuleType,
    log_norm: Tensor,
    messages: Tensor,
    scales: Tensor,
    redone: Tensor,
    weight: Tensor,
    grad_x: Tensor | None,
    grad_bulk: Tensor | None,
    *,
    steps: int,
    segments: int,
) -> Tensor:
    """Gradients of `sum(weight * log_norm)` for weights (g, m), as in `kernels.plain.sum_product`."""
    count, length = count_of(steps, segments)
    if redone[1].any():
        kept = as_sequential(chain, count, messages, scales)
        found: Tensor = kernels.backward(chain, log_norm, *kept, redone[0], weight, grad_x, grad_bulk)
        return found
    # what is impossible entered its segments as something arbitrary
    weight = weight.masked_fill(log_norm == -torch.inf, 0.0)
    return _backward(Cut(chain, count), kernels, messages, scales, weight, grad_x, grad_bulk)


def _forward(cut: Cut, kernels: ModuleType, keep: bool, steps: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """The log-partition, messages and scales; None where something is in doubt."""
    chain, head = cut.chain, cut.head()
    ahead = kernels.forward(head, keep=True, steps=head.v)
    if ahead[3].any():
        return None
    found = products(cut.segments(), cut.matrices(chain.bulk)[0])
    if found is None:
        return None
    between = Between(cut, found, *ahead[:3])
    if between.doubtful():
        return None
    log_norm = between.log_norm()
    if not keep:
        return log_norm, chain.new(0), chain.new(0)
    entering, final = between.entering(), between.final()
    if entering is None or final is None:
        return None
    del found, between
    _, messages, scales, redone = kernels.forward(cut.segments(entering, final[1:]), keep=True, steps=steps)
    if redone.any():
        return None
    messages[cut.length :] = 0.0
    scales[cut.length : -1] = 0.0
    kept = Kept.of(cut, messages, scales)
    kept.final.copy_(final[:-1])
    kept.entering.copy_(entering)
    kept.head_messages.copy_(ahead[1])
    kept.head_scales.copy_(ahead[2][:-1])
    total = (ahead[1][-1] * final[0]).sum(-1, keepdim=True)
    kept.head_total.copy_(total if head.ends is None else torch.where(head.ends <= cut.rest, ahead[2][-1], total))
    return log_norm, messages.flatten(1, 2).unsqueeze(2), scales.flatten(1, 2).unsqueeze(2)


def _backward(
    cut: Cut,
    kernels: ModuleType,
    messages: Tensor,
    scales: Tensor,
    weight: Tensor,
    grad_x: Tensor | None,
    grad_bulk: Tensor | None,
) -> Tensor:
    g, m, c, rest = cut.chain.g, cut.chain.m, cut.chain.c, cut.rest
    kept = Kept.of(cut, messages, scales)
    messages, scales = (tensor.view(len(tensor), *cut.shape, -1) for tensor in (messages, scales))
    chain = cut.segments(kept.entering, torch.cat([kept.final[1:], torch.ones_like(kept.final[:1])]))
    weights = cut.by_set(weight.expand(cut.count, g, m))
    redone = torch.zeros(cut.shape, dtype=torch.bool, device=weight.device)
    into = room = None
    if grad_bulk is not None:
        into = cut.matrices(grad_bulk)
        shape = len(into[1]), cut.shape[0], c, c
        room = into[1].view(shape) if cut.homogeneous or g == 1 else chain.new(*shape)
    entered = kernels.backward(
        chain,
        weights.double(),
        messages,
        scales,
        redone,
        weights,
        None if grad_x is None else cut.steps(grad_x),
        room,
    )
    if into is not None and room is not None:
        if not cut.homogeneous and g > 1:
            into[1].copy_(room.view(into[1].shape))
        if not (chain.log_params or chain.by_log):
            entered = entered * chain.p0
        between = _transitions(cut, kept, messages, entered.reshape(*cut.shape, c))
        if cut.homogeneous:
            into[0].add_(between)
        else:
            into[0].copy_(between.view(into[0].shape))
    head_bulk = None
    if grad_bulk is not None and rest > 0:
        head_bulk = torch.empty_like(grad_bulk) if cut.homogeneous else grad_bulk[:rest]
    grad_p0: Tensor = kernels.backward(
        cut.head(kept.final[0]),
        weight.double(),
        kept.head_messages,
        torch.cat([kept.head_scales, kept.head_total[None]]),
        torch.zeros_like(weight, dtype=torch.bool),
        weight,
        None if grad_x is None else grad_x[: rest + 1],
        head_bulk,
    )
    if grad_bulk is not None and head_bulk is not None and cut.homogeneous:
        grad_bulk.add_(head_bulk)
    return grad_p0


def _transitions(cut: Cut, kept: "Kept", messages: Tensor, entered: Tensor) -> Tensor:
    """The gradient of the matrices into the segments (g', c, c), from the posteriors of their first states."""
    last = cut.by_segment(messages[cut.length - 1])
    before = cut.by_set(torch.cat([kept.head_messages[-1:], last[:-1]])).double()
    top = before.amax(-1, keepdim=True)
    before /= top.masked_fill_(top == 0, 1.0)
    matrices, scale = cut.between()
    share = (entered / torch.bmm(before, matrices)).masked_fill_(entered == 0, 0.0)
    counts = torch.bmm(before.mT, share)
    # what lies behind an end may be NaN, and has no count
    nothing = counts == 0
    if cut.chain.log_params or cut.chain.by_log:
        return counts.mul_(matrices).masked_fill_(nothing, 0.0)
    return counts.div_(scale).masked_fill_(nothing | (matrices == 0), 0.0)
