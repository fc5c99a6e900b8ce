"""The product of two nodes of a product tree `log(exp(a) exp(b))`, and its gradient, a few nodes at a time.

A node is a (c, c) matrix in float32 or float64 and a float64 offset kept apart. As long as nothing is too small for it,
a node stays linear: entries from about 2^-91 to 1, so that a product of two is one matrix product and one pass over its
result, with nothing to take an exponential or a logarithm of. Otherwise it holds logarithms whose largest is about 0,
made by row and column maxima with rescue as in `log_matmul`. Which of the two is decided by what the sums hold, before
anything is overwritten, so that results may lie over their operands.

All temporaries live in one workspace that fits a cache: on a CPU the pages of fresh ones cost more than the arithmetic.
Cost of a product: c^3 multiply-adds, and c^2 exponentials for each operand that is a leaf; of its gradient twice that.
Tested against float64 pairwise log-sum-exp (`logchain.reference.matrix_product`).
"""

import math

import torch
from torch import Tensor

from ..numbers import exp_shifted, finite, trusted_sum
from .nodes import Block, Nodes, parts, split, two_sum

# entries of each buffer of the workspace: enough to hide the calls, few enough for a cache
_HELD = 2**17

# pairwise terms held at a time
_PAIRS = 2**20

Piece = tuple[Tensor, Tensor, Tensor]


class Arithmetic:
    """Products of nodes with c states, at most so many at once, in one workspace.

    `rescued` counts the entries redone pairwise.
    """

    def __init__(self, c: int, most: int, dtype: torch.dtype, device: torch.device) -> None:
        self._held = max(1, min(most, _HELD // c**2))
        self._buffers = torch.empty(6, self._held, c, c, dtype=dtype, device=device)
        self._logs = torch.empty(self._held, c, c, dtype=torch.float64, device=device)
        self._lines = torch.empty(2, self._held, c, dtype=dtype, device=device)
        self._tops = torch.empty(4, self._held, dtype=dtype, device=device)
        self._masks = torch.empty(2, self._held, c, c, dtype=torch.bool, device=device)
        self._sums = torch.empty(4 + parts(dtype), max(1, most), dtype=torch.float64, device=device)
        self._least, self._any = self._tops.new_empty(()), self._masks.new_empty(())
        self._rooms: dict[tuple[int, ...], _Room] = {}
        self._trusted = 2 * trusted_sum(torch.float32, c)
        self.rescued = 0

    def leaves_for_root(self, values: Tensor) -> Nodes:
        """The leaves of a tree of which only the root is wanted."""
        return Nodes.leaves(values)

    def multiply(self, left: Nodes, right: Nodes, out: Nodes) -> None:
        """`out = left right`; it may lie over either."""
        size = self._block(out)
        blocks = (nodes.blocks(*size) for nodes in (left, right, out))
        credit = 1  # where linear products fail, it is not tried each time
        for a, b, c, taken in zip(*blocks, split(out.taken.zero_(), *size), strict=True):
            done = False
            if credit > 0 and a.may_be_linear and b.may_be_linear:
                done = self._multiply_linear(a, b, c, taken)
                credit += 1 if done else -1
            if not done:
                self._multiply_logs(a, b, c, taken)
            c.linear[...] = done
        self._add_offsets(left, right, out)

    def gradient(
        self,
        weight: Tensor,
        left: Nodes,
        right: Nodes,
        out: Nodes,
        grad_left: Tensor,
        grad_right: Tensor,
        *,
        add_left: bool = False,
    ) -> None:
        """From `weight`, the gradient of the logarithm of `out`, those of `left` and `right` (g, p, c, c).

        Either may lie over `weight`. With `add_left` that of `left` is added to what is there.
        """
        size = self._block(out)
        blocks = (nodes.blocks(*size) for nodes in (left, right, out))
        tensors = (split(tensor, *size) for tensor in (weight, out.taken[..., :1], grad_left, grad_right))
        for a, b, c, w, factor, grad_a, grad_b in zip(*blocks, *tensors, strict=True):
            if c.are_linear:
                self._gradient_linear(w, a, b, c, factor, grad_a, grad_b, add_left)
            else:
                self._gradient_logs(w, a, b, grad_a, grad_b, add_left)

    def logarithms(self, nodes: Nodes, out: Tensor) -> None:
        """The nodes as they are meant (g, p, c, c): logarithms with their offsets."""
        size = self._block(nodes)
        tensors = (split(tensor, *size) for tensor in (nodes.offset, out))
        for block, offset, target in zip(nodes.blocks(*size), *tensors, strict=True):
            room = self._room(block)
            values = torch.log(block.values, out=room.s) if block.are_linear else block.values
            # what the offset has beyond the dtype goes to the smaller summand
            high, rest = (part.copy_(offset[..., 0]) for part in (room.high, room.wide))
            rest = rest.sub_(high) if offset.shape[-1] == 1 else offset[..., 1]
            rest = room.low.copy_(rest).nan_to_num_(0.0, 0.0, 0.0)  # the offset may be beyond the range
            torch.add(values, rest[..., None, None], out=room.s)
            torch.add(room.s, high[..., None, None], out=target)

    def _block(self, nodes: Nodes) -> tuple[int, int]:
        """How many sets and how many slots make a block that the workspace holds."""
        slots = max(1, min(nodes.values.shape[1], self._held))
        return self._held // slots, slots

    def _room(self, block: Block) -> "_Room":
        shape = block.values.shape
        if shape not in self._rooms:
            self._rooms[shape] = _Room(self, shape)
        return self._rooms[shape]

    def _multiply_linear(self, a: Block, b: Block, out: Block, taken: Tensor) -> bool:
        """Unless some sum cannot be trusted."""
        room = self._room(out)
        factor, top_a, top_b, _ = taken.unbind(-1)
        ea, eb = self._linear(a, room.ea, top_a), self._linear(b, room.eb, top_b)
        torch.amin(torch.amin(torch.bmm(ea, eb, out=room.flat_s), (-2, -1), out=room.flat_low), 0, out=self._least)
        if not self._least.item() >= self._trusted:  # NaN is not trusted either
            return False
        torch.amax(room.s, (-2, -1), out=factor)
        torch.div(room.s, factor[..., None, None], out=out.values)
        return True

    def _linear(self, block: Block, buffer: Tensor, top: Tensor) -> Tensor:
        """Linear nodes (n, c, c) as they are, leaves over their largest entries; `top` are these' logarithms."""
        if not block.leaf and block.are_linear:
            return _flat(block.values, buffer)
        scratch = self._room(block).scratch
        values = _same(block.values, scratch)
        finite(torch.amax(values, (-2, -1), out=top))
        return exp_shifted(values, top[..., None, None], buffer, scratch).flatten(0, 1)

    def _multiply_logs(self, a: Block, b: Block, out: Block, taken: Tensor) -> None:
        room = self._room(out)
        factor, top_a, top_b, top = taken.unbind(-1)
        pieces = self._shift(a, b)
        # in float64: row, column and sum are rounded once, when all has been taken out
        logs = room.logs.copy_(room.s.log_()).add_(room.row).add_(room.column)
        for z, i, j in pieces:
            room.flat_logs[z, i, j] = torch.logsumexp(self._pairs(a, b, z, i, j), -1)
            self.rescued += len(z)
        top.copy_(torch.amax(logs, (-2, -1), out=room.wide))
        torch.threshold_(top, -math.inf, 0.0)
        out.values.copy_(logs.sub_(top[..., None, None]))
        factor.fill_(1.0)
        top_a.copy_(room.top_a[..., 0, 0])
        top_b.copy_(room.top_b[..., 0, 0])

    def _add_offsets(self, left: Nodes, right: Nodes, out: Nodes) -> None:
        """The offset of a product: those of the operands and what was taken out of it."""
        g, p, parts = out.offset.shape
        room = self._sums[:, : g * p].unflatten(1, (g, p))
        factor, *logs = out.taken.unbind(-1)
        total = room[:parts].copy_(left.offset.movedim(-1, 0))
        for term in (*right.offset.unbind(-1), room[-1].copy_(factor).log_(), *logs):
            if parts == 1:
                total.add_(term)
            else:
                two_sum(total, term, room[parts:-1])
        out.offset.copy_(total.movedim(0, -1))

    def _gradient_linear(
        self,
        weight: Tensor,
        a: Block,
        b: Block,
        out: Block,
        factor: Tensor,
        grad_a: Tensor,
        grad_b: Tensor,
        add_a: bool,
    ) -> None:
        """`exp(a)` times (weight / sums) exp(b)^T, and the other way round."""
        room = self._room(out)
        ea, eb = self._linear(a, room.ea, room.high), self._linear(b, room.eb, room.high)
        torch.div(weight, out.values, out=room.s).div_(factor.unsqueeze(-1))
        shape = out.values.shape
        torch.bmm(ea.mT, room.flat_s, out=room.flat_scratch)
        torch.mul(room.scratch, eb.view(shape), out=grad_b)
        torch.bmm(room.flat_s, eb.mT, out=room.flat_scratch)
        if add_a:
            grad_a.addcmul_(room.scratch, ea.view(shape))
        else:
            torch.mul(room.scratch, ea.view(shape), out=grad_a)

    def _gradient_logs(self, weight: Tensor, a: Block, b: Block, grad_a: Tensor, grad_b: Tensor, add_a: bool) -> None:
        room = self._room(a)
        pieces = self._shift(a, b)
        ea, eb = (buffer.view(room.flat_s.shape) for buffer in (room.ea, room.eb))
        torch.div(weight, room.s, out=room.scratch)
        share = room.flat_scratch.masked_fill_(room.small, 0.0)
        found_b = torch.bmm(ea.mT, share, out=room.flat_spare).mul_(eb)
        found_a = torch.bmm(share, eb.mT, out=room.flat_s).mul_(ea)
        for z, i, j in pieces:
            terms = torch.softmax(self._pairs(a, b, z, i, j), -1).mul_(weight[(*_grid(z, a), i, j)].unsqueeze(-1))
            terms = terms.to(found_a.dtype)
            found_a.index_put_((z, i), terms, accumulate=True)
            found_b.mT.index_put_((z, j), terms, accumulate=True)
        grad_b.copy_(room.spare)
        if add_a:
            grad_a.add_(room.s)
        else:
            grad_a.copy_(room.s)

    def _shift(self, a: Block, b: Block) -> list[Piece]:
        """The product `s` of the rows of `a` and the columns of `b` over their maxima, `row` and `column`.

        Those are relative to the largest of them, `top_a` and `top_b`. `small` says where `s` is not to be trusted.
        Returned is what is to be rescued, as pieces of indices (n, i, j).
        """
        room = self._room(a)
        self._exponentials(a, -1, room.ea, room.row)
        self._exponentials(b, -2, room.eb, room.column)
        for shift, top in ((room.row, room.top_a), (room.column, room.top_b)):
            torch.threshold_(torch.amax(shift, (-2, -1), keepdim=True, out=top), torch.finfo(top.dtype).min, 0.0)
            shift.sub_(top)
        torch.bmm(room.ea.view(room.flat_s.shape), room.eb.view(room.flat_s.shape), out=room.flat_s)
        torch.lt(room.flat_s, self._trusted, out=room.small)
        if not self._any_of(room.small):
            return []
        for block, possible in ((a, room.scratch), (b, room.spare)):
            torch.gt(block.values, 0.0 if block.are_linear else -math.inf, out=possible)
        torch.bmm(room.flat_scratch, room.flat_spare, out=room.flat_count)
        torch.gt(room.flat_count, 0.0, out=room.lost).logical_and_(room.small)
        if not self._any_of(room.lost):
            return []
        indices = room.lost.nonzero(as_tuple=True)
        size = max(1, _PAIRS // a.values.shape[-1])
        return list(zip(*(index.split(size) for index in indices), strict=True))

    def _exponentials(self, block: Block, axis: int, out: Tensor, shift: Tensor) -> None:
        """The nodes over their maxima along an axis (g, p, c, c), linear, and the logarithms of those."""
        if block.are_linear:
            torch.div(block.values, torch.amax(block.values, axis, keepdim=True, out=shift), out=out)
            shift.log_()
            return
        scratch = self._room(block).scratch
        values = _same(block.values, scratch)
        torch.amax(values, axis, keepdim=True, out=shift)
        exp_shifted(values, finite(shift), out, scratch)

    def _pairs(self, a: Block, b: Block, z: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """The logarithms of the terms of some outputs (f, c), relative to `top_a` and `top_b`, in float64."""
        room, (sets, slots) = self._room(a), _grid(z, a)
        terms = []
        for block, top, entries in (
            (a, room.top_a, a.values[sets, slots, i]),
            (b, room.top_b, b.values[sets, slots, :, j]),
        ):
            logs = entries.double().log_() if block.are_linear else entries.double()
            terms.append(logs.sub_(top[sets, slots, 0]))
        return terms[0].add_(terms[1])

    def _any_of(self, mask: Tensor) -> bool:
        return bool(torch.amax(mask, (0, 1, 2), out=self._any).item())


class _Room:
    """The workspace as blocks of one shape (g, p, c, c) see it, and flat (n, c, c) as matrix products do."""

    def __init__(self, arithmetic: Arithmetic, shape: torch.Size) -> None:
        n, c = shape[0] * shape[1], shape[-1]
        flat = arithmetic._buffers[:, :n].unbind(0)
        grid = [buffer.view(shape) for buffer in flat]
        self.ea, self.eb, self.s, self.scratch, self.spare, _ = grid
        _, _, self.flat_s, self.flat_scratch, self.flat_spare, self.flat_count = flat
        self.flat_logs = arithmetic._logs[:n]
        self.logs = self.flat_logs.view(shape)
        lines = arithmetic._lines[:, :n].unflatten(1, shape[:2])
        self.row, self.column = lines[0].unsqueeze(-1), lines[1].unsqueeze(-2)
        self.flat_low, *_ = tops = arithmetic._tops[:, :n].unbind(0)
        self.low, self.high, top_a, top_b = (top.view(shape[:2]) for top in tops)
        self.top_a, self.top_b = top_a[..., None, None], top_b[..., None, None]
        self.wide = arithmetic._sums[0, :n].view(shape[:2])
        self.small, self.lost = arithmetic._masks[:, :n].unbind(0)
        assert c == flat[0].shape[-1]


def _same(values: Tensor, room: Tensor) -> Tensor:
    """Values of the dtype of the arithmetic."""
    return values if values.dtype == room.dtype else room.copy_(values)


def _flat(values: Tensor, room: Tensor) -> Tensor:
    """(g, p, c, c) as (g * p, c, c): a view if there is one, else a copy in the buffer."""
    g, p = values.shape[:2]
    if g == 1 or p == 1 or values.stride(0) == p * values.stride(1):
        return values.flatten(0, 1)
    return room.copy_(values).flatten(0, 1)


def _grid(z: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Sets and slots of the nodes with these numbers."""
    p = block.values.shape[1]
    return z // p, z % p
