"""Log-semiring products of stacks of matrices of logarithms on a binary tree, and their gradients.

A node is a matrix of logarithms near 0 and a float64 offset. A product is stored less the largest entries of both its
operands, which are added to its offset, so that a result may be an operand without rescaling. The product of two nodes
is that of a subclass of `Arithmetic`. An odd last node of a level is a node of the next level.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .numbers import two_sum


class Nodes(NamedTuple):
    """`values` (g, p, c, c), their largest entries `maxima` (g, p), and `offset` (g, p, 2), float64.

    The logarithms of p nodes of g sets are `values` plus the offset, a sum and its rounding error. Leaves may have any
    floating dtype; their offset is 0.
    """

    values: Tensor
    maxima: Tensor
    offset: Tensor

    @classmethod
    def leaves(cls, values: Tensor) -> "Nodes":
        """Nodes of the caller's matrices, without a copy."""
        offset = values.new_zeros(1, 1, 1, dtype=torch.float64).expand(*values.shape[:2], 2)
        return cls(values, values.amax((-2, -1)).to(_dtype(values)), offset)

    @classmethod
    def over(cls, values: Tensor) -> "Nodes":
        """Nodes to be written, with their values in this memory."""
        sizes = values.shape[:2]
        return cls(values, values.new_empty(sizes), values.new_empty(*sizes, 2, dtype=torch.float64))

    def at(self, first: int, stop: int | None = None, step: int = 1) -> "Nodes":
        """The nodes in these places of each set, as a view."""
        return Nodes(*(tensor[:, first:stop:step] for tensor in self))

    def copy_(self, other: "Nodes") -> "Nodes":
        """Copy the nodes from as many others."""
        for into, tensor in zip(self, other, strict=True):
            into.copy_(tensor)
        return self


def add_offset(values: Tensor, offset: Tensor) -> Tensor:
    """Add offsets (..., 2) to logarithms (..., c, c) near 0."""
    high, low = offset[..., None, None, :].unbind(-1)
    rounded = high.to(values.dtype)
    # the digits of the offset that the dtype cannot hold are added to the values, which are small
    low = (low + (high - rounded)).nan_to_num(0.0, 0.0, 0.0)
    return values.add_(low.to(values.dtype)).add_(rounded)


class Arithmetic(ABC):
    """Products of at most `most` pairs of nodes at once; a subclass defines `pair`, `gradient` and `recomputed`."""

    def __init__(self, most: int, c: int, dtype: torch.dtype, device: torch.device) -> None:  # noqa: B027
        """Allocate what products of nodes need."""

    @abstractmethod
    def pair(self, left: Nodes, right: Nodes, out: Nodes) -> None:
        """Write the values `log(exp(left) exp(right))` less the maxima of both, and their maxima; `out` may be either.

        Where an operand is impossible, so is the product, whatever is subtracted.
        """

    @abstractmethod
    def gradient(
        self, weight: Tensor, left: Nodes, right: Nodes, out: Nodes, grad_left: Tensor, grad_right: Tensor, *, add: bool
    ) -> None:
        """Write the gradients of both operands (g, p, c, c) from `weight`, the gradient of the logarithm of `out`.

        Either gradient may be in the memory of `weight`. With `add`, `grad_left` is added to.
        """

    @abstractmethod
    def recomputed(self) -> int | Tensor:
        """The number of entries of all products that were recomputed."""

    def multiply(self, left: Nodes, right: Nodes, out: Nodes) -> None:
        """Write the products of `left` and `right` to `out`, which may be either."""
        high, low = left.offset.unbind(-1)
        for term in (*right.offset.unbind(-1), left.maxima, right.maxima):
            high, low = two_sum(high, low, term)
        # the rounding error of an infinite sum would be NaN
        out.offset.copy_(torch.stack([high, low.masked_fill(~high.isfinite(), 0.0)], -1))
        self.pair(left, right, out)


def write_product(kind: type[Arithmetic], stack: Tensor, out: Tensor, *, inplace: bool) -> int | Tensor:
    """The number of recomputed entries of the products of stacks (g, s, c, c), written to `out` (g, c, c).

    Stacks have any floating dtype; products are computed in the memory of `stack` if `inplace`.
    """
    s, c = stack.shape[1:3]
    arithmetic, leaves = _arithmetic(kind, stack), Nodes.leaves(stack)
    if s == 1:
        out.copy_(stack[:, 0])
        return arithmetic.recomputed()
    over = inplace and stack.dtype == out.dtype
    nodes = Nodes.over(stack[:, ::2] if over else out.new_empty(len(stack), s - s // 2, c, c))
    _write_level(arithmetic, leaves, nodes)
    count, width = s - s // 2, 1
    while width < count:
        left = nodes.at(0, count - width, 2 * width)
        arithmetic.multiply(left, nodes.at(width, None, 2 * width), left)
        width *= 2
    out.copy_(add_offset(nodes.values[:, 0], nodes.offset[:, 0]))
    return arithmetic.recomputed()


def product_gradient(kind: type[Arithmetic], weight: Tensor, stack: Tensor, into: Tensor) -> None:
    """Write the gradients (g, s, c, c) of `sum(weight * log product)` with respect to stacks; weights are (g, c, c)."""
    arithmetic, s = _arithmetic(kind, stack), stack.shape[1]
    levels = _levels(arithmetic, stack)
    into[:, 0] = weight
    if s == 1:
        into.masked_fill_(stack == -torch.inf, 0.0)
    for level in reversed(range(len(levels) - 1)):  # the gradient of its left operand overwrites that of a product
        nodes, width = levels[level], 2**level
        left, right = into[:, : s - width : 2 * width], into[:, width :: 2 * width]
        pairs = left.shape[1]
        operands = nodes.at(0, 2 * pairs, 2), nodes.at(1, 2 * pairs, 2), levels[level + 1].at(0, pairs)
        arithmetic.gradient(left, *operands, left, right, add=False)


def prefixes(kind: type[Arithmetic], stack: Tensor, out: Tensor) -> int | Tensor:
    """The number of recomputed entries of the products of the first 1 to s matrices, which are written to `out`."""
    arithmetic = _arithmetic(kind, stack)
    nodes = _prefixes(arithmetic, stack, out)
    add_offset(nodes.values, nodes.offset)
    return arithmetic.recomputed()


def prefixes_gradient(kind: type[Arithmetic], weight: Tensor, stack: Tensor, into: Tensor) -> None:
    """Write the gradients (g, s, c, c) of `sum(weight * prefixes)`, by both sweeps in reverse.

    The gradient of a product is overwritten by that of its right operand; that of its left operand is added to.
    """
    arithmetic, s = _arithmetic(kind, stack), stack.shape[1]
    into.copy_(weight)
    levels, products = _levels(arithmetic, stack), Nodes.over(torch.empty_like(into))
    for level in range(s.bit_length()):
        products.at(2**level - 1, 2**level).copy_(levels[level].at(0, 1))
    _multiply_downward(arithmetic, products, levels)
    for level in range(s.bit_length()):
        before, after, count = _downward(s, 2**level)
        operands = products.at(*before), levels[level].at(2, 2 + 2 * count, 2), products.at(*after)
        left, right = (into[:, slice(*places)] for places in (before, after))
        arithmetic.gradient(right, *operands, left, right, add=True)
    for level in reversed(range(s.bit_length() - 1)):
        left, right = (into[:, slice(*places)] for places in _upward(s, 2**level))
        nodes, pairs = levels[level], left.shape[1]
        operands = nodes.at(0, 2 * pairs, 2), nodes.at(1, 2 * pairs, 2), levels[level + 1].at(0, pairs)
        arithmetic.gradient(right, *operands, left, right, add=True)
    into[:, 0].masked_fill_(stack[:, 0] == -torch.inf, 0.0)


def _levels(arithmetic: Arithmetic, stack: Tensor) -> list[Nodes]:
    """The levels of the tree, from the leaves to the root, in one tensor."""
    (g, count, c, _), sizes = stack.shape, list[int]()
    while count > 1:
        count -= count // 2
        sizes.append(count)
    rest, levels = Nodes.over(stack.new_empty(g, sum(sizes), c, c, dtype=_dtype(stack))), [Nodes.leaves(stack)]
    for size in sizes:
        nodes, rest = rest.at(0, size), rest.at(size)
        _write_level(arithmetic, levels[-1], nodes)
        levels.append(nodes)
    return levels


def _write_level(arithmetic: Arithmetic, nodes: Nodes, out: Nodes) -> None:
    """Write the next level: the products of pairs of nodes, and an odd last node."""
    count = nodes.values.shape[1]
    pairs = count // 2
    if pairs:
        arithmetic.multiply(nodes.at(0, 2 * pairs, 2), nodes.at(1, 2 * pairs, 2), out.at(0, pairs))
    if count % 2:
        out.at(pairs).copy_(nodes.at(2 * pairs))


def _prefixes(arithmetic: Arithmetic, stack: Tensor, memory: Tensor) -> Nodes:
    """The products of the first 1 to s matrices, by two sweeps in this memory.

    The first multiplies pairs of products of `width` matrices, each in the place of its last matrix, where the result
    is, too. The second multiplies each of these by the prefix before it.
    """
    nodes, s = Nodes.over(memory).copy_(Nodes.leaves(stack)), stack.shape[1]
    for level in range(s.bit_length() - 1):
        left, right = (nodes.at(*places) for places in _upward(s, 2**level))
        arithmetic.multiply(left, right, right)
    _multiply_downward(arithmetic, nodes, None)
    return nodes


def _multiply_downward(arithmetic: Arithmetic, products: Nodes, levels: list[Nodes] | None) -> None:
    """The second sweep; the right operands are those of `levels`, or where the results are."""
    s = products.values.shape[1]
    for level in reversed(range(s.bit_length())):
        before, after, count = _downward(s, 2**level)
        right = products.at(*after) if levels is None else levels[level].at(2, 2 + 2 * count, 2)
        if count:
            arithmetic.multiply(products.at(*before), right, products.at(*after))


Places = tuple[int, int, int]


def _upward(s: int, width: int) -> tuple[Places, Places]:
    """The places of left and right operands of the first sweep."""
    stop = s // (2 * width) * 2 * width
    return (width - 1, stop, 2 * width), (2 * width - 1, stop, 2 * width)


def _downward(s: int, width: int) -> tuple[Places, Places, int]:
    """The places of left and right operands of the second sweep, and their number."""
    count = (s - width) // (2 * width)
    first, length = 2 * width - 1, 2 * width * count
    return (first, first + length, 2 * width), (first + width, first + width + length, 2 * width), count


def with_arithmetic(kind: type[Arithmetic]) -> list[Any]:
    """The functions of a module `product`, with `kind` as their arithmetic."""
    return [partial(f, kind) for f in (write_product, product_gradient, prefixes, prefixes_gradient)]


def blocks(nodes: Tensor, entries: int) -> Iterator[tuple[slice, slice]]:
    """The sets and places of blocks of about so many entries, at least one node, of nodes (g, p, c, c)."""
    g, p, c, _ = nodes.shape
    places = max(1, min(p, entries // c**2))
    sets = max(1, entries // (c**2 * places))
    for z in range(0, g, sets):
        for i in range(0, p, places):
            yield slice(z, z + sets), slice(i, i + places)


def _dtype(stack: Tensor) -> torch.dtype:
    return torch.promote_types(stack.dtype, torch.float32)


def _arithmetic(kind: type[Arithmetic], stack: Tensor) -> Arithmetic:
    """Arithmetic for all pairs of a level of stacks (g, s, c, c) at once."""
    g, s, c, _ = stack.shape
    return kind(g * max(1, s // 2), c, _dtype(stack), stack.device)
