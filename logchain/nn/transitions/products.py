"""Trained factors of transition matrices that are products; rows of the products sum to 1."""

import math

import torch
from torch import Tensor

from ... import transitions as structures
from ...arguments import check_flag
from ..checks import check_count
from ..log_weights import LogWeights
from ..parameters import broadcast
from .weights import TransitionWeights


class LowRank(TransitionWeights):
    r"""`logchain.transitions.LowRank` of probabilities: a state draws a component, and that the next state.

    With a diagonal a state may also draw to stay where it is.

    Args:
        num_states: c.
        rank: r, the number of components.
        diagonal: whether states may stay without a component.
        lead: see `Banded`, as for `prior_count` and `generator`.

    Attributes:
        left: `LogWeights` `[*lead, c, r]`, or `[*lead, c, r + 1]` with the diagonal as the last one.
        right: `LogWeights` `[*lead, c, r]`, which sum to 1 over the states.

    It has no best path: `logchain.viterbi` raises TypeError.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: a size is not positive.

    Cost: `2 c r` exponentials; in a chain, see `logchain.transitions.LowRank`.

    >>> transition = LowRank(2, 1)
    >>> transition.set(torch.ones(2, 1), torch.tensor([[0.25], [0.75]]))
    >>> transition().to_dense(log_params=True).exp()
    tensor([[0.2500, 0.7500],
            [0.2500, 0.7500]], grad_fn=<ExpBackward0>)
    """

    def __init__(
        self,
        num_states: int,
        rank: int,
        *,
        diagonal: bool = False,
        lead: tuple[int, ...] = (),
        prior_count: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        check_count("num_states", num_states)
        check_count("rank", rank)
        check_flag("diagonal", diagonal)
        super().__init__(num_states, lead)
        self.diagonal = diagonal
        shape = (*lead, num_states, rank)
        self.left = LogWeights(*shape[:-1], rank + diagonal, prior_count=prior_count, generator=generator)
        self.right = LogWeights(*shape, dim=-2, prior_count=prior_count, generator=generator)

    def structure(self, *logs: Tensor) -> structures.LowRank:
        """The structure, whose diagonal is the last of the components to the left."""
        left, right = logs
        if not self.diagonal:
            return structures.LowRank(left, right)
        return structures.LowRank(left[..., :-1], right, left[..., -1])

    def as_weights(self, *parameters: Tensor) -> tuple[Tensor, ...]:
        """The factors to the left `[*lead, c, r]`, with the diagonal `[*lead, c]`, and to the right `[*lead, c, r]`."""
        if len(parameters) != 2 + self.diagonal:
            expected = "left, right and diagonal" if self.diagonal else "None besides left and right"
            raise ValueError(f"diagonal: expected {expected}, got {len(parameters)} parameters")
        left, right, *diagonal = parameters
        if not diagonal:
            return left, right
        shape = self.left.logits.shape
        left = broadcast("left", left, torch.Size((*shape[:-1], shape[-1] - 1)))
        return torch.cat([left, broadcast("diagonal", diagonal[0], shape[:-1])[..., None]], -1), right


class BlockDiagonal(TransitionWeights):
    r"""`logchain.transitions.BlockDiagonal` of probabilities: groups of states that do not mix.

    Args:
        num_blocks: A, the number of groups.
        block_size: B, the states of each.
        lead: see `Banded`, as for `prior_count` and `generator`.

    Attributes:
        blocks: `LogWeights` `[*lead, A, B, B]`.

    Raises:
        TypeError: a size is no integer.
        ValueError: a size is not positive.

    Cost: `c B` exponentials; in a chain, see `logchain.transitions.BlockDiagonal`.

    >>> transition = BlockDiagonal(2, 1)
    >>> transition.set(torch.ones(2, 1, 1))
    >>> transition().to_dense(log_params=True).exp()
    tensor([[1., 0.],
            [0., 1.]], grad_fn=<ExpBackward0>)
    """

    kind = structures.BlockDiagonal

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        lead: tuple[int, ...] = (),
        prior_count: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        check_count("num_blocks", num_blocks)
        check_count("block_size", block_size)
        super().__init__(num_blocks * block_size, lead)
        shape = (*lead, num_blocks, block_size, block_size)
        self.blocks = LogWeights(*shape, prior_count=prior_count, generator=generator)


class Kronecker(TransitionWeights):
    r"""`logchain.transitions.Kronecker` of probabilities: parts of a state that move independently.

    Args:
        *sizes: the number of values of each part, two or more.
        lead: see `Banded`, as for `prior_count` and `generator`.

    Attributes:
        factors: a `LogWeights` `[*lead, c_k, c_k]` for each part.

    Raises:
        TypeError: a size is no integer.
        ValueError: a size is not positive, or there are less than two.

    Cost: `c_1^2 + c_2^2 + ...` exponentials; in a chain, see `logchain.transitions.Kronecker`.

    >>> transition = Kronecker(2, 1)
    >>> transition.set(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.ones(1, 1))
    >>> transition().to_dense(log_params=True).exp()
    tensor([[0.9000, 0.1000],
            [0.2000, 0.8000]], grad_fn=<ExpBackward0>)
    """

    kind = structures.Kronecker

    def __init__(
        self,
        *sizes: int,
        lead: tuple[int, ...] = (),
        prior_count: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        if len(sizes) < 2:
            raise ValueError(f"sizes: expected two or more, got {len(sizes)}")
        check_count("sizes", *sizes)
        super().__init__(math.prod(sizes), lead)
        factors = (LogWeights(*lead, size, size, prior_count=prior_count, generator=generator) for size in sizes)
        self.factors = torch.nn.ModuleList(factors)


class Monarch(TransitionWeights):
    r"""`logchain.transitions.Monarch` of probabilities: moves within a block, and then within one of another division.

    Args:
        num_blocks: A.
        block_size: B, the states of each block; c = A B.
        middle: B', by default B: from each block to as many middles, which divide c.
        lead: see `Banded`, as for `prior_count` and `generator`.

    Attributes:
        left: `LogWeights` `[*lead, A, B, B']`.
        right: `LogWeights` `[*lead, B', A, A']`, with A' = c / B'.

    Raises:
        TypeError: a size is no integer.
        ValueError: a size is not positive, or `middle` does not divide c.

    Cost: `c (A + B')` exponentials; in a chain, see `logchain.transitions.Monarch`.

    >>> transition = Monarch(2, 2)
    >>> transition.set(torch.eye(2), torch.eye(2))
    >>> transition().to_dense(log_params=True).exp()  # from (a, b) to (b, a)
    tensor([[1., 0., 0., 0.],
            [0., 0., 1., 0.],
            [0., 1., 0., 0.],
            [0., 0., 0., 1.]], grad_fn=<ExpBackward0>)
    """

    kind = structures.Monarch

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        middle: int | None = None,
        *,
        lead: tuple[int, ...] = (),
        prior_count: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        middle = block_size if middle is None else middle
        check_count("num_blocks", num_blocks)
        check_count("block_size", block_size)
        check_count("middle", middle)
        super().__init__(num_blocks * block_size, lead)
        if self.num_states % middle:
            raise ValueError(f"middle: expected a divisor of {self.num_states} states, got {middle}")
        last = self.num_states // middle
        self.left = LogWeights(*lead, num_blocks, block_size, middle, prior_count=prior_count, generator=generator)
        self.right = LogWeights(*lead, middle, num_blocks, last, prior_count=prior_count, generator=generator)
