"""Hidden Markov models whose parameters are trained."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..adapters import ChainArguments
from ..arguments import Lengths, check_choice
from ..marginals import Marginals, marginals
from ..product import product
from ..sample import sample as draw_paths
from ..viterbi import Path, viterbi
from .checks import check_count
from .emissions.input_layer import InputLayer
from .emissions.named import emission_of
from .fitting import Fit, Optimiser, fit, frozen
from .log_weights import LogWeights
from .parameters import arithmetic
from .potentials import fill, in_batch, over, potentials, where_known
from .stationary import stationary


class Sample(NamedTuple):
    """State paths int64 `[num_samples, *B, v]` and data `[num_samples, *B, v, *event]`."""

    states: Tensor
    data: Tensor


class HMM(torch.nn.Module):
    r"""`p(data) = sum_z p(z_0) prod_i P_i(z_{i-1}, z_i) prod_i p(data_i | z_i)` over paths `z` of hidden states.

    Args:
        num_states: c.
        emission: "categorical", "gaussian" or "poisson"; or an `InputLayer` with units `c`, or `(d, c)` for d
            observations a step that are independent given the state; or any module that makes log-potentials
            `[*B, v, c]` of data `[*B, v, *event]`, with which `lengths` have all axes of B.
        num_features: d, the size of the vector that is observed at each step; None for a single number.
        num_categories: of "categorical".
        covariance: of "gaussian": "diagonal" or "full".
        initial: "free", or "stationary": that which the transitions leave as it is. Then they have to be one matrix for
            all steps, with which every state reaches every other, and `fit` goes by gradients.
        transition: a module whose call makes logits `[*B or less, v-1 or 1, c, c]` (`[from, to]`) of covariates. By
            default there is one matrix for all steps.
        num_steps: v, for a matrix of its own at each step; sequences may be shorter.
        generator: where the initial parameters come from.

    The methods take data `[*B, v, *event]`, as `[n, v]` or `[v]`, and
        observed: bool, of the shape of the data or `[*B, v]`; what is False is summed out, and so is NaN in the data by
            an `InputLayer` (a network is given it).
        lengths: integers from 1 to v, of the shape of the first axes of B: what lies behind has no influence.
        covariates: what `transition` is called with, `[*B, v-1, ...]` to depend on the step.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: a choice is unknown, or sizes do not go together.

    Cost: that of the emission and of `logchain.product`.

    Source: L. R. Rabiner, "A tutorial on hidden Markov models", Proc. IEEE 77 (1989).

    >>> hmm = HMM(2, "categorical", num_categories=2)
    >>> hmm
    HMM(
      num_states=2, initial='free'
      (initial): LogWeights(2)
      (transition): LogWeights(1, 2, 2)
      (emission): Categorical(
        units=(2,)
        (weights): LogWeights(2, 2, dim=-2)
      )
    )
    >>> hmm.initial.set(torch.tensor([0.5, 0.5]))
    >>> hmm.transition.set(torch.tensor([[0.9, 0.1], [0.2, 0.8]]))
    >>> hmm.emission.weights.set(torch.tensor([[0.5, 0.25], [0.5, 0.75]]))  # [data, state]
    >>> hmm.log_prob(torch.tensor([[0, 0, 1], [0, 1, 1]]), lengths=[3, 1]).exp()
    tensor([0.0875, 0.3750], grad_fn=<ExpBackward0>)
    """

    def __init__(
        self,
        num_states: int,
        emission: str | torch.nn.Module,
        *,
        num_features: int | None = None,
        num_categories: int | None = None,
        covariance: Literal["diagonal", "full"] = "diagonal",
        initial: Literal["free", "stationary"] = "free",
        transition: torch.nn.Module | None = None,
        num_steps: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_count("num_states", num_states)
        if num_steps is not None:
            check_count("num_steps", num_steps)
        check_choice("initial", initial, ("free", "stationary"))
        if initial == "stationary" and num_steps is not None:
            raise ValueError("initial: expected 'free' where each step has a matrix of its own, got 'stationary'")
        if not isinstance(transition, torch.nn.Module | None):
            raise TypeError(f"transition: expected a torch.nn.Module, got {type(transition).__name__}")
        if transition is not None and num_steps is not None:
            raise ValueError(f"num_steps: expected None with a transition module, got {num_steps}")
        self.num_states, self.num_steps = num_states, num_steps
        self.initial = LogWeights(num_states, generator=generator) if initial == "free" else None
        if transition is None:
            transition = LogWeights((num_steps or 2) - 1, num_states, num_states, generator=generator)
        self.transition: torch.nn.Module = transition
        self.emission: torch.nn.Module = emission_of(
            emission, num_states, num_features, num_categories, covariance, generator
        )

    def arguments(
        self,
        data: Tensor,
        *,
        observed: Tensor | None = None,
        lengths: Lengths | None = None,
        covariates: Tensor | None = None,
    ) -> ChainArguments:
        """What the library's functions take: `logchain.entropy(**hmm.arguments(data)._asdict())`."""
        x, ends = potentials(self.emission, self.num_states, data, observed, lengths)
        bulk = self._transitions(x.shape, ends, covariates)
        if self.initial is not None:
            return ChainArguments(x, bulk, self.initial(), True, ends)
        if bulk.shape[-3] != 1:
            raise ValueError(f"initial: expected 'free' with {bulk.shape[-3]} transition matrices, got 'stationary'")
        # linear: a state that is never visited has no logarithm with a gradient
        p0 = stationary(bulk[..., 0, :, :].double().exp())
        return ChainArguments(x, bulk.exp(), p0.to(bulk.dtype), False, ends)

    def log_prob(
        self,
        data: Tensor,
        *,
        observed: Tensor | None = None,
        lengths: Lengths | None = None,
        covariates: Tensor | None = None,
    ) -> Tensor:
        """`log p(data)` `[*B]` in nats; it can be differentiated."""
        chain = self.arguments(data, observed=observed, lengths=lengths, covariates=covariates)
        return product(**chain._asdict())

    # what wrappers such as DistributedDataParallel call
    forward = log_prob

    def posterior(
        self,
        data: Tensor,
        *,
        observed: Tensor | None = None,
        lengths: Lengths | None = None,
        covariates: Tensor | None = None,
        transitions: Literal["sum", "full"] | None = None,
    ) -> Marginals:
        """Posterior probabilities of states `[*B, v, c]`, and of transitions: see `logchain.marginals`."""
        chain = self.arguments(data, observed=observed, lengths=lengths, covariates=covariates)
        return marginals(**chain._asdict(), transitions=transitions)

    def decode(
        self,
        data: Tensor,
        *,
        observed: Tensor | None = None,
        lengths: Lengths | None = None,
        covariates: Tensor | None = None,
    ) -> Path:
        """The most probable path of states `[*B, v]`, and `log p(data, path)` `[*B]`: see `logchain.viterbi`."""
        chain = self.arguments(data, observed=observed, lengths=lengths, covariates=covariates)
        return viterbi(**chain._asdict())

    def sample_posterior(
        self,
        data: Tensor,
        num_samples: int,
        *,
        observed: Tensor | None = None,
        lengths: Lengths | None = None,
        covariates: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Paths of states given the data: int64 `[num_samples, *B, v]`, see `logchain.sample`."""
        chain = self.arguments(data, observed=observed, lengths=lengths, covariates=covariates)
        return draw_paths(**chain._asdict(), num_samples=num_samples, generator=generator)

    @torch.no_grad()
    def sample(
        self,
        num_samples: int,
        num_steps: int,
        *,
        covariates: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Sample:
        """Paths of states and data of the model: nothing is observed. The emission has to be an `InputLayer`."""
        emission = self.emission
        if not isinstance(emission, InputLayer):
            raise TypeError(f"emission: expected an InputLayer to sample from, got {type(emission).__name__}")
        check_count("num_steps", num_steps)
        bulk = self._transitions(torch.Size((num_steps, self.num_states)), None, covariates)
        nothing = torch.zeros(*bulk.shape[:-3], num_steps, self.num_states, device=bulk.device)
        initial = stationary(bulk[..., 0, :, :].double().exp()).log() if self.initial is None else self.initial()
        states = draw_paths(nothing, bulk, initial, num_samples, generator=generator, log_params=True)
        of_each = over(states, states.shape + emission.units[:-1])
        return Sample(states, emission.draw(of_each, generator))

    @torch.no_grad()
    def initialise(
        self,
        data: Tensor,
        *,
        observed: Tensor | None = None,
        lengths: Lengths | None = None,
        covariates: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Draw what is trained anew: probabilities uniformly, emissions by the data."""
        with frozen(self):
            for weights in (self.initial, self.transition):
                if isinstance(weights, LogWeights):
                    weights.reset_parameters(generator)
            if isinstance(self.emission, InputLayer) and any(p.requires_grad for p in self.emission.parameters()):
                known, _ = where_known(self.emission, data, observed, lengths)
                self.emission.initialise(data if known is None else fill(data, known), known, generator=generator)

    def fit(
        self,
        data: Tensor,
        *,
        observed: Tensor | None = None,
        lengths: Lengths | None = None,
        covariates: Tensor | None = None,
        method: Literal["em", "gradient"] = "em",
        max_iterations: int = 100,
        tolerance: float = 1e-2,
        batch_size: int | None = None,
        step: float | Callable[[int], float] | None = None,
        optimiser: Optimiser | None = None,
        restarts: int = 1,
        generator: torch.Generator | None = None,
        progress: bool = False,
    ) -> Fit:
        """Maximum likelihood from starts that the data suggest: see `logchain.nn.fit`.

        `restarts`: how many starts, of which the best is kept; 0 goes on from the present parameters.
        """
        if method == "em" and self.initial is None:
            raise ValueError("method: expected 'gradient' with a stationary initial distribution, got 'em'")
        data, conditions = in_batch(self.emission, data, {"observed": observed, "covariates": covariates}, lengths)
        return fit(
            self,
            data,
            conditions=conditions,
            method=method,
            max_iterations=max_iterations,
            tolerance=tolerance,
            batch_size=batch_size,
            step=step,
            optimiser=optimiser,
            restarts=restarts,
            generator=generator,
            progress=progress,
        )

    @classmethod
    def from_hmmlearn(cls, model: Any) -> "HMM":
        """A fitted GaussianHMM, GMMHMM, PoissonHMM or CategoricalHMM of hmmlearn, in float64.

        Data are `[*B, v, d]` as hmmlearn's samples are `[samples, d]`, but categories are `[*B, v]`.
        """
        from .hmmlearn_models import from_hmmlearn

        return from_hmmlearn(model)

    def to_hmmlearn(self) -> Any:
        """The model of hmmlearn with the same parameters; its samples are `[samples, d]`, with d = 1 for numbers."""
        from .hmmlearn_models import to_hmmlearn

        return to_hmmlearn(self)

    def _transitions(self, shape: torch.Size, ends: Tensor | None, covariates: Tensor | None) -> Tensor:
        """Log-probabilities `[*B or less, v-1 or 1, c, c]` to go with x of a shape."""
        *batch, v, _ = shape
        if isinstance(self.transition, LogWeights):
            if covariates is not None:
                raise ValueError("covariates: expected None without a transition module")
            found: Tensor = self.transition()
            if self.num_steps is None:
                return found
            if v > self.num_steps:
                raise ValueError(f"data: expected at most {self.num_steps} steps, got {v}")
            return found[: v - 1]
        if covariates is not None and ends is not None and covariates.shape[: len(batch) + 1] == (*batch, v - 1):
            covariates = fill(covariates, torch.arange(1, v, device=ends.device) < ends[..., None])
        return torch.log_softmax(arithmetic(self.transition(covariates)), -1)

    def extra_repr(self) -> str:
        """Sizes, and where chains start."""
        return f"num_states={self.num_states}, initial={'stationary' if self.initial is None else 'free'!r}"
