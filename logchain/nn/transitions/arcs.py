"""Trained weights of transitions that are not zero: on a few diagonals, or the arcs of a graph."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ... import transitions as structures
from ...arguments import check_has_values
from ..checks import check_count
from ..parameters import broadcast
from .weights import ArcWeights, TransitionWeights


class Banded(TransitionWeights):
    r"""`logchain.transitions.Banded` whose weights of the bands out of each state are a softmax: rows sum to 1.

    Args:
        num_states: c.
        offsets: the diagonal of each band, different integers from -(c-1) to c-1; some band leads out of every state.
        lead: sizes of axes before those of the parameters: steps, or repetitions and steps. () is one matrix for all.
        prior_count: added to expected counts by expectation maximization, see `LogWeights`.
        generator: the source of randomness for the initial weights, uniform over the simplex.

    Attributes:
        weights: `LogWeights` `[*lead, arcs]`: those values of a band that have a source state, band by band.

    Call: `()` to the structure, with values `[*lead, bands, c]` in nats.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: an offset is out of range or occurs twice, or no band leads out of some state.

    Cost: `bands c` exponentials; in a chain, see `logchain.transitions.Banded`.

    >>> transition = Banded(3, [0, 1])
    >>> transition.set(torch.tensor([[0.9, 0.8, 1.0], [0.0, 0.1, 0.2]]))
    >>> transition().to_dense(log_params=True).exp()
    tensor([[0.9000, 0.1000, 0.0000],
            [0.0000, 0.8000, 0.2000],
            [0.0000, 0.0000, 1.0000]], grad_fn=<ExpBackward0>)
    """

    def __init__(
        self,
        num_states: int,
        offsets: Sequence[int],
        *,
        lead: tuple[int, ...] = (),
        prior_count: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        check_count("num_states", num_states)
        super().__init__(num_states, lead)
        bands = len(offsets) if isinstance(offsets, Sequence) else 1  # another kind is refused by the structure
        if not bands:
            raise ValueError("offsets: expected one or more, got none")
        self.offsets = structures.Banded(torch.zeros(bands, num_states), offsets).offsets
        sources = torch.arange(num_states) - torch.tensor(self.offsets)[:, None]  # (bands, c)
        check_has_values("offsets", sources)  # what is computed here is not drawn by `reset_parameters`
        inside = (sources >= 0) & (sources < num_states)
        _check_sources("offsets", sources[inside], num_states)
        self.register_buffer("places", inside.flatten().nonzero()[:, 0], persistent=False)
        self.weights = ArcWeights(sources[inside], num_states, lead, prior_count, generator)

    def structure(self, *logs: Tensor) -> structures.Banded:
        """The structure, with -inf where a value of a band has no source state."""
        (arcs,) = logs
        bands = arcs.new_full((*arcs.shape[:-1], len(self.offsets) * self.num_states), -torch.inf)
        bands = bands.index_copy(-1, cast(Tensor, self.places), arcs)
        return structures.Banded(bands.unflatten(-1, (-1, self.num_states)), self.offsets)

    def as_weights(self, *parameters: Tensor) -> tuple[Tensor, ...]:
        """The values of bands `[*lead, bands, c]` that have a source state."""
        (bands,) = parameters
        shape = (*self.weights.logits.shape[:-1], len(self.offsets), self.num_states)
        return (broadcast("values", bands, torch.Size(shape)).flatten(-2)[..., cast(Tensor, self.places)],)


class Sparse(TransitionWeights):
    r"""`logchain.transitions.Sparse` whose weights of the arcs out of each state are a softmax: rows sum to 1.

    What is no arc is impossible, and stays so; the weights of arcs are trained.

    Args:
        indices: integers `[2, arcs]`, the state that each arc leads from and the one that it leads to. Some arc leads
            out of every state, and no pair occurs twice.
        num_states: c; by default one more than the largest index.
        lead: see `Banded`, as for `prior_count` and `generator`.

    Attributes:
        weights: `LogWeights` `[*lead, arcs]`, in the order of the indices.

    Call: `()` to the structure, with values `[*lead, arcs]` in nats.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: an index is out of range, a pair occurs twice, or no arc leads out of some state.

    Cost: `arcs` exponentials; in a chain, see `logchain.transitions.Sparse`.

    >>> transition = Sparse(torch.tensor([[0, 0, 1], [0, 1, 1]]))
    >>> transition.set(torch.tensor([0.75, 0.25, 1.0]))
    >>> transition().to_dense(log_params=True).exp()
    tensor([[0.7500, 0.2500],
            [0.0000, 1.0000]], grad_fn=<ExpBackward0>)
    """

    def __init__(
        self,
        indices: Tensor,
        num_states: int | None = None,
        *,
        lead: tuple[int, ...] = (),
        prior_count: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        arcs = indices.shape[-1] if isinstance(indices, Tensor) and indices.dim() else 1
        # arcs are sorted once; this structure has no parameters
        structure = structures.Sparse(indices, torch.zeros(arcs), num_states).with_parameters()
        super().__init__(structure.states, lead)
        self._structure, indices = structure, structure.indices
        _check_sources("indices", indices[0], self.num_states)
        self.register_buffer("indices", indices)
        self.weights = ArcWeights(indices[0], self.num_states, lead, prior_count, generator)

    def structure(self, *logs: Tensor) -> structures.Sparse:
        """The structure, whose arcs are sorted again where the indices have moved to another device."""
        (arcs,), indices = logs, cast(Tensor, self.indices)
        if self._structure.indices.device != indices.device:
            self._structure = structures.Sparse(indices, arcs.detach(), self.num_states).with_parameters()
        return self._structure.with_parameters(arcs)


def _check_sources(name: str, sources: Tensor, num_states: int) -> None:
    """Check that something leads out of every state."""
    check_has_values(name, sources)
    ends = torch.bincount(sources, minlength=num_states) == 0
    if bool(ends.any()):
        raise ValueError(f"{name}: expected to lead out of every state, got none out of {int(ends.int().argmax())}")
