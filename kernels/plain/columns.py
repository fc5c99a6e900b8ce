"""Chains of dense matrices of which each process holds some columns: linear products, whose parts are joined.

A message a, whose largest logarithm is 0, passes as `U = A P` with A = exp(a) and P divided by about its largest entry.
A is raised to at least 2^-108 of its largest (float64: 2^-908), and a copy of P to 2^-115 (2^-1000), so that U is zero
only where no path leads. Where U is so small that this counts, it is computed again by logarithms, and backward too:

    before(k) = A(k) sum over j of P(k, j) w(j) / U(j)        counts = sum over steps of A^T (w / U), times P

Definition: `forward` and `backward` of `plain.structured` with the logarithms of whole matrices.
"""

import math
from functools import cached_property

import torch
from torch import Tensor

from ..numbers import FLUSH, exp_shifted, near_one
from ..sets import Sets
from ..structured import Gradients, Structured, Walk
from . import matmul as log_matmul
from . import structured

# the largest entry of a message as it is multiplied, and the least that is not zero
_TOP, _LEAST = {torch.float32: 2.0**100, torch.float64: 2.0**900}, 2.0**-8

# linear matrices are multiplied where they lie if their largest entry is between
_IN_PLACE = 2.0**-20, 2.0**8

# rows of messages that are kept to be multiplied at once
_ROWS = 256


def forward(chain: Structured, keep: bool) -> Walk:
    """The log-partitions, and what `backward` reads: the messages (v, g, m, c), and log U (v - 1, g, m, own)."""
    walking = _Walking(chain, keep)
    walk = structured.forward(chain, walking.passing, keep)
    redone = walking.sets.batched(walking.shares.summed(walking.redone.double()) > 0)
    return walk._replace(kept=(*walk.kept, walking.sums) if keep else (), redone=redone.contiguous())


def backward(chain: Structured, walk: Walk, weight: Tensor, needs: tuple[bool, bool, bool]) -> Gradients:
    """The gradients of `sum(weight * log_norm)`; see `Gradients`."""
    walking = _Walking(chain, False, needs[1])
    walking.sums = walk.kept[1]
    return structured.backward(chain, walking.passing, walk, weight, needs)


class Matrix:
    """Matrices (g or 1, k, n), logarithms or weights, as they are multiplied: where they lie, or a copy.

    Attributes:
        given: the matrices.
        log: whether they are logarithms.
        linear: what is multiplied (g or 1, k, n), of the dtype of the arithmetic.
        shift: the logarithm of what the weights have been divided by (g or 1, 1, 1), float64.
        bound: the largest entry of `linear` or more (g or 1, 1, 1), float64.
        copied: whether the least entries have been raised.
    """

    def __init__(self, given: Tensor, dtype: torch.dtype, log: bool) -> None:
        self.given, self.log = given, log
        top = given.amax((-2, -1), keepdim=True) if given.numel() else given.new_zeros(len(given), 1, 1)
        self.bound, self.linear, low, high = top.double(), given, *_IN_PLACE
        zero = self.bound == 0
        in_place = not log and given.dtype == dtype and (zero | (self.bound >= low) & (self.bound <= high)).all()
        self.copied, self.shift = not in_place, torch.zeros_like(self.bound)
        if in_place:
            return
        finite = self.bound.isfinite()
        if log:
            self.shift = self.bound.masked_fill(~finite, 0.0)
            out, scratch = torch.empty(2, *given.shape, dtype=dtype, device=given.device)
            self.linear = exp_shifted(given, self.shift.to(dtype), out, scratch)
        else:
            exponent = torch.frexp(self.bound).exponent.double().masked_fill(zero | ~finite, 0.0)
            half = (exponent / 2).floor()
            self.linear = given.to(dtype) * torch.exp2(-half).to(dtype) * torch.exp2(half - exponent).to(dtype)
            self.shift = exponent * math.log(2)
        self.linear.masked_fill_((self.linear < FLUSH[dtype]) & (given > (-math.inf if log else 0.0)), FLUSH[dtype])
        self.bound = torch.ones_like(self.bound)

    @cached_property
    def mT(self) -> "Matrix":
        """The transposed matrices."""
        other: Matrix = object.__new__(Matrix)
        other.__dict__.update(self.__dict__, given=self.given.mT, linear=self.linear.mT)
        return other

    @cached_property
    def least(self) -> Tensor:
        """What U has to be to be right to rounding (g or 1, 1, 1), where the largest entry of the message is 1."""
        dtype = self.linear.dtype
        lost = self.bound * (_LEAST / _TOP[dtype]) + FLUSH[dtype]
        return lost * (self.given.shape[-2] / torch.finfo(dtype).eps)

    @cached_property
    def _keeps_zeros(self) -> bool:
        """Whether U is zero only where no path leads."""
        return self.copied or not ((self.linear > 0) & (self.linear < FLUSH[self.linear.dtype])).any()

    def logs(self, columns: Tensor) -> Tensor:
        """The logarithms of some columns (g or 1, k, columns)."""
        given = self.given[..., columns].double()
        return given if self.log else given.log()

    def sums(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """log U (g, m, n) of messages (g, m, k) whose largest logarithm is 0, and where it was computed again."""
        dtype = self.linear.dtype
        top = _TOP[dtype]
        raised = message.exp().clamp_(min=_LEAST / top).mul_(top).masked_fill_(message == -math.inf, 0.0)
        products = _matmul(raised.to(dtype), self.linear)
        # a power of two divides out exactly, a logarithm of it does not
        sums = products.to(torch.float64, copy=True).div_(top).log_().add_(self.shift)
        doubtful = products < self.least * top
        if doubtful.any():
            doubtful &= products > 0 if self._keeps_zeros else (message > -math.inf).any(-1, keepdim=True)
            columns = _columns(doubtful)
            if len(columns):
                again = log_matmul.forward(message, self.logs(columns), torch.float64)[0]
                sums[..., columns] = torch.where(doubtful[..., columns], again, sums[..., columns])
        return sums, doubtful


class _Walking:
    """The steps of a chain: `sums` of all, the sequences `redone` (g, m), `values` (s, g or 1, c, own)."""

    def __init__(self, chain: Structured, keep: bool, counted: bool = False) -> None:
        self.chain, self.sets, self.shares = chain, Sets.of(chain), chain.pattern
        self.values = self.sets.parameter(chain.parameters[0])
        self._ended = structured.ended_before(chain, self.sets)
        g, m, device = self.sets.g, self.sets.m, chain.x.device
        self.redone = torch.zeros(g, m, dtype=torch.bool, device=device)
        shape = (chain.v - 1 if keep else 0, g, m, self.values.shape[-1])
        self.sums = torch.empty(shape, dtype=torch.float64, device=device)
        self._ready: tuple[int, Matrix] | None = None
        self._counts = _Counts(self) if counted else None
        self.passing = structured.Passing(self._forth, self._back, False, self.at, self._gradients)

    def at(self, step: int) -> tuple[int, Matrix]:
        """A step, and the columns that lead into it; one matrix for all is prepared once."""
        # whoever uses the one matrix has a second step
        index = step - 1 if len(self.values) > 1 else 0
        if self._ready is None or self._ready[0] != index:
            given = structured.weights_at(self.values, index + 1, self._ended, self.chain.log_params)
            self._ready = index, Matrix(given, self.chain.dtype, self.chain.log_params)
        return step, self._ready[1]

    def _forth(self, message: Tensor, at: tuple[int, Matrix]) -> Tensor:
        step, matrix = at
        sums, doubtful = matrix.sums(message)
        self.redone |= doubtful.any(-1)
        if len(self.sums):
            self.sums[step - 1] = sums
        joined: Tensor = self.shares.joined(sums)
        return joined

    def _back(self, before: Tensor, weight: Tensor, at: tuple[int, Matrix]) -> tuple[Tensor, list[Tensor]]:
        (step, matrix), message, weight = at, before.exp(), self.shares.own(weight)
        if not weight.numel():
            return self.shares.summed(torch.zeros_like(before)), []
        weight, scale = near_one(weight)
        sums = (self.sums[step - 1] - matrix.shift).exp()
        doubtful = (sums < matrix.least) & (weight != 0)
        quotients = (weight / sums).masked_fill_(doubtful | (weight == 0), 0.0)
        quotients = quotients.masked_fill_(quotients.abs() < FLUSH[self.chain.dtype], 0.0).to(self.chain.dtype)
        earlier = _matmul(quotients, matrix.linear.mT).double().mul_(message)
        if self._counts is not None:
            self._counts.add(step, matrix, message * scale, quotients)
        if doubtful.any():
            columns = _columns(doubtful)
            lost = torch.where(doubtful, weight, 0.0)[..., columns]
            need = self._counts is not None
            more, counts = log_matmul.backward(lost, before, matrix.logs(columns), True, need, torch.float64)
            assert more is not None
            earlier += more
            if self._counts is not None and counts is not None:
                self._counts.add_exact(matrix, columns, counts * scale)
        if self._counts is not None and len(self.values) > 1:
            self._counts.end(step, matrix)
        return self.shares.summed(earlier * scale), []

    def _gradients(self) -> list[Tensor]:
        return [] if self._counts is None else [self._counts.gradient()]


class _Counts:
    """The expected counts of the entries of a process's columns, and the gradient (s, g or 1, c, own) of them."""

    def __init__(self, walking: _Walking) -> None:
        self._walking, self._rows = walking, list[tuple[Tensor, Tensor]]()
        self._exact: Tensor | None = None
        self._begun = self._ended = False
        values, dtype = walking.values, walking.chain.dtype
        self._total = torch.empty(values.shape, dtype=dtype, device=values.device)

    def add(self, step: int, matrix: Matrix, messages: Tensor, quotients: Tensor) -> None:
        """Add the products of messages (g, m, c) in front of a step with quotients (g, m, own) behind it."""
        messages = messages.masked_fill_(messages.abs() < FLUSH[quotients.dtype], 0.0).to(quotients.dtype)
        self._rows.append((messages, quotients))
        if sum(one.shape[-2] for one, _ in self._rows) >= _ROWS:
            self._multiply(step)

    def add_exact(self, matrix: Matrix, columns: Tensor, counts: Tensor) -> None:
        """Add counts (g or 1, c, columns), in float64, of some columns."""
        if self._exact is None:
            self._exact = torch.zeros(matrix.given.shape, dtype=torch.float64, device=counts.device)
        self._exact[..., columns] += counts

    def end(self, step: int, matrix: Matrix) -> None:
        """Make the gradient of all that has been added, which is that of one matrix."""
        self._multiply(step)
        chain, into, self._begun, self._ended = self._walking.chain, self._into(step), False, True
        linear = not (chain.log_params or chain.by_log)
        if not linear:
            into.mul_(matrix.linear)
        elif matrix.copied:
            into.mul_((-matrix.shift).exp())
        if self._exact is not None:
            exact = self._exact / matrix.given.double() if linear else self._exact
            into.add_(exact.masked_fill(self._exact == 0, 0.0))
            self._exact = None
        if linear and not matrix.given.amin() > 0:
            into.masked_fill_(matrix.given == 0, 0.0)

    def gradient(self) -> Tensor:
        """The gradient of the parameter, in its shape."""
        walking = self._walking
        if self._rows or self._begun:
            self.end(*walking.at(1))
        if not self._ended:
            self._total.zero_()
        return walking.sets.as_parameter(self._total, walking.chain.parameters[0].shape)

    def _into(self, step: int) -> Tensor:
        return self._total[step - 1 if len(self._total) > 1 else 0]

    def _multiply(self, step: int) -> None:
        """Add the products of the rows that wait."""
        if not self._rows:
            return
        messages, quotients = (torch.cat(each, -2) for each in zip(*self._rows, strict=True))
        into, beta = self._into(step), int(self._begun)
        if len(into) == 1:
            into[0].addmm_(messages[0].mT, quotients[0], beta=beta)
        else:
            into.baddbmm_(messages.mT, quotients, beta=beta)
        self._rows, self._begun = [], True


def _columns(marked: Tensor) -> Tensor:
    """The indices along the last axis at which something is marked."""
    return marked.flatten(0, -2).any(0).nonzero()[:, 0]


def _matmul(rows: Tensor, matrices: Tensor) -> Tensor:
    """The products of (g, m, k) and (g or 1, k, n)."""
    return (rows[0] @ matrices[0])[None] if len(rows) == 1 else rows @ matrices
