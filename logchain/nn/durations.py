"""Trained durations of states: hidden semi-Markov models."""

import math
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

from ..arguments import check_choice, check_flag
from ..transitions import Duration
from .checks import check_count
from .em import maximize_by_lbfgs
from .emissions.distribution import Distribution
from .emissions.emission import Emission
from .log_weights import LogWeights
from .parameters import first_draw
from .priors import Dirichlet
from .transitions import Transitions


class Durations(Transitions):
    r"""`logchain.transitions.Duration` of trained probabilities: states with explicit durations.

    A segment of state s lasts d steps with probability `q_s(d)`, for d from 1 to D, and another state follows. An `HMM`
    with this transition has these c states, in its emission and in all results.

    Args:
        num_states: the number of states, c.
        max_duration: the largest number of steps, D.
        durations: "free" for a probability of each number of steps; or the family of d - 1, which is "poisson",
            "negative_binomial" or an `Emission` of c units over integers from 0 on, restricted to d from 1 to D and
            normalized: `q_s(d) = f_s(d - 1) / sum_k f_s(k - 1)`.
        right_censored: whether the last segment may go on after the last step, so that probabilities of all sequences
            of a length sum to 1. With False it ends there, and `log_prob` is that of the data and of this event.
        prior: a `Dirichlet` density of the probabilities of moves and of durations, see `LogWeights`.
        generator: the source of randomness for the initial weights.

    Attributes:
        weights: `LogWeights` `[c, c]` of the states that follow, whose diagonal is 0 (but 1 for a single state), and
            `[c, D]` of durations. The module of a family is `weights[1].family`; expectation maximization fits it to
            expected counts by up to 100 steps of L-BFGS.

    Call: `()` to the structure, of logarithms. `set` takes its matrix `[c, c]` and durations `[c, D]`, to which it fits
    a family by maximum likelihood.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: a size is not positive, a choice is unknown, or units are others than c.

    Cost: `c D + c^2` exponentials, and in a chain, in time and memory, that of `logchain.transitions.Duration`.

    Source: S.-Z. Yu, "Hidden semi-Markov models", Artificial Intelligence 174 (2010).

    >>> from logchain.nn import HMM
    >>> transition = Durations(2, 3)
    >>> transition.set(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.5, 0.5]]))
    >>> hmm = HMM(2, "poisson", transition=transition)
    >>> hmm.emission.set(torch.tensor([1.0, 9.0]))
    >>> hmm.decode(torch.tensor([0, 0, 9, 9, 9, 1, 0])).states  # state 0 takes three steps, the last time at least two
    tensor([0, 0, 0, 1, 1, 0, 0])
    """

    def __init__(
        self,
        num_states: int,
        max_duration: int,
        durations: Literal["free", "poisson", "negative_binomial"] | Emission = "free",
        *,
        right_censored: bool = True,
        prior: Dirichlet | None = None,
        generator: Generator | None = None,
    ) -> None:
        check_count("num_states", num_states)
        check_count("max_duration", max_duration)
        check_flag("right_censored", right_censored)
        super().__init__(
            Duration(torch.ones(num_states, num_states), torch.ones(num_states, max_duration)), prior=prior
        )
        self.right_censored = right_censored
        if num_states > 1:
            self.weights[0] = MoveWeights(num_states, num_states, prior=prior)
        first_draw(self, generator)
        if not isinstance(durations, Emission):
            check_choice("durations", durations, ("free", "poisson", "negative_binomial"))
            if durations == "free":
                return
            # of about the same mean for every state
            family, initial = "Poisson", dict[str, Any](rate=max_duration / 2)
            if durations == "negative_binomial":
                family, initial = "NegativeBinomial", {"total_count": 1.0, "logits": math.log(max_duration / 2)}
            durations = Distribution(family, num_states, spread=0.5, generator=generator, **initial)
        if durations.units != (num_states,):
            raise ValueError(f"durations: expected an Emission of units ({num_states},), got {durations.units}")
        self.weights[1] = FamilyWeights(durations, max_duration, prior)


class MoveWeights(LogWeights):
    """Log-probabilities `[c, c]` of the states that follow others: none follows itself."""

    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw the weights again; the diagonal, too, has no values after a construction on the meta device."""
        super().reset_parameters(generator)
        self.zeros = torch.eye(len(self.logits), dtype=torch.bool, device=self.logits.device)


class FamilyWeights(LogWeights):
    """Log-probabilities `[c, K]` of the integers from 0 to K - 1 under a family, normalized."""

    values: Tensor

    def __init__(self, family: Emission, num_values: int, prior: Dirichlet | None) -> None:
        nn.Module.__init__(self)
        self.dim, self.prior, self.family = -1, prior, family
        self.register_buffer("zeros", None)
        self.register_buffer("values", torch.arange(num_values)[:, None], persistent=False)

    @property
    def logits(self) -> Tensor:  # type: ignore[override]
        """Log-probabilities of the family, which may have larger values too."""
        return self.family.log_density(self.values).mT

    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw the parameters of the family again."""
        self.family.reset_parameters(generator)

    def _store(self, probabilities: Tensor) -> None:
        """Set the family's parameters to the best that a maximization of `sum probabilities log q` meets."""

        def likelihood() -> Tensor:
            terms: Tensor = (probabilities * self().masked_fill(probabilities == 0, 0.0)).sum()  # not 0 times -inf
            return terms

        maximize_by_lbfgs(list(self.family.parameters()), likelihood, 100)
