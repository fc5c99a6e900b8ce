"""The log-partition of a batch of chains, as `kernels.plain.forward` defines it, on the Triton kernels.

All forward messages are logarithms. No length and no result is read on the host, so nothing waits for the device. The
kernels begin with log p0: where a message enters, its product with the first transition matrices takes that place.
"""

import math

import torch
from torch import Tensor

from ..chain import Chain
from ..message import Kept, Message, leaving_message, normalised
from . import forward_chain
from .matmul import forward as log_matmul


def forward(
    chain: Chain, entering: Message | None = None, *, keep: Tensor | None = None, leave: bool = False
) -> tuple[Kept, Message | None]:
    """The log-partitions and kept messages, and the last forward message; arguments as in `kernels.plain.forward`.

    A sequence whose length is outside 1..v gets NaN, for lengths are not checked before. `chain` holds v steps even if
    all sequences are shorter. `redone` of the result counts sums that underflowed and were recomputed.
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
        rescued=rescued, out=None if messages is None else messages[: chain.v],
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
    after = Message(normalised(last.double())[0], scale if entering is None else scale + entering.scale)
    return kept, leaving_message(chain.ends, after, entering)


def operands(chain: Chain, entering: Message | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The arguments of `forward_chain.forward`: x (v, g, m, c), bulk, the first message before x_0, and ends (g, m).

    `bulk` (v - 1 or 1, g, c, c) leads into steps 1 to v - 1; the message (g, m, c) is of float64 logarithms.
    """
    v, g, m, c = chain.v, chain.g, chain.m, chain.c
    bulk = chain.bulk.reshape(len(chain.bulk), g, c, c)
    if entering is None:
        start = chain.log_p0()
    else:
        start = log_matmul(entering.values.double().expand(g, m, c), first_logs(chain))[0]
        bulk = bulk if len(bulk) == 1 else bulk[1:]
    ends = None if chain.ends is None else chain.ends.reshape(g, m).clamp(1, v)
    return chain.x.reshape(v, g, m, c), bulk, start, ends


def first_logs(chain: Chain) -> Tensor:
    """The logarithms of the first transition matrices (g, c, c) in float64; -inf for sets with no step to go to."""
    first = chain.matrix(0).double()
    if chain.ends is not None:  # matrices that no sequence of a set uses may hold NaN
        first = first.masked_fill((chain.ends < 1).all(1)[:, None], chain.zero)
    return first if chain.log_params else first.log()
