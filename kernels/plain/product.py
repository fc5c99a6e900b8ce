"""Products of stacks of matrices of logarithms on a tree, each pair of nodes multiplied by `matmul` in float64."""

import torch
from torch import Tensor

from .. import tree
from ..numbers import finite
from ..tree import Nodes, blocks
from . import matmul

# entries of nodes that are converted to float64 and multiplied at a time
_HELD = 2**15


class Arithmetic(tree.Arithmetic):
    """Products of nodes in float64, a block of them at a time."""

    _recomputed = 0

    def pair(self, left: Nodes, right: Nodes, out: Nodes) -> None:
        """Write products of nodes, see `kernels.tree`."""
        for at in blocks(left.values, _HELD):
            a, b = (
                (nodes.values[at].double() - finite(nodes.maxima[at])[..., None, None]).flatten(0, 1)
                for nodes in (left, right)
            )
            values, recomputed = matmul.forward(a, b, torch.float64)
            out.values[at] = values.view(out.values[at].shape)
            out.maxima[at] = out.values[at].amax((-2, -1))
            self._recomputed += recomputed

    def gradient(
        self, weight: Tensor, left: Nodes, right: Nodes, out: Nodes, grad_left: Tensor, grad_right: Tensor, *, add: bool
    ) -> None:
        """Write gradients of nodes, see `kernels.tree`."""
        for at in blocks(weight, _HELD):
            w, a, b = (values[at].double().flatten(0, 1) for values in (weight, left.values, right.values))
            grads = matmul.backward(w, a, b, True, True, torch.float64)
            for grad, into, adds in zip(grads, (grad_left, grad_right), (add, False), strict=True):
                assert grad is not None
                part = grad.view(into[at].shape)
                into[at] = into[at] + part if adds else part

    def recomputed(self) -> int:
        """The number of entries that were recomputed, see `kernels.tree`."""
        return self._recomputed


write_product, product_gradient, prefixes, prefixes_gradient = tree.with_arithmetic(Arithmetic)
