"""Trained transition matrices: dense ones, and the factors of structured ones."""

from typing import cast

import torch
from torch import Generator, Tensor, nn

from ..arguments import check_has_values, check_tensor
from ..transitions import Banded, BlockDiagonal, Duration, Kronecker, LowRank, Monarch, Sparse, Transition
from ..transitions.dense import Dense
from .checks import check_count, check_lead, check_number
from .log_weights import ArcWeights, LogWeights
from .parameters import broadcast, first_draw
from .priors import Dirichlet

# the axis along which parameters sum to 1, where it is the same for all of a structure, or that of each parameter;
# values of `Banded` and `Sparse` sum to 1 over the arcs out of each state
DIMS: dict[type[Transition], int | tuple[int, ...]] = {
    **dict.fromkeys((Dense, BlockDiagonal, Duration, Kronecker, Monarch), -1),
    LowRank: (-1, -2),
}


class Transitions(nn.Module):
    r"""Trained transition probabilities: a dense matrix, or the parameters of a structure; all rows sum to 1.

    Args:
        states: c, for a dense matrix that is drawn; or what training starts from: a matrix `[..., c, c]`, or a
            structure of `logchain.transitions`, of non-negative weights, which are normalized. What is 0 stays 0.
        dims: for a structure that is not of `logchain.transitions`, the axis from the right along which each of its
            parameters sums to 1; one number serves all. They have to make the rows of matrices sum to 1.
        lead: sizes of axes before those of the weights: steps `(v - 1,)`, or repetitions and steps.
        sticky: added to the concentration of the diagonal, so that states last longer; for dense matrices, `Banded` and
            `Sparse`. 0 or more.
        prior: a `Dirichlet` density of all probabilities, for maximum a posteriori fits; see `LogWeights`.
        generator: the source of randomness of a matrix that is drawn, each row uniformly over the simplex.

    Attributes:
        weights: a `LogWeights` for each parameter of the structure, in its order. Those of `LowRank` with a diagonal
            are left `[c, r + 1]`, whose last column is the diagonal, and right `[c, r]`, which sums to 1 over states.

    Call: `()` to the structure, whose parameters are logarithms; a dense matrix to these logarithms `[*lead, c, c]`,
    `[1, c, c]` without leading axes. In nats, in float32 at least.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: a size is not positive, a weight is negative, nothing leads out of some state, `sticky` goes with a
            structure without a diagonal, or `dims` are missing.

    Cost: an exponential for each parameter; in a chain, that of the structure.

    >>> from logchain.nn import HMM
    >>> from logchain.transitions import Banded
    >>> forward = Transitions(Banded(torch.ones(2, 3), [0, 1]))  # to the same state, or to the next
    >>> forward().to_dense(log_params=True).exp()
    tensor([[0.5000, 0.5000, 0.0000],
            [0.0000, 0.5000, 0.5000],
            [0.0000, 0.0000, 1.0000]], grad_fn=<ExpBackward0>)
    >>> hmm = HMM(3, "gaussian", transition=forward)
    >>> lasting = HMM(3, "gaussian", transition=Transitions(3, sticky=10.0))
    """

    def __init__(
        self,
        states: int | Tensor | Transition,
        *,
        dims: int | tuple[int, ...] | None = None,
        lead: tuple[int, ...] = (),
        sticky: float = 0.0,
        prior: Dirichlet | None = None,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        check_lead(lead, least=0)
        structure = _structure(states).map(Tensor.detach)
        if isinstance(structure, Dense) and not (lead or structure.lead):
            lead = (1,)
        structure = structure.map(lambda parameter: parameter.expand(*lead, *parameter.shape))
        self._structure = _without_values(structure, structure.device)
        prior = _sticky(structure, sticky, prior)
        self.weights = cast(list[LogWeights], nn.ModuleList(_modules(structure, dims, prior)))
        for part, start in zip(self.weights, _layout(structure), strict=True):
            part.start(start)
        if isinstance(states, int):
            first_draw(self, generator)

    def forward(self) -> Tensor | Transition:
        """The structure, of logarithms."""
        logs: list[Tensor] = [part() for part in self.weights]
        if self._structure.device != logs[0].device:
            self._structure = _without_values(self._structure, logs[0].device)
        if isinstance(self._structure, Dense):
            return logs[0]
        if len(self._structure.parameters) > len(logs):  # the diagonal of `LowRank` is a column of the left factor
            logs = [logs[0][..., :-1], logs[1], logs[0][..., -1]]
        return self._structure.with_parameters(*logs)

    def set(self, *parameters: Tensor) -> None:
        """Set the parameters of the structure, in its order, to probabilities.

        Args:
            *parameters: one for each parameter, of its shape or what broadcasts to it; a dense matrix `[..., c, c]`.

        Raises:
            ValueError: there is another number of them, a number is negative, a sum differs from 1 by more than 1e-5,
                or an entry is not 0 that was 0 when the module was constructed.
        """
        shapes = [parameter.shape for parameter in self._structure.parameters]
        if len(parameters) != len(shapes):
            raise ValueError(f"parameters: expected {len(shapes)}, got {len(parameters)}")
        values = (broadcast("parameters", *pair) for pair in zip(parameters, shapes, strict=True))
        for part, value in zip(self.weights, _layout(self._structure.with_parameters(*values)), strict=True):
            part.set(value)

    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw the weights again, uniformly over the simplex of those that are not fixed at 0."""
        for part in self.weights:
            part.reset_parameters(generator)

    def extra_repr(self) -> str:
        """The structure and its sizes."""
        return repr(self._structure)


def _structure(states: object) -> Transition:
    if isinstance(states, Transition):
        return states
    if isinstance(states, Tensor):
        check_tensor("states", states, 2)
        if states.shape[-1] != states.shape[-2]:
            raise ValueError(f"states: expected a matrix [..., c, c], got {list(states.shape)}")
        return Dense(states)
    if not isinstance(states, int):
        expected = "a number, a matrix or a structure of logchain.transitions"
        raise TypeError(f"states: expected {expected}, got {type(states).__name__}")
    check_count("states", states)
    return Dense(torch.ones(states, states))


def _without_values(structure: Transition, device: torch.device) -> Transition:
    """A structure of zeros that take no memory, on a device: what is trained are the weights."""
    return structure.map(lambda parameter: torch.zeros((), device=device).expand_as(parameter))


def _modules(structure: Transition, dims: int | tuple[int, ...] | None, prior: Dirichlet | None) -> list[LogWeights]:
    shapes = [start.shape for start in _layout(structure)]
    if dims is None and isinstance(structure, Banded | Sparse):
        sources = _arcs(structure)[0]
        check_has_values("states", sources)
        empty = torch.bincount(sources.flatten(), minlength=structure.states) == 0
        if bool(empty.any()):
            raise ValueError(f"states: expected arcs out of every state, got none out of {int(empty.int().argmax())}")
        return [ArcWeights(*shapes[0], sources=sources, num_states=structure.states, prior=prior)]
    dims = DIMS.get(type(structure)) if dims is None else dims
    if dims is None:
        expected = f"the axes along which parameters of {type(structure).__name__} sum to 1"
        raise ValueError(f"dims: expected {expected}, got None; pass them, such as dims=-1")
    normalized_dims = (dims,) * len(shapes) if isinstance(dims, int) else dims
    return [LogWeights(*shape, dim=dim, prior=prior) for shape, dim in zip(shapes, normalized_dims, strict=True)]


def _layout(structure: Transition) -> list[Tensor]:
    """The parameters of a structure as weights that sum to 1, 0 where they are not used."""
    pairs = zip(structure.parameters, structure.used, strict=True)
    values = [value if used is None else torch.where(used, value, 0.0) for value, used in pairs]
    if not isinstance(structure, LowRank) or structure.diagonal is None:
        return values
    left, right, diagonal = values
    shape = torch.broadcast_shapes(left.shape[:-1], diagonal.shape)
    return [torch.cat([left.expand(*shape, -1), diagonal.expand(shape)[..., None]], -1), right]


def _arcs(structure: Banded | Sparse) -> Tensor:
    """The states that each value leads from and to, int64 `[2, *sizes]`."""
    if isinstance(structure, Sparse):
        return structure.indices
    target = torch.arange(structure.states, device=structure.device)
    source = target - torch.tensor(structure.offsets, device=structure.device)[:, None]
    return torch.stack([source % structure.states, target.expand_as(source)])


def _sticky(structure: Transition, sticky: float, prior: Dirichlet | None) -> Dirichlet | None:
    check_number("sticky", sticky)
    if not sticky:
        return prior
    if isinstance(structure, Dense):
        diagonal = torch.eye(structure.states)
    elif isinstance(structure, Banded | Sparse):
        source, target = _arcs(structure)
        diagonal = (source == target).double()
    else:
        raise ValueError(f"sticky: expected 0 with {type(structure).__name__}, got {sticky}; pass prior=")
    concentration = 1.0 if prior is None else prior.concentration
    return Dirichlet(concentration + sticky * diagonal)
