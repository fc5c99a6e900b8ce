"""A piece of an unbounded chain, and its forward messages by operations that torch's autograd differentiates.

Messages are float64 logarithms, and each step is one product in the log semiring. The largest entry is taken out of
each message as a constant, so that the gradient of an impossible sequence is exactly 0.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd.matmul import broadcast_log_matmul, log_matmul
from ..kernels import in_c
from ..kernels.numbers import log_weights, shifted
from ..kernels.weights import Weights, check_weights, has_negative
from ..layout import Layout
from ..operands import at_hand, differentiated
from ..transitions import Transition
from .structures import Matrices, each, parts, step_at, steps_between, through


class Carried(NamedTuple):
    """The forward message and the log-partition after a piece, in float64, from which the next one goes on.

    `message` [*B, c]: the logarithm of the newest state's posterior; -inf before the first, and if impossible. `total`
    [*B]: the log-partition. `lost` [*B]: the rounding error of its sum, to be added. To autograd both are constants.
    """

    message: Tensor
    total: Tensor
    lost: Tensor

    @classmethod
    def before(cls, x: Tensor) -> "Carried":
        """The values before the first variable of a batch like x [*B, k, c]."""
        message = x.new_full((*x.shape[:-2], x.shape[-1]), -torch.inf, dtype=torch.float64)
        zero = x.new_zeros(x.shape[:-2], dtype=torch.float64)
        return cls(message, zero, zero)

    def log_norm(self) -> Tensor:
        """The log-partition [*B], with the gradient that the logarithm of the message's sum has."""
        return self.total + self.lost + self._log_sum()

    def posterior(self) -> Tensor:
        """The newest state's posterior [*B, c]; 0 before the first variable, and if impossible."""
        return (self.message - self._log_sum()[..., None]).exp()

    def _log_sum(self) -> Tensor:
        """The logarithm of the message's sum [*B], which is 0 but for its gradient."""
        if not self.message.requires_grad:
            return torch.zeros_like(self.total)
        norm = normalised(self.message)[1]
        return torch.where(norm == -torch.inf, 0.0, norm - norm.detach())

    def where(self, mask: Tensor, other: "Carried") -> "Carried":
        """The values of this for the sequences in a mask [*B], and of the other for the rest."""
        message = torch.where(mask[..., None], self.message, other.message)
        return Carried(message, torch.where(mask, self.total, other.total), torch.where(mask, self.lost, other.lost))


class RawPiece(NamedTuple):
    """A piece as the caller passes it: x [*B, k, c], bulk [*Bb, k or 1, c, c] with the matrix into each variable, p0.

    `bulk` may be a structure, of which nothing but `logs` is asked.
    `own`: whether bulk is the stream's own matrix. `fresh` [*B]: sequences without an earlier variable. `unlinked`:
    whether all are known to be fresh, and `running`: whether none is known to be fresh or over, both without looking at
    values. `counts` int64 [*B]: the number of variables of each sequence in the piece; None if all have k.
    """

    x: Tensor
    bulk: Any
    p0: Tensor
    own: bool
    fresh: Tensor
    unlinked: bool
    running: bool
    counts: Tensor | None
    log_params: bool

    def part(self, start: int, stop: int) -> "RawPiece":
        """The piece of the variables from `start` to before `stop`."""
        if stop - start == self.x.shape[-2]:
            return self
        bulk = self.bulk if self.bulk.shape[-3] == 1 else self.bulk[..., start:stop, :, :]
        counts = None if self.counts is None else (self.counts - start).clamp(0, stop - start)
        return self._replace(x=self.x[..., start:stop, :], bulk=bulk, counts=counts)

    def active(self) -> Tensor:
        """Which variables [*B, k] belong to their sequence, not behind its end."""
        k = self.x.shape[-2]
        counts = torch.full_like(self.fresh, k, dtype=torch.int64) if self.counts is None else self.counts
        return torch.arange(k, device=counts.device) < counts[..., None]

    def linked(self) -> Tensor:
        """Which variables [*B, k] of their sequence have another one before them."""
        active = self.active()
        return active & ~((torch.arange(active.shape[-1], device=active.device) == 0) & self.fresh[..., None])

    def weights(self) -> list[Weights]:
        """The weights that are read, by the names of what was given."""
        name, linked = "bulk" if self.own else "bulk_piece", self.linked()
        names: list[str] = [name]
        used: list[Tensor | None] = [None]
        if isinstance(self.bulk, Transition):
            names, used = [f"{name}.{one}" for one in self.bulk.names], self.bulk.used
        weights = []
        for one, entries, (tensor, own) in zip(names, used, parts(self.bulk), strict=True):
            read = used_steps(tensor, linked, own)
            read = read if entries is None else read.view(*read.shape, *(1,) * entries.dim()) & entries
            weights.append(Weights(one, tensor, read))
        starts = (self.active() & ~linked).any().view((1,) * self.p0.dim())
        return [*weights, Weights("p0", self.p0, starts)]

    def check_signs(self) -> None:
        """Raise on a CPU for a weight below 0 in p0, or in parameters that serve all steps."""
        if self.log_params or not in_c(self.x) or not at_hand(self.x, self.p0):
            return
        shared = [tensor.shape[-own - 1] == 1 for tensor, own in parts(self.bulk)]
        tensors = [tensor for tensor, _ in parts(self.bulk)]
        pairs = [*zip(tensors, shared, strict=True), (self.p0, True)]
        wrong = [check and has_negative(tensor) for tensor, check in pairs]
        if any(wrong):
            check_weights(*itertools.compress(self.weights(), wrong))

    def still_fresh(self) -> Tensor:
        """Which sequences [*B] have no variable after the piece either."""
        return self.fresh & (self.x.shape[-2] == 0 if self.counts is None else self.counts == 0)

    def logs(self, *, every: bool = False) -> "Piece":
        """The piece in float64 logarithms; `every`: a matrix for every variable, even if the caller passed one."""
        k, active, linked = self.x.shape[-2], self.active(), self.linked()

        def into(weights: Tensor, own: int) -> Tensor:
            weights = weights if self.own else only_used(weights, linked, own)
            weights = log_weights(weights, self.log_params, torch.float64)
            lead, sizes = weights.shape[: -1 - own], weights.shape[weights.dim() - own :]
            return weights.expand(*lead, k, *sizes) if every and not self.own else weights

        start = log_weights(self.p0, self.log_params, torch.float64).expand(*self.x.shape[:-2], -1)
        return Piece(self.x.double(), each(into, self.bulk), start, active, linked, self.unlinked)


class Piece(NamedTuple):
    """A piece in float64 logarithms: x [*B, k, c], and `matrices` [*Bb, k or 1, c, c] that lead into each variable.

    `start` [*B, c]: log p0. `active` [*B, k]: variables that belong to their sequence, not behind its end; `linked`
    [*B, k]: those of them with a variable before. `unlinked`: whether no sequence has a variable before the piece. A
    structure's parameters [*B or ones, k or 1, *own] are logarithms too.
    """

    x: Tensor
    matrices: Matrices
    start: Tensor
    active: Tensor
    linked: Tensor
    unlinked: bool

    def matrix(self, i: int) -> Matrices:
        """The log-matrices [*Bb, c, c] that lead into variable i."""
        return step_at(self.matrices, i)

    def part(self, start: int, stop: int) -> "Piece":
        """The piece of the variables from `start` to before `stop`."""
        matrices = steps_between(self.matrices, start, stop)
        x, active, linked = self.x[..., start:stop, :], self.active[..., start:stop], self.linked[..., start:stop]
        return Piece(x, matrices, self.start, active, linked, self.unlinked and start == 0)

    def potentials(self) -> tuple[Tensor, Tensor]:
        """The log-potentials less their largest entry [*B, k, c], and that entry [*B, k, 1]; 0 behind the end."""
        return shifted(torch.where(self.active[..., None], self.x, 0.0))


def only_used(matrices: Tensor, used: Tensor, own: int) -> Tensor:
    """The matrices [*Bb, k or 1, *own], with 0 where no sequence uses them [*B, k]: no NaN reaches gradients."""
    return torch.where(used_steps(matrices, used, own)[(..., *(None,) * own)], matrices, 0.0)


def used_steps(matrices: Tensor, used: Tensor, own: int) -> Tensor:
    """Which of the matrices [*Bb, k or 1, *own] some sequence uses [*B, k], as [*Bb or ones, k or 1]."""
    if matrices.shape[-1 - own] != used.shape[-1]:
        used = used.any(-1, keepdim=True)
    missing = used.dim() + own - matrices.dim()
    shared = [axis for axis in range(used.dim()) if axis < missing or matrices.shape[axis - missing] == 1]
    used = used.any(shared, keepdim=True) if shared else used
    return used.reshape(used.shape[missing:])


def normalised(message: Tensor) -> tuple[Tensor, Tensor]:
    """The message [..., c] with sum 1, and the logarithm of its sum [...]; -inf, with gradient 0, if all are -inf."""
    if not differentiated(message):
        norm = torch.logsumexp(message, -1)
        # -inf less the lowest number is -inf
        return message - norm[..., None].clamp(min=torch.finfo(norm.dtype).min), norm
    dead = (message == -torch.inf).all(-1)
    norm = torch.logsumexp(message.masked_fill(dead[..., None], 0.0), -1).masked_fill(dead, 0.0)
    return message - norm[..., None], norm.masked_fill(dead, -torch.inf)


def filtering(piece: Piece, message: Tensor) -> tuple[Tensor, Tensor]:
    """The forward messages [*B, k + 1, c] with maximum 0, `message` being the first, and their shifts [*B, k, 2].

    Where a sequence has no variable, its message stays and its shifts are 0.
    """
    k = piece.x.shape[-2]
    x, shift = piece.potentials()
    if x.numel() == 0:
        return message[..., None, :].expand(*message.shape[:-1], k + 1, -1), shift.expand(*shift.shape[:-1], 2)
    layout, ahead_of = _stepping(piece)
    steps, active = layout.steps_first(x), layout.steps_first(piece.active[..., None])
    message = layout.weights(message)
    messages, tops = [message], []
    for i in range(k):
        if i == 0 and piece.unlinked:
            ahead = layout.weights(piece.start)
        else:
            ahead = ahead_of(message, i)
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


def _stepping(piece: Piece) -> tuple[Layout, Callable[[Tensor, int], Tensor]]:
    """The layout of a piece, and what takes a message (*lead, c) through the matrices that lead into a variable."""
    if not isinstance(piece.matrices, Tensor):
        order = Layout(piece.x.shape[:-2], ())

        def by_structure(message: Tensor, i: int) -> Tensor:
            return order.weights(through(order.states(message)[..., None, :], piece.matrix(i))[..., 0, :])

        return order, by_structure
    layout, c = Layout.of(piece.x, piece.matrices), piece.x.shape[-1]
    grid, matrices = (*layout.grid, c), layout.matrices(piece.matrices)

    def by_matrix(message: Tensor, i: int) -> Tensor:
        matrix = matrices[0 if len(matrices) == 1 else i]
        return log_matmul(message.reshape(grid), matrix.reshape(grid[0], c, c)).view(message.shape)

    return layout, by_matrix


def added(carried: Carried, term: Tensor) -> Carried:
    """The carried values with a term [*B] added to the log-partition, by Knuth's two-sum."""
    total = carried.total + term
    part = total - carried.total
    error = (carried.total - (total - part)) + (term - part)
    # an infinite sum has no rounding error
    return carried._replace(total=total, lost=carried.lost + error.nan_to_num(0.0, 0.0, 0.0))


def recovered(piece: Piece, before: Tensor, messages: Tensor) -> Tensor:
    """The forward messages [*B, k, c] with maximum 0 and small entries, which linear `messages` had flushed to zero.

    Each is computed again, in log space, from the one before it, which small entries hardly count for. `before` [*B, c]
    is the message before the piece.
    """
    if piece.x.numel() == 0:
        return messages
    assert isinstance(piece.matrices, Tensor)
    messages = torch.cat([before[..., None, :], messages[..., :-1, :]], -2)
    if piece.matrices.shape[-3] != 1:
        ahead = broadcast_log_matmul(messages[..., None, :], piece.matrices)[..., 0, :]
    else:
        ahead = through(messages, piece.matrix(0))
    ahead = torch.where(piece.linked[..., None], ahead, piece.start[..., None, :])
    return torch.where(piece.active[..., None], shifted(ahead + piece.potentials()[0])[0], -torch.inf)
