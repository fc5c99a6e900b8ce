"""One step of a chain in log space: over the finite entries of its matrices where those are few, else by `log_matmul`.

A left-to-right chain has two entries a column; gathering those is exact whatever the messages hold, and cheaper than
any product.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from . import log_matmul
from .chain import Chain
from .exponentials import finite

# entries of matrices looked at or gathered at a time
_HELD = 2**18


class Rows:
    """The sequences `sets` x `members` of a chain's grid, in float64 logarithms (g', c, m')."""

    def __init__(self, chain: Chain, sets: Tensor, members: Tensor) -> None:
        self._chain, self.sets, self.members = chain, sets, members
        self.shape = (len(sets), chain.c, len(members))
        self._index = torch.unravel_index((sets[:, None] * chain.m + members).flatten(), chain.lead)
        self._every: tuple[slice | Tensor, ...] = (slice(None), *self._index)  # the same, of every step
        self.ends = None if chain.ends is None else chain.ends[sets][:, members].mT  # (g', 1, m')
        self.homogeneous = chain.bulk.shape[0] == 1
        self.v, self.zero, self.log_params = chain.v, chain.zero, chain.log_params
        self._by_log = chain.log_params or chain.by_log

    def potentials(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """x of a block of steps less its maximum (k, g', c, m'), and the maximum (k, g', 1, m')."""
        block = self._grid(self._chain.x[start:stop][self._every].double())
        top = finite(block.amax(-2, keepdim=True))
        return torch.sub(block, top).contiguous(), top

    def start(self) -> Tensor:
        """log p0 (g', c, m')."""
        chain = self._chain
        p0 = self._grid(chain.p0.expand(*chain.lead, chain.c)[self._index][None])[0].double()
        return p0 if self.log_params else p0.log()

    def _grid(self, sequences: Tensor) -> Tensor:
        """(k, g' m', c) as (k, g', c, m')."""
        grid: Tensor = sequences.unflatten(1, (self.shape[0], self.shape[2]))
        return grid.mT

    def write(self, values: Tensor, out: Tensor) -> None:
        """Put values (k, g', c, m') where these sequences lie in (k, *lead, c)."""
        out[self._every] = values.mT.flatten(1, 2).to(out.dtype)

    def numbers(self, start: int, stop: int) -> Tensor:
        """The numbers of the steps of a block (k, 1, 1, 1)."""
        return torch.arange(start, stop, device=self.sets.device).view(-1, 1, 1, 1)

    def matrices(self, start: int, stop: int) -> Tensor:
        """What the caller passed for the transitions into some steps (k or 1, g, c * c), of all sets."""
        chain = self._chain
        raw = chain.bulk if self.homogeneous else chain.bulk[start - 1 : stop - 1]
        return raw.reshape(len(raw), chain.g, -1)

    def log(self, entries: Tensor) -> Tensor:
        """The logarithms of what the caller passed."""
        return entries.double() if self.log_params else entries.double().log()

    def gradient(self, counts: Tensor, logs: Tensor) -> Tensor:
        """The gradient of what the caller asks for, from that of its logarithm; exactly 0 at an exact zero."""
        gradient = counts if self._by_log else counts / logs.exp()
        return gradient.masked_fill_(counts == 0, 0.0)


class DenseSteps:
    """Steps by the rescued log-semiring product, a few sets of matrices at a time."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        sets, c, _ = rows.shape
        self._parts = torch.arange(sets, device=rows.sets.device).split(max(1, _HELD // c**2))

    def _matrices(self, step: int) -> Iterator[tuple[slice, Tensor]]:
        c = self._rows.shape[1]
        for part in self._parts:
            raw = self._rows.matrices(step, step + 1)[0, self._rows.sets[part]]
            yield slice(int(part[0]), int(part[-1]) + 1), self._rows.log(raw).view(-1, c, c)

    def forward(self, message: Tensor, step: int) -> Tensor:
        """log sum_j exp(message_j + log P(j, .)) (g', c, m')."""
        return torch.cat(
            [log_matmul.forward(logs.mT, message[part], torch.float64)[0] for part, logs in self._matrices(step)]
        )

    def backward(self, message: Tensor, step: int) -> Tensor:
        """log sum_k exp(log P(., k) + message_k) (g', c, m')."""
        return torch.cat(
            [log_matmul.forward(logs, message[part], torch.float64)[0] for part, logs in self._matrices(step)]
        )

    def transitions(
        self, before: Tensor, after: Tensor, states: Tensor, weight: Tensor, start: int, gradient: Tensor
    ) -> None:
        """Add the gradients of some steps' matrices (s, g, c, c): posteriors, shared out among the states before."""
        rows = self._rows
        for i in range(len(before)):
            for part, logs in self._matrices(start + i):
                posterior = states[i, part]
                counts = log_matmul.backward(posterior, logs.mT, before[i, part], True, False, torch.float64)[0]
                assert counts is not None
                counts = counts.masked_fill_((posterior == 0).all(-1, keepdim=True), 0.0).mT
                found = rows.gradient(counts, logs).to(gradient.dtype)
                gradient[0 if rows.homogeneous else start - 1 + i].index_add_(0, rows.sets[part], found)


class SparseSteps:
    """Steps over the entries that are not zero in some matrix: their logarithms are gathered, a few per state."""

    def __init__(self, rows: Rows, linked: Tensor) -> None:
        self._rows, self._c = rows, rows.shape[1]
        before, after = _listed(linked), _listed(linked.T)
        states = torch.arange(self._c, device=linked.device)
        self._before = _Table(rows, before, before * self._c + states)
        self._after = _Table(rows, after, states * self._c + after)

    def forward(self, message: Tensor, step: int) -> Tensor:
        """log sum_j exp(message_j + log P(j, .)) (g', c, m')."""
        return _log_sum(self._before.terms(message, self._before.at(step)))

    def backward(self, message: Tensor, step: int) -> Tensor:
        """log sum_k exp(log P(., k) + message_k) (g', c, m')."""
        return _log_sum(self._after.terms(message, self._after.at(step)))

    def transitions(
        self, before: Tensor, after: Tensor, states: Tensor, weight: Tensor, start: int, gradient: Tensor
    ) -> None:
        """Add the gradients of some steps' matrices (s, g, c, c): the posteriors of linked pairs of states."""
        rows, steps = self._rows, len(before)
        entries = self._before.entries(start, start + steps)
        flat = self._before.flat
        counts = torch.zeros(steps, rows.shape[0], len(flat), dtype=torch.float64, device=flat.device)
        size = max(1, _HELD // counts.numel())
        for first in range(0, rows.shape[2], size):
            part = (..., slice(first, first + size))
            pairs = self._before.terms(before[part], entries).add_(after[part][:, :, None]).flatten(2, 3)
            some = weight[part]
            counts += torch.softmax(pairs, -2).mul_(some).masked_fill_(some == 0, 0.0).sum(-1)
        if rows.homogeneous:
            counts, steps, start = counts.sum(0, keepdim=True), 1, 1
        found = rows.gradient(counts, entries.flatten(2)).to(gradient.dtype)
        number = torch.arange(start - 1, start - 1 + steps, device=found.device)
        where = (number[:, None, None], rows.sets[:, None], flat // self._c, flat % self._c)
        gradient.index_put_(where, found, accumulate=True)


class _Table:
    """For each state the few states it is linked with (d, c), and where their entries lie in a matrix."""

    def __init__(self, rows: Rows, states: Tensor, flat: Tensor) -> None:
        self._rows, self._states, self.flat = rows, states.flatten(), flat.flatten()
        self._shape = states.shape
        self._piece = max(1, _HELD // (rows.shape[0] * rows.shape[1] ** 2))
        self._first, self._held = 0, torch.empty(0)
        self._each: tuple[Tensor, ...] = ()  # the held ones, apart

    def at(self, step: int) -> Tensor:
        """log P_i at the listed entries (g', d, c, 1)."""
        number = 0 if self._rows.homogeneous else step - self._first
        if not 0 <= number < len(self._each):
            self.entries(step, step + 1)
            number = 0 if self._rows.homogeneous else step - self._first
        return self._each[number]

    def entries(self, start: int, stop: int) -> Tensor:
        """log P_i at the listed entries (k or 1, g', d, c, 1)."""
        rows = self._rows
        if rows.homogeneous:
            start, stop = 1, 2
        if not self._first <= start <= stop <= self._first + len(self._held):
            self._first = 1 + (start - 1) // self._piece * self._piece
            raw = rows.matrices(self._first, min(rows.v, max(stop, self._first + self._piece)))
            raw = raw[:, rows.sets[:, None], self.flat]
            self._held = rows.log(raw).unflatten(-1, self._shape)[..., None]
            self._each = self._held.unbind(0)
        return self._held[start - self._first : stop - self._first]

    def terms(self, message: Tensor, entries: Tensor) -> Tensor:
        """The terms (..., g', d, c, m') of the sums over linked states."""
        shape = (*message.shape[:-2], *self._shape, message.shape[-1])
        return message.index_select(-2, self._states).view(shape).add_(entries)


def steps_for(rows: Rows) -> DenseSteps | SparseSteps:
    """Sparse where no state is linked with more than a few: a gathered term costs about as much as 64 of a product."""
    sets, c, _ = rows.shape
    linked = torch.zeros(c * c, dtype=torch.bool, device=rows.sets.device)
    piece = max(1, _HELD // (sets * c * c))
    for start in range(1, 2 if rows.homogeneous else rows.v, piece):
        entries = rows.matrices(start, min(start + piece, rows.v))
        linked |= (entries != rows.zero).any(0).any(0)
    linked = linked.view(c, c)
    most = max(linked.sum(0).amax().item(), linked.sum(1).amax().item())
    return SparseSteps(rows, linked) if most <= 4 + c // 64 else DenseSteps(rows)


def _listed(linked: Tensor) -> Tensor:
    """For each column of `linked` the rows in which it is true, padded with others: (d, c)."""
    most = max(1, int(linked.sum(0).amax()))
    return torch.sort(linked.to(torch.uint8), dim=0, descending=True, stable=True).indices[:most]


def _log_sum(terms: Tensor) -> Tensor:
    """logsumexp over the linked states (..., d, c, m'); overwrites the terms.

    torch's own takes several times as long where terms lie far apart.
    """
    top = finite(terms.amax(-3))
    return terms.sub_(top.unsqueeze(-3)).mul_(math.log2(math.e)).exp2_().sum(-3).log_().add_(top)
