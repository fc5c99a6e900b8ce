"""The log-partition of a batch of chains, as `kernels.plain.forward` defines it, on the Triton kernels.

Messages are linear numbers; sequences in which one may have underflowed are computed again, as logarithms. No length,
no result and no doubt is read on the host, so nothing waits for the device. The kernels begin with log p0: where a
message enters, its product with the first transition matrices takes that place.
"""

import math
from types import ModuleType

import torch
from torch import Tensor

from ..chain import Chain
from ..message import Kept, Message, leaving_message, normalised
from ..numbers import exact_sum
from ..plain.forward import transitions
from . import chain_exact, chain_forward, chain_own, chain_wide, launch
from .chains import Operands
from .matmul import forward as log_matmul
from .scaled import floor

# most states of which a program holds columns of the whole matrix: where rows are loaded four entries at a time, or not
_WIDE, _ODD = 256, 128


def forward(
    chain: Chain, entering: Message | None = None, *, keep: Tensor | None = None, leave: bool = False
) -> tuple[Kept, Message | None]:
    """The log-partitions and kept messages, and the last forward message; arguments as in `kernels.plain.forward`.

    A sequence whose length is outside 1..v gets NaN, for lengths are not checked before. `chain` holds v steps even if
    all sequences are shorter. A message that entered is kept as logarithms.
    """
    v, g, m, c = chain.v, chain.g, chain.m, chain.c
    start = top = None
    if entering is not None:
        first, top = transitions(chain, 0, 1)
        start = log_matmul(entering.values.double().expand(g, m, c), first)[0]
    elif chain.dtype == torch.float64 and not chain.log_params:  # whose logarithms would be rounded as their size is
        start, top = chain.relative_log_p0()
    operands = operands_of(chain, start, entered=entering is not None)
    log_norm = torch.empty(g, m, dtype=torch.float64, device=chain.x.device)
    messages = chain.new(min(v, 2), g, m, c) if keep is None else keep[int(entering is not None) :][:v]
    leaving, error, found = None, torch.zeros_like(log_norm) if leave else None, None
    if log_norm.numel():
        kernel, options = kernel_of(m, c), {}
        size = found_size(*operands.shape, len(operands.bulk)) if keep is not None else 0
        if size:
            found = options["found"] = torch.empty(size, dtype=torch.int32, device=chain.x.device)
        if leave and keep is None and kernel is not chain_own:
            leaving = chain.new(g, m, c)
            doubt = kernel.forward(operands, messages, log_norm, leaving, error)
        else:
            doubt = kernel.forward(operands, messages, log_norm, error=error, **options)
            if leave:  # what follows may ask for a state of the last step whose message was raised
                last, least = last_message(operands, messages), floor(operands.double)
                doubt |= ((last > 0) & (last <= least)).any(-1)
        chain_exact.forward(operands, messages, log_norm, doubt, error)
    else:
        doubt = torch.zeros(g, m, dtype=torch.bool, device=chain.x.device)
    if entering is not None and keep is not None:
        keep[0] = entering.values
    if chain.ends is not None and entering is None:
        log_norm.masked_fill_(((chain.ends < 1) | (chain.ends > chain.v))[..., 0], math.nan)
    # what was taken out of the first message, which the kernels do not know of
    taken = [] if top is None else [top[..., 0].expand(g, m)]
    if entering is not None:
        taken.append(entering.scale[0].expand(g, m))
    whole = sum(taken, log_norm)
    kept = Kept(whole, chain.new(0) if keep is None else keep, doubt, entering is not None, found)
    if error is None:
        return kept, None
    last = last_message(operands, messages)
    if leaving is None:
        logs = kept._replace(messages=last[None]).logs(0)
    else:
        logs = torch.where(doubt[..., None], last, leaving).double()
    if taken:
        log_norm, lost = exact_sum(torch.stack([log_norm, *taken]))
        error += lost
    if entering is not None:
        error += entering.scale[1]
    after = Message(normalised(logs)[0], torch.stack([log_norm, error]))
    return kept, leaving_message(chain.ends, after, entering)


def last_message(chain: Operands, messages: Tensor) -> Tensor:
    """The message (g, m, c) of each sequence's last step, from all messages or two slots in turn."""
    v, g, m, c = chain.shape
    if chain.ends is None:
        return messages[(v - 1) % len(messages)]
    at = (chain.ends - 1) % len(messages)
    return messages.gather(0, at[None, ..., None].expand(1, g, m, c))[0]


def found_size(v: int, g: int, m: int, c: int, matrices: int) -> int:
    """The length of the `found` of `Kept`, with so many matrices in each set."""
    return launch.whole(matrices * g, v * m * g) if kernel_of(m, c) is chain_forward else 0


def kernel_of(m: int, c: int) -> ModuleType:
    """The module whose kernels fit the chains: matrices of each sequence's own, or shared ones by their size."""
    if m == 1:
        return chain_own
    return chain_forward if c <= (_WIDE if c % 4 == 0 else _ODD) else chain_wide


def operands_of(chain: Chain, start: Tensor | None = None, *, entered: bool = False) -> Operands:
    """The chains as the kernels read them, with log p0 or, where a message `entered`, what it gives as `start`."""
    v, g, m, c = chain.v, chain.g, chain.m, chain.c
    bulk = chain.bulk.reshape(len(chain.bulk), g, c, c)
    if entered and len(bulk) > 1:  # the kernels begin after the first transition
        bulk = bulk[1:]
    start = (chain.log_p0() if start is None else start).contiguous()
    ends = None if chain.ends is None else chain.ends.reshape(g, m).clamp(1, v).contiguous()
    return Operands(chain.x.reshape(v, g, m, c), bulk, start, ends, chain.log_params, chain.dtype)
