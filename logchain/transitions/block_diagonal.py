"""Matrices of blocks along the diagonal: groups of states that do not mix."""

import torch
from torch import Tensor

from ..kernels.structured import Factor, Factors
from .products import Product
from .semiring import LINEAR, Semiring
from .transition import check_parameter, look_up


class BlockDiagonal(Product):
    r"""A matrix of A square blocks along the diagonal: `P[a B + b, a B + b'] = blocks[a, b, b']`.

    Args:
        blocks: weights `[*B or ones, v-1 or 1, A, B, B]`, or `[A, B, B]`; logarithms with `log_params`.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together.

    Cost of a step: `c B` multiply-adds. In `product` each block is a separate chain with a dense matrix; elsewhere a
    step is one batched product of matrices.

    >>> BlockDiagonal(torch.tensor([[[0.9, 0.1], [0.2, 0.8]], [[0.5, 0.5], [0.0, 1.0]]])).to_dense()
    tensor([[0.9000, 0.1000, 0.0000, 0.0000],
            [0.2000, 0.8000, 0.0000, 0.0000],
            [0.0000, 0.0000, 0.5000, 0.5000],
            [0.0000, 0.0000, 0.0000, 1.0000]])
    """

    axes = (3,)

    def __init__(self, blocks: Tensor) -> None:
        check_parameter("blocks", blocks, 3)
        count, size, columns = blocks.shape[-3:]
        if size != columns:
            raise ValueError(f"blocks: expected square ones [..., A, B, B], got {list(blocks.shape)}")
        super().__init__(blocks)
        self.states = count * size
        self.pattern = Factors((Factor(size, size, blocks=count),))

    @property
    def blocks(self) -> Tensor:
        """The weights `[..., A, B, B]`."""
        return self.parameters[0]

    @property
    def mT(self) -> "BlockDiagonal":
        """The transposed matrices: those of transposed blocks."""
        return BlockDiagonal(self.blocks.mT)

    def entries(self, source: Tensor, target: Tensor, semiring: Semiring = LINEAR) -> Tensor:
        """`P[source, target]`, weight zero between blocks; see `Transition.entries`."""
        size = self.blocks.shape[-1]
        block, target_block = source // size, target // size
        weights = look_up(self.blocks, block, source % size, target % size)
        return torch.where(block == target_block, weights, semiring.zero)
