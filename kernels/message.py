"""What passes between stretches of a chain, and what a stretch keeps for its backward pass.

A stretch maps the message that enters it to the one that leaves it, and backwards likewise. `Message` has one meaning
in every room; `Kept` is what a room keeps for its own `backward`; whoever else reads messages asks for their `logs`.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Message(NamedTuple):
    """The forward message `exp(values + scale)` of a step, for g sets of matrices and m sequences of each.

    `values` (g, m, c), float64: logarithms of the states' shares, which sum to 1; -inf where nothing is possible.
    `scale` (2, g, m), float64: the logarithm of the message's sum, and what the rounding of that has lost.
    """

    values: Tensor
    scale: Tensor

    @property
    def log_norm(self) -> Tensor:
        """The log-partition (g, m) of all up to here."""
        return self.scale[0]


class Kept(NamedTuple):
    """What `forward` leaves for `backward`.

    `log_norm` (g, m), float64; `messages` (v, g, m, c), over any factor each: linear, but logarithms where `redone` (g,
    m) marks a sequence, and on a GPU, which counts single sums that it redid, logarithms everywhere. `entered`: the
    first of the messages is the one that entered the stretch.
    """

    log_norm: Tensor
    messages: Tensor
    redone: Tensor
    entered: bool = False

    @property
    def all_logs(self) -> bool:
        """Whether the messages of all sequences are logarithms."""
        return self.redone.dtype != torch.bool

    def logs(self, steps: int | slice) -> Tensor:
        """The messages of some steps as float64 logarithms (..., g, m, c), over any factor each."""
        messages = self.messages[steps].double()
        if self.all_logs:
            return messages
        # the logarithm of a large message would take its last digits
        top = messages.amax(-1, keepdim=True)
        linear = (messages / top.masked_fill(top == 0, 1.0)).log()
        return torch.where(self.redone[..., None], messages, linear)


def normalised(logs: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithms (..., c) less that of their sum, and that (...); both -inf where all are."""
    total = torch.logsumexp(logs, -1)
    return logs - total.masked_fill(total == -torch.inf, 0.0)[..., None], total


def where_moved(moved: Tensor | None, after: Message, before: Message) -> Message:
    """The message after a stretch, or before it where a sequence has none of its steps; None: all have some."""
    if moved is None:
        return after
    values = torch.where(moved[..., None], after.values, before.values)
    return Message(values, torch.where(moved, after.scale, before.scale))
