"""The leaves of a chain's tree, one log-matrix for each transition, for some steps of some sequences at a time.

A leaf is `log P_i(k, j) + x_i(j)`, less the largest entries of both, the shifts, which are summed separately; behind a
sequence's end it is the identity. Those in memory at a time take no more than two messages.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import kernels
from ..kernels.numbers import relative_logs
from ..operands import Operands, chain_of

# bytes that leaves, with all that is computed from them, may take where two messages are smaller
_LEAST = 2**21

# transitions that a piece has at least, if there are as many, even if fewer sequences then fit into a block
_SHORT = 64

# entries that are converted to float64 at a time
HELD = 2**17


# a range of the sets of matrices, and a range of the sequences that share each set
Block = tuple[slice, slice]


@dataclass(frozen=True)
class Cut:
    """The division of a chain: pieces of `steps` transitions, in blocks of `sets` times `members` sequences."""

    steps: int
    sets: int
    members: int

    @classmethod
    def of(cls, v: int, g: int, m: int, c: int, dtype: torch.dtype) -> "Cut":
        """The division whose blocks take no more memory than two messages (v, g, m, c)."""
        steps = max(1, v - 1)
        # leaves, nodes, gradients and logarithms of matrices; potentials; in float64 sums and gradients of x
        leaf_bytes = dtype.itemsize * (4 * c * c + 3 * c) + 8 * (2 * c + 4)
        fitting = max(_LEAST, 2 * v * g * m * c * dtype.itemsize) // leaf_bytes
        held = min(steps, max(fitting // (g * m), _SHORT))
        if held > fitting:
            held = min(steps, max(2, fitting))
        held = -(-steps // -(-steps // held))
        sequences = max(1, fitting // held)
        return cls(held, min(g, max(1, sequences // m)), min(m, sequences))

    def pieces(self, v: int) -> list[tuple[int, int]]:
        """The range of variables of each piece, into which its transitions lead."""
        return [(first, min(first + self.steps, v)) for first in range(1, v, self.steps)]

    def blocks(self, g: int, m: int) -> Iterator[tuple[slice, list[slice]]]:
        """Each range of sets, with the ranges of members that make a block with it."""
        members = [slice(r, min(r + self.members, m)) for r in range(0, m, self.members)]
        for z in range(0, g, self.sets):
            yield slice(z, min(z + self.sets, g)), members


class Leaves:
    """The leaves of a chain, a piece of steps and a block of sequences at a time."""

    def __init__(self, operands: Operands) -> None:
        self.layout, self.chain = chain_of(*operands)
        chain = self.chain
        self.g, self.m, self.c, self.v = chain.g, chain.m, chain.c, chain.v
        self.cut = Cut.of(operands.x.shape[-2], chain.g, chain.m, chain.c, chain.dtype)
        self.one = len(chain.bulk) == 1

    def raw(self, first: int, stop: int, sets: slice) -> Tensor:
        """The matrices of these transitions as the caller passed them (k, g', c, c); k = 1 where one serves all."""
        part = self.chain.bulk[:1] if self.one else self.chain.bulk[first - 1 : stop - 1]
        return part.reshape(-1, self.g, self.c, self.c)[:, sets]

    def logarithms(self, first: int, stop: int, sets: slice) -> tuple[Tensor, Tensor]:
        """The log-matrices less their largest entries (k, g', c, c), and these entries in float64 (k, g', 1)."""
        raw, log_params = self.raw(first, stop, sets), self.chain.log_params
        top = raw.amax((-2, -1)).double()
        top = finite_top(top if log_params else top.log())
        logs = raw.new_empty(raw.shape, dtype=self.chain.dtype)
        size = max(1, HELD // raw[:1].numel())
        for part, shift, out in zip(raw.split(size), top.split(size), logs.split(size), strict=True):
            if logs.dtype == torch.float64 and not log_params:
                out.copy_(relative_logs(part.double(), (-2, -1), log=False)[0])
                continue
            wide = part.to(torch.float64, copy=True)
            out.copy_((wide if log_params else wide.log_()).sub_(shift[..., None, None]))
        return logs, top[..., None]

    def parts(self, first: int, stop: int) -> Iterator[tuple[Block, Tensor, Tensor]]:
        """Each block, its leaves (g' m', k, c, c), and the shifts out of them, terms of a sum (2 k, g', m')."""
        for sets, spans in self.cut.blocks(self.g, self.m):
            logs, top = self.logarithms(first, stop, sets)
            for members in spans:
                leaves, shifts = self.stack(first, stop, (sets, members), logs, top)
                yield (sets, members), leaves, shifts

    def over(self, first: int, stop: int, block: Block) -> Tensor | None:
        """Which sequences have ended before a step (g', m', k); None where none has."""
        ends = self.chain.ends
        if ends is None:
            return None
        over = ends[block] <= torch.arange(first, stop, device=ends.device)
        return over if kernels.on_gpu(over) or over.any() else None

    def stack(self, first: int, stop: int, block: Block, logs: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
        """The leaves of a block (g' m', k, c, c), and the shifts out of them in float64 (2 k, g', m')."""
        potentials, shift = self.potentials(first, stop, block)
        k, g, m, c = potentials.shape
        stack = self.chain.new(g, m, k, c, c)
        logs, potentials = logs.movedim(0, 1)[:, None], potentials.permute(1, 2, 0, 3)[..., None, :]
        torch.add(logs, potentials.to(stack.dtype), out=stack)
        top = top.expand(k, g, m)
        over = self.over(first, stop, block)
        if over is not None:
            stack.masked_fill_(over[..., None, None], -math.inf)
            stack.diagonal(dim1=-2, dim2=-1).masked_fill_(over[..., None], 0.0)
            shift, top = (torch.where(over.movedim(-1, 0), 0.0, term) for term in (shift, top))
        return stack.flatten(0, 1), torch.cat([shift, top])

    def potentials(self, first: int, stop: int, block: Block) -> tuple[Tensor, Tensor]:
        """The log-potentials less their largest entry (k, g', m', c), and that entry (k, g', m'), in float64."""
        x = self.chain.x[first:stop].reshape(-1, self.g, self.m, self.c)[:, block[0], block[1]]
        top = finite_top(x.amax(-1, keepdim=True).double())
        return x.double() - top, top[..., 0]

    def start(self) -> tuple[Tensor, Tensor]:
        """The first message (g, m, c) in float64, and the shifts out of x_0 and p0 (2, g, m)."""
        x, top = relative_logs(self.chain.x[0].reshape(self.g, self.m, self.c).double(), -1, log=True)
        p0, shift = self.chain.relative_log_p0()
        return p0 + x, torch.cat([top, shift], -1).movedim(-1, 0)


def finite_top(top: Tensor) -> Tensor:
    """The largest entries, with 0 in place of -inf, overwritten."""
    return top.masked_fill_(top == -math.inf, 0.0)
