"""`kernels.plain.forward` on the Triton kernels. Messages are logarithms, and nothing waits for the device.

The kernels know no entering message: what it becomes in the first step takes the place of log p0.
"""

import math

import torch
from torch import Tensor

from ..chain import Chain
from ..message import Kept, Message, normalised, where_moved
from . import forward_chain
from .matmul import forward as log_matmul


def forward(
    chain: Chain, entering: Message | None = None, *, keep: Tensor | None = None, leave: bool = False
) -> tuple[Kept, Message | None]:
    """See `kernels.plain.forward`. A length that is out of range makes its sequence NaN.

    The chain has all its steps: lengths are not looked at. `redone` of what is kept counts single sums.
    """
    rescued = torch.zeros(1, dtype=torch.int64, device=chain.x.device)
    x, bulk, start, ends = operands(chain, entering)
    messages = keep
    if entering is not None and keep is not None:
        keep[0], messages = entering.values, keep[1:]
    if messages is None and leave:
        messages = chain.new(*x.shape)
    log_norm, _ = forward_chain.forward(
        x, bulk, start, ends, log_params=chain.log_params, keep=messages is not None, dtype=chain.dtype,
        rescued=rescued, room=None if messages is None else messages[: chain.v],
    )  # fmt: skip
    if chain.ends is not None and entering is None:
        log_norm.masked_fill_(((chain.ends < 1) | (chain.ends > chain.v))[..., 0], math.nan)
    kept = Kept(log_norm, chain.new(0) if keep is None else keep, rescued, entering is not None)
    if not leave or messages is None:
        return kept, None
    last = messages[chain.v - 1]
    if ends is not None:
        last = messages.gather(0, (ends - 1)[None, ..., None].expand(1, *last.shape))[0]
    scale = torch.stack([log_norm, torch.zeros_like(log_norm)])
    leaving = Message(normalised(last.double())[0], scale if entering is None else scale + entering.scale)
    if entering is None or chain.ends is None:
        return kept, leaving
    return kept, where_moved(chain.ends[..., 0] > 0, leaving, entering)


def operands(chain: Chain, entering: Message | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """x (v, g, m, c), bulk (s, g, c, c) behind the first step, log p0 (g, m, c) in float64, and ends (g, m)."""
    v, g, m, c = chain.v, chain.g, chain.m, chain.c
    bulk = chain.bulk.reshape(len(chain.bulk), g, c, c)
    if entering is None:
        start = chain.p0.double() if chain.log_params else chain.p0.double().log()
        start = start.expand(*chain.lead, c).reshape(g, m, c)
    else:
        start = log_matmul(entering.values.double().expand(g, m, c), first_logs(chain))[0]
        bulk = bulk if len(bulk) == 1 else bulk[1:]
    ends = None if chain.ends is None else chain.ends.reshape(g, m).clamp(1, v)
    return chain.x.reshape(v, g, m, c), bulk, start, ends


def first_logs(chain: Chain) -> Tensor:
    """The logarithms of the first matrices (g, c, c), in float64; zeros for a set of which no sequence has the step."""
    first = chain.bulk[0].reshape(chain.g, chain.c, chain.c).double()
    if chain.ends is not None:  # behind all ends of a set there may be NaN
        first = first.masked_fill((chain.ends < 1).all(1)[:, None], chain.zero)
    return first if chain.log_params else first.log()
