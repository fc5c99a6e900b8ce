"""The tree schedule: the log-partition by products of pairs of matrices, and its gradient.

A chain is cut into pieces of so many steps that the matrices fit into memory. The tree multiplies the matrices of a
piece, pair by pair, and the forward message is multiplied by the product. Backward, from the last piece to the first,
the posterior behind a piece and the forward message before it give the expected transitions from the piece's first
state to its last, and the tree divides these among its nodes down to the leaves, which are computed again.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import kernels
from ..kernels.numbers import exact_sum
from ..kernels.plain.semiring import probabilities
from ..layout import Layout
from ..operands import Operands, arithmetic_dtype, marked, unwritten
from ..rescues import report_outputs
from ..schedules.tree_leaves import HELD, Block, Cut, Leaves, finite_top


def forward(operands: Operands) -> tuple[Tensor, Tensor]:
    """The log-partition [*B] in float64, and the messages before each piece and at the end (pieces + 1, g, m, c)."""
    log_norm, messages = kept_shapes(operands.x, operands.bulk, operands.p0)
    leaves = Leaves(operands)
    matmul, stacks = kernels.log_matmul_kernels(operands.x), kernels.stack_kernels(operands.x)
    message, shift = leaves.start()
    messages[0], top = _without_top(message)
    sums, rescued, last = [shift, top], 0, 0
    for first, stop in leaves.cut.pieces(leaves.v):
        terms = messages.new_zeros(5, leaves.g, leaves.m)
        for block, stack, shifts in leaves.parts(first, stop):
            root = stacks.product(stack, inplace=True)
            before = messages[last][block]
            after = matmul.forward(before.reshape(-1, 1, leaves.c), root.values.double())[0]
            after, top = _without_top(after.view(before.shape))
            for term, into in zip((*exact_sum(shifts), *top, *root.offset), terms[:, block[0], block[1]], strict=False):
                into.copy_(term.view(into.shape))
            messages[last + 1][block] = after
            rescued = rescued + root.rescued
        sums.append(terms)
        last += 1
    messages[last + 1 :] = messages[last]
    report_outputs(rescued)
    sums.append(torch.logsumexp(messages[last], -1)[None])
    total = torch.stack(exact_sum(torch.cat(sums))).sum(0)
    return log_norm.copy_(leaves.layout.batched(marked(leaves.chain, total[..., None])[..., 0])), messages


def backward(
    grad: Tensor, operands: Operands, messages: Tensor, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of operands in their own shapes, empty for one that is not needed, from `forward`'s messages."""
    _, bulk, p0, _, log_params = operands
    grad_x, grad_bulk, grad_p0 = gradients = unwritten(operands[:3], needs)
    for gradient in gradients:
        gradient.zero_()
    leaves = Leaves(operands)
    weight = leaves.layout.sequences(grad).double()[..., None]
    states = _States(leaves, grad_x) if needs[0] else None
    counts = _Counts(leaves, grad_bulk) if needs[1] else None
    posterior = probabilities(messages[-1])
    pieces = leaves.cut.pieces(leaves.v)
    for before, (first, stop) in reversed(list(zip(messages, pieces, strict=False))):
        for block, stack, _ in leaves.parts(first, stop):
            posterior[block], gradient = _back(stack, before[block], posterior[block])
            over = leaves.over(first, stop, block)
            if over is not None:
                gradient.masked_fill_(over[..., None, None], 0.0)
            if states is not None:
                states.add(first, stop, block, gradient, weight[block])
            if counts is not None:
                counts.add(first, stop, block, gradient, weight[block])
    start = posterior.mul_(weight).view(*leaves.chain.lead, leaves.c)
    if states is not None:
        states.finish(start)
    if counts is not None:
        counts.finish()
    if needs[2]:
        if not log_params:
            value = leaves.chain.p0.double()
            start = (start / value).masked_fill_((start == 0) | (value == 0), 0.0)
        grad_p0.copy_(leaves.layout.states(start).sum_to_size(p0.shape))
    return gradients


def _back(stack: Tensor, before: Tensor, posterior: Tensor) -> tuple[Tensor, Tensor]:
    """The posterior before a piece (g', m', c), from that behind it, and its expected transitions (g', m', k, c, c)."""
    gradient = torch.empty_like(stack)
    tree = kernels.stack_kernels(stack).Kept(stack, gradient)
    ends, begins = (value.reshape(-1, 1, value.shape[-1]) for value in (posterior, before))
    matmul = kernels.log_matmul_kernels(stack)
    start, pairs = matmul.backward(ends, begins, tree.root().values.double(), True, True)
    tree.gradient(pairs.to(stack.dtype))
    return start.view(before.shape), gradient.unflatten(0, before.shape[:2])


class _States:
    """The gradient of x, which is the posteriors of states, written block by block."""

    def __init__(self, leaves: Leaves, grad_x: Tensor) -> None:
        self._grad_x = leaves.layout.steps_first(grad_x)
        # a copy where batch axes do not merge, which `finish` puts back
        self._grid = self._grad_x.reshape(len(self._grad_x), leaves.g, leaves.m, leaves.c)

    def add(self, first: int, stop: int, block: Block, gradient: Tensor, weight: Tensor) -> None:
        """Write the posteriors of a block, the sums of its expected transitions (g', m', k, c, c)."""
        states = gradient.sum(-2).mul_(weight[..., None].to(gradient.dtype))
        self._grid[first:stop, block[0], block[1]] = states.movedim(2, 0)

    def finish(self, start: Tensor) -> None:
        """Complete the gradient by the posterior of the first step (*lead, c)."""
        if self._grid.data_ptr() != self._grad_x.data_ptr():
            self._grad_x.copy_(self._grid.view(self._grad_x.shape))
        self._grad_x[0] = start


class _Counts:
    """The gradient of bulk, which is the sum of expected transitions, added up block by block."""

    def __init__(self, leaves: Leaves, grad_bulk: Tensor) -> None:
        self._leaves, self._grad_bulk = leaves, grad_bulk
        # a sum over all steps is rounded once
        dtype = torch.float64 if leaves.one else leaves.chain.dtype
        self._wide = grad_bulk if grad_bulk.dtype == dtype else torch.zeros_like(grad_bulk, dtype=dtype)
        view = leaves.layout.matrices(self._wide)[: leaves.v - 1]
        self._sums = view.view(len(view), leaves.g, leaves.c, leaves.c)

    def add(self, first: int, stop: int, block: Block, gradient: Tensor, weight: Tensor) -> None:
        """Add the expected transitions of a block (g', m', k, c, c), which are overwritten."""
        gradient.mul_(weight[..., None, None].to(gradient.dtype))
        if not self._leaves.one:
            self._sums[first - 1 : stop - 1, block[0]] += gradient.sum(1).transpose(0, 1)
            return
        size = max(1, HELD // gradient[:, :, :1].numel())
        for part in gradient.split(size, 2):
            self._sums[0, block[0]] += part.sum((1, 2), dtype=torch.float64)

    def finish(self) -> None:
        """Divide expected transitions by the weights unless those are logarithms; 0 at weight 0 and behind all ends."""
        leaves = self._leaves
        if not leaves.chain.log_params:
            pieces = [(1, 2)] if leaves.one else leaves.cut.pieces(leaves.v)
            for first, stop in pieces:
                raw, sums = leaves.raw(first, stop, slice(None)), self._sums[first - 1 : stop - 1]
                nothing = (sums == 0) | (raw == 0)
                sums.div_(raw).masked_fill_(nothing, 0.0)
        if self._wide is not self._grad_bulk:
            self._grad_bulk.copy_(self._wide)


def kept_shapes(x: Tensor, bulk: Tensor, p0: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the outputs of `forward`, unwritten."""
    g, m = Layout.of(x, bulk).grid
    v, c = x.shape[-2:]
    pieces = len(Cut.of(v, g, m, c, arithmetic_dtype(x, bulk, p0)).pieces(v)) if x.numel() else 0
    return (
        x.new_empty(x.shape[:-2], dtype=torch.float64),
        x.new_empty((pieces + 1, g, m, c), dtype=torch.float64),
    )


def _without_top(message: Tensor) -> tuple[Tensor, Tensor]:
    """The message (g, m, c) less its largest entry, and that entry (1, g, m)."""
    top = finite_top(message.amax(-1, keepdim=True))
    return message - top, top.movedim(-1, 0)
