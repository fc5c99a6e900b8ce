"""The log-partition of a batch of chains, as `kernels.plain.forward` defines it, by the Triton kernels.

Messages are linear numbers; sequences whose sums may have underflowed are flagged on the device and recomputed in
logarithms. No length, result or flag is read on the host, so nothing waits for the device. The kernels begin with p0:
where a message enters, its product with the first transition matrices takes that place.
"""

import math

import torch
from torch import Tensor

from ..chain import Chain
from ..message import Kept, Message, leaving_message, normalised
from ..numbers import exact_sum
from ..plain.forward import transitions
from . import exact
from .chains import Chains, Scan, meets
from .matmul import forward as log_matmul
from .scaled import floor_of


def forward(
    chain: Chain,
    entering: Message | None = None,
    *,
    keep: Tensor | None = None,
    leave: bool = False,
    halved: bool = False,
) -> tuple[Kept, Message | None]:
    """The log-partitions and kept messages, and the last forward message; arguments as in `kernels.plain.forward`.

    `halved`: only the gradient reads the kept messages, which may then be backward messages after the middle step.
    A sequence whose length is outside 1..v gets NaN, because lengths are not checked before. `chain` holds v steps even
    if all sequences are shorter. A message that entered is kept as logarithms.
    """
    v, g, m, c = chain.v, chain.g, chain.m, chain.c
    start = top = None
    if entering is not None:
        first, top = transitions(chain, 0, 1)
        start = log_matmul(entering.values.double().expand(g, m, c), first)[0]
    chains = Chains.of(chain, start)
    log_norm = chains.new(g, m, dtype=torch.float64)
    messages = chains.new(min(v, 2), g, m, c) if keep is None else keep[int(entering is not None) :][:v]
    if keep is None:
        halved = not leave and meets(v, g, m, c, chain.dtype, chain.x.device)
    if log_norm.numel():
        scan = Scan(chains)
        scan.forward(messages, log_norm, halved=halved)
        flags, bound = scan.flags, scan.bound
        if leave:  # a later step may depend on a state of the last step whose message was raised
            last = _last_message(chains, messages)
            flags |= ((last > 0) & (last <= floor_of(chain.dtype))).any(-1)
        exact.forward(chains, flags, messages, log_norm)
    else:
        flags, bound = chains.new(g, m, dtype=torch.int8).zero_(), chains.new(0, 0, dtype=torch.int32)
    if entering is not None and keep is not None:
        keep[0] = entering.values
    if chain.ends is not None and entering is None:
        log_norm.masked_fill_(((chain.ends < 1) | (chain.ends > v))[..., 0], math.nan)
    scale = torch.stack([log_norm, torch.zeros_like(log_norm)]) if leave else log_norm[None]
    if entering is not None and top is not None:
        scale = _sum(scale, top[..., 0].expand(g, m), entering.scale.expand(2, g, m))
    redone, entered = flags.view(torch.bool), entering is not None
    if keep is None:
        kept = Kept(scale[0], chain.new(0), redone, entered, bound)
    else:
        kept = Kept(scale[0], keep, redone, entered, bound, halved)
    if not leave:
        return kept, None
    logs = kept._replace(messages=_last_message(chains, messages)[None]).logs(0)
    return kept, leaving_message(chain.ends, Message(normalised(logs)[0], scale), entering)


def _sum(scale: Tensor, taken: Tensor, entering: Tensor) -> Tensor:
    """The sum (2, g, m) of what was subtracted, and its rounding error; only the sum if `scale` is (1, g, m)."""
    total, error = exact_sum(torch.stack([scale[0], taken, entering[0]]))
    return torch.stack([total, error + entering[1]])[: len(scale)]


def _last_message(chains: Chains, messages: Tensor) -> Tensor:
    """The message (g, m, c) of each sequence's last step, from all messages or from two alternating slots."""
    v, g, m, c = chains.x.shape
    if chains.ends is None:
        return messages[(v - 1) % len(messages)]
    at = (chains.ends - 1) % len(messages)
    return messages.gather(0, at[None, ..., None].expand(1, g, m, c))[0]
