"""Products of stacks of matrices of logarithms on a tree, each pair of nodes multiplied by the kernels of `log_matmul`.

A product over its right operand is the transposed product over its left one. A product over an operand with more
columns than a tile, and a gradient that is added or over its weight, go through temporaries of bounded size.
"""

import torch
from torch import Tensor

from .. import tree
from ..tree import Nodes, blocks
from . import log_matmul

# entries of a temporary, at least one matrix
_ENTRIES = 2**22


class Arithmetic(tree.Arithmetic):
    """Products of nodes by the kernels of `log_matmul`; the host reads no value."""

    def __init__(self, most: int, c: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(most, c, dtype, device)
        tiles, (_, self._columns, _), _ = log_matmul.tiles(c, c, c, dtype)
        self._tops = torch.empty(max(1, most), tiles, dtype=dtype, device=device)
        self._counts = torch.zeros(max(1, most), tiles, dtype=torch.int32, device=device)

    def pair(self, left: Nodes, right: Nodes, out: Nodes) -> None:
        """Write products of nodes, see `kernels.tree`."""
        a, b, into, shifts = left.values, right.values, out.values, (_lines(left), _lines(right))
        if into.data_ptr() == b.data_ptr():
            a, b, into, shifts = b.mT, a.mT, into.mT, shifts[::-1]
        if into.data_ptr() != a.data_ptr() or a.shape[-1] <= self._columns:
            self._multiply(a, b, shifts, into, out.maxima)
            return
        for at in blocks(into, _ENTRIES):
            into[at] = self._multiply(a[at], b[at], (shifts[0][at], shifts[1][at]), None, out.maxima[at])

    def _multiply(
        self, a: Tensor, b: Tensor, shifts: tuple[Tensor, Tensor], out: Tensor | None, maxima: Tensor
    ) -> Tensor:
        """Products, written to `out` if it is not None, and their `maxima`."""
        g, p = maxima.shape
        tops = self._tops[: g * p]
        out = log_matmul.forward(a, b, shifts, out, tops, self._counts)
        torch.amax(tops.view(g, p, -1), -1, out=maxima)
        return out

    def gradient(
        self, weight: Tensor, left: Nodes, right: Nodes, out: Nodes, grad_left: Tensor, grad_right: Tensor, *, add: bool
    ) -> None:
        """Write gradients of nodes, see `kernels.tree`."""
        tensors = grad_left, grad_right, weight, left.values, right.values, out.values, _lines(left), _lines(right)
        for at in blocks(weight, _ENTRIES):
            into_a, into_b, w, a, b, product, rows, columns = (tensor[at] for tensor in tensors)
            # either gradient may be in the memory of the weight, so neither is written before both are computed
            of_a, of_b = torch.empty_like(w), into_b
            if into_b.data_ptr() == w.data_ptr():
                of_b = torch.empty_like(w)
            log_matmul.backward(of_b.mT, w.mT, b.mT, a.mT, product.mT, (columns, rows))
            log_matmul.backward(of_a, w, a, b, product, (rows, columns))
            if of_b is not into_b:
                into_b.copy_(of_b)
            into_a.copy_(of_a.add_(into_a) if add else of_a)

    def recomputed(self) -> Tensor:
        """The number of entries that were recomputed, on the device."""
        return self._counts.sum()


def _lines(nodes: Nodes) -> Tensor:
    """The maximum of each matrix, for all of its rows or columns (g, p, c)."""
    return nodes.maxima[..., None].expand(nodes.values.shape[:-1])


write_product, product_gradient, prefixes, prefixes_gradient = tree.with_arithmetic(Arithmetic)
