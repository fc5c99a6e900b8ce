"""Monarch matrices: two block-diagonal factors with a permutation between them."""

from torch import Tensor

from ..kernels.structured import Factor, Factors
from .products import Product
from .semiring import LINEAR, Semiring
from .transition import check_parameter, look_up


class Monarch(Product):
    r"""A matrix of two block-diagonal factors: `P[(a, b), (b', a')] = left[a, b, b'] right[b', a, a']`.

    A state (a, b), which is number `a B + b`, moves within its block a to the middle (a, b'), and from there within
    block b' to the state (b', a'), number `b' A' + a'`: each pair of states is joined by one middle, so that no entry
    is a sum.

    Args:
        left: weights `[*B or ones, v-1 or 1, A, B, B']`, or `[A, B, B']`.
        right: weights `[..., B', A, A']`, with `B' A' = A B`.

    With `log_params` both are logarithms.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together.

    Cost of a step: `c B' + c A` multiply-adds, `2 c^1.5` for square blocks, as two batched products of matrices.

    Source: T. Dao et al., "Monarch: expressive structured matrices for efficient and accurate training", ICML (2022),
    arXiv:2204.00595; in circuits, H. Zhang et al., "Scaling probabilistic circuits via Monarch matrices", ICML (2025),
    arXiv:2506.12383.

    >>> import torch
    >>> left = torch.tensor([[[0.9, 0.1]], [[0.5, 0.5]]])
    >>> Monarch(left, torch.tensor([[[1.0], [0.0]], [[0.25], [0.75]]])).to_dense()
    tensor([[0.9000, 0.0250],
            [0.0000, 0.3750]])
    """

    axes = (3, 3)

    def __init__(self, left: Tensor, right: Tensor) -> None:
        check_parameter("left", left, 3)
        check_parameter("right", right, 3, like=left)
        blocks, size, middle = left.shape[-3:]
        last = blocks * size // middle
        if right.shape[-3:] != (middle, blocks, last) or last * middle != blocks * size:
            expected = f"[..., {middle}, {blocks}, {blocks * size / middle:g}]"
            raise ValueError(f"right: expected {expected} to go with left {list(left.shape)}, got {list(right.shape)}")
        super().__init__(left, right)
        self.states = blocks * size
        self.pattern = Factors((Factor(size, middle, blocks=blocks), Factor(blocks, last, blocks=middle)))

    @property
    def left(self) -> Tensor:
        """The weights from states to middles `[..., A, B, B']`."""
        return self.parameters[0]

    @property
    def right(self) -> Tensor:
        """The weights from middles to states `[..., B', A, A']`."""
        return self.parameters[1]

    @property
    def mT(self) -> "Monarch":
        """The transposed matrices: transposed factors in the other order."""
        return Monarch(self.right.mT, self.left.mT)

    def entries(self, source: Tensor, target: Tensor, semiring: Semiring = LINEAR) -> Tensor:
        """`P[source, target]`, one entry of each factor, multiplied; see `Transition.entries`."""
        size, last = self.left.shape[-2], self.right.shape[-1]
        block, middle = source // size, target // last
        into = look_up(self.left, block, source % size, middle)
        return semiring.times(into, look_up(self.right, middle, block, target % last))
