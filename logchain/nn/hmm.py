"""Hidden Markov models with trained parameters."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..arguments import Lengths, check_choice, check_tensor
from ..chain_arguments import ChainArguments
from ..marginals import Marginals, marginals
from ..product import product
from ..sample import sample as draw_paths
from ..transitions import Duration, Transition
from ..viterbi import Path, viterbi
from .chain_model import ChainModel
from .checks import check_count
from .emissions import Bernoulli, Emission, Gaussian, Poisson
from .log_weights import LogWeights
from .parameters import arithmetic, fill, over
from .stationary import stationary
from .transitions.weights import TransitionWeights


class Sample(NamedTuple):
    """Draws of `HMM.sample`.

    Attributes:
        states: paths int64 `[num_samples, *B, v]`.
        data: `[num_samples, *B, v, *event]`.
    """

    states: Tensor
    data: Tensor


class HMM(ChainModel):
    r"""`p(data) = sum_z p(z_0) prod_i P_i(z_{i-1}, z_i) prod_i p(data_i | z_i)` over paths `z` of hidden states.

    Args:
        num_states: c.
        emission: "gaussian", "poisson" or "bernoulli" for numbers; or an `Emission` with units `c`, or `(d, c)` for d
            observations a step that are independent given the state; or any module that maps data `[*B, v, *event]` to
            log-potentials `[*B, v, c]` (`lengths` then need all axes of B).
        initial: "free" for trained initial probabilities; "stationary" for the stationary distribution of the
            transitions, which must be one irreducible matrix for all steps; `fit` then needs `method="gradient"`.
        transition: a module of `logchain.nn.transitions`, such as `Banded` or, for a hidden semi-Markov model,
            `Durations`; or one that maps covariates to logits `[*B or less, v-1 or 1, c, c]` (`[from, to]`), or to a
            structure of `logchain.transitions` whose parameters are logarithms. By default one trained matrix serves
            all steps.
        num_steps: the largest v, for a trained matrix at each step.
        generator: the source of randomness for the initial parameters.

    The methods take data `[*B, v, *event]`, such as `[n, v]` or `[v]`, and
        observed: bool, of the shape of the data or `[*B, v]`. False entries are summed out. If the emission is an
            `Emission`, so are NaN entries of the data, and `[v]` serves all sequences.
        lengths: integers from 1 to v, of the shape of the first axes of B; steps after the end have no influence.
        covariates: the argument of `transition`; `[*B, v-1, ...]` where it depends on the step.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: a choice is unknown, the emission has no such option, or sizes do not go together.

    Cost: that of the emission and of `logchain.product`.

    Source: L. R. Rabiner, "A tutorial on hidden Markov models", Proc. IEEE 77 (1989).

    >>> from logchain.nn import Categorical
    >>> hmm = HMM(2, Categorical(2, 2))
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
        initial: Literal["free", "stationary"] = "free",
        transition: torch.nn.Module | None = None,
        num_steps: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_count("num_states", num_states)
        check_choice("initial", initial, ("free", "stationary"))
        if num_steps is not None:
            check_count("num_steps", num_steps)
            if initial == "stationary":
                raise ValueError("initial: expected 'free' where each step has a separate matrix, got 'stationary'")
            if transition is not None:
                raise ValueError(f"num_steps: expected None with a transition module, got {num_steps}")
        if not isinstance(transition, torch.nn.Module | None):
            raise TypeError(f"transition: expected a torch.nn.Module, got {type(transition).__name__}")
        self.num_states, self.num_steps, self.stationary = num_states, num_steps, initial == "stationary"
        self.initial = LogWeights(num_states, generator=generator) if initial == "free" else None
        if transition is None:
            transition = LogWeights((num_steps or 2) - 1, num_states, num_states, generator=generator)
        self.transition: torch.nn.Module = transition
        families = {"gaussian": Gaussian, "poisson": Poisson, "bernoulli": Bernoulli}
        if isinstance(emission, str):
            check_choice("emission", emission, tuple(families))
            emission = families[emission](num_states, generator=generator)
        if not isinstance(emission, torch.nn.Module):
            raise TypeError(f"emission: expected a name or a torch.nn.Module, got {type(emission).__name__}")
        self.emission = emission
        if isinstance(self.emission, Emission):
            units = self.emission.units
            if units[-1] != num_states or len(units) > 2:
                raise ValueError(f"emission: expected units ({num_states},) or (d, {num_states}), got {units}")

    def arguments(
        self,
        data: Tensor,
        observed: Tensor | None = None,
        *,
        lengths: Lengths | None = None,
        covariates: Tensor | None = None,
    ) -> ChainArguments:
        """The chain of the data, for functions such as `logchain.entropy`.

        Returns:
            `x` `[*B, v, c]`, `bulk` and `p0` (logarithms, or probabilities if `initial` is "stationary"), and lengths.
            With `Durations`, states count steps: state s with r more steps is number `s D + r`.

        >>> from logchain import entropy
        >>> hmm = HMM(2, "poisson")
        >>> entropy(**hmm.arguments(torch.tensor([[0, 3, 1]]))._asdict()).shape
        torch.Size([1])
        """
        data, known, ends = self._observations(data, observed, lengths)
        x = self._potentials(data, known, "lengths" if observed is None else "observed")
        if not x.shape[-2]:
            raise ValueError(f"data: expected at least one step [*B, v, ...], got {list(data.shape)}")
        return self._chain(x, self._transitions(x.shape[:-2], x.shape[-2], ends, covariates), ends)

    def log_prob(
        self,
        data: Tensor,
        observed: Tensor | None = None,
        *,
        lengths: Lengths | None = None,
        covariates: Tensor | None = None,
    ) -> Tensor:
        """`log p(data)` of each sequence.

        Returns:
            `[*B]` in nats, with gradients: float64 if a parameter is, otherwise float32; -inf for impossible data.

        >>> hmm = HMM(2, "poisson")
        >>> hmm.log_prob(torch.tensor([[0, 2, 5], [1, 0, 0]]), lengths=[3, 1]).shape
        torch.Size([2])
        """
        chain = self.arguments(data, observed, lengths=lengths, covariates=covariates)
        return product(**chain._asdict())

    # wrappers such as DistributedDataParallel call `forward`
    forward = log_prob

    def posterior(
        self,
        data: Tensor,
        observed: Tensor | None = None,
        *,
        lengths: Lengths | None = None,
        covariates: Tensor | None = None,
        transitions: Literal["sum", "full"] | None = None,
    ) -> Marginals:
        """The posterior marginals of states, and those of transitions: see `logchain.marginals`.

        `transitions` is None for none, "sum" for expected counts, "full" for posteriors of each step `[*B, v-1, c, c]`.
        With `Durations` those are of moves between segments, and of the durations of all segments but the first.

        Returns:
            `Marginals(states [*B, v, c], transitions, log_norm [*B])`; `log_norm` is `log p(data)` in nats.

        >>> hmm = HMM(2, "poisson")
        >>> hmm.emission.set(torch.tensor([1.0, 50.0]))
        >>> posterior = hmm.posterior(torch.tensor([0, 1, 48]), transitions="sum")
        >>> posterior.states.detach().round()
        tensor([[1., 0.],
                [1., 0.],
                [0., 1.]])
        >>> posterior.transitions.detach().round()  # state 0 stays once, then moves to 1
        tensor([[[1., 1.],
                 [0., 0.]]])
        """
        chain = self.arguments(data, observed, lengths=lengths, covariates=covariates)
        posterior = marginals(**chain._asdict(), transitions=transitions)
        if not isinstance(chain.bulk, Duration):
            return posterior
        return posterior._replace(states=posterior.states.unflatten(-1, (self.num_states, -1)).sum(-1))

    def decode(
        self,
        data: Tensor,
        observed: Tensor | None = None,
        *,
        lengths: Lengths | None = None,
        covariates: Tensor | None = None,
    ) -> Path:
        """The most probable path of states of each sequence: see `logchain.viterbi`.

        Returns:
            `Path(states, score)`: int64 `[*B, v]`, -1 after a sequence's end, and `log p(data, states)` `[*B]`, nats.

        >>> hmm = HMM(2, "poisson")
        >>> hmm.emission.set(torch.tensor([1.0, 50.0]))
        >>> hmm.decode(torch.tensor([0, 1, 48])).states
        tensor([0, 0, 1])
        """
        chain = self.arguments(data, observed, lengths=lengths, covariates=covariates)
        path = viterbi(**chain._asdict())
        return path._replace(states=self._states(path.states, chain))

    def sample_posterior(
        self,
        data: Tensor,
        num_samples: int,
        observed: Tensor | None = None,
        *,
        lengths: Lengths | None = None,
        covariates: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Independent draws of `num_samples` paths of states of each sequence, given the data: see `logchain.sample`.

        Returns:
            int64 `[num_samples, *B, v]`, -1 after a sequence's end.

        >>> hmm = HMM(2, "poisson")
        >>> hmm.emission.set(torch.tensor([1.0, 50.0]))
        >>> hmm.sample_posterior(torch.tensor([0, 1, 48]), 2)  # two draws, hardly uncertain
        tensor([[0, 0, 1],
                [0, 0, 1]])
        """
        chain = self.arguments(data, observed, lengths=lengths, covariates=covariates)
        paths = draw_paths(**chain._asdict(), num_samples=num_samples, generator=generator)
        return self._states(paths, chain)

    @torch.no_grad()
    def sample(
        self,
        num_samples: int,
        num_steps: int,
        *,
        covariates: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Sample:
        """Independent draws of states and data from the model, whose emission has to be an `Emission`.

        Args:
            num_samples: the number of sequences.
            num_steps: v, the length of each.
            covariates: the argument of `transition`.
            generator: the source of randomness.

        Returns:
            `Sample(states, data)`: int64 `[num_samples, v]` and `[num_samples, v, *event]`.

        Raises:
            TypeError: the emission is no `Emission`, or a number is no integer.
            ValueError: a number is negative, the model has trained matrices for fewer steps, or `Durations` that are
                not `right_censored` do not sum to `num_steps`.

        >>> from logchain.nn import Gaussian
        >>> draws = HMM(2, Gaussian(2, 3)).sample(4, 5)
        >>> draws.states.shape, draws.data.shape
        (torch.Size([4, 5]), torch.Size([4, 5, 3]))
        """
        emission = self.emission
        if not isinstance(emission, Emission):
            raise TypeError(f"emission: expected an Emission to sample from, got {type(emission).__name__}")
        check_count("num_steps", num_steps)
        if self.num_steps is not None and num_steps > self.num_steps:
            raise ValueError(f"num_steps: expected at most {self.num_steps} steps, got {num_steps}")
        bulk = self._transitions(None, num_steps, None, covariates)
        lead = bulk.lead if isinstance(bulk, Transition) else bulk.shape[:-2]
        potentials = torch.zeros(*lead[:-1], num_steps, self.num_states, device=bulk.device)
        chain = self._chain(potentials, bulk, None)
        states = self._states(draw_paths(**chain._asdict(), num_samples=num_samples, generator=generator), chain)
        if not getattr(self.transition, "right_censored", True) and bool((states < 0).any()):
            expected = "a sum of possible durations, since no segment may go on after the last step"
            raise ValueError(f"num_steps: expected {expected}, got {num_steps}")
        of_each = over(states, states.shape + emission.units[:-1])
        return Sample(states, emission.draw(of_each, generator))

    def _emission(self) -> torch.nn.Module:
        return self.emission

    def _event_axes(self) -> int | None:
        layer = self.emission
        return len(layer.units) - 1 + len(layer.event) if isinstance(layer, Emission) else None

    def _potentials(self, data: Tensor, known: Tensor | None, mask: str) -> Tensor:
        """`log p(data_i | z_i)` `[*B, v, c]` in nats, 0 where nothing is observed; `mask` is the name in errors."""
        if isinstance(self.emission, Emission):
            x: Tensor = self.emission(data, known)  # (*B, v, *U, c)
            return x.sum(-2) if len(self.emission.units) > 1 else x
        x = self.emission(data)
        check_tensor("emission", x, 2)
        if x.shape[-1] != self.num_states:
            raise ValueError(f"emission: expected log-potentials [..., v, {self.num_states}], got {list(x.shape)}")
        if known is None:
            return x
        if x.shape[:-1] != known.shape:
            expected = "those of" if mask == "lengths" else "shape"
            expected += f" {list(x.shape[:-1])}, the steps that the emission module makes of the data"
            raise ValueError(f"{mask}: expected {expected}, got {list(known.shape)}")
        return torch.where(known[..., None], x, 0)

    def _chain(self, x: Tensor, bulk: Tensor | Transition, ends: Tensor | None) -> ChainArguments:
        """The chain of log-potentials of the c states; with durations, of the states that count steps."""
        if self.initial is None:
            weights = bulk.map(torch.exp) if isinstance(bulk, Transition) else bulk.exp()
            return ChainArguments(x, weights, _stationary_start(bulk).to(bulk.dtype), False, ends)
        if isinstance(bulk, Duration):
            censored: bool = getattr(self.transition, "right_censored", True)
            return bulk.arguments(x, self.initial(), log_params=True, lengths=ends, right_censored=censored)
        return ChainArguments(x, bulk, self.initial(), True, ends)

    def _states(self, paths: Tensor, chain: ChainArguments) -> Tensor:
        """The states of the model on paths of a chain that may count steps; -1 stays."""
        counted = chain.x.shape[-1] // self.num_states
        return paths // counted if counted > 1 else paths

    def _transitions(
        self, batch: torch.Size | None, v: int, ends: Tensor | None, covariates: Tensor | None
    ) -> Tensor | Transition:
        """Log-probabilities `[*B or less, v-1 or 1, c, c]`, or such a structure, for a batch B, or for any if None."""
        bulk: Tensor | Transition
        if isinstance(self.transition, LogWeights | TransitionWeights):
            if covariates is not None:
                raise ValueError("covariates: expected None without a transition module")
            if self.num_steps is not None and v > self.num_steps:
                raise ValueError(f"data: expected at most {self.num_steps} steps, got {v}")
            bulk = self.transition()
            if self.num_steps is not None and isinstance(bulk, Tensor):
                bulk = bulk[: v - 1]
        else:
            if (
                covariates is not None
                and ends is not None
                and covariates.shape[: ends.dim() + 1] == (*ends.shape, v - 1)
            ):
                covariates = fill(covariates, torch.arange(1, v, device=ends.device) < ends[..., None])
            bulk = self.transition(covariates)
            if not isinstance(bulk, Transition):
                check_tensor("transition", bulk, 3)
                bulk = torch.log_softmax(arithmetic(bulk), -1)
        shape = (*bulk.lead, bulk.states, bulk.states) if isinstance(bulk, Transition) else tuple(bulk.shape)
        if isinstance(bulk, Duration):
            if self.initial is None:
                raise ValueError("initial: expected 'free' with durations, got 'stationary'")
            shape = tuple(bulk.matrix.shape)
        lead, steps = shape[:-3], shape[-3:-2]
        batch = torch.Size(lead) if batch is None else batch
        fits = len(lead) <= len(batch) and all(a in (1, b) for a, b in zip(lead[::-1], batch[::-1], strict=False))
        if not fits or steps not in ((), (1,), (v - 1,)) or shape[-2:] != (self.num_states,) * 2:
            expected = f"[{', '.join(map(str, (*batch, v - 1, *(self.num_states,) * 2)))}], or 1 for batch and steps"
            raise ValueError(f"transition: expected shape {expected}, got {list(shape)}")
        return bulk

    @classmethod
    def from_hmmlearn(cls, model: Any) -> "HMM":
        """The model, in float64, of a fitted model of hmmlearn.

        Args:
            model: a GaussianHMM, GMMHMM, PoissonHMM or CategoricalHMM.

        Returns:
            An `HMM`. Its data are `[*B, v, d]` as hmmlearn's samples are `[samples, d]`, but categories are `[*B, v]`.
            hmmlearn's priors are not read: pass priors to the parts of an `HMM`.

        Raises:
            TypeError: the model is another, or not fitted.

        >>> from types import SimpleNamespace
        >>> PoissonHMM = type("PoissonHMM", (SimpleNamespace,), {})  # in the place of hmmlearn's
        >>> model = PoissonHMM(n_components=1, startprob_=[1.0], transmat_=[[1.0]], lambdas_=[[3.5]])
        >>> HMM.from_hmmlearn(model).emission.log_rates.exp().detach()
        tensor([[3.5000]], dtype=torch.float64)
        """
        from .hmmlearn_models import from_hmmlearn

        return from_hmmlearn(model)

    def extra_repr(self) -> str:
        """The number of states and the kind of initial distribution."""
        return f"num_states={self.num_states}, initial={'stationary' if self.initial is None else 'free'!r}"


def _stationary_start(logs: Tensor | Transition) -> Tensor:
    """The stationary distribution `[*B or less, c]` of one matrix for all steps, in float64."""
    lead = logs.lead if isinstance(logs, Transition) else logs.shape[:-2]
    if lead and lead[-1] != 1:
        raise ValueError(f"initial: expected 'free' with {lead[-1]} transition matrices, got 'stationary'")
    dense = logs.to_dense(log_params=True) if isinstance(logs, Transition) else logs
    # probabilities: the logarithm of a state that is never visited would have no gradient
    return stationary((dense[..., 0, :, :] if lead else dense).double().exp())
