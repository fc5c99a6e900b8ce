"""The base class of trained structures, and weights that sum to 1 over the arcs out of each state."""

from typing import cast

import torch
from torch import Tensor

from ...transitions import LINEAR, LOG, Transition
from ..checks import check_lead
from ..log_weights import LogWeights


class TransitionWeights(torch.nn.Module):
    """A module that returns a structure of `logchain.transitions` whose parameters are logarithms.

    A subclass assigns a `LogWeights` for each parameter of the structure `kind`, in their order: expectation
    maximization fits those by the gradients with respect to what they return. Where a parameter is laid out in another
    way than its weights, it implements `structure` and `as_weights`.
    """

    kind: type[Transition]

    def __init__(self, num_states: int, lead: tuple[int, ...]) -> None:
        super().__init__()
        check_lead(lead)
        self.num_states = num_states

    def forward(self) -> Transition:
        """The structure, of logarithms."""
        return self.structure(*(part() for part in self._parts()))

    def set(self, *parameters: Tensor) -> None:
        """Set the parameters of the structure, in its order, to probabilities.

        Args:
            *parameters: `[*lead, ...]`, or what broadcasts to it, laid out as those of the structure; what sums to 1 is
                normalized.

        Raises:
            ValueError: there is another number of them, a number is negative, or a sum is 0.
        """
        parts = self._parts()
        values = self.as_weights(*parameters)
        if len(values) != len(parts):
            raise ValueError(f"parameters: expected {len(parts)}, got {len(values)}")
        for part, value in zip(parts, values, strict=True):
            part.set(value)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the weights again, uniformly over the simplex."""
        for part in self._parts():
            part.reset_parameters(generator)

    def structure(self, *logs: Tensor) -> Transition:
        """The structure of the logarithms of all weights."""
        return self.kind(*logs)

    def as_weights(self, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Parameters of the structure in the layout of the weights."""
        return parameters

    def _parts(self) -> list[LogWeights]:
        return [part for part in self.modules() if isinstance(part, LogWeights)]


class ArcWeights(LogWeights):
    """Logarithms `[*lead, arcs]` of probabilities that sum to 1 over the arcs out of each state."""

    def __init__(
        self,
        sources: Tensor,
        num_states: int,
        lead: tuple[int, ...],
        prior_count: float,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__(*lead, len(sources), prior_count=prior_count, generator=generator)
        self.num_states = num_states
        self.register_buffer("sources", sources, persistent=False)

    def normalized(self, logits: Tensor) -> Tensor:
        """Logarithms of weights that sum to 1."""
        sources = cast(Tensor, self.sources)
        return logits - LOG.sum_at(logits, sources, self.num_states)[..., sources]

    def totals(self, weights: Tensor) -> Tensor:
        """The sum to which each weight belongs."""
        sources = cast(Tensor, self.sources)
        return LINEAR.sum_at(weights, sources, self.num_states)[..., sources]
