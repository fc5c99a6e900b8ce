"""The part of chains that a rank holds: walked from either end, or multiplied out, and back.

A rank's first matrix leads into its first variable, from the last one of the rank before: the step belongs to the rank
that it leads into. What enters a rank is the forward message of the variable before its first; what follows it is the
backward message of its last variable.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..kernels.chain import Chain
from ..kernels.message import Kept, Message
from ..layout import Layout
from ..operands import Operands, arithmetic_dtype
from ..rescues import report_chains
from ..schedules.cost_counts import WARM_PART
from ..schedules.overlapped import Differ, Walk, steps_to_forget
from ..schedules.turned import Tail
from .messages import message_of, unless_infinite

F64 = torch.float64


class Gradients(NamedTuple):
    """Memory for the gradients of a rank's x and `bulk`, in their shapes, and of p0 in float64; None if not needed."""

    x: Tensor | None
    bulk: Tensor | None
    p0: Tensor | None


class Stretch:
    """The part of a block of sequences that a rank holds; `begins`: its first variable is that of the chains.

    `start` is the number of variables before it. `needs`: whether gradients of x, bulk and p0 will be asked for.
    """

    def __init__(
        self, operands: Operands, start: int, needs: tuple[bool, ...], *, begins: bool, by_log: bool = False
    ) -> None:
        x, bulk, p0, lengths, log_params = operands
        self.layout, self._needs, self._begins = Layout.of(x, bulk), needs, begins
        v = x.shape[-2]
        # variables of each sequence from the first of this part on (g, m)
        self._ends = None if lengths is None else self.layout.sequences(lengths) - start
        ends = None if self._ends is None else self._ends[..., None].clamp(0, v)
        steps, matrices = self.layout.steps_first(x), self.layout.matrices(bulk)
        matrices = matrices[: v - 1] if begins and v == 1 else matrices
        dtype = arithmetic_dtype(x, bulk, p0)
        self.chain = Chain(steps, matrices, self.layout.weights(p0), ends, log_params, dtype, by_log)
        self._walk = kernels.chain_kernels(x)
        self._kept: Kept | None = None
        self._entering: Message | None = None
        self._last: Message | None = None

    @property
    def grid(self) -> tuple[int, int, int]:
        """The sizes (g, m, c) of a message."""
        return self.chain.g, self.chain.m, self.chain.c

    def message(self, row: Tensor) -> Message:
        """The message that a row from another rank holds."""
        return message_of(row, self.grid, self.chain.x.device)

    @property
    def kept(self) -> Kept:
        """What the walk of this part kept; if a message was given to `enter`, it is walked now."""
        if self._kept is None and self._entering is not None:
            self.ahead(self._entering)
        assert self._kept is not None
        return self._kept

    def enter(self, entering: Message) -> None:
        """Walk ahead from this message as soon as what it keeps is asked for."""
        self._kept, self._entering = None, entering

    @property
    def continues(self) -> Tensor:
        """Whether sequences have variables behind this part (g, m), or () if all have."""
        return torch.tensor(True, device="cpu") if self._ends is None else self._ends > self.chain.v

    def as_chain(self) -> Chain:
        """The chain of this part alone, without the step into it."""
        chain = self.chain
        whole = self._begins or (len(chain.bulk) == 1 and chain.v > 1)
        return chain if whole else replace(chain, bulk=chain.bulk[1:])

    def early(self, walk: Walk, differ: Differ) -> float:
        """The number of steps that messages in either direction begin early, 0 if they do not forget in time."""
        chain = self.as_chain()
        steps = steps_to_forget(chain, chain.v // WARM_PART, walk, differ) if chain.v > WARM_PART else 0
        return float(min(steps + steps // 2, chain.v))

    @property
    def reached(self) -> Tensor | None:
        """Whether sequences have variables in this part (g, m); None if all have."""
        return None if self.chain.ends is None else self.chain.ends[..., 0] > 0

    def ahead(self, entering: Message | None) -> Message:
        """The forward message of the last variable, from the one that enters; none enters where the chains begin."""
        keep = None
        if any(self._needs):
            keep = kernels.messages_of(self.chain, self.chain.v + (entering is not None))
        self._kept, leaving = self._walk.forward(self.chain, entering, keep=keep, leave=True)
        report_chains(self.kept.redone)
        assert leaving is not None
        message: Message = leaving
        return message

    def back(self, log_norm: Tensor, weight: Tensor, following: Tensor | None, into: Gradients) -> Tensor:
        """The backward message of the variable before the first (g, m, c), from the one that follows.

        Gradients are written. Where the chains begin, the result has no meaning.
        """
        grad_x, grad_bulk = self._views(into)
        kept = self.kept._replace(log_norm=log_norm)
        ahead: Tensor = self._walk.backward(self.chain, kept, weight, following, grad_x, grad_bulk)
        if self._begins and into.p0 is not None:
            into.p0.copy_(self.layout.states(ahead).sum_to_size(into.p0.shape))
        return ahead.new_zeros(self.grid) if self._begins else ahead

    def first_back(self, steps: int) -> Tensor:
        """The backward message of the variable before the first (g, m, c), from a uniform one after so many steps."""
        window = self.window(0, steps)
        kept = self.kept._replace(
            messages=self.kept.messages[: steps + 1], log_norm=torch.zeros_like(self.kept.log_norm)
        )
        uniform = torch.zeros(self.grid, dtype=F64, device=self.chain.x.device)
        ahead: Tensor = self._walk.backward(window, kept, torch.ones_like(kept.log_norm), uniform, None, None)
        return ahead

    def last_ahead(self, steps: int) -> Tensor:
        """The forward message of the last variable (g, m, c), from a uniform one before the last steps."""
        uniform = torch.zeros(self.grid, dtype=F64, device=self.chain.x.device)
        entering = Message(uniform, torch.zeros(2, *self.grid[:2], dtype=F64, device=uniform.device))
        leaving = self._walk.forward(self.window(-steps), entering, leave=True)[1]
        assert leaving is not None
        values: Tensor = leaving.values
        return values

    def product(self) -> tuple[Tensor, Tensor]:
        """The logarithms of the product of all steps (g, m, c, c) less `scale`, and the scale (g, m)."""
        (g, m, c), chain = self.grid, self.chain
        x = chain.x.unsqueeze(-2).expand(*chain.x.shape[:-1], c, c)
        ends = None if chain.ends is None else chain.ends.expand(g, m, c).reshape(g, m * c, 1)
        rows = torch.eye(c, dtype=F64, device=x.device).log_().repeat(m, 1).expand(g, -1, c)
        nothing = torch.zeros(2, g, m * c, dtype=F64, device=x.device)
        kept, after = self._walk.forward(replace(chain, x=x, ends=ends), Message(rows, nothing), leave=True)
        report_chains(kept.redone.view(g, m, c).any(-1))
        assert after is not None
        high, low = after.scale.view(2, g, m, c)
        scale = high.amax(-1)
        scale = scale.masked_fill(scale == -torch.inf, 0.0)
        return after.values.view(g, m, c, c) + (high - scale[..., None] + low)[..., None], scale

    def turned(self) -> Message:
        """The backward message of the variable before the first, with its scale, of chains that end here."""
        self._tail = Tail(self.chain)
        keep = kernels.messages_of(self.chain, self.chain.v) if any(self._needs) else None
        ((self._kept, last),) = kernels.at_once(self._tail.forward(keep))
        self._last = unless_infinite(last)
        before, redone = self._tail.before(self._last)
        report_chains(self.kept.redone | redone)
        return before

    def back_turned(self, log_norm: Tensor, weight: Tensor, entering: Message, into: Gradients) -> None:
        """Write the gradients of chains that end here, after `turned`, from the message that enters."""
        assert self._last is not None
        kept = self.kept._replace(log_norm=log_norm)
        kernels.at_once(self._tail.backward(kept, self._last.values, weight, entering, *self._views(into)))

    def _views(self, into: Gradients) -> tuple[Tensor | None, Tensor | None]:
        grad_x = None if into.x is None else self.layout.steps_first(into.x)
        grad_bulk = None if into.bulk is None else self.layout.matrices(into.bulk)
        if grad_bulk is not None and len(self.chain.bulk) < len(grad_bulk):
            grad_bulk.zero_()
            grad_bulk = grad_bulk[: len(self.chain.bulk)]
        return grad_x, grad_bulk

    def window(self, start: int, stop: int | None = None) -> Chain:
        """The steps from `start` to before `stop`, which a message enters; a negative start counts from the end.

        No message enters the very first variable: there the window begins with the second.
        """
        chain, first = self.chain, int(self._begins)
        start = max(first, start + chain.v if start < 0 else start)
        stop = chain.v if stop is None else stop
        one = len(chain.bulk) == 1 and chain.v > 1 + first
        bulk = chain.bulk if one else chain.bulk[start - first : stop - first]
        ends = None if chain.ends is None else (chain.ends - start).clamp(0, stop - start)
        return replace(chain, x=chain.x[start:stop], bulk=bulk, ends=ends)
