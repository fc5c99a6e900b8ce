"""A batch of chains in the layout of the recursions: steps first, then batch axes, then states.

Sequences that share their transition matrices are a set. The batch is g sets of m sequences each, so that one step of a
recursion is one batched product [g, m, c] x [g, c, c] for c states. Batch axes along which a parameter has several
values come first. All tensors are views of what the caller passed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels

# multiply-adds for which a CPU wakes another thread, and states of a message that its loops keep in registers
WORTH_A_THREAD, FEW_STATES = 2**20, 16


class Layout(NamedTuple):
    """The batch axes in the order of sets and members.

    Attributes:
        batch: the sizes of the batch axes.
        set_axes: the axes of the batch that tell sets apart.
        packed: whether the sequences are packed, of one batch axis: x and matrices are rows, which lie in place.
    """

    batch: tuple[int, ...]
    set_axes: tuple[int, ...]
    packed: bool = False

    @classmethod
    def of(cls, x: Tensor, bulk: Tensor, starts: Tensor | None = None) -> "Layout":
        """The layout of x [*B, v, c] and bulk [*B or ones, s, c, c], of which leading axes may be missing.

        `starts`: see `Chain`.
        """
        if starts is not None:
            return cls((len(starts),), (0,) if len(bulk) > 1 else (), packed=True)
        return cls.of_parameters(x.shape[:-2], [bulk[(None,) * (x.dim() + 1 - bulk.dim())]])

    @classmethod
    def of_parameters(cls, batch: Sequence[int], parameters: Sequence[Tensor]) -> "Layout":
        """The layout of a batch *B, of parameters [*B or ones, ...]."""
        axes = range(len(batch))
        return cls(tuple(batch), tuple(axis for axis in axes if any(tensor.shape[axis] != 1 for tensor in parameters)))

    @property
    def order(self) -> tuple[int, ...]:
        """The batch axes, those that tell sets apart first."""
        return (*self.set_axes, *(axis for axis in range(len(self.batch)) if axis not in self.set_axes))

    @property
    def back(self) -> tuple[int, ...]:
        """The index of each batch axis in `order`."""
        order = self.order
        return tuple(order.index(axis) for axis in range(len(order)))

    @property
    def grid(self) -> tuple[int, int]:
        """The number g of sets, and the number m of members of each."""
        g = math.prod(self.batch[axis] for axis in self.set_axes)
        return g, math.prod(self.batch[axis] for axis in self.order[len(self.set_axes) :])

    def grouped(self, tensor: Tensor) -> Tensor:
        """A tensor [*B or ones, *rest] as (g, m, *rest)."""
        if self.packed:
            return tensor[:, None] if self.set_axes else tensor[None]
        rest = tensor.shape[len(self.batch) :]
        return _moved(tensor.expand((*self.batch, *rest)), self.order).reshape(*self.grid, *rest)

    def batched(self, tensor: Tensor) -> Tensor:
        """A tensor (g, m, *rest) as [*B, *rest], a view where it can be one."""
        if self.packed:
            return tensor.flatten(0, 1)
        lead = tuple(self.batch[axis] for axis in self.order)
        return _moved(tensor.reshape(lead + tensor.shape[2:]), self.back)

    def steps_first(self, x: Tensor) -> Tensor:
        """A view of x [*B, v, c] as (v, *lead, c); a chain without batch axes gets one."""
        if self.packed:
            return x
        last = len(self.batch)
        return x.permute(last, *self.order, last + 1) if self.batch else x.unsqueeze(1)

    def weights(self, p0: Tensor) -> Tensor:
        """A view of p0 [*B or ones, c], of which axes may be missing, as (*lead or ones, c)."""
        if not self.batch:
            return p0.unsqueeze(0)
        return _moved(p0[(None,) * (len(self.batch) + 1 - p0.dim())], self.order)

    def states(self, values: Tensor) -> Tensor:
        """A view of values (..., *lead, c) of states as [..., *B, c]."""
        return _moved(values, self.back, values.dim() - 1 - len(self.batch)) if self.batch else values.squeeze(-2)

    def matrices(self, bulk: Tensor) -> Tensor:
        """A view of bulk [*B or ones, s, c, c], of which axes may be missing, as (s, *sets, c, c)."""
        if self.packed:
            return bulk
        lead = bulk.dim() - 3
        axes = [axis - (len(self.batch) - lead) for axis in self.set_axes]
        shared = tuple(axis for axis in range(lead) if axis not in axes)
        bulk = bulk.squeeze(shared) if shared else bulk
        return bulk.movedim(len(axes), 0) if axes else bulk

    @property
    def _sets(self) -> "Layout":
        """The layout of sets alone, of one member each."""
        batch = tuple(size if axis in self.set_axes else 1 for axis, size in enumerate(self.batch))
        return Layout(batch, self.set_axes)

    def parameter(self, tensor: Tensor) -> Tensor:
        """A parameter [*B or ones, s, *sizes] as (s, g or 1, *sizes), a view where all or no sets have their own."""
        if all(size == 1 for size in tensor.shape[: len(self.batch)]):
            return tensor.reshape(tensor.shape[len(self.batch) :]).unsqueeze(1)
        return self._sets.grouped(tensor)[:, 0].transpose(0, 1)

    def as_parameter(self, counts: Tensor, shape: Sequence[int]) -> Tensor:
        """Sums (s, g or 1, *sizes) over sets in the shape [*B or ones, s, *sizes] of a parameter, contiguous."""
        if counts.shape[1] == 1:
            return counts.reshape(shape)
        return self._sets.batched(counts.transpose(0, 1)[:, None]).sum_to_size(shape).contiguous()


@dataclass(frozen=True)
class Chain:
    """The operands of a batch of chains, or of a stretch of longer chains that an earlier stretch's message enters.

    Attributes:
        x: log-potentials (v, *lead, c) for v steps, batch axes `lead` and c states.
        bulk: transition matrices (s, *sets, c, c), [from, to]; s = v - 1, or 1 for one matrix at all steps. `sets` are
            the first axes of `lead`. In a stretch that a message enters, s = v or 1: the first leads into step 0.
        p0: initial weights (*lead or ones, c); not read in a stretch that a message enters.
        ends: the number of steps of each sequence (g, m, 1), 0 only in such a stretch; None: all have v.
        log_params: whether `bulk` and `p0` are logarithms.
        dtype: the dtype of the arithmetic.
        by_log: whether gradients are with respect to the logarithms of `bulk` and `p0` even if these are linear.
        starts: on a CPU, the first row (n) of each of n packed sequences. Then x, its gradient and the messages are
            (rows, c), and `bulk` is (rows, c, c), where each matrix leads into its row, or (1, c, c).
        layout: the order of the batch axes of the operands in `lead`; only in chains from `of`.
    """

    x: Tensor
    bulk: Tensor
    p0: Tensor
    ends: Tensor | None
    log_params: bool
    dtype: torch.dtype
    by_log: bool = False
    starts: Tensor | None = None
    layout: Layout = Layout((), ())

    @classmethod
    def of(
        cls,
        x: Tensor,
        bulk: Tensor,
        p0: Tensor,
        lengths: Tensor | None,
        log_params: bool,
        starts: Tensor | None = None,
        *,
        by_log: bool = False,
        stretch: bool = False,
    ) -> "Chain":
        """The chain of x [*B, v, c], bulk [*B or ones, s, c, c], p0 [*B or ones, c] and lengths int64 [*B].

        Leading axes of bulk and p0 may be missing. With `starts` they are rows [total, c] and [1 or total, c, c].
        A `stretch` of longer chains has a matrix into its first step. In other chains a length that is not from 1 to v
        raises ValueError, except on a GPU, where lengths are not read.
        """
        layout = Layout.of(x, bulk, starts)
        steps, matrices = layout.steps_first(x), layout.matrices(bulk)
        ends = None if lengths is None else layout.grouped(lengths)[..., None]
        if starts is None and not stretch:
            if lengths is not None and not kernels.on_gpu(p0):
                check_ends(lengths, len(steps))
            matrices = matrices[: len(steps) - 1]  # none for a single step
        dtype = arithmetic_dtype(x, bulk, p0)
        return cls(steps, matrices, layout.weights(p0), ends, log_params, dtype, by_log, starts, layout)

    @property
    def v(self) -> int:
        """Steps of the longest sequence."""
        return self.x.shape[0] if self.starts is None else self._longest

    @cached_property
    def _longest(self) -> int:
        assert self.ends is not None
        return int(self.ends.max())

    @property
    def c(self) -> int:
        """States."""
        return self.x.shape[-1]

    @cached_property
    def lead(self) -> torch.Size:
        """The batch axes, those of `bulk` first."""
        return self.x.shape[1:-1] if self.starts is None else self.starts.shape

    @cached_property
    def g(self) -> int:
        """Sets of transition matrices."""
        if self.starts is not None:
            return len(self.starts) if len(self.bulk) > 1 else 1
        return math.prod(self.bulk.shape[1:-2])

    @cached_property
    def m(self) -> int:
        """Sequences of each set."""
        if self.starts is not None:
            return len(self.starts) // self.g
        return math.prod(self.lead[self.bulk.dim() - 3 :])

    @property
    def zero(self) -> float:
        """The entry of `bulk` and `p0` of weight 0."""
        return -math.inf if self.log_params else 0.0

    def new(self, *shape: int) -> Tensor:
        """An uninitialized tensor of the dtype of the arithmetic."""
        return self.x.new_empty(shape, dtype=self.dtype)

    def matrix(self, index: int) -> Tensor:
        """The transition matrices (g, c, c) at an index, or the only ones."""
        return self.bulk[index if len(self.bulk) > 1 else 0].reshape(self.g, self.c, self.c)

    def part(self, start: int, stop: int) -> "Chain":
        """The chain of steps `start` to before `stop`, which a message enters unless `start` is 0; views."""
        bulk = self.bulk if len(self.bulk) == 1 else self.bulk[max(0, start - 1) : stop - 1]
        ends = None if self.ends is None else (self.ends - start).clamp(0, stop - start)
        return replace(self, x=self.x[start:stop], bulk=bulk, ends=ends)

    @cached_property
    def ended(self) -> Tensor | None:
        """Whether a sequence has ended before a step (v, g, m, 1); None where all have v steps."""
        return None if self.ends is None else self.ends <= torch.arange(self.v, device=self.x.device).view(-1, 1, 1, 1)


def has_idle_threads(threads: int, sequences: int, v: int, c: int) -> bool:
    """Whether at least half of the threads that are worth waking have no sequence."""
    return min(threads, sequences * v * c**2 // WORTH_A_THREAD) >= 2 * sequences


def arithmetic_dtype(x: Tensor, bulk: Tensor, p0: Tensor) -> torch.dtype:
    """float64 if an operand is, otherwise float32."""
    return torch.float64 if torch.float64 in (x.dtype, bulk.dtype, p0.dtype) else torch.float32


def check_ends(lengths: Tensor, v: int, least: int = 1) -> None:
    """Raise for a length that is not from 1, or `least`, to v."""
    if lengths.numel():
        low, high = (int(bound) for bound in torch.aminmax(lengths))
        if low < least or high > v:
            expected = f"values from {least} to {'v' if least else 'k'} = {v}"
            raise ValueError(f"lengths: expected {expected}, got {low} to {high}")


def _moved(tensor: Tensor, order: Sequence[int], first: int = 0) -> Tensor:
    """A view whose axes from `first` on lie in another order."""
    if tuple(order) == tuple(range(len(order))):
        return tensor
    last = range(first + len(order), tensor.dim())
    return tensor.permute((*range(first), *(first + axis for axis in order), *last))
