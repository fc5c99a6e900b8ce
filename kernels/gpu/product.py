"""The product of two nodes of a product tree, and its gradient, on the Triton kernels of `log_matmul`.

A node is a (c, c) matrix of logarithms in float32 or float64, its largest entry `top`, and a float64 offset kept apart.
A product is stored relative to the tops of its operands, which go into its offset: so nodes stay near 0 without a pass
of their own, over either operand if need be, and nothing waits for the device. Up to c = 64, where a product is bound
by memory, segments of a stack are multiplied by one program each instead (`segment_products`).

Names and meaning are those of `kernels.plain.product`. Reference: `logchain.reference.matrix_product`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..numbers import exact_sum
from ..plain.nodes import parts, two_sum
from . import launch, log_matmul, log_matmul_gradient
from .segments import segment_products

# up to this size segments are multiplied by one program, which holds a whole matrix
_WHOLE = 64

# segments that one multiprocessor works on at a time, from their registers; not measured yet
_RESIDENT = 8

# fewer matrices to a segment are not worth a launch
_SHORTEST = 4

# entries of gradients that are added to others at a time
_HELD = 2**24


@dataclass(frozen=True)
class Nodes:
    """`values` (g, p, c, c), their largest entries `top` (g, p), and `offset` (g, p, r), one float64 or a sum of two.

    The logarithm of a node is `values + offset`. Leaves are the caller's: of any floating dtype, with offsets of 0.
    """

    values: Tensor
    top: Tensor
    offset: Tensor

    @classmethod
    def leaves(cls, values: Tensor) -> "Nodes":
        """The matrices that the caller passed."""
        g, p = values.shape[:2]
        zero = values.new_zeros(1, 1, 1, dtype=torch.float64)
        top = values.amax((-2, -1)).to(torch.promote_types(values.dtype, torch.float32))
        return cls(values, top, zero.expand(g, p, parts(values.dtype)))

    @classmethod
    def over(cls, values: Tensor) -> "Nodes":
        """Nodes to be written, in this memory."""
        g, p = values.shape[:2]
        return cls(values, values.new_empty(g, p), values.new_empty(g, p, parts(values.dtype), dtype=torch.float64))

    def at(self, slots: slice) -> "Nodes":
        """The nodes in some slots of each set, as a view."""
        return Nodes(self.values[:, slots], self.top[:, slots], self.offset[:, slots])

    def copy_(self, other: "Nodes") -> None:
        """Become as many others."""
        self.values.copy_(other.values)
        self.top.copy_(other.top)
        self.offset.copy_(other.offset)


class Arithmetic:
    """Products of nodes with c states, at most so many at once; `rescued` counts the entries redone, on the device."""

    def __init__(self, c: int, most: int, dtype: torch.dtype, device: torch.device) -> None:
        self._tops = torch.empty(2, max(1, most), dtype=dtype, device=device)
        self._sums = torch.empty(3 + parts(dtype), max(1, most), dtype=torch.float64, device=device)
        self.rescued = torch.zeros(1, dtype=torch.int64, device=device)

    def leaves_for_root(self, values: Tensor) -> Nodes:
        """The leaves of a tree of which only the root is wanted, or products of theirs."""
        g, s, c, _ = values.shape
        if c > _WHOLE or s == 1:
            return Nodes.leaves(values)
        programs = _RESIDENT * launch.processors(values)
        offsets, matrices = [], values.transpose(0, 1)  # (s, g, c, c)
        while len(matrices) > 1:
            count = len(matrices)
            length = count if count <= 2 * _SHORTEST else max(_SHORTEST, math.ceil(count * g / programs))
            matrices, offset = segment_products(matrices, None, length, log_params=True, rescued=self.rescued)
            offsets.append(offset)
        offset = torch.stack(exact_sum(torch.cat(offsets))[: parts(matrices.dtype)], -1)
        return Nodes(matrices.transpose(0, 1), matrices.new_zeros(g, 1), offset[:, None])

    def multiply(self, left: Nodes, right: Nodes, out: Nodes) -> None:
        """`out = left right`; it may lie over either."""
        shape = out.top.shape
        tops = [
            room[: out.top.numel()].view(shape).copy_(nodes.top)
            for room, nodes in zip(self._tops, (left, right), strict=True)
        ]
        self._add_offsets(left, right, tops, out)
        log_matmul.forward(
            left.values,
            right.values,
            out.values,
            a_top=tops[0],
            b_top=tops[1],
            out_top=out.top.fill_(-math.inf),
            rescued=self.rescued,
        )

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
        if not add_left:
            log_matmul_gradient.backward(weight, left.values, right.values, grad_a=grad_left, grad_b=grad_right)
            return
        g, _, c, _ = weight.shape
        slots = max(1, _HELD // (g * c * c))
        for w, a, b, grad_a, grad_b in zip(
            *(t.split(slots, 1) for t in (weight, left.values, right.values, grad_left, grad_right)), strict=True
        ):
            found = torch.empty(grad_a.shape, dtype=grad_a.dtype, device=grad_a.device)
            log_matmul_gradient.backward(w, a, b, grad_a=found, grad_b=grad_b)
            grad_a.add_(found)

    def logarithms(self, nodes: Nodes, out: Tensor) -> None:
        """The nodes as they are meant (g, p, c, c): logarithms with their offsets; `out` may be the nodes' memory."""
        offset, *lost = nodes.offset.unbind(-1)
        high = offset.to(out.dtype)
        # what the offset has beyond the dtype goes to the smaller summand
        rest = (lost[0] if lost else offset - high).nan_to_num(0.0, 0.0, 0.0).to(out.dtype)
        torch.add(nodes.values, rest[..., None, None], out=out)
        out.add_(high[..., None, None])

    def _add_offsets(self, left: Nodes, right: Nodes, tops: list[Tensor], out: Nodes) -> None:
        """The offset of a product: those of the operands and their tops; -inf where nothing is possible."""
        g, p, count = out.offset.shape
        room = self._sums[:, : g * p].unflatten(1, (g, p))
        total = room[:count].copy_(left.offset.movedim(-1, 0))
        for term in (*right.offset.unbind(-1), *tops):
            if count == 1:
                total.add_(term)
            else:
                two_sum(total, term, room[count:])
        out.offset.copy_(total.movedim(0, -1))
