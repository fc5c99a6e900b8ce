"""The log-partition of a batch of chains, as `kernels.plain.forward` defines it, by the Triton kernels.

Messages are linear numbers; sequences whose sums may have underflowed are flagged on the device and recomputed in
logarithms. No length, result or flag is read on the host, so nothing waits for the device.
"""

import math

import torch
from torch import Tensor

from ..chain import Chain
from ..message import Message, Residuals, leaving_message, normalized
from ..numbers import exact_sum
from . import exact
from .chains import Chains, Scan, meets
from .scaled import numbers


def forward(
    chain: Chain,
    entering: Message | None = None,
    *,
    keep: Tensor | None = None,
    leave: bool = False,
    halved: bool = False,
) -> tuple[Residuals, Message | None]:
    """The log-partitions and kept messages, and the last forward message; arguments as in `kernels.plain.forward`.

    `halved`: only the gradient reads the kept messages, which may then be backward messages after the middle step.
    A sequence whose length is outside 1..v gets NaN, because lengths are not checked before. `chain` holds v steps even
    if all sequences are shorter.
    """
    chains = Chains.of(chain, None if entering is None else entering.values)
    v, g, m, c = chains.shape
    scale = chains.new(2, g, m, dtype=torch.float64)  # log-partitions and their rounding errors
    messages = chains.new(min(v, 2), g, m, c) if keep is None else keep[:v]
    if keep is None:
        halved = not leave and meets(v, g, m, c, chain.dtype, chain.x.device)
    if scale.numel():
        scan = Scan(chains)
        scan.forward(messages, scale, halved=halved)
        flags, bound = scan.flags, scan.bound
        if leave:  # a later step may depend on a state of the last step whose message was raised
            last = _last_message(chains, messages)
            flags |= ((last > 0) & (last <= numbers(chain.dtype).floor)).any(-1)
        exact.forward(chains, flags, messages, scale)
    else:
        flags, bound = chains.new(g, m, dtype=torch.int8).zero_(), chains.new(0, 0, dtype=torch.int32)
    if chain.ends is not None and entering is None:
        scale[0].masked_fill_(((chain.ends < 1) | (chain.ends > v))[..., 0], math.nan)
    if entering is not None:
        scale = torch.stack(exact_sum(torch.cat([scale, entering.scale.expand(2, g, m)])))
    kept_messages, recomputed = chain.new(0) if keep is None else keep, flags.view(torch.bool)
    residuals = Residuals(scale[0], kept_messages, recomputed, entering is not None, bound, halved and keep is not None)
    if not leave:
        return residuals, None
    logs = residuals._replace(messages=_last_message(chains, messages)[None]).logs(0)
    return residuals, leaving_message(chain.ends, Message(normalized(logs)[0], scale), entering)


def _last_message(chains: Chains, messages: Tensor) -> Tensor:
    """The message (g, m, c) of each sequence's last step, from all messages or from two alternating slots."""
    v, g, m, c = chains.shape
    if chains.ends is None:
        return messages[(v - 1) % len(messages)]
    at = (chains.ends - 1) % len(messages)
    return messages.gather(0, at[None, ..., None].expand(1, g, m, c))[0]
