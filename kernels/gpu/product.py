"""Products of stacks of matrices of logarithms on a tree, each pair of nodes multiplied by the kernels of `log_matmul`.

Up to c = 64, or 32 in float64, where a product of two matrices is bound by memory, the root alone is computed by
`segments`, in which one program multiplies a whole segment of a stack. Larger products hand the maxima of their rows
and columns on to the next level, so that no operand is read for these alone. Reference:
`logchain.reference.matrix_product`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..numbers import exact_sum
from ..tree import Nodes, parts
from . import launch, log_matmul, log_matmul_gradient
from .line_maxima import maxima_of
from .segment_product import fits, resident
from .segments import products

# least matrices of a segment that are worth a launch
_SHORTEST = 4

# entries of gradients that are computed apart and added to others at a time
_HELD = 2**24


class Arithmetic(tree.Arithmetic):
    """Products of nodes by the kernels of `log_matmul`; nothing waits for the device."""

    def lines(self, c: int, dtype: torch.dtype) -> tuple[int, int]:
        """The shape of a node's maxima: of rows and columns, where a program of `log_matmul` has not all terms."""
        return (1, 1) if fits(c, dtype) else (2, c)

    def leaves(self, values: Tensor) -> Nodes:
        """Nodes of the caller's matrices."""
        if self.lines(values.shape[-1], torch.promote_types(values.dtype, torch.float32)) == (1, 1):
            return super().leaves(values)
        return Nodes.leaves(values, maxima_of(values))

    def leaves_for_root(self, values: Tensor) -> Nodes:
        """One node, the product of all, by segments; for large or single matrices, the leaves."""
        g, s, c, _ = values.shape
        dtype = torch.promote_types(values.dtype, torch.float32)
        if not fits(c, dtype) or s == 1:
            return self.leaves(values)
        programs = resident(c, dtype) * launch.processors(values)
        offsets, matrices = [], values.transpose(0, 1)  # (s, g, c, c)
        options: dict[str, Any] = {"dtype": dtype, "rescued": self.rescued}
        while len(matrices) > 1:
            count = len(matrices)
            length = count if count <= 2 * _SHORTEST else max(_SHORTEST, math.ceil(count * g / programs))
            matrices, offset = products(matrices, length, **options)
            offsets.append(offset)
        offset = torch.stack(exact_sum(torch.cat(offsets))[: parts(matrices.dtype)], -1)
        return Nodes(matrices.transpose(0, 1), matrices.new_zeros(g, 1, 1, 1), offset[:, None])

    def pair(self, left: Tensor, right: Tensor, out: Nodes, tops: Tensor, maxima: Tensor | None) -> None:
        """Write products of nodes, see `kernels.tree`."""
        found = out.maxima.fill_(-math.inf)
        row, column = (found[:, :, 0, 0], None) if maxima is None else found.unbind(2)
        options = {"a_top": tops[0], "b_top": tops[1], "maxima": maxima, "out_top": row, "out_column": column}
        log_matmul.forward(left, right, out.values, rescued=self.rescued, **options)

    def gradient(
        self, weight: Tensor, left: Nodes, right: Nodes, grad_left: Tensor, grad_right: Tensor, *, add_left: bool
    ) -> None:
        """Write gradients of nodes, see `kernels.tree`."""
        if not add_left:
            log_matmul_gradient.backward(weight, left.values, right.values, grad_a=grad_left, grad_b=grad_right)
            return
        g, _, c, _ = weight.shape
        slots = max(1, _HELD // (g * c * c))
        for w, a, b, grad_a, grad_b in zip(
            *(t.split(slots, 1) for t in (weight, left.values, right.values, grad_left, grad_right)), strict=True
        ):
            grad = torch.empty(grad_a.shape, dtype=grad_a.dtype, device=grad_a.device)
            log_matmul_gradient.backward(w, a, b, grad_a=grad, grad_b=grad_b)
            grad_a.add_(grad)


product, write_product, product_gradient, prefixes, prefixes_gradient, Kept = tree.with_arithmetic(Arithmetic)
