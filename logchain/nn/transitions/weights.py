"""What modules of structures have in common: parts with trained probabilities that sum to 1."""

from typing import cast

import torch
from torch import Tensor

from ...transitions import LINEAR, LOG, Transition
from ..log_weights import LogWeights


class TransitionWeights(torch.nn.Module):
    """A module that returns a structure of `logchain.transitions` whose parameters are logarithms.

    Its parts are `LogWeights`: expectation maximisation fits those by the gradients with respect to what they return.
    """

    def forward(self) -> Transition:
        """The structure, of logarithms."""
        raise NotImplementedError

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the weights anew, uniformly over the simplex."""
        for part in self.modules():
            if isinstance(part, LogWeights):
                part.reset_parameters(generator)


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

    def normalised(self, logits: Tensor) -> Tensor:
        """Logarithms of weights that sum to 1."""
        sources = cast(Tensor, self.sources)
        return logits - LOG.sum_at(logits, sources, self.num_states)[..., sources]

    def shares(self, logits: Tensor) -> Tensor:
        """Weights that sum to 1."""
        return self.normalised(logits).exp()

    def sums(self, weights: Tensor) -> Tensor:
        """The sums of which each weight is a part."""
        sources = cast(Tensor, self.sources)
        return LINEAR.sum_at(weights, sources, self.num_states)[..., sources]
