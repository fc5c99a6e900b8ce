"""Matrices of low rank, plus a diagonal: many states that mix through few components."""

import torch
from torch import Tensor

from ..kernels.structured import Factor, Factors
from .products import Product
from .semiring import LINEAR, LOG, Semiring
from .transition import check_parameter, look_up, pick


class LowRank(Product):
    r"""A matrix of rank r, plus a diagonal if there is one: `P = left @ right.T + diag(diagonal)`.

    Args:
        left: weights `[*B or ones, v-1 or 1, c, r]`, or `[c, r]`, from states to components.
        right: weights `[..., c, r]`, from components to states: `right[j, k]` leads from component k to state j.
        diagonal: weights `[..., c]` with which a state stays, added to those of the components.

    With `log_params` all are logarithms. Entries are sums over components, so that there is no best path through them:
    `viterbi` and `topk_paths` raise TypeError, and `entropy` takes the dense matrix.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together.

    Cost of a step: `2 c r` multiply-adds, as two products of matrices for all sequences together.

    Source: J. Chiu and A. Rush, "Scaling hidden Markov language models", EMNLP (2020); J. Chiu, Y. Deng and A. Rush,
    "Low-rank constraints for fast inference in structured models", NeurIPS (2021), arXiv:2201.02715.

    >>> LowRank(torch.tensor([[1.0], [2.0]]), torch.tensor([[0.25], [0.5]]), torch.tensor([0.5, 0.0])).to_dense()
    tensor([[0.7500, 0.5000],
            [0.5000, 1.0000]])
    """

    sums = True

    def __init__(self, left: Tensor, right: Tensor, diagonal: Tensor | None = None) -> None:
        check_parameter("left", left, 2)
        check_parameter("right", right, 2, like=left)
        c, r = left.shape[-2:]
        if right.shape[-2:] != (c, r):
            raise ValueError(f"right: expected [..., {c}, {r}] to go with left, got {list(right.shape)}")
        if diagonal is not None:
            check_parameter("diagonal", diagonal, 1, like=left)
            if diagonal.shape[-1] != c:
                raise ValueError(f"diagonal: expected [..., {c}] to go with left, got {list(diagonal.shape)}")
        super().__init__(left, right, *(() if diagonal is None else (diagonal,)))
        self.states, self.axes = c, (2, 2, 1)[: len(self.parameters)]
        self.pattern = Factors((Factor(c, r), Factor(r, c, transposed=True)), diagonal is not None)

    @property
    def left(self) -> Tensor:
        """The weights from states to components `[..., c, r]`."""
        return self.parameters[0]

    @property
    def right(self) -> Tensor:
        """The weights from components to states `[..., c, r]`."""
        return self.parameters[1]

    @property
    def diagonal(self) -> Tensor | None:
        """The weights with which a state stays `[..., c]`, or None."""
        return self.parameters[2] if self.pattern.diagonal else None

    @property
    def mT(self) -> "LowRank":
        """The transposed matrices: left and right exchanged."""
        return LowRank(self.right, self.left, self.diagonal)

    def entries(self, source: Tensor, target: Tensor, semiring: Semiring = LINEAR) -> Tensor:
        """`P[source, target]`, a sum over components; see `Transition.entries`."""
        components = semiring.times(look_up(self.left, source, rest=1), look_up(self.right, target, rest=1))
        entries = semiring.sum(components, -1)
        if self.diagonal is None:
            return entries
        stays = torch.where(source == target, look_up(self.diagonal, target), semiring.zero)
        return semiring.plus(entries, stays)

    def draw(self, message: Tensor, target: Tensor, uniform: Tensor) -> Tensor:
        """States before `target`: a component is drawn, or the diagonal, and then a state; see `Transition.draw`."""
        logs = LOG.matmul(message, self.left)
        logs = logs + look_up(self.right[..., None, :, :], target, rest=1)  # [draws, *lead, rows, r]
        if self.diagonal is not None:
            stays = message.expand(*target.shape, -1).gather(-1, target[..., None])
            logs = torch.cat([logs, stays + look_up(self.diagonal[..., None, :], target)[..., None]], -1)
        component, rest = pick(logs, uniform)
        r = self.left.shape[-1]
        left = look_up(self.left.mT[..., None, :, :], component.clamp(max=r - 1), rest=1)  # [draws, *lead, rows, c]
        return torch.where(component == r, target, pick(message + left, rest)[0])
