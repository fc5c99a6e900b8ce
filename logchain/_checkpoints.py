r"""The log-partition whose forward messages are kept at a few steps only, and found again in the backward pass.

The chain is cut into segments, each of which begins with the step that the one before it ends with. Kept is, for the
first step s of each, what arrives there, `u_s = log(a_{s-1} P_s)`: the last forward message of the segment before, with
0 in place of x_s, so that nothing which the emission hides is lost. Less its log-sum, in float64. So a segment is a
chain of its own, with `u_s + x_s` as its first log-potentials; the log-sums that were taken out add up to the result.

Backward the last segment comes first. With the posterior g_s of its first step, the segment before it ends with
`log g_s - u_s` in place of x_s: then its own last forward message times that is g_s, and its posteriors and expected
counts are those of the whole chain.
"""

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import _chain_operators as operators
from . import _device
from ._arguments import check_lengths
from ._chain_operators import arithmetic_dtype, chain_of
from ._layout import Layout
from ._rescues import report_chains
from .kernels.exponentials import finite
from .kernels.summation import exact_sum

# bytes of the float64 in which segments are computed
_WIDE = 8

# values by state, and beside the states, that a step of a segment holds: potentials, messages and gradients; scales
_STATES, _SCALES = 3, 9

# entries of x that the kernels take at a time, in linear space and in log space, and matrices' entries there
_LINEAR_BLOCK, _LOG_BLOCK, _HELD = 2**18, 2**15, 2**18


# a segment of so many steps hides what a segment costs, and the views of its steps are few
_LONG = 2**10


def log_norm(x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, every: int) -> Tensor:
    """The log-partition [*B] in float64, with a checkpoint after so many steps. Arguments have been checked."""
    if torch.compiler.is_compiling():
        raise NotImplementedError("memory_budget: expected None inside torch.compile")
    found: Tensor = _call(_LogNorm, x, bulk, p0, lengths, log_params, every)
    return found


def every_within(budget: int, x: Tensor, bulk: Tensor, p0: Tensor) -> int | None:
    """After how many steps a checkpoint is to be kept; None for the messages of all steps, where they fit.

    Raises ValueError, with the smallest budget, where nothing fits.
    """
    size = Sizes.of(x, bulk, p0)
    if budget >= size.all_messages:
        return None
    root = math.isqrt(size.v) + 1
    most = max(1, size.v - 1)
    choices = {min(k, most) for k in (*range(1, root + 1), _LONG)} | {-(-most // k) for k in range(1, root + 1)}
    bytes_of = {every: size.checkpointed(every) for every in choices}
    fitting = [every for every, needed in bytes_of.items() if needed <= budget]
    if not fitting:
        least = min(size.all_messages, *bytes_of.values())
        raise ValueError(
            f"memory_budget: expected at least {least} bytes to go with x {list(x.shape)} and bulk "
            f"{list(bulk.shape)}, got {budget}"
        )
    short = [every for every in fitting if every <= _LONG]
    return max(short) if short else min(fitting)


@dataclass(frozen=True)
class Sizes:
    """What decides how many bytes messages take: `g` times `m` sequences of v steps and c states."""

    v: int
    g: int
    m: int
    c: int
    item: int
    own: bool
    counts: int

    @classmethod
    def of(cls, x: Tensor, bulk: Tensor, p0: Tensor) -> "Sizes":
        """Those of operands."""
        g, m = Layout.of(x, bulk).grid
        v, c = x.shape[-2:]
        own = bulk.shape[-3] > 1
        # gradients of one step's matrices before they are rounded to bulk's dtype, and those in it
        counts = _WIDE + bulk.element_size() if own and bulk.requires_grad else 0
        return cls(v, g, m, c, arithmetic_dtype(x, bulk, p0).itemsize, own, counts)

    @property
    def all_messages(self) -> int:
        """Bytes of the messages and scales of all steps."""
        return self.v * self.g * self.m * (self.c + 1) * self.item

    def checkpointed(self, every: int) -> int:
        """Bytes of the checkpoints, and of one segment with all that is computed from it, at the worst."""
        sequences, steps = self.g * self.m, every + 1
        segments = max(1, -(-(self.v - 1) // every))
        kept = segments * sequences * (self.c + 3)
        segment = steps * sequences * (_STATES * self.c + _SCALES)
        # a sparse chain's few transitions from each state are gathered in log space, see `kernels.log_steps`
        few = 4 + self.c // 64
        entries, step = steps * sequences * self.c, sequences * self.c
        linear = 3 * min(entries, max(_LINEAR_BLOCK, step))
        logs = (8 + (8 if self.own else 4) * few) * min(entries, max(_LOG_BLOCK, step))
        matrices = 4 * self.g * self.c**2 + 6 * min(self.g * self.c**2, max(_HELD, self.c**2))
        return _WIDE * (kept + segment + max(linear, logs) + matrices) + steps * self.g * self.c**2 * self.counts


class _LogNorm(torch.autograd.Function):
    """x, bulk, p0, lengths, log_params, every -> the log-partition, and the checkpoints (segments - 1, *B, c)."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x, bulk, p0, lengths, log_params, every = args
        segments = _Segments(x, bulk, p0, lengths, log_params, every)
        with _device.arithmetic_on(x):
            found, checkpoints = segments.forward()
        ctx.save_for_backward(x, bulk, p0, lengths, checkpoints)
        ctx.options = log_params, every
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = _call(_Gradient, grad, *ctx.saved_tensors, *ctx.options, ctx.needs_input_grad[:3])
        return (*found, None, None, None)


class _Gradient(torch.autograd.Function):
    """grad, x, bulk, p0, lengths, checkpoints, log_params, every, needs -> gradients, None if not needed."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor | None, ...]:
        grad, *operands, checkpoints, log_params, every, needs = args
        with _device.arithmetic_on(grad):
            x, bulk, p0, lengths = operands
            return _Segments(x, bulk, p0, lengths, log_params, every).backward(grad, checkpoints, needs)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor | None, ...]:
        raise RuntimeError("memory_budget: expected one derivative, got a second; pass None for two")


def _call(function: Any, *args: Any) -> Any:
    return function.apply(*args)


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
        self, x: Tensor, bulk: Tensor, p0: Tensor, lengths: Tensor | None, log_params: bool, every: int
    ) -> None:
        self._operands, self._lengths, self._log_params, self._every = (x, bulk, p0), lengths, log_params, every
        self._v = x.shape[-2]
        if lengths is not None and not _device.on_gpu(x):
            check_lengths(lengths, self._v)
            self._v = int(lengths.max())
        self._starts = range(0, max(1, self._v - 1), every)
        # no state is forbidden, and none is preferred
        self._free = p0.new_full(p0.shape[-1:], 0.0 if log_params else 1.0)

    def forward(self) -> tuple[Tensor, Tensor]:
        """The log-partition [*B] in float64, and the checkpoints (segments - 1, *B, c)."""
        x, batch = self._operands[0], self._operands[0].shape[:-2]
        checkpoints = x.new_empty((len(self._starts) - 1, *batch, x.shape[-1]), dtype=torch.float64)
        sums = x.new_empty((2, len(self._starts), *batch), dtype=torch.float64)
        redone: list[Tensor] = []
        for i in range(len(self._starts)):
            segment = self._segment(i, checkpoints)
            more = i < len(checkpoints)
            if more:
                segment.end_with(0.0)
            layout, chain = chain_of(*segment.operands, self._log_params)
            norm, messages, _, again = self._kernels.forward(chain, keep=more, steps=segment.x.shape[-2])
            sums[0, i], sums[1, i] = layout.batched(norm), segment.shift
            if segment.there is not None:
                sums[:, i].masked_fill_(~segment.there, 0.0)
            if more:
                checkpoints[i] = layout.states(_logs(messages[-1], again).view(*chain.lead, chain.c))
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
        x, bulk, p0 = self._operands
        one = bulk.shape[-3] == 1
        found = [
            torch.zeros_like(operand, dtype=dtype, memory_format=torch.contiguous_format) if need else None
            # what all segments add to is rounded once
            for operand, need, dtype in zip(
                (x, bulk, p0), needs, (None, torch.float64 if one else None, None), strict=True
            )
        ]
        ahead: Tensor | None = None
        for i in reversed(range(len(self._starts))):
            segment = self._segment(i, checkpoints)
            if ahead is not None:
                segment.end_with(ahead)
            posterior = self._add(segment, grad, found, i > 0)
            if i > 0:
                ahead = torch.where(posterior == 0, -math.inf, posterior.log() - checkpoints[i - 1])
        return found[0], None if found[1] is None else found[1].to(bulk.dtype), found[2]

    def _add(self, segment: _Segment, grad: Tensor, found: list[Tensor | None], more: bool) -> Tensor:
        """Write a segment's gradients into those `found`; the posterior of its first step over any factor [*B, c]."""
        layout, chain = chain_of(*segment.operands, self._log_params)
        norm, *kept = self._kernels.forward(chain, keep=True, steps=segment.x.shape[-2])
        first, last = segment.first, segment.last
        into_x, into_bulk, into_p0 = found
        wanted = (into_x is not None or more, into_bulk is not None and last > first, into_p0 is not None and not more)
        gradients = operators.log_norm_backward(
            grad, *segment.operands, layout.batched(norm), *kept, self._log_params, False, *wanted
        )
        if into_x is not None:
            into_x[..., first : last + 1, :] = gradients[0]
        if into_bulk is not None and wanted[1]:
            into = into_bulk if into_bulk.shape[-3] == 1 else into_bulk[..., first:last, :, :]
            into += gradients[1]
        if into_p0 is not None and wanted[2]:
            into_p0.copy_(gradients[2])
        posterior: Tensor = gradients[0][..., 0, :].abs() if more else gradients[0]
        return posterior

    @property
    def _kernels(self) -> ModuleType:
        return _device.chain_kernels(self._operands[0])

    def _segment(self, i: int, checkpoints: Tensor) -> _Segment:
        x, bulk, p0 = self._operands
        first = self._starts[i]
        last = min(first + self._every, self._v - 1)
        part = x[..., first : last + 1, :].to(torch.float64, copy=True)
        there = lengths = None
        shift: Tensor | float = 0.0
        if self._lengths is not None:
            there = self._lengths > first
            lengths = (self._lengths - first).clamp(1, last + 1 - first)
        if i > 0:
            # large log-potentials would take the message's last digits
            shift = finite(part[..., 0, :].amax(-1))
            start = part[..., 0, :].sub_(shift[..., None]).add_(checkpoints[i - 1])
            if there is not None:
                start.masked_fill_(~there[..., None], -math.inf)
            p0 = self._free
        matrices = bulk if bulk.shape[-3] == 1 else bulk[..., first:last, :, :]
        return _Segment(first, last, part, matrices, p0, lengths, self._log_params, shift, there)


def _logs(message: Tensor, redone: Tensor) -> Tensor:
    """Logarithms (g, m, c) of a message less that of its sum, whatever it has been kept as."""
    if redone.dtype == torch.bool:  # a CPU keeps linear messages but for the sequences redone
        message = torch.where(redone[..., None], message, message.log())
    return message - finite(torch.logsumexp(message, -1, keepdim=True))
