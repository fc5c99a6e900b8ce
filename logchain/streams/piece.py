"""One piece of an unbounded chain, and its forward messages where somebody may differentiate them.

Everything is float64 logarithms, and each step one log-semiring product, whose derivatives autograd chains. What is
taken out of a message is a constant to it, so that what is impossible has a gradient of exactly 0.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..autograd.matmul import broadcast_log_matmul, log_matmul
from ..layout import Layout
from ..operands import differentiated


class Carried(NamedTuple):
    """What goes from one piece to the next.

    `message` [*B, c]: the logarithm of the newest state's posterior, float64; -inf for none and for the impossible.
    `total` + `lost` [*B]: the log-partition, and what its rounding has lost.
    """

    message: Tensor
    total: Tensor
    lost: Tensor

    @classmethod
    def before(cls, x: Tensor) -> "Carried":
        """That of a batch [*B, k, c] of which no variable has come."""
        message = x.new_full((*x.shape[:-2], x.shape[-1]), -torch.inf, dtype=torch.float64)
        zero = x.new_zeros(x.shape[:-2], dtype=torch.float64)
        return cls(message, zero, zero)

    def where(self, mask: Tensor, other: "Carried") -> "Carried":
        """This for the sequences of a mask [*B], and another for the rest."""
        message = torch.where(mask[..., None], self.message, other.message)
        return Carried(message, torch.where(mask, self.total, other.total), torch.where(mask, self.lost, other.lost))


class RawPiece(NamedTuple):
    """A piece as it comes: x [*B, k, c], bulk [*Bb, k or 1, c, c] into each variable, p0, and what is before it.

    `own`: bulk is the stream's. `fresh` [*B]: no variable is before. `unlinked`: that is so for all sequences, which is
    known without a look; `running`: likewise, that it is so for none and that none has ended. `counts` int64 [*B]: how
    many variables each sequence has, from 0 to k; None for all of them.
    """

    x: Tensor
    bulk: Tensor
    p0: Tensor
    own: bool
    fresh: Tensor
    unlinked: bool
    running: bool
    counts: Tensor | None
    log_params: bool

    def part(self, start: int, stop: int) -> "RawPiece":
        """The variables from `start` to before `stop`."""
        if stop - start == self.x.shape[-2]:
            return self
        bulk = self.bulk if self.bulk.shape[-3] == 1 else self.bulk[..., start:stop, :, :]
        counts = None if self.counts is None else (self.counts - start).clamp(0, stop - start)
        return self._replace(x=self.x[..., start:stop, :], bulk=bulk, counts=counts)

    def active(self) -> Tensor:
        """Which variables belong to a sequence [*B, k]."""
        k = self.x.shape[-2]
        counts = torch.full_like(self.fresh, k, dtype=torch.int64) if self.counts is None else self.counts
        return torch.arange(k, device=counts.device) < counts[..., None]

    def still_fresh(self) -> Tensor:
        """Which sequences have no variable after the piece either [*B]."""
        return self.fresh & (self.x.shape[-2] == 0 if self.counts is None else self.counts == 0)

    def logs(self, *, each: bool = False) -> "Piece":
        """The piece in float64 logarithms; `each`: also a matrix for all variables is one for each."""
        k, active = self.x.shape[-2], self.active()
        linked = active & ~((torch.arange(k, device=active.device) == 0) & self.fresh[..., None])
        matrices = logs(self.bulk if self.own else only_used(self.bulk, linked), self.log_params)
        if each and not self.own:
            matrices = matrices.expand(*matrices.shape[:-3], k, -1, -1)
        start = logs(self.p0, self.log_params).expand(*self.x.shape[:-2], -1)
        return Piece(self.x.double(), matrices, start, active, linked, self.unlinked)


class Piece(NamedTuple):
    """x [*B, k, c], and log-matrices into each variable [*Bb, k, c, c] or, the same for all, [*Bb, 1, c, c].

    `active` [*B, k]: which variables belong to a sequence; `linked` [*B, k]: which of them have one before.
    `start` [*B, c]: the logarithm of p0. `unlinked`: no sequence has a variable before the first one.
    """

    x: Tensor
    matrices: Tensor
    start: Tensor
    active: Tensor
    linked: Tensor
    unlinked: bool

    def matrix(self, i: int) -> Tensor:
        """The log-matrices [*Bb, c, c] that lead into a variable."""
        return self.matrices[..., 0 if self.matrices.shape[-3] == 1 else i, :, :]

    def part(self, start: int, stop: int) -> "Piece":
        """Some of its variables."""
        matrices = self.matrices if self.matrices.shape[-3] == 1 else self.matrices[..., start:stop, :, :]
        x, active, linked = self.x[..., start:stop, :], self.active[..., start:stop], self.linked[..., start:stop]
        return Piece(x, matrices, self.start, active, linked, self.unlinked and start == 0)

    def potentials(self) -> tuple[Tensor, Tensor]:
        """x less the largest entry of each variable [*B, k, c], and that [*B, k, 1]; 0 behind the end."""
        return shifted(torch.where(self.active[..., None], self.x, 0.0))


def logs(weights: Tensor, log_params: bool) -> Tensor:
    """The logarithm of weights, or what is one already, in float64, with gradient 0 at weight 0."""
    weights = weights.double()
    if log_params:
        return weights
    zero = weights == 0
    return weights.masked_fill(zero, 1.0).log().masked_fill(zero, -torch.inf)


def only_used(matrices: Tensor, used: Tensor) -> Tensor:
    """Matrices [*Bb, k or 1, c, c], 0 where no sequence uses them [*B, k]: a NaN there would come into gradients."""
    if matrices.shape[-3] != used.shape[-1]:
        used = used.any(-1, keepdim=True)
    missing = used.dim() + 2 - matrices.dim()
    shared = [axis for axis in range(used.dim()) if axis < missing or matrices.shape[axis - missing] == 1]
    used = used.any(shared, keepdim=True) if shared else used
    return torch.where(used.reshape(used.shape[missing:])[..., None, None], matrices, 0.0)


def shifted(message: Tensor) -> tuple[Tensor, Tensor]:
    """The message less its largest entry, a constant, and that entry [..., 1]; 0 where there is none."""
    top = message.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    return message - top, top


def normalised(message: Tensor) -> tuple[Tensor, Tensor]:
    """The message [..., c] less the logarithm of its sum, and that [...]: -inf, with gradient 0, of what is nothing."""
    if not differentiated(message):
        norm = torch.logsumexp(message, -1)
        # -inf less the lowest number is -inf
        return message - norm[..., None].clamp(min=torch.finfo(norm.dtype).min), norm
    dead = (message == -torch.inf).all(-1)
    norm = torch.logsumexp(message.masked_fill(dead[..., None], 0.0), -1).masked_fill(dead, 0.0)
    return message - norm[..., None], norm.masked_fill(dead, -torch.inf)


def posterior(message: Tensor) -> Tensor:
    """The shares of the states [..., c], exactly 0 where there is nothing."""
    dead = (message == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(message.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)


def filtering(piece: Piece, message: Tensor) -> tuple[Tensor, Tensor]:
    """The forward messages [*B, k + 1, c] with maximum 0, `message` ahead, and the shifts out of them [*B, k, 2].

    A message stays where a sequence has no variable, and its shifts are 0.
    """
    k = piece.x.shape[-2]
    x, shift = piece.potentials()
    if x.numel() == 0:
        return message[..., None, :].expand(*message.shape[:-1], k + 1, -1), shift.expand(*shift.shape[:-1], 2)
    layout = Layout.of(x, piece.matrices)
    steps, active = layout.steps_first(x), layout.steps_first(piece.active[..., None])
    lead, c = steps.shape[1:-1], steps.shape[-1]
    grid = (*layout.grid, c)
    matrices = layout.matrices(piece.matrices)
    message = layout.weights(message)
    messages, tops = [message], []
    for i in range(k):
        if i == 0 and piece.unlinked:
            ahead = layout.weights(piece.start)
        else:
            matrix = matrices[0 if len(matrices) == 1 else i]
            ahead = log_matmul(message.reshape(grid), matrix.reshape(grid[0], c, c)).view(*lead, c)
            if i == 0:
                linked = layout.weights(piece.linked[..., :1])
                ahead = torch.where(linked, ahead, layout.weights(piece.start))
        after, top = shifted(ahead + steps[i])
        message = torch.where(active[i], after, message)
        messages.append(message)
        tops.append(top)
    shifts = torch.cat([shift, torch.stack([layout.states(top) for top in tops], -2)], -1)
    by_step = torch.stack([layout.states(message) for message in messages], -2)
    return by_step, torch.where(piece.active[..., None], shifts, 0.0)


def added(carried: Carried, term: Tensor) -> Carried:
    """The same with a term [*B] added to its log-partition (D. E. Knuth's two-sum)."""
    total = carried.total + term
    part = total - carried.total
    error = (carried.total - (total - part)) + (term - part)
    # beside infinity nothing is lost
    return carried._replace(total=total, lost=carried.lost + error.nan_to_num(0.0, 0.0, 0.0))


def recovered(piece: Piece, before: Tensor, messages: Tensor) -> Tensor:
    """Forward messages with maximum 0 [*B, k, c], from ones of which small entries, in linear space, were lost.

    `before` [*B, c] is the message before the piece. What arrives at each variable is good to rounding in either space.
    """
    if piece.x.numel() == 0:
        return messages
    messages = torch.cat([before[..., None, :], messages[..., :-1, :]], -2)
    if piece.matrices.shape[-3] != 1:
        ahead = broadcast_log_matmul(messages[..., None, :], piece.matrices)[..., 0, :]
    else:
        ahead = broadcast_log_matmul(messages, piece.matrix(0))
    ahead = torch.where(piece.linked[..., None], ahead, piece.start[..., None, :])
    return torch.where(piece.active[..., None], shifted(ahead + piece.potentials()[0])[0], -torch.inf)
