"""The log-partition of few long chains, each walked from both of its ends at once: the walks meet in the middle.

    a_i = a_{i-1} P_i D_i              from the first step to the last of the left half, h - 1
    c_i = D_i P_{i+1} c_{i+1}          from the last step to the first of the right half, h
    Z   = a_{h-1} P_h c_h

Each half is a chain of its own, whose walk needs nothing of the other's: the work is that of one walk, on twice as many
threads, whether the chain forgets or not. Backward, a_{h-1} P_h is the message that enters the right half, and P_h c_h
the one that follows the left: each walk goes back over the steps that it has come from. The step between the halves is
a stretch of one step in float64, which a_{h-1} enters. A chain of which a message holds infinity or NaN is walked as
one.

The backward pass needs `messages`, those of the left half and then of the right, from its end; `middle` (3, g, m, c),
float64, the messages of the stretch and the logarithms of c_h; and which sequences were `redone` exactly in the left
half, in the stretch and in the right half, and fourth whether the chain was walked as one, of which the first then
tells.
"""

from dataclasses import replace

import torch
from torch import Tensor

from .. import kernels
from ..kernels.chain import Chain
from ..kernels.message import Kept
from ..kernels.numbers import exact_sum
from ..rescues import report_chains
from .turned import Turned


def kept_shapes(v: int, g: int, m: int, c: int, segments: int, keep: bool) -> tuple[tuple[int, ...], ...]:
    """The shapes of `messages`, `middle` and `redone`; the first two are empty unless they are to be kept."""
    return (v, g, m, c) if keep else (0,), (3, g, m, c) if keep else (0,), (4, g * m)


def forward(chain: Chain, segments: int, *, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The log-partition (g, m) in float64, messages, middle, redone; `segments` has no meaning here."""
    left, step, right = _parts(chain)
    shapes = kept_shapes(chain.v, chain.g, chain.m, chain.c, segments, keep)
    messages = kernels.messages_of(chain, chain.v) if keep else chain.new(0)
    middle = chain.x.new_empty(shapes[1], dtype=torch.float64)
    ahead, behind, stretch = (messages[: left.v], messages[left.v :], middle[:2]) if keep else (None, None, None)
    (before, entering), (after, ending) = kernels.at_once(
        kernels.chain_walks(chain.x).forward(left, keep=ahead, leave=True), Turned(right).forward(behind)
    )
    walk = kernels.chain_kernels(chain.x)
    between, arriving = walk.forward(step, entering, keep=stretch, leave=True)
    if keep:
        middle[2] = ending.values
    both = torch.logsumexp(arriving.values + ending.values, -1)
    total, lost = exact_sum(torch.stack([arriving.scale[0], ending.scale[0], both]))
    log_norm = total + (lost + arriving.scale[1] + ending.scale[1])
    none = torch.zeros_like(before.redone)
    redone = torch.stack([before.redone, between.redone, after.redone, none])
    if not (torch.stack([entering.scale[0], ending.scale[0], log_norm]) < torch.inf).all():
        whole = walk.forward(chain, keep=messages if keep else None)[0]
        log_norm, redone = whole.log_norm, torch.stack([whole.redone, none, none, ~none])
    report_chains(redone[:3].any(0))
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
    before, between, after, as_one = redone.view(4, chain.g, chain.m)
    walk = kernels.chain_kernels(chain.x)
    start: Tensor
    if as_one.any():
        start = walk.backward(chain, Kept(log_norm, messages, before), weight, None, grad_x, grad_bulk)
        return start
    left, step, right = _parts(chain)
    kept = Kept(log_norm, middle[:2], between, True)
    into_left, into_step, into_right = _counts(chain, left.v, grad_bulk)
    following = walk.backward(step, kept, weight, middle[2], None, into_step)
    of_left, of_right = (Kept(log_norm, *one) for one in ((messages[: left.v], before), (messages[left.v :], after)))
    ahead, behind = (None, None) if grad_x is None else (grad_x[: left.v], grad_x[left.v :])
    start, _ = kernels.at_once(
        kernels.chain_walks(chain.x).backward(left, of_left, weight, following, ahead, into_left),
        Turned(right).backward(of_right, weight, kept.logs(1), behind, into_right),
    )
    if grad_bulk is not None and into_step is not None and into_right is not None:
        if len(chain.bulk) > 1:
            grad_bulk[left.v - 1] = into_step[0]
        else:
            grad_bulk.copy_(into_step.add_(grad_bulk).add_(into_right))
    return start


def _parts(chain: Chain) -> tuple[Chain, Chain, Chain]:
    """The left half, the step into the right half, which a message enters and whose x is 0, and the right half."""
    half, each = chain.v // 2, len(chain.bulk) > 1
    left = replace(chain, x=chain.x[:half], bulk=chain.bulk[: half - 1] if each else chain.bulk)
    right = replace(chain, x=chain.x[half:], bulk=chain.bulk[half:] if each else chain.bulk)
    zeros = chain.x.new_zeros(chain.c, dtype=torch.float64).expand(1, *chain.lead, chain.c)
    between = chain.bulk[half - 1 : half] if each else chain.bulk
    return left, replace(chain, x=zeros, bulk=between, dtype=torch.float64), right


def _counts(chain: Chain, half: int, grad_bulk: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Memory for the gradients of the matrices of the three parts; where these share one, the left's is `grad_bulk`."""
    if grad_bulk is None:
        return None, None, None
    into_step = torch.empty_like(grad_bulk[:1], dtype=torch.float64)
    if len(chain.bulk) > 1:
        return grad_bulk[: half - 1], into_step, grad_bulk[half:]
    return grad_bulk, into_step, torch.empty_like(grad_bulk)
