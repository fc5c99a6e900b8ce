"""Chains of dense matrices of which each process holds some columns: linear products, whose parts are joined.

A message a, whose largest logarithm is 0, passes as `U = A P` with A = exp(a) and P divided by about its largest entry.
A is raised to at least 2^-108 of its largest (float64: 2^-908), and a copy of P to 2^-115 (2^-1000), so that U is zero
only where no path leads. Where U is so small that this counts, it is computed again by logarithms, and backward too:

    before(k) = A(k) sum over j of P(k, j) w(j) / U(j)        counts = sum over steps of A^T (w / U), times P

Definition: `forward` and `backward` of `plain.structured` with the logarithms of whole matrices.
"""

import math
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..numbers import FLUSH, exp_shifted, near_one
from ..sets import Sets
from ..structured import Gradients, Shares, Structured, Walk
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
    redone = walking.sets.batched(chain.pattern.summed(walking.redone.double()) > 0)
    return walk._replace(kept=(*walk.kept, walking.sums) if keep else (), redone=redone.contiguous())


def backward(chain: Structured, walk: Walk, weight: Tensor, needs: tuple[bool, bool, bool]) -> Gradients:
    """The gradients of `sum(weight * log_norm)`; see `Gradients`."""
    walking = _Walking(chain, False, needs[1])
    walking.sums = walk.kept[1]
    return structured.backward(chain, walking.passing, walk, weight, needs)


class _Matrix(NamedTuple):
    """The columns that lead into a step.

    Attributes:
        step: the number of the step.
        given: the weights as they are given (g or 1, c, own).
        linear: those that are multiplied (g or 1, c, own), of the dtype of the arithmetic.
        shift: the logarithm of what the weights have been divided by (g or 1, 1, 1), float64.
        least: what U has to be to be right to rounding (g or 1, 1, 1), where the largest entry of the message is 1.
        copied: whether the least entries have been raised.
    """

    step: int
    given: Tensor
    linear: Tensor
    shift: Tensor
    least: Tensor
    copied: bool


class _Walking:
    """The steps of a chain: `sums` of all, the sequences `redone` (g, m), `values` (s, g or 1, c, own)."""

    def __init__(self, chain: Structured, keep: bool, counted: bool = False) -> None:
        self.chain, self.sets, self._counted = chain, Sets.of(chain), counted
        self._shares: Shares = chain.pattern
        self.values = self.sets.parameter(chain.parameters[0])
        self._ended = structured.ended_before(chain, self.sets)
        g, m, device = self.sets.g, self.sets.m, chain.x.device
        self.redone = torch.zeros(g, m, dtype=torch.bool, device=device)
        shape = (chain.v - 1 if keep else 0, g, m, self.values.shape[-1])
        self.sums = torch.empty(shape, dtype=torch.float64, device=device)
        self.last: _Matrix | None = None
        self.counts = _Counts(self)
        self.passing = structured.Passing(self._forth, self._back, False, self.at, self.counts.gradients)

    def at(self, step: int) -> _Matrix:
        """The columns that lead into a step; one matrix for all is prepared once."""
        if self.last is None or len(self.values) > 1:
            # whoever uses the one matrix has a second step
            first = step if len(self.values) > 1 else 1
            given = structured.weights_at(self.values, first, self._ended, self.chain.log_params)
            self.last = _prepared(step, given, self.chain)
        return self.last._replace(step=step)

    def logs(self, matrix: _Matrix, columns: Tensor) -> Tensor:
        """The logarithms of some columns (g or 1, c, columns)."""
        given = matrix.given[..., columns].double()
        return given if self.chain.log_params else given.log()

    def _forth(self, message: Tensor, matrix: _Matrix) -> Tensor:
        top = _TOP[self.chain.dtype]
        raised = message.exp().clamp_(min=_LEAST / top).mul_(top).masked_fill_(message == -math.inf, 0.0)
        products = _matmul(raised.to(self.chain.dtype), matrix.linear)
        sums = products.double().log_().sub_(math.log(top)).add_(matrix.shift)
        doubtful = products < matrix.least * top
        if doubtful.any():
            doubtful &= (message > -math.inf).any(-1, keepdim=True)
            if matrix.copied or not self._has_tiny:
                doubtful &= products > 0
            columns = doubtful.flatten(0, -2).any(0).nonzero()[:, 0]
            if len(columns):
                again = log_matmul.forward(message, self.logs(matrix, columns), torch.float64)[0]
                sums[..., columns] = torch.where(doubtful[..., columns], again, sums[..., columns])
                self.redone |= doubtful.any(-1)
        if len(self.sums):
            self.sums[matrix.step - 1] = sums
        return self._shares.joined(sums)

    @cached_property
    def _has_tiny(self) -> bool:
        """Whether products with entries of the given matrices may be lost."""
        weights = self.values
        return bool(((weights > 0) & (weights < FLUSH[self.chain.dtype])).any())

    def _back(self, before: Tensor, weight: Tensor, matrix: _Matrix) -> tuple[Tensor, list[Tensor]]:
        message, weight = before.exp(), self._shares.own(weight)
        earlier = torch.zeros_like(before)
        if weight.numel():
            weight, scale = near_one(weight)
            sums = (self.sums[matrix.step - 1] - matrix.shift).exp()
            doubtful = (sums < matrix.least) & (weight != 0)
            quotients = (weight / sums).masked_fill_(doubtful | (weight == 0), 0.0)
            quotients.masked_fill_(quotients.abs() < FLUSH[self.chain.dtype], 0.0)
            quotients = quotients.to(self.chain.dtype)
            earlier = _matmul(quotients, matrix.linear.mT).double().mul_(message)
            if self._counted:
                self.counts.add(matrix, message * scale, quotients)
            if doubtful.any():
                columns = doubtful.flatten(0, -2).any(0).nonzero()[:, 0]
                lost = torch.where(doubtful, weight, 0.0)[..., columns] * scale
                logs = self.logs(matrix, columns)
                more, counts = log_matmul.backward(lost, before, logs, True, self._counted, torch.float64)
                earlier += more / scale
                if counts is not None:
                    self.counts.add_exact(matrix, columns, counts)
            earlier *= scale
        if self._counted and len(self.values) > 1:
            self.counts.end(matrix)
        return self._shares.summed(earlier), []


class _Counts:
    """The expected counts of the entries of a process's columns, and what the gradients are of them."""

    def __init__(self, walking: "_Walking") -> None:
        self._walking, self._rows = walking, list[tuple[Tensor, Tensor]]()
        self._exact: Tensor | None = None
        self._begun = False

    @cached_property
    def _total(self) -> Tensor:
        """The gradient (s, g or 1, c, own)."""
        values = self._walking.values
        return torch.empty(values.shape, dtype=self._walking.chain.dtype, device=values.device)

    def add(self, matrix: _Matrix, messages: Tensor, quotients: Tensor) -> None:
        """Add the products of messages (g, m, c) in front of a step with quotients (g, m, own) behind it."""
        messages = messages.masked_fill(messages.abs() < FLUSH[quotients.dtype], 0.0).to(quotients.dtype)
        self._rows.append((messages, quotients))
        if len(self._total) == 1 and sum(one.shape[-2] for one, _ in self._rows) >= _ROWS:
            self._multiply(matrix)

    def add_exact(self, matrix: _Matrix, columns: Tensor, counts: Tensor) -> None:
        """Add counts (g or 1, c, columns), in float64, of some columns."""
        if self._exact is None:
            self._exact = torch.zeros(matrix.given.shape, dtype=torch.float64, device=counts.device)
        self._exact[..., columns] += counts

    def end(self, matrix: _Matrix) -> None:
        """Make the gradient of all that has been added, which is that of one matrix."""
        if self._rows:
            self._multiply(matrix)
        chain, into = self._walking.chain, self._into(matrix)
        linear = not (chain.log_params or chain.by_log)
        if not linear:
            into.mul_(matrix.linear)
        elif matrix.copied:
            into.mul_((-matrix.shift).exp())
        if self._exact is not None:
            exact = self._exact / matrix.given.double() if linear else self._exact
            into.add_(exact.masked_fill_(self._exact == 0, 0.0))
            self._exact = None
        if linear and into.numel() and not matrix.given.amin() > 0:
            into.masked_fill_(matrix.given == 0, 0.0)
        self._begun = False

    def gradients(self) -> list[Tensor]:
        """The gradient of the parameter, in its shape."""
        walking = self._walking
        if walking.last is None:
            self._total.zero_()
        elif len(self._total) == 1:
            self.end(walking.last)
        return [walking.sets.as_parameter(self._total, walking.chain.parameters[0].shape)]

    def _into(self, matrix: _Matrix) -> Tensor:
        return self._total[matrix.step - 1 if len(self._total) > 1 else 0]

    def _multiply(self, matrix: _Matrix) -> None:
        """Add the products of the rows that wait."""
        messages, quotients = (torch.cat(each, -2) for each in zip(*self._rows, strict=True))
        into, beta = self._into(matrix), int(self._begun)
        if len(into) == 1:
            into[0].addmm_(messages[0].mT, quotients[0], beta=beta)
        else:
            into.baddbmm_(messages.mT, quotients, beta=beta)
        self._rows, self._begun = [], True


def _matmul(rows: Tensor, matrices: Tensor) -> Tensor:
    """The products of (g, m, k) and (g or 1, k, n)."""
    return (rows[0] @ matrices[0])[None] if len(rows) == 1 else rows @ matrices


def _prepared(step: int, given: Tensor, chain: Structured) -> _Matrix:
    """The columns of a step as they are multiplied: where they lie, or a copy."""
    dtype, c = chain.dtype, chain.c
    if given.numel():
        top = given.amax((-2, -1), keepdim=True).double()
    else:
        top = torch.zeros(len(given), 1, 1, dtype=torch.float64, device=given.device)
    low, high = _IN_PLACE
    bound, copied, linear, shift = top, False, given, torch.zeros_like(top)
    if chain.log_params:
        shift = top.masked_fill(~top.isfinite(), 0.0)
        linear, scratch = torch.empty(2, *given.shape, dtype=dtype, device=given.device)
        linear = exp_shifted(given, shift.to(dtype), linear, scratch)
        copied = True
    elif given.dtype != dtype or not ((top == 0) | (top >= low) & (top <= high)).all():
        exponent = torch.frexp(top).exponent.double().masked_fill((top == 0) | ~top.isfinite(), 0.0)
        half = (exponent / 2).floor()
        linear = given.to(dtype) * torch.exp2(-half).to(dtype) * torch.exp2(half - exponent).to(dtype)
        shift, copied = exponent * math.log(2), True
    if copied:
        zero = -math.inf if chain.log_params else 0.0
        linear.masked_fill_((linear < FLUSH[dtype]) & (given > zero), FLUSH[dtype])
        bound = torch.ones_like(top)
    least = (bound * (_LEAST / _TOP[dtype]) + FLUSH[dtype]) * (c / torch.finfo(dtype).eps)
    return _Matrix(step, given, linear, shift, least, copied)
