"""Explicit durations: hidden semi-Markov chains, as chains of states that count the steps left."""

import math

import torch
from torch import Tensor

from ..chain_arguments import ChainArguments
from ..kernels.structured import Durations
from .semiring import Semiring
from .transition import Transition, check_parameter


class Duration(Transition):
    r"""A chain that stays in each of c states for a duration, drawn when it enters the state.

    A counting state `(s, r)`, number `s D + r`, is state s with r more steps of it to come, r from 0 to D - 1. From
    r > 0 it leads to `(s, r - 1)` with weight 1, and from `(s, 0)` to `(s', r')` with the weight
    `matrix[s, s'] durations[s', r']`.

    Args:
        matrix: weights `[*B or ones, v-1 or 1, c, c]`, or `[c, c]`, with which one segment follows another. A diagonal
            of 0 keeps segments of one state apart.
        durations: weights `[..., c, D]` of each state's durations: `durations[s, d - 1]` is that of d steps.

    With `log_params` both are logarithms.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together.

    Cost of a step: `c D + c^2` multiply-adds, where all pairs of counting states that have arcs are `c^2 D`.

    >>> matrix, durations = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    >>> Duration(matrix, durations).to_dense()  # from and to (0, 0), (0, 1), (1, 0), (1, 1)
    tensor([[0.0000, 0.0000, 1.0000, 0.0000],
            [1.0000, 0.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000, 0.0000],
            [0.0000, 0.0000, 1.0000, 0.0000]])
    """

    own = (2, 2)

    def __init__(self, matrix: Tensor, durations: Tensor) -> None:
        check_parameter("matrix", matrix, 2)
        check_parameter("durations", durations, 2, like=matrix)
        c = matrix.shape[-1]
        if matrix.shape[-2] != c:
            raise ValueError(f"matrix: expected [..., c, c], got {list(matrix.shape)}")
        if durations.shape[-2] != c:
            raise ValueError(f"durations: expected [..., {c}, D] to go with matrix, got {list(durations.shape)}")
        super().__init__(matrix, durations)
        self.states = c * durations.shape[-1]

    @property
    def pattern(self) -> Durations:
        """The sizes of both parameters."""
        return Durations(*self.durations.shape[-2:])

    def to_pattern(self, parameters: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """One parameter of the entries of both; see `Transition.to_pattern`."""
        return (torch.cat([one.expand(*self.lead, -1, -1).flatten(-2) for one in parameters], -1),)

    def from_pattern(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The gradients of both parameters; see `Transition.from_pattern`."""
        (total,) = gradients
        parts = total.split([one.shape[-2:].numel() for one in self.parameters], -1)
        pairs = zip(parts, self.parameters, strict=True)
        return tuple(part.unflatten(-1, one.shape[-2:]).sum_to_size(one.shape) for part, one in pairs)

    @property
    def matrix(self) -> Tensor:
        """The weights with which one segment follows another `[..., c, c]`."""
        return self.parameters[0]

    @property
    def durations(self) -> Tensor:
        """The weights of each state's durations `[..., c, D]`."""
        return self.parameters[1]

    def arguments(
        self,
        x: Tensor,
        p0: Tensor,
        *,
        log_params: bool = False,
        lengths: Tensor | None = None,
        right_censored: bool = False,
    ) -> ChainArguments:
        """The arguments of `logchain`'s functions for log-potentials of the c states.

        Args:
            x: log-potentials `[*B, v, c]` in nats.
            p0: weights `[*B or ones, c]` of the first segment's state; its duration is drawn like that of others.
            log_params: whether `matrix`, `durations` and `p0` are logarithms.
            lengths: the lengths of the sequences, as in `logchain.product`.
            right_censored: whether the last segment may go on after the last step. By default it ends there.
        """
        durations = self.durations
        first = p0[..., None] + durations if log_params else p0[..., None] * durations
        states = x[..., None].expand(*x.shape, durations.shape[-1])
        if not right_censored:
            states = states.clone()
            states[..., -1, :, 1:] = -math.inf
        return ChainArguments(states.flatten(-2), self, first.flatten(-2), log_params, lengths)

    def apply(self, message: Tensor, semiring: Semiring) -> Tensor:
        """`message @ P`, a shift and an entry through the matrix; see `Transition.apply`."""
        counts = message.unflatten(-1, self.durations.shape[-2:])
        entering = semiring.matmul(counts[..., 0], self.matrix)
        entered = semiring.times(entering[..., None], self.durations[..., None, :, :])
        shifted = torch.cat([counts[..., 1:], torch.full_like(counts[..., :1], semiring.zero)], -1)
        return semiring.plus(entered, shifted).flatten(-2)
