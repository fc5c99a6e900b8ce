r"""The log-partition whose forward messages are kept at a few steps only, and found again in the backward pass.

The chain is cut into segments, each of which begins with the step that the one before it ends with. Kept is, for the
first step s of each, what arrives there, `u_s = log(a_{s-1} P_s)`: the last forward message of the segment before, with
0 in place of x_s, so that nothing which the emission hides is lost. Less its log-sum, in float64. So a segment is a
chain of its own, with `u_s + x_s` as its first log-potentials; the log-sums that were taken out add up to the result.

Backward the last segment comes first. With the posterior g_s of its first step, the segment before it ends with
`log g_s - u_s` in place of x_s: then its own last forward message times that is g_s, and its posteriors and expected
counts are those of the whole chain.

All is computed where p0 lies. Of operands that lie on the host a segment at a time is moved there, and their gradients
are moved back.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..arguments import check_lengths
from ..kernels.numbers import exact_sum, finite
from ..operands import chain_of
from ..progress import bar
from ..rescues import report_chains
from ..schedules.transfers import Returns, pieces
from . import chain as chain_functions
from . import chain_operators as operators
from .operator import call


def log_norm(
    x: Tensor,
    bulk: Tensor,
    p0: Tensor,
    lengths: Tensor | None,
    log_params: bool,
    every: int,
    keep: bool = True,
    progress: bool = False,
) -> Tensor:
    """The log-partition [*B] in float64, with a checkpoint after so many steps. Arguments have been checked.

    `keep`: the checkpoints, for a backward pass. `progress`: show a bar over the segments of either pass.
    """
    if torch.compiler.is_compiling():
        raise NotImplementedError("memory_budget: expected None inside torch.compile")
    if x.numel() == 0:  # nothing to cut
        return chain_functions.log_norm(x.to(p0.device), bulk.to(p0.device), p0, lengths, log_params)
    found: Tensor = call(_LogNorm, x, bulk, p0, lengths, log_params, every, progress, keep)
    return found


class _LogNorm(torch.autograd.Function):
    """x, bulk, p0, lengths, log_params, every, progress, keep -> the log-partition [*B]."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *arguments, keep = args
        x, bulk, p0, lengths, *ctx.options = arguments
        with kernels.arithmetic_on(p0):
            found, checkpoints = _Segments(*arguments).forward(keep)
        ctx.save_for_backward(x, bulk, p0, lengths, checkpoints)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = call(_Gradient, grad, *ctx.saved_tensors, *ctx.options, ctx.needs_input_grad[:3])
        return (*found, *(None,) * 5)


class _Gradient(torch.autograd.Function):
    """grad, x, bulk, p0, lengths, checkpoints, log_params, every, progress, needs -> gradients, None if not needed."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor | None, ...]:
        grad, x, bulk, p0, lengths, checkpoints, *options, needs = args
        with kernels.arithmetic_on(grad):
            return _Segments(x, bulk, p0, lengths, *options).backward(grad, checkpoints, needs)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor | None, ...]:
        raise RuntimeError("memory_budget: expected one derivative, got a second; pass None for two")


@dataclass
class _Segment:
    """The chain of the steps `first` to `last`, both included; `there` [*B], None where all are.

    `shift`, [*B] or a number, has been taken out of the log-potentials of the first.
    """

    first: int
    last: int
    x: Tensor
    bulk: Tensor
    p0: Tensor
    lengths: Tensor | None
    log_params: bool
    shift: Tensor | float
    there: Tensor | None

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return self.x, self.bulk, self.p0, self.lengths

    def end_with(self, potential: Tensor | float) -> None:
        """Put that in the place of the last log-potentials, which are behind the end of a sequence that ends before."""
        self.x[..., -1, :] = potential


class _Segments:
    """A chain's segments of `every` transitions each, the last one of as many as are left."""

    def __init__(
        self, x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, every: int, progress: bool
    ) -> None:
        self._operands, self._lengths, self._log_params, self._progress = (x, bulk, p0), lengths, log_params, progress
        v, self._device, self._kernels = x.shape[-2], p0.device, kernels.chain_kernels(p0)
        if lengths is not None and not kernels.on_gpu(p0):
            check_lengths(lengths, v)
            v = int(lengths.max())
        self._v = v
        self._ranges = [(first, min(first + every, v - 1)) for first in range(0, max(1, v - 1), every)]
        # no state is forbidden, and none is preferred
        self._free = p0.new_full(p0.shape[-1:], 0.0 if log_params else 1.0)

    def forward(self, keep: bool) -> tuple[Tensor, Tensor]:
        """The log-partition [*B] in float64, and the checkpoints (segments - 1, *B, c): one alone if not to `keep`."""
        x, _, p0 = self._operands
        batch, others = x.shape[:-2], len(self._ranges) - 1
        checkpoints = p0.new_empty((others if keep else min(1, others), *batch, x.shape[-1]), dtype=torch.float64)
        sums = p0.new_empty((2, others + 1, *batch), dtype=torch.float64)
        redone: list[Tensor] = []
        for i, part, matrices in self._walk(range(others + 1), "forward"):
            segment = self._segment(i, part, matrices, checkpoints)
            more = i < others
            if more:
                segment.end_with(0.0)
            layout, chain = chain_of(*segment.operands, self._log_params)
            norm, messages, _, again = self._kernels.forward(chain, keep=more, steps=segment.x.shape[-2])
            sums[0, i], sums[1, i] = layout.batched(norm), segment.shift
            if segment.there is not None:
                sums[:, i].masked_fill_(~segment.there, 0.0)
            if more:
                last = layout.states(_logs(messages[-1], again).view(*chain.lead, chain.c))
                checkpoints[i % len(checkpoints)] = last
            redone = [again if not redone else redone[0] + again]
        report_chains(redone[0])
        found = torch.stack(exact_sum(sums.flatten(0, 1))).sum(0)
        if self._lengths is not None:  # those of a GPU have not been looked at
            found.masked_fill_((self._lengths < 1) | (self._lengths > self._v), math.nan)
        return found, checkpoints

    def backward(
        self, grad: Tensor, checkpoints: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of `sum(grad * log_norm)`, of those that are needed."""
        found = _Gradients(*self._operands, needs, max(last - first for first, last in self._ranges))
        ahead: Tensor | None = None
        for i, part, matrices in self._walk(range(len(self._ranges))[::-1], "backward"):
            segment = self._segment(i, part, matrices, checkpoints)
            if ahead is not None:
                segment.end_with(ahead)
            posterior = self._add(segment, grad, found, i > 0)
            if i > 0:
                ahead = torch.where(posterior == 0, -math.inf, posterior.log() - checkpoints[i - 1])
        return found.all()

    def _add(self, segment: _Segment, grad: Tensor, found: "_Gradients", more: bool) -> Tensor:
        """Write a segment's gradients into those `found`; the posterior of its first step over any factor [*B, c]."""
        layout, chain = chain_of(*segment.operands, self._log_params)
        norm, *kept = self._kernels.forward(chain, keep=True, steps=segment.x.shape[-2])
        want_x, want_bulk, want_p0 = found.needs
        wanted = (want_x or more, want_bulk and segment.last > segment.first, want_p0 and not more)
        gradients = operators.log_norm_backward(
            grad, *segment.operands, layout.batched(norm), *kept, self._log_params, False, *wanted
        )
        found.add(segment.first, *(value if want else None for value, want in zip(gradients, wanted, strict=True)))
        posterior: Tensor = gradients[0][..., 0, :].abs() if more else gradients[0]
        return posterior

    def _walk(self, order: Sequence[int], title: str) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The numbers of segments, their log-potentials and their matrices; valid until the next is asked for."""
        x, bulk, _ = self._operands
        parts = pieces(x, -2, [(first, last + 1) for first, last in map(self._ranges.__getitem__, order)], self._device)
        if bulk.shape[-3] == 1:
            # whose gradient is rounded once
            matrices: Iterator[Tensor] = repeat(bulk.to(self._device, torch.float64))
        else:
            matrices = pieces(bulk, -3, [self._ranges[i] for i in order], self._device)
        return zip(bar(order, title, self._progress), parts, matrices, strict=False)

    def _segment(self, i: int, part: Tensor, matrices: Tensor, checkpoints: Tensor) -> _Segment:
        first, last = self._ranges[i]
        part = part.to(torch.float64, copy=True)
        p0, there, lengths = self._operands[2], None, None
        shift: Tensor | float = 0.0
        if self._lengths is not None:
            there = self._lengths > first
            lengths = (self._lengths - first).clamp(1, last + 1 - first)
        if i > 0:
            # large log-potentials would take the message's last digits
            shift = finite(part[..., 0, :].amax(-1))
            start = part[..., 0, :].sub_(shift[..., None]).add_(checkpoints[(i - 1) % len(checkpoints)])
            if there is not None:
                start.masked_fill_(~there[..., None], -math.inf)
            p0 = self._free
        return _Segment(first, last, part, matrices, p0, lengths, self._log_params, shift, there)


class _Gradients:
    """The gradients of a chain, found `every` transitions at a time; each lies where its operand does."""

    def __init__(self, x: Tensor, bulk: Tensor, p0: Tensor, needs: tuple[bool, bool, bool], every: int) -> None:
        self.needs = needs
        self._found: list[Tensor | None] = [
            torch.zeros_like(operand, memory_format=torch.contiguous_format) if need else None
            for operand, need in zip((x, bulk, p0), needs, strict=True)
        ]
        into_x, into_bulk, self._into_p0 = self._found
        self._returns_x = None if into_x is None else Returns(into_x, -2, every + 1, p0.device)
        self._returns_bulk = None if into_bulk is None else Returns(into_bulk, -3, max(every, 1), p0.device)
        # what all segments add to is rounded once
        one = needs[1] and bulk.shape[-3] == 1
        self._sum = torch.zeros(bulk.shape, dtype=torch.float64, device=p0.device) if one else None

    def add(self, first: int, x: Tensor | None, bulk: Tensor | None, p0: Tensor | None) -> None:
        """Those of the segment that begins with a step."""
        if x is not None and self._returns_x is not None:
            self._returns_x.put(first, x)
        if bulk is not None and self._sum is not None:
            self._sum += bulk
        elif bulk is not None and self._returns_bulk is not None:
            self._returns_bulk.put(first, bulk)
        if p0 is not None and self._into_p0 is not None:
            self._into_p0.copy_(p0)

    def all(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of x, bulk and p0."""
        if self._sum is not None and self._returns_bulk is not None:
            self._returns_bulk.put(0, self._sum)
        for returns in (self._returns_x, self._returns_bulk):
            if returns is not None:
                returns.finish()
        return self._found[0], self._found[1], self._found[2]


def _logs(message: Tensor, redone: Tensor) -> Tensor:
    """Logarithms (g, m, c) of a message less that of its sum, whatever it has been kept as."""
    logs = message - finite(torch.logsumexp(message, -1, keepdim=True))
    if redone.dtype != torch.bool:
        return logs
    # a CPU keeps linear messages but for the sequences redone
    total = message.sum(-1, keepdim=True)
    return torch.where(redone[..., None], logs, (message / total.masked_fill_(total == 0, 1.0)).log())
