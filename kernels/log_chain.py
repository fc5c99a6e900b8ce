"""The sum-product recursion in log space, float64, for the sequences that linear space cannot represent.

    a_i = log sum_j exp(a_{i-1}(j) + log P_i(j, .)) + x_i - t_i        b_{i-1} = log sum_k exp(log P_i(., k) + x_i(k) + b_i(k)) - u_i

with the scales t and u chosen so that the largest entry is 0. Where each column of the matrices has few entries the sum runs
over those (a left-to-right chain has two), otherwise it is the rescued product of `log_matmul`. The messages are kept in the
chain's own dtype: an entry D nats below the maximum is known to D roundings. Every probability of the backward pass is
normalised over its own terms, so that those roundings do not add up along the chain.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from . import log_matmul
from .chain import Chain
from .exponentials import finite


@dataclass
class Forward:
    """`log_norm` (g', m') in float64, for the sequences `sets` x `members` of the grid, and the messages (v, g', m', c)."""

    sets: Tensor
    members: Tensor
    log_norm: Tensor
    messages: Tensor | None


def forward(chain: Chain, lossy: Tensor, *, keep: bool) -> Forward:
    """The log-partition of the sequences marked in `lossy` (g, m), and of those that share both a row and a column with them."""
    rows = _Rows(chain, lossy.any(1).nonzero()[:, 0], lossy.any(0).nonzero()[:, 0])
    log_norm = torch.zeros(rows.shape[:-1], dtype=torch.float64, device=lossy.device)
    scale = log_norm.clone()
    messages = chain.new(chain.v, *rows.shape) if keep else None
    links = _links(chain, rows)
    for start, stop in chain.blocks():
        x = rows.potentials(start, stop)
        for step in range(start, stop):
            message = rows.start() if step == 0 else links.forward(message, step)
            message += x[step - start]
            if rows.ends is not None:
                message.masked_fill_(rows.ends <= step, -math.inf)
            scale += _normalise(message)
            if messages is not None:
                messages[step].copy_(message)
            if rows.ends is not None:
                log_norm = torch.where((rows.ends == step + 1)[..., 0], scale + torch.logsumexp(message, -1), log_norm)
    if rows.ends is None:
        log_norm = scale + torch.logsumexp(message, -1)
    return Forward(rows.sets, rows.members, log_norm, messages)


def backward(
    chain: Chain, kept: Forward, weight: Tensor, grad_x: Tensor | None, grad_bulk: Tensor | None, grad_p0: Tensor
) -> None:
    """Write the gradients of `sum(weight * log_norm)`, weights (g, m), into the sequences of `grad_x` (v, *lead, c) and of `grad_p0`
    (*lead, c); add those of the matrices to `grad_bulk` (s, g, c, c)."""
    assert kept.messages is not None
    rows = _Rows(chain, kept.sets, kept.members)
    weight = weight[kept.sets][:, kept.members].double()[..., None]
    weight = weight.masked_fill(kept.log_norm[..., None] == -math.inf, 0.0)
    links = _links(chain, rows)
    message = torch.zeros(rows.shape, dtype=torch.float64, device=weight.device)
    for start, stop in reversed(chain.blocks()):
        x = rows.potentials(start, stop)
        for step in reversed(range(start, stop)):
            running = None if rows.ends is None else rows.ends > step
            if rows.ends is not None and running is not None:
                message.masked_fill_(~running, -math.inf).masked_fill_(rows.ends == step + 1, 0.0)
            active = weight if running is None else weight.masked_fill(~running, 0.0)
            states = _shares(kept.messages[step] + message, active)
            if grad_x is not None:
                grad_x[step].index_put_(rows.index, states.view(-1, chain.c).to(grad_x.dtype))
            if step == 0:
                gradient = rows.gradient(states, rows.start())
                grad_p0.index_put_(rows.index, gradient.view(-1, chain.c).to(grad_p0.dtype))
                return
            message += x[step - start]
            if running is not None:
                message.masked_fill_(~running, -math.inf)
            if grad_bulk is not None:
                gradient = links.transitions(kept.messages[step - 1].double(), message, states, active, step)
                grad_bulk[0 if rows.homogeneous else step - 1].index_add_(0, rows.sets, gradient.to(grad_bulk.dtype))
            message = links.backward(message, step)
            _normalise(message)


def _normalise(message: Tensor) -> Tensor:
    """Take the largest entry of each row out of it, in place, and return it; 0 for a row of -inf."""
    top = finite(message.amax(-1, keepdim=True))
    message.sub_(top)
    return top[..., 0]


def _shares(joint: Tensor, weight: Tensor) -> Tensor:
    """`weight * softmax(joint)` over the last axis; 0 where the weight is."""
    return torch.softmax(joint, -1).mul_(weight).masked_fill_(weight == 0, 0.0)


class _Rows:
    """The chosen sequences of a chain, in float64 logarithms."""

    def __init__(self, chain: Chain, sets: Tensor, members: Tensor) -> None:
        self._chain, self.sets, self.members = chain, sets, members
        self.shape = (len(sets), len(members), chain.c)
        self.index = torch.unravel_index((sets[:, None] * chain.m + members).flatten(), chain.lead)
        self.ends = None if chain.ends is None else chain.ends[sets][:, members]
        self.homogeneous = chain.bulk.shape[0] == 1
        self.steps = chain.v

    def potentials(self, start: int, stop: int) -> Tensor:
        """x of a block of steps (k, g', m', c)."""
        return self._chain.x[start:stop][(slice(None), *self.index)].double().view(stop - start, *self.shape)

    def start(self) -> Tensor:
        """log p0 (g', m', c)."""
        chain = self._chain
        p0 = chain.p0.expand(*chain.lead, chain.c)[self.index].double().view(self.shape)
        return p0 if chain.log_params else p0.log()

    def links(self, start: int, stop: int) -> Tensor:
        """What the caller passed for the transitions into a range of steps (k, g', c * c)."""
        chain = self._chain
        raw = chain.bulk if self.homogeneous else chain.bulk[start - 1 : stop - 1]
        raw = raw.reshape(len(raw), chain.g, -1)
        return raw if len(self.sets) == chain.g else raw[:, self.sets]

    def log(self, links: Tensor) -> Tensor:
        return links.double() if self._chain.log_params else links.double().log()

    def gradient(self, counts: Tensor, log_links: Tensor) -> Tensor:
        """The gradient of what the caller passed, from that of its logarithm; exactly 0 at an exact zero."""
        gradient = counts if self._chain.log_params else counts / log_links.exp()
        return gradient.masked_fill_(counts == 0, 0.0)


class _DenseLinks:
    """Steps by `log_matmul`."""

    def __init__(self, rows: _Rows) -> None:
        self._rows = rows

    def _matrix(self, step: int) -> Tensor:
        sets, _, c = self._rows.shape
        return self._rows.log(self._rows.links(step, step + 1)).view(sets, c, c)

    def forward(self, message: Tensor, step: int) -> Tensor:
        return log_matmul.forward(message, self._matrix(step))[0]

    def backward(self, message: Tensor, step: int) -> Tensor:
        return log_matmul.forward(message, self._matrix(step).mT)[0]

    def transitions(self, before: Tensor, after: Tensor, states: Tensor, weight: Tensor, step: int) -> Tensor:
        """The gradient of the matrix (g', c, c): each state's posterior, shared out among the states before it."""
        matrix = self._matrix(step)
        counts = log_matmul.backward(states, before, matrix, False, True)[1]
        assert counts is not None
        counts.masked_fill_((states == 0).all(1, keepdim=True), 0.0)
        return self._rows.gradient(counts, matrix)


class _SparseLinks:
    """Steps by the finite entries alone: `columns` (d, c) lists the states before each state, `rows` (d', c) those after it."""

    def __init__(self, rows: _Rows, linked: Tensor) -> None:
        self._rows, self._c = rows, rows.shape[-1]
        self._tables = {"before": _listed(linked), "after": _listed(linked.T)}
        states = torch.arange(self._c, device=linked.device)
        self._flat = {
            "before": self._tables["before"] * self._c + states,
            "after": states * self._c + self._tables["after"],
        }
        self._held: tuple[str, range, Tensor] | None = None
        self._steps = max(1, _HELD_LINKS // (rows.shape[0] * self._c**2))

    def _links(self, side: str, step: int) -> Tensor:
        """log P_i at the listed entries (g', 1, d, c)."""
        held = self._held
        if held is None or held[0] != side or step not in held[1]:
            first = 1 + (step - 1) // self._steps * self._steps
            steps = range(first, min(first + self._steps, self._rows.steps))
            table = self._flat[side]
            links = self._rows.log(self._rows.links(steps.start, steps.stop)[..., table.flatten()])
            held = self._held = (side, steps, links.view(-1, self._rows.shape[0], 1, *table.shape))
        return held[2][0 if self._rows.homogeneous else step - held[1].start]

    def _terms(self, side: str, message: Tensor, step: int) -> Tensor:
        """The terms of the sum (g', m', d, c)."""
        table = self._tables[side]
        terms = message.index_select(-1, table.flatten()).view(*message.shape[:-1], *table.shape)
        return terms.add_(self._links(side, step))

    def forward(self, message: Tensor, step: int) -> Tensor:
        return _log_sum(self._terms("before", message, step))

    def backward(self, message: Tensor, step: int) -> Tensor:
        return _log_sum(self._terms("after", message, step))

    def transitions(self, before: Tensor, after: Tensor, states: Tensor, weight: Tensor, step: int) -> Tensor:
        """The gradient of the matrix (g', c, c): the posterior of each pair of states, over its listed entries."""
        pairs = self._terms("before", before, step).add_(after[..., None, :])
        counts = _shares(pairs.flatten(-2), weight).sum(1)
        gradient = self._rows.gradient(counts, self._links("before", step).flatten(1))
        full = gradient.new_zeros(len(gradient), self._c**2)
        return full.index_copy_(1, self._flat["before"].flatten(), gradient).view(-1, self._c, self._c)


# entries of matrices looked at or gathered at a time
_HELD_LINKS = 2**18


def _links(chain: Chain, rows: _Rows) -> _DenseLinks | _SparseLinks:
    c = chain.c
    linked = torch.zeros(c * c, dtype=torch.bool, device=chain.x.device)
    piece = max(1, _HELD_LINKS // (rows.shape[0] * c * c))
    for start in range(1, 2 if rows.homogeneous else chain.v, piece):
        links = rows.links(start, min(start + piece, chain.v))
        linked |= (links != (-math.inf if chain.log_params else 0)).any(0).any(0)
    linked = linked.view(c, c)
    most = max(linked.sum(0).amax().item(), linked.sum(1).amax().item())
    return _SparseLinks(rows, linked) if most <= 4 + c // 64 else _DenseLinks(rows)


def _listed(linked: Tensor) -> Tensor:
    """For each column of `linked` the rows in which it is true, padded with others: (d, c)."""
    most = max(1, int(linked.sum(0).amax()))
    return torch.sort(linked.to(torch.uint8), dim=0, descending=True, stable=True).indices[:most]


def _log_sum(terms: Tensor) -> Tensor:
    """logsumexp over the last axis but one."""
    if terms.shape[-2] == 1:
        return terms[..., 0, :]
    if terms.shape[-2] == 2:
        return torch.logaddexp(terms[..., 0, :], terms[..., 1, :])
    return torch.logsumexp(terms, -2)
