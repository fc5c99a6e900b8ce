"""The log-partition of few long chains, each walked from both of its ends at once: the walks meet in the middle.

    a_i = a_{i-1} P_i D_i              from the first step to the last of the left half, h - 1
    c_i = D_i P_{i+1} c_{i+1}          from the last step to the first of the right half, h
    Z   = a_{h-1} P_h c_h

Each half is a chain of its own, whose walk needs nothing of the other's: the work is that of one walk, on twice as many
threads, whether the chain forgets or not. Backward, P_h c_h is the message that follows the left half, and a_{h-1} the
one that enters the right: each walk goes back over the steps that it has come from. A chain of which a message holds
infinity or NaN is walked as one.

The backward pass needs `messages`, those of the left half and then of the right, from its end; `middle` (3, g, m, c),
float64, the logarithms of a_{h-1}, P_h c_h and c_h; and which sequences were `redone` exactly in the left half, in the
step between them and in the right half, and fourth whether the chain was walked as one, of which the first then tells.
"""

from dataclasses import replace

import torch
from torch import Tensor

from .. import kernels
from ..kernels.chain import Chain
from ..kernels.message import Kept, Message
from ..kernels.numbers import exact_sum
from ..rescues import report_chains
from .turned import Tail


def kept_shapes(v: int, g: int, m: int, c: int, segments: int, keep: bool) -> tuple[tuple[int, ...], ...]:
    """The shapes of `messages`, `middle` and `redone`; the first two are empty unless they are to be kept."""
    return (v, g, m, c) if keep else (0,), (3, g, m, c) if keep else (0,), (4, g * m)


def forward(chain: Chain, segments: int, *, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The log-partition (g, m) in float64, messages, middle, redone; `segments` has no meaning here."""
    left, right = _halves(chain)
    shapes = kept_shapes(chain.v, chain.g, chain.m, chain.c, segments, keep)
    messages = kernels.messages_of(chain, chain.v) if keep else chain.new(0)
    ahead, behind = (messages[: left.v], messages[left.v :]) if keep else (None, None)
    (of_left, entering), (of_right, last) = kernels.at_once(
        kernels.chain_walks(chain.x).forward(left, keep=ahead, leave=True), right.forward(behind)
    )
    before, between = right.before(last)
    both = torch.logsumexp(entering.values + before.values, -1)
    total, lost = exact_sum(torch.stack([entering.scale[0], before.scale[0], both]))
    log_norm = total + (lost + entering.scale[1] + before.scale[1])
    none = torch.zeros_like(between)
    redone = torch.stack([of_left.redone, between, of_right.redone, none])
    if not (torch.stack([entering.scale[0], last.scale[0], log_norm]) < torch.inf).all():
        whole = kernels.chain_kernels(chain.x).forward(chain, keep=messages if keep else None)[0]
        log_norm, redone = whole.log_norm, torch.stack([whole.redone, none, none, ~none])
    report_chains(redone[:3].any(0))
    middle = torch.stack([entering.values, before.values, last.values]) if keep else entering.values.new_empty(0)
    return log_norm, messages, middle, redone.view(shapes[2])


def backward(
    chain: Chain,
    segments: int,
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    weight: Tensor,
    grad_x: Tensor | None,
    grad_bulk: Tensor | None,
) -> Tensor:
    """The gradient of p0 (*lead, c), as in `kernels.plain.backward`; `saved` is what `forward` returned."""
    log_norm, messages, middle, redone = saved
    before, _, after, as_one = redone.view(4, chain.g, chain.m)
    start: Tensor
    if as_one.any():
        walk = kernels.chain_kernels(chain.x)
        start = walk.backward(chain, Kept(log_norm, messages, before), weight, None, grad_x, grad_bulk)
        return start
    left, right = _halves(chain)
    of_left, of_right = (Kept(log_norm, *one) for one in ((messages[: left.v], before), (messages[left.v :], after)))
    ahead, behind = (None, None) if grad_x is None else (grad_x[: left.v], grad_x[left.v :])
    into_left, into_right = _counts(chain, left.v, grad_bulk)
    entering = Message(middle[0], torch.zeros_like(middle[0, ..., 0]).expand(2, -1, -1))
    start, _ = kernels.at_once(
        kernels.chain_walks(chain.x).backward(left, of_left, weight, middle[1], ahead, into_left),
        right.backward(of_right, middle[2], weight, entering, behind, into_right),
    )
    if grad_bulk is not None and into_right is not None and len(chain.bulk) == 1:
        grad_bulk.add_(into_right)
    return start


def _halves(chain: Chain) -> tuple[Chain, Tail]:
    """The left half, and the right one behind it."""
    half, each = chain.v // 2, len(chain.bulk) > 1
    left = replace(chain, x=chain.x[:half], bulk=chain.bulk[: half - 1] if each else chain.bulk)
    return left, Tail(replace(chain, x=chain.x[half:], bulk=chain.bulk[half - 1 :] if each else chain.bulk))


def _counts(chain: Chain, half: int, grad_bulk: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Memory for the gradients of the matrices of the halves; where these share one, the left's is `grad_bulk`."""
    if grad_bulk is None:
        return None, None
    if len(chain.bulk) > 1:
        return grad_bulk[: half - 1], grad_bulk[half - 1 :]
    return grad_bulk, torch.empty_like(grad_bulk)
