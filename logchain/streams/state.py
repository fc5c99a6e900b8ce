"""The state of a stream between two pieces."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..arguments import has_values
from ..autograd.scan import Message
from ..transitions import Transition
from ..transitions.dense import Dense
from .lag import Window
from .paths import Survivors
from .piece import Piece, before_all, mapped, selected

# the fields that are named tuples
_PARTS = {"message": Message, "window": Window, "survivors": Survivors}


class State(NamedTuple):
    """What the next piece depends on; `window` and `survivors` are None where no lag and no best path need them.

    `message` [*B, c] has sum 1; it is -inf before the first variable, and if impossible. `fresh` [*B]: no variable yet.
    `over` [*B]: ended. `running`: all are known to go on, without looking at values. `double`: an operand was float64.
    """

    message: Message
    fresh: Tensor
    over: Tensor
    running: bool
    double: bool
    window: Window | None
    survivors: Survivors | None

    @classmethod
    def before(cls, x: Tensor, viterbi: bool) -> "State":
        """The state before the first variable of a batch like x."""
        over, message, survivors = x.new_zeros(x.shape[:-2], dtype=torch.bool), before_all(x), None
        if viterbi:
            paths = x.new_zeros((*over.shape, 0, x.shape[-1]), dtype=torch.int32)
            survivors = Survivors(message.values, paths, over[..., None][..., :0])
        return cls(message, ~over, over, False, False, None, survivors)

    def piece(
        self, x: Tensor, name: str, transition: Transition, p0: Tensor, ends: Tensor | None, log_params: bool
    ) -> Piece:
        """The next piece, of lengths `ends` [*B]."""
        k, counts = x.shape[-2], None
        readable = has_values(self.fresh) and not kernels.on_gpu(self.fresh)  # on a GPU one would wait for values
        if ends is not None or not self.running:
            counts = torch.where(self.over, 0, k if ends is None else ends.clamp(0, k))
            counts = None if readable and (counts == k).all() else counts
        going = self.running or (readable and not self.fresh.any())
        return Piece(x, transition, p0, name, counts, self.fresh, going, log_params)

    def after(self, piece: Piece, message: Message, ends: Tensor | None) -> "State":
        """The state after a piece that leaves a message, of lengths `ends` [*B], with the same window and survivors."""
        k, counts, over = piece.x.shape[-2], piece.counts, self.over
        if ends is not None:
            unknown = ((ends < 0) | (ends > k))[..., None]  # on a GPU lengths have not been checked
            message, over = message._replace(scale=message.scale.masked_fill(unknown, torch.nan)), over | (ends < k)
        fresh = self.fresh & (k == 0 if counts is None else counts == 0)
        running = counts is None and (k > 0 or self.running)
        return self._replace(message=message, fresh=fresh, over=over, running=running)

    def restarted(self, mask: Tensor) -> "State":
        """The state with the sequences in a mask [*B] before their first variable again."""
        message = selected(mask, before_all(self.message.values[..., None, :]), self.message)
        return self._replace(message=message, fresh=self.fresh | mask, over=self.over & ~mask, running=False)

    def detached(self) -> "State":
        """The state without gradients to earlier pieces."""
        leaves = [self.message.values, *(() if self.window is None else (self.window.messages,))]
        detached: State = mapped(Tensor.detach, self) if any(leaf.requires_grad for leaf in leaves) else self
        return detached

    def plain(self) -> dict[str, Any]:
        """A copy as dictionaries of tensors, bools, None and a structure if one waits for the lag."""
        fields: dict[str, Any] = mapped(lambda tensor: tensor.detach().clone(), self)._asdict()
        fields |= {name: fields[name]._asdict() for name in _PARTS if fields[name] is not None}
        if self.window is not None and isinstance(self.window.transition, Dense):
            (fields["window"]["transition"],) = fields["window"]["transition"].parameters
        return fields

    @classmethod
    def of_plain(cls, fields: dict[str, Any]) -> "State":
        """The state that `plain` has made dictionaries of."""
        parts = {name: kind(**fields[name]) for name, kind in _PARTS.items() if fields[name] is not None}
        if "window" in parts and isinstance(parts["window"].transition, Tensor):
            parts["window"] = parts["window"]._replace(transition=Dense(parts["window"].transition))
        copied: State = mapped(partial(torch.clone, memory_format=torch.contiguous_format), cls(**fields | parts))
        return copied
