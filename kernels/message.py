"""The forward message that one stretch of a chain passes to the next, and the messages kept for the backward pass.

A chain may be computed stretch by stretch: each maps an entering forward message to a leaving one, and `backward` maps
backward messages the other way. `Message` means the same in kernels/plain, cpu and gpu. So does `Residuals.logs`;
scales of linear `messages` differ, and on a GPU `backward` of one backend reads what `forward` of the other kept.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# the stored logarithm that represents NaN; its negative represents -inf: finite, so that products with zeros are 0
LOG_LIMIT = {torch.float32: 3.36e38, torch.float64: 1.7e308}


class Message(NamedTuple):
    """The forward message `exp(values + scale[0] + scale[1])` of one step, for g sets of m sequences with c states.

    `values` (g, m, c), float64: logarithms of the normalized message, the filtered posterior; all -inf where no path
    is possible. `scale` (2, g, m), float64: the logarithm of the message's sum, and the rounding error of that.
    """

    values: Tensor
    scale: Tensor

    @property
    def log_norm(self) -> Tensor:
        """The log-partition (g, m) of all steps up to this one."""
        return self.scale[0]


class Residuals(NamedTuple):
    """The results of `forward` that `backward` reads.

    Attributes:
        log_norm: log-partitions (g, m), float64.
        messages: forward messages (v, g, m, c), each up to a factor.
        recomputed: (g, m), bool: sequences that underflowed, whose messages are logarithms; all others are linear.
        entered: whether `messages` (v + 1, g, m, c) begins with the message that entered.
        bound: (s, g), int32: exponents of the matrices, from the Triton kernels; None: they compute them again.
        halved: whether the messages after the middle step are backward messages, because a forward and a backward scan
            met there; only `backward` of the Triton kernels reads them.
    """

    log_norm: Tensor
    messages: Tensor
    recomputed: Tensor
    entered: bool = False
    bound: Tensor | None = None
    halved: bool = False

    def logs(self, steps: int | slice) -> Tensor:
        """The messages of `steps` as float64 logarithms (..., g, m, c), each up to an additive constant."""
        # the logarithm of a negative number takes ten times as long
        messages = self.messages[steps].double().masked_fill(self.recomputed[..., None], 1.0)
        # log of a message near 1 keeps more digits than log of a large one
        top = messages.amax(-1, keepdim=True)
        linear = (messages / top.masked_fill(top == 0, 1.0)).log()
        return torch.where(self.recomputed[..., None], decoded(self.messages[steps]), linear)


def encoded(logs: Tensor, dtype: torch.dtype) -> Tensor:
    """Logarithms of messages as they are kept in `dtype`: finite, see LOG_LIMIT."""
    limit = LOG_LIMIT[dtype]
    return torch.where(logs == -torch.inf, -limit, logs.clamp(min=-0.99 * limit)).nan_to_num(limit, limit).to(dtype)


def decoded(logs: Tensor) -> Tensor:
    """Logarithms of messages in float64, with -inf and NaN in place of what represents them, see LOG_LIMIT."""
    limit = 0.995 * LOG_LIMIT[logs.dtype]
    return logs.double().masked_fill(logs <= -limit, -torch.inf).masked_fill(logs >= limit, torch.nan)


def normalized(logs: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithms (..., c) of weights divided by their sum, and the logarithm of the sum (...); -inf for no weight."""
    total = torch.logsumexp(logs, -1)
    return logs - total.masked_fill(total == -torch.inf, 0.0)[..., None], total


def leaving_message(ends: Tensor | None, after: Message, entering: Message | None) -> Message:
    """The message after a stretch, or the one that entered it for sequences with no step in it, of `ends` (g, m, 1)."""
    if ends is None or entering is None:
        return after
    values = torch.where(ends > 0, after.values, entering.values)
    return Message(values, torch.where(ends[..., 0] > 0, after.scale, entering.scale))
