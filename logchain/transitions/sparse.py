"""Matrices of which only some entries are not zero: graphs."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..arguments import check_has_values, check_integers, has_values
from ..kernels.structured import Arcs
from .semiring import LINEAR, Semiring
from .transition import Transition, check_parameter, look_up, with_entries


@dataclass(frozen=True)
class _Graph:
    """The arcs of a graph, int64 [2, arcs], and their orders, which are computed once."""

    indices: Tensor
    states: int

    @cached_property
    def reversed(self) -> "_Graph":
        """The graph whose arcs lead back."""
        graph = _Graph(self.indices.flip(0), self.states)
        graph.__dict__["reversed"] = self
        return graph

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """The places of arcs in a flat matrix, sorted, and the arcs in that order."""
        places, order = torch.sort(self.indices[0] * self.states + self.indices[1])
        return places, order

    @cached_property
    def arcs(self) -> Arcs:
        """The sorted arcs, which the kernels take."""
        return Arcs(*self.indices[:, self.places[1]].contiguous())

    @cached_property
    def inverse(self) -> Tensor | None:
        """The place of each arc among the sorted ones; None if they are sorted as they are."""
        inverse = torch.argsort(self.places[1])
        if not has_values(inverse):
            return inverse
        in_order = torch.arange(len(inverse), device=inverse.device)
        return None if torch.equal(inverse, in_order) else inverse


class Sparse(Transition):
    r"""A matrix given by its entries that are not zero, arcs of a graph: `P[indices[0, k], indices[1, k]] = values[k]`.

    Args:
        indices: integers `[2, arcs]`, the state that each arc leads from and the one that it leads to, in any order. No
            pair may occur twice.
        values: weights `[*B or ones, v-1 or 1, arcs]`, or `[arcs]`; logarithms with `log_params`.
        states: c; by default one more than the largest index.

    `values` and their gradients keep the order of `indices`.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: sizes do not go together, an index is out of range, or a pair occurs twice.

    Cost of a step: `arcs` multiply-adds. Arcs are sorted once, when the structure is made. On a CPU, a structure of 32
    states or more and c^2 / 20 arcs or more is computed as a dense matrix if that is small compared with x: it takes
    less time.

    >>> Sparse(torch.tensor([[0, 0, 1], [0, 2, 1]]), torch.tensor([0.5, 0.4, 1.0]), states=3).to_dense()
    tensor([[0.5000, 0.0000, 0.4000],
            [0.0000, 1.0000, 0.0000],
            [0.0000, 0.0000, 0.0000]])
    """

    axes = (1,)

    def __init__(self, indices: Tensor, values: Tensor, states: int | None = None) -> None:
        check_integers("indices", indices)
        check_parameter("values", values, 1)
        if indices.shape != (2, values.shape[-1]):
            raise ValueError(f"indices: expected [2, {values.shape[-1]}] to go with values, got {list(indices.shape)}")
        if states is not None and (isinstance(states, bool) or not isinstance(states, int)):
            raise TypeError(f"states: expected an integer or None, got {states!r}")
        super().__init__(values)
        self.states = _checked_states(indices, states)
        self._graph = _Graph(indices.to(values.device, torch.int64), self.states)
        places, _ = self._graph.places
        if has_values(places) and bool((places[1:] == places[:-1]).any()):
            raise ValueError("indices: expected each pair of states once, got one twice")

    def with_parameters(self, *parameters: Tensor) -> "Sparse":
        """The same graph with other values, on their device; see `Transition.with_parameters`."""
        copy = super().with_parameters(*parameters)
        if parameters and parameters[0].device != self.indices.device:
            copy._graph = _Graph(self.indices.to(parameters[0].device), self.states)
        return copy

    @property
    def values(self) -> Tensor:
        """The weights `[..., arcs]`."""
        return self.parameters[0]

    @property
    def indices(self) -> Tensor:
        """The states that arcs lead from and to, `[2, arcs]`."""
        return self._graph.indices

    @property
    def pattern(self) -> Arcs:
        """The sorted arcs."""
        return self._graph.arcs

    def to_pattern(self, parameters: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The values in the order of sorted arcs; see `Transition.to_pattern`."""
        return parameters if self._graph.inverse is None else (parameters[0][..., self._graph.places[1]],)

    def from_pattern(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Gradients in the order of `indices`; see `Transition.from_pattern`."""
        return gradients if self._graph.inverse is None else (gradients[0][..., self._graph.inverse],)

    def apply(self, message: Tensor, semiring: Semiring) -> Tensor:
        """`message @ P`, a product for each arc, summed where arcs meet; see `Transition.apply`."""
        source, target = self.indices
        terms = semiring.times(message[..., source], self.values[..., None, :])
        return semiring.sum_at(terms, target, self.states)

    def _dense(self, semiring: Semiring) -> Tensor:
        source, target = self.indices
        return with_entries(self.values, source * self.states + target, self.states, semiring.zero)

    @property
    def multiply_adds(self) -> int:
        """The multiply-adds of one step of one sequence."""
        return self.values.shape[-1]

    @property
    def mT(self) -> "Sparse":
        """The transposed matrices: arcs lead back."""
        transposed = self.with_parameters(self.values)
        transposed._graph = self._graph.reversed
        return transposed

    def entries(self, source: Tensor, target: Tensor, semiring: Semiring = LINEAR) -> Tensor:
        """`P[source, target]`, weight zero where no arc leads; see `Transition.entries`."""
        (places, order), place = self._graph.places, source * self.states + target
        at = torch.searchsorted(places, place.contiguous()).clamp_(max=len(places) - 1)
        return torch.where(places[at] == place, look_up(self.values, order[at]), semiring.zero)


def _checked_states(indices: Tensor, states: int | None) -> int:
    """The number of states, by default one more than the largest index; indices without values are not checked."""
    if states is not None and not has_values(indices):
        return states
    check_has_values("indices", indices)
    low, high = (int(bound) for bound in torch.aminmax(indices))
    c = high + 1 if states is None else states
    if low < 0 or high >= c:
        raise ValueError(f"indices: expected values from 0 to c - 1 = {c - 1}, got {low} to {high}")
    return c
