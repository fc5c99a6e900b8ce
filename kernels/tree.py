"""Log-semiring products of stacks of matrices of logarithms on a binary tree, and their gradients.

A node is a matrix of logarithms near 0 and a float64 offset. A product is stored less the largest entries of both its
operands, which are added to its offset, so that a result need not be normalised before it is an operand itself. `order`
says which nodes are multiplied when, and where results lie; the product of two nodes is a subclass of `Arithmetic`'s.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .order import Step, downward, halved, reduction, shifted, upward


@dataclass(frozen=True)
class Nodes:
    """`values` (g, p, c, c), their largest entries `maxima` (g, p), and `offset` (g, p, r), r = 1 or 2 float64.

    The logarithms of p nodes of g sets are `values + offset`. Leaves may have any floating dtype; their offset is 0.
    """

    values: Tensor
    maxima: Tensor
    offset: Tensor

    @classmethod
    def leaves(cls, values: Tensor) -> "Nodes":
        """Nodes of the caller's matrices, without a copy."""
        g, p = values.shape[:2]
        zero = values.new_zeros(1, 1, 1, dtype=torch.float64)
        maxima = values.amax((-2, -1)).to(_dtype(values))
        return cls(values, maxima, zero.expand(g, p, parts(values.dtype)))

    @classmethod
    def over(cls, values: Tensor) -> "Nodes":
        """Nodes to be written, with their values in this memory."""
        g, p = values.shape[:2]
        return cls(values, values.new_empty(g, p), values.new_empty(g, p, parts(values.dtype), dtype=torch.float64))

    def at(self, slots: slice) -> "Nodes":
        """The nodes in these slots of each set, as a view."""
        return Nodes(self.values[:, slots], self.maxima[:, slots], self.offset[:, slots])

    def copy_(self, other: "Nodes") -> None:
        """Copy the nodes from as many others."""
        self.values.copy_(other.values)
        self.maxima.copy_(other.maxima)
        self.offset.copy_(other.offset)


def total(values: Tensor, offset: Tensor, dtype: torch.dtype) -> Tensor:
    """The logarithms (g, c, c) `values` + `offset` in a dtype; the offset (r, g) is float64."""
    high, *rest = offset.unbind(0)
    # the digits of the offset that the dtype has no room for are added to the values, which are small
    low = (rest[0] if rest else high - high.to(dtype)).nan_to_num(0.0, 0.0, 0.0)
    return (values + low.to(values.dtype)[:, None, None]).add_(high[:, None, None]).to(dtype)


class Arithmetic:
    """Products of at most `most` pairs of nodes at once; a subclass defines `pair`, `gradient` and `recomputed`."""

    def __init__(self, most: int, c: int, dtype: torch.dtype, device: torch.device) -> None:
        self._sums = torch.empty(3 + parts(dtype), max(1, most), dtype=torch.float64, device=device)

    def pair(self, left: Nodes, right: Nodes, out: Nodes) -> None:
        """Write the values `log(exp(left) exp(right))` less the maxima of both, and their maxima; `out` may be either.

        Where an operand is impossible, so is the product, whatever is subtracted.
        """
        raise NotImplementedError

    def gradient(
        self, weight: Tensor, left: Nodes, right: Nodes, out: Nodes, grad_left: Tensor, grad_right: Tensor, *, add: bool
    ) -> None:
        """Write the gradients of both operands (g, p, c, c) from `weight`, the gradient of the logarithm of `out`.

        Either gradient may be in the memory of `weight`. With `add`, `grad_left` is added to.
        """
        raise NotImplementedError

    def recomputed(self) -> int | Tensor:
        """The number of entries of all products that were recomputed."""
        raise NotImplementedError

    def multiply(self, left: Nodes, right: Nodes, out: Nodes) -> None:
        """Write the products of `left` and `right` to `out`, which may be either."""
        self._add_offsets(left, right, out)
        self.pair(left, right, out)

    def logarithms(self, nodes: Nodes) -> None:
        """Add the offsets of nodes to their values."""
        offset, *lost = nodes.offset.unbind(-1)
        high = offset.to(nodes.values.dtype)
        low = (lost[0] if lost else offset - high).nan_to_num(0.0, 0.0, 0.0).to(nodes.values.dtype)
        nodes.values.add_(low[..., None, None]).add_(high[..., None, None])

    def _add_offsets(self, left: Nodes, right: Nodes, out: Nodes) -> None:
        """Write the offset of a product: the sum of the operands' offsets and maxima, -inf for an impossible one."""
        g, p, count = out.offset.shape
        scratch = self._sums[:, : g * p].unflatten(1, (g, p))
        total = scratch[:count].copy_(left.offset.movedim(-1, 0))
        for term in (*right.offset.unbind(-1), left.maxima, right.maxima):
            if count == 1:
                total.add_(term)
            else:
                two_sum(total, term, scratch[count:])
        if count == 2:  # the rounding error of an infinite sum would be NaN
            total[1].masked_fill_(~total[0].isfinite(), 0.0)
        out.offset.copy_(total.movedim(0, -1))


def write_product(kind: type[Arithmetic], stack: Tensor, out: Tensor, *, inplace: bool) -> int | Tensor:
    """The number of recomputed entries of the products of stacks (g, s, c, c), written to `out` (g, c, c).

    Stacks have any floating dtype; products are computed in the memory of `stack` if `inplace`.
    """
    g, s, c, _ = stack.shape
    arithmetic = _arithmetic(kind, stack)
    leaves, dtype = Nodes.leaves(stack), _dtype(stack)
    memory = stack[:, : s // 2 * 2 : 2] if inplace and stack.dtype == dtype else None
    nodes = Nodes.over(stack.new_empty(g, s // 2, c, c, dtype=dtype) if memory is None else memory)
    for step in reduction(s):
        left = leaves.at(step.left) if step.left_at is None else nodes.at(halved(step.left))
        right = leaves.at(step.right) if step.right_at is None else nodes.at(halved(step.right))
        arithmetic.multiply(left, right, nodes.at(halved(step.left)))
    root = nodes if s > 1 else leaves
    out.copy_(total(root.values[:, 0].to(dtype), root.offset[:, 0].T, out.dtype))
    return arithmetic.recomputed()


def product_gradient(kind: type[Arithmetic], weight: Tensor, stack: Tensor, into: Tensor) -> None:
    """Write the gradients (g, s, c, c) of `sum(weight * log product)` with respect to stacks; weights are (g, c, c)."""
    arithmetic, steps = _arithmetic(kind, stack), list(reduction(stack.shape[1]))
    leaves, nodes = Nodes.leaves(stack), Nodes.over(torch.empty_like(into))
    for step in steps:
        arithmetic.multiply(*_operands(step, leaves, nodes, nodes), nodes.at(step.right))
    into[:, 0] = weight
    if not steps:
        into.masked_fill_(stack == -torch.inf, 0.0)
    for step in reversed(steps):
        grads, out = (into[:, step.left], into[:, step.right]), nodes.at(step.right)
        arithmetic.gradient(grads[0], *_operands(step, leaves, nodes, nodes), out, *grads, add=False)


def prefixes(kind: type[Arithmetic], stack: Tensor, out: Tensor) -> int | Tensor:
    """The number of recomputed entries of the products of the first 1 to s matrices, which are written to `out`."""
    s = stack.shape[1]
    arithmetic = _arithmetic(kind, stack)
    leaves, nodes = Nodes.leaves(stack), Nodes.over(out)
    for step in (*upward(s), *downward(s)):
        left = (leaves if step.left_at is None else nodes).at(step.left)
        right = (leaves if step.right_at is None else nodes).at(step.right)
        arithmetic.multiply(left, right, nodes.at(step.right))
    arithmetic.logarithms(nodes.at(slice(1, s)))
    out[:, 0] = stack[:, 0]
    return arithmetic.recomputed()


def prefixes_gradient(kind: type[Arithmetic], weight: Tensor, stack: Tensor, into: Tensor) -> None:
    """Write the gradients (g, s, c, c) of `sum(weight * prefixes)`, by both sweeps in reverse.

    The gradient of a product is overwritten by that of its right operand; that of its left operand is added to.
    """
    s = stack.shape[1]
    into.copy_(weight)
    arithmetic = _arithmetic(kind, stack)
    leaves = Nodes.leaves(stack)
    nodes, passed = (Nodes.over(torch.empty_like(into)) for _ in range(2))
    up, down = list(upward(s)), list(downward(s))
    for step in up:
        arithmetic.multiply(*_operands(step, leaves, nodes, nodes), nodes.at(step.left))
        first = step.left.start  # the first product of each level is a prefix
        passed.at(slice(step.right.start, step.right.start + 1)).copy_(nodes.at(slice(first, first + 1)))
    for step in down:
        arithmetic.multiply(*_operands(step, leaves, passed, nodes), passed.at(step.right))
    for step in reversed(up + down):
        is_down = step.left_at == 0
        operands = _operands(step, leaves, passed if is_down else nodes, nodes)
        out = passed.at(step.right) if is_down else nodes.at(step.left)
        grads = into[:, step.left], into[:, step.right]
        arithmetic.gradient(grads[1], *operands, out, *grads, add=True)
    into[:, 0].masked_fill_(stack[:, 0] == -torch.inf, 0.0)


def with_arithmetic(kind: type[Arithmetic]) -> list[Any]:
    """The functions that a module of `kernels.stack_kernels` offers, with `kind` as their arithmetic."""
    return [partial(f, kind) for f in (write_product, product_gradient, prefixes, prefixes_gradient)]


def blocks(nodes: int, g: int, p: int) -> Iterator[tuple[slice, slice]]:
    """The sets and slots of blocks of about `nodes` nodes that cover g sets of p nodes."""
    slots = max(1, min(p, nodes))
    sets = max(1, nodes // slots)
    for z in range(0, g, sets):
        for i in range(0, p, slots):
            yield slice(z, z + sets), slice(i, i + slots)


def parts(dtype: torch.dtype) -> int:
    """The number of float64 numbers in an offset of values of this dtype."""
    return 2 if dtype == torch.float64 else 1


def two_sum(total: Tensor, term: Tensor, scratch: Tensor) -> None:
    """Add a term to `total[0]` of (2, g, p), and the rounding error of that to `total[1]` (D. E. Knuth's two-sum)."""
    (high, low), (result, back, error) = total, scratch
    torch.sub(torch.add(high, term, out=result), high, out=back)
    low.add_(torch.sub(term, back, out=error))
    low.add_(high.sub_(torch.sub(result, back, out=error)))
    high.copy_(result)


def _dtype(stack: Tensor) -> torch.dtype:
    return torch.promote_types(stack.dtype, torch.float32)


def _arithmetic(kind: type[Arithmetic], stack: Tensor) -> Arithmetic:
    """Arithmetic for all pairs of a level of stacks (g, s, c, c) at once."""
    g, s, c, _ = stack.shape
    return kind(g * max(1, s // 2), c, _dtype(stack), stack.device)


def _operands(step: Step, leaves: Nodes, lefts: Nodes, rights: Nodes) -> tuple[Nodes, Nodes]:
    """The operands of a step where all nodes are kept."""
    left = leaves.at(step.left) if step.left_at is None else lefts.at(shifted(step.left, step.left_at))
    right = leaves.at(step.right) if step.right_at is None else rights.at(shifted(step.right, step.right_at))
    return left, right
